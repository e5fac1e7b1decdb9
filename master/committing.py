"""Pushes -> the next version: accumulate, clip, commit the rows, apply the dense part."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import cast

from embedding_store.errors import ElastableError, StoreFailed, Unavailable
from embedding_store.store import Commit, EmbeddingStore
from master.accumulate import Accumulated, accumulate
from master.api import Push
from master.clipping import clip
from master.dense import DensePart
from master.keras_optimizer import Clipping

__all__ = ["Committer", "commit_rows"]

_log = logging.getLogger(__name__)

_FIRST_PAUSE_S = 0.05
_LONGEST_PAUSE_S = 2.0


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step needs of the optimizer; see `DensePart`."""

    number: int | None
    rate: float | None
    clipping: Clipping


class Committer:
    """Makes versions. Used by one thread at a time.

    Args:
        store: Where the rows are.
        dense: The dense part of the model.
        average: "mean" or "sum" (see `master.accumulate`).
        deadline_s: How long a failing commit is tried again.
    """

    def __init__(self, store: EmbeddingStore, dense: DensePart, average: str, deadline_s: float) -> None:
        self._store = store
        self._dense = dense
        self._average = average
        self._deadline_s = deadline_s
        self._foreseen: _Step | None = None

    def foresee(self) -> None:
        """Asks the optimizer for the next step's numbers now, while workers compute.

        Nothing may change them before the next `commit`.
        """
        self._foreseen = _Step(self._dense.step(), self._dense.learning_rate(), self._dense.clipping)

    def commit(self, version: int, pushes: Sequence[Push]) -> Accumulated:
        """The step from `version - 1` to `version`; returns what it was made of.

        Rows come first: should their commit fail for good, the dense part is
        still that of `version - 1`.

        Args:
            version: That will stand.
            pushes: In micro-batch order, checked; none: a version that changes
                nothing but the step count.

        Raises:
            StoreFailed, Unavailable: the store failed until the deadline.
        """
        if self._foreseen is None:
            self.foresee()
        step, self._foreseen = cast(_Step, self._foreseen), None
        gradient = clip(accumulate(pushes, self._average), step.clipping)
        rates = {} if step.rate is None else dict.fromkeys(gradient.updates, step.rate)
        commit = Commit(version, gradient.updates, version - 1 if step.number is None else step.number, rates)
        commit_rows(self._store, commit, self._deadline_s)
        if pushes:
            self._dense.apply(gradient.dense, gradient.states)
        else:
            self._dense.skip()
        return gradient


def commit_rows(
    store: EmbeddingStore,
    commit: Commit,
    deadline_s: float,
    now: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Commits, and tries the same commit again while the store fails.

    Args:
        store: Where the rows are.
        commit: Made once, so that a repetition cannot differ.
        deadline_s: No new attempt is made after that many seconds.
        now: Monotonic clock, in seconds.
        sleep: Waits that many seconds.

    Raises:
        StoreFailed, Unavailable: the last failure before the deadline.
    """
    give_up = now() + deadline_s
    pause = _FIRST_PAUSE_S
    try:
        store.commit(commit)
        return
    except (StoreFailed, Unavailable) as error:
        failure: ElastableError = error
    while now() + pause <= give_up:
        _log.warning("commit of version %d failed, trying again: %s", commit.version, failure)
        sleep(pause)
        pause = min(2 * pause, _LONGEST_PAUSE_S)
        try:
            # Only its reply may have been lost.
            if store.version() != commit.version:
                store.commit(commit)
            return
        except (StoreFailed, Unavailable) as error:
            failure = error
    raise failure
