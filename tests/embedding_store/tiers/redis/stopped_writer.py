"""A writer that is stopped in the middle of a commit, and wakes up later.

Run with a URL and after how many writes of that commit. Prints how each thing ended that it tried after that.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.tiers.redis.redis_store import RedisStore
from tests.embedding_store.disturbed_job import commit_of
from tests.embedding_store.dying_writer import dying_after

__all__ = ["main"]


def main(url: str, writes: int) -> None:
    """Stops in the commit of version 2, after so many writes."""
    rows = np.full((5, 3), 9, np.float32)
    with RedisStore(url) as store:
        store.commit(commit_of(1))

        def stopped() -> None:
            with pytest.MonkeyPatch.context() as patch, dying_after(patch, writes, stop):
                store.commit(commit_of(2))

        tell("commit", stopped)
        tell("again", lambda: store.commit(commit_of(2)))
        tell("next", lambda: store.commit(commit_of(store.version() + 1)))
        tell("put", lambda: store.put("adagrad", [RowBlock(np.arange(5), rows, rows)]))
        tell("delete", lambda: store.delete("sgd", np.arange(50)))
        tell("clear", lambda: store.clear("sgd"))
        tell("reset", lambda: store.reset_version(9))
        tell("drop", lambda: store.drop_table("sgd"))
        tell("read", lambda: store.lookup({"sgd": np.arange(5)}, store.version()))


def stop() -> None:
    """Until somebody lets it go on."""
    os.kill(os.getpid(), signal.SIGSTOP)


def tell(what: str, act: Callable[[], object]) -> None:
    """Prints what became of it."""
    try:
        act()
        print(what, "done", flush=True)
    except ElastableError as error:
        print(what, type(error).__name__, error, flush=True)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))
