"""A writer of a tier that is stopped in the middle of a write, and wakes up later.

Run with a URL and after how many commands of that write. Prints how each thing ended that it tried after that.
"""

import os
import signal
import sys
from collections.abc import Callable

import pytest

from elastable.embedding_store import ElastableError
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from tests.embedding_store.dying_writer import dying_after
from tests.embedding_store.tiers.redis.tier_samples import IDS, changed, read_back


def main(url: str, commands: int) -> None:
    """Stops in the write of sequence 2."""
    with RedisTier(url) as tier:
        tier.write(changed(1), {}, 1)

        def stopped() -> None:
            with pytest.MonkeyPatch.context() as patch, dying_after(patch, commands, stop):
                tier.write(changed(2), {"t": (IDS[:0], IDS[:0])}, 2)

        tell("write", stopped)
        tell("again", lambda: tier.write(changed(2), {}, 2))
        tell("delete", lambda: tier.write([], {"t": (IDS, IDS)}, 3))
        tell("state", lambda: tier.put_state(b"of the one that was stopped"))
        tell("create", lambda: tier.create(TierTable("u", 1)))
        tell("drop", lambda: tier.drop("t"))
        tell("owner", tier.require_owner)
        tell("read", lambda: read_back(tier))


def stop() -> None:
    os.kill(os.getpid(), signal.SIGSTOP)


def tell(what: str, act: Callable[[], object]) -> None:
    try:
        act()
        print(what, "done", flush=True)
    except ElastableError as error:
        print(what, type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
