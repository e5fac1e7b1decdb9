"""A job whose store is taken over or lost fails at once, and not at its next commit."""

from __future__ import annotations

import time
from contextlib import AbstractContextManager

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ElastableError, StoreBroken, TakenOver, Unavailable
from elastable.embedding_store.support.retry import given_up
from elastable.master.jobs.job_master import Master
from elastable.process.repeating import repeating

__all__ = ["watching_store"]

_LOOK_EVERY_S = 1.0


def watching_store(master: Master, store: EmbeddingStore, deadline_s: float) -> AbstractContextManager[None]:
    """While the block runs, the job fails as soon as its store has another owner, or has lost what it held.

    Otherwise its workers would read another job's versions meanwhile, or none, and report nothing, so no commit of this
    job would ever find out.

    Args:
        master: Of the job.
        store: Of the job.
        deadline_s: How long the store, or a shard of it, may be unreachable.
    """
    answered = time.monotonic()

    def look() -> bool:
        nonlocal answered
        try:
            _require_all(store, master.status().version)
            answered = time.monotonic()
        except (TakenOver, StoreBroken) as error:
            master.report_failure("store", error, fatal=True)
            return True
        except Unavailable as error:
            if time.monotonic() - answered > deadline_s:
                master.report_failure("store", given_up(error, deadline_s), fatal=True)
                return True
        except ElastableError:
            pass  # whoever needs the store now reports it
        return False

    return repeating(look, _LOOK_EVERY_S, "elastable-store-watch")


def _require_all(store: EmbeddingStore, committed: int) -> None:
    """Raises if the store is another's, is unreachable, or is at a version before one that was committed to it."""
    store.require_owner()
    version = store.version()
    if version < committed:
        raise StoreBroken(f"the store is at version {version}, and held {committed}: it has lost its rows")
