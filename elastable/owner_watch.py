"""A job whose store is taken over by another one hears of it at once, and not at its next commit."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastable.embedding_store.errors import ElastableError, TakenOver
from elastable.embedding_store.store import EmbeddingStore
from elastable.master.core import Master

__all__ = ["watching_owner"]

_LOOK_EVERY_S = 1.0


@contextmanager
def watching_owner(master: Master, store: EmbeddingStore) -> Iterator[None]:
    """While the block runs, the job fails with `TakenOver` as soon as its store has another owner.

    Its workers would read the other job's versions meanwhile and report nothing, so no commit of this job would
    ever find out.
    """
    over = threading.Event()

    def look() -> None:
        while not over.wait(_LOOK_EVERY_S):
            try:
                store.require_owner()
            except TakenOver as error:
                master.report_failure("store", error, fatal=True)
                return
            except ElastableError:
                continue  # away for a while: whoever needs the store now says so

    watcher = threading.Thread(target=look, name="elastable-owner", daemon=True)
    watcher.start()
    try:
        yield
    finally:
        over.set()
        watcher.join(timeout=5.0)
