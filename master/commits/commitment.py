"""A commit of rows, made exactly once: tried again while the store fails, and logged while workers compute on."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import count

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import FutureVersion, StoreBroken
from elastable.embedding_store.support.retry import retry
from elastable.embedding_store.support.waits.futures import at_once

__all__ = ["DONE", "Commitment", "begin_rows", "commit_rows"]


@dataclass(frozen=True, slots=True)
class Commitment:
    """A commit whose version may not be logged yet.

    Attributes:
        unlogged: Its version, while the store has not logged it; else None. Does not wait, and asks no server.
        over: Whether it has, or has failed to. Does not wait.
        wait: Waits until it has, and tries again while the store fails; raises as `commit_rows`.
    """

    unlogged: Callable[[], int | None]
    over: Callable[[], bool]
    wait: Callable[[], None]


DONE = Commitment(lambda: None, lambda: True, lambda: None)
"""A commit that is logged, or needs no log."""


def begin_rows(store: EmbeddingStore, commit: Commit, deadline_s: float) -> Commitment:
    """As `commit_rows`, but the store may still be logging the version."""
    begun = at_once(None)  # as where the first attempt fails, and another one commits

    def begin() -> None:
        nonlocal begun
        begun = store.begin_commit(commit)

    commit_rows(store, commit, deadline_s, first=begin)
    return Commitment(
        lambda: None if _is_logged(begun) else commit.version,
        begun.done,
        lambda: commit_rows(store, commit, deadline_s, first=begun.result),
    )


def commit_rows(
    store: EmbeddingStore,
    commit: Commit,
    deadline_s: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
    first: Callable[[], None] | None = None,
) -> None:
    """Commits, and tries the same commit again while the store fails.

    Args:
        store: Where the rows are.
        commit: Made once, so that a repetition cannot differ.
        deadline_s: No new attempt is made after that many seconds.
        now: Monotonic clock, in seconds.
        sleep: Waits that many seconds.
        first: The first attempt; None: as the others, which commit.

    Raises:
        StoreFailed, Unavailable: the last failure before the deadline.
        StoreBroken: the store is at an earlier version than was committed to it.
    """
    attempts = count()

    def attempt() -> None:
        number = next(attempts)
        # Only the reply of one before may have been lost.
        if number and _is_committed(store, commit):
            return
        try:
            if number or first is None:
                store.commit(commit)
            else:
                first()
        except FutureVersion as error:
            raise StoreBroken(f"the store has lost versions that were committed to it: {error}") from error

    retry(attempt, f"commit of version {commit.version}", deadline_s, now=now, sleep=sleep)


def _is_logged(begun: Future[None]) -> bool:
    return begun.done() and begun.exception() is None


def _is_committed(store: EmbeddingStore, commit: Commit) -> bool:
    """Whether the commit was made; where another master took the store over, its version of that number is not ours."""
    return store.version() == commit.version and (not store.keeps_records or store.record() == commit.record)
