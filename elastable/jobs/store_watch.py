"""A job whose store is taken over or lost hears of it at once, and not at its next commit."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ElastableError, StoreBroken, TakenOver, Unavailable
from elastable.embedding_store.support.retry import given_up
from elastable.master.jobs.job_master import Master

__all__ = ["watching_store"]

_LOOK_EVERY_S = 1.0


@contextmanager
def watching_store(master: Master, store: EmbeddingStore, deadline_s: float) -> Iterator[None]:
    """While the block runs, the job fails as soon as its store has another owner, or has lost what it held.

    Its workers would read another job's versions meanwhile, or none, and report nothing, so no commit of this job
    would ever find out.

    Args:
        master: Of the job.
        store: Of the job.
        deadline_s: How long the store, or a shard of it, may stay away.
    """
    over = threading.Event()

    def look() -> None:
        answered = time.monotonic()
        while not over.wait(_LOOK_EVERY_S):
            try:
                _require_all(store, master.status().version)
                answered = time.monotonic()
            except (TakenOver, StoreBroken) as error:
                master.report_failure("store", error, fatal=True)
                return
            except Unavailable as error:
                if time.monotonic() - answered > deadline_s:
                    master.report_failure("store", given_up(error, deadline_s), fatal=True)
                    return
            except ElastableError:
                continue  # whoever needs the store now says so

    watcher = threading.Thread(target=look, name="elastable-store-watch", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(timeout=5.0)


def _require_all(store: EmbeddingStore, committed: int) -> None:
    """Raises where the store is another's, is away, or stands before a version that was committed to it."""
    store.require_owner()
    version = store.version()
    if version < committed:
        raise StoreBroken(f"the store stands at version {version}, and held {committed}: it has lost its rows")
