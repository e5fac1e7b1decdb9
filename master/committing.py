"""Pushes -> the next version: accumulate, clip, commit the rows, apply the dense part."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import count
from typing import cast

import numpy as np

from elastable.embedding_store.retry import retry
from elastable.embedding_store.row_optimizer import follows_steps
from elastable.embedding_store.store import Commit, EmbeddingStore
from elastable.master.accumulate import Accumulated, accumulate
from elastable.master.api import JobSpec, Push
from elastable.master.clipping import Clipping, clip
from elastable.master.dense_part import DensePart, OwnStep
from elastable.master.progress import Progress
from elastable.master.version_record import VersionRecord, job_as_json

__all__ = ["Committer", "commit_rows"]


@dataclass(frozen=True, slots=True)
class _Step:
    """What a step needs of the optimizer; see `DensePart`."""

    number: int | None
    rate: float | None
    clipping: Clipping
    own: Mapping[str, OwnStep]


class Committer:
    """Makes versions. Used by one thread at a time.

    Args:
        store: Where the rows are.
        dense: The dense part of the model.
        job: Its `average` says how pushes are summed (see `elastable.master.accumulate`),
            its `staleness_modulation` what becomes of late ones.
        deadline_s: How long a failing commit is tried again.
        ends_chapter: Of a version: as of `Commit`.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        dense: DensePart,
        job: JobSpec,
        deadline_s: float,
        ends_chapter: Callable[[int], bool] = lambda version: False,
    ) -> None:
        self._store = store
        self._dense = dense
        self._average = job.average
        self._slows_stale = job.staleness_modulation == "inverse"
        self._job = job_as_json(job)
        self._deadline_s = deadline_s
        self._ends_chapter = ends_chapter
        self._foreseen: _Step | None = None
        self._followers: list[str] | None = None

    def foresee(self) -> None:
        """Asks the optimizer for the next step's numbers now, while workers compute.

        Nothing may change them before the next `commit`.
        """
        dense = self._dense
        self._foreseen = _Step(dense.step(), dense.learning_rate(), dense.clipping, dense.own_steps())

    def commit(self, version: int, pushes: Sequence[Push], progress: Callable[[Accumulated], Progress]) -> Accumulated:
        """The step from `version - 1` to `version`; returns what it was made of.

        Args:
            version: That will stand.
            pushes: In micro-batch order, checked; none: a version that changes
                nothing but the step count.
            progress: The job's place once `version` stands.

        Raises:
            StoreFailed, Unavailable: the store failed until the deadline; the
                dense part is still that of `version - 1`.
        """
        if self._foreseen is None:
            self.foresee()
        step, self._foreseen = cast(_Step, self._foreseen), None
        own = {table: its.clipping for table, its in step.own.items()}
        # Late pushes of async mode may be of when a table was not frozen.
        frozen = self._dense.frozen_tables
        gradient = clip(self._accumulated(pushes, frozen), step.clipping, own)
        share = 1.0 / (1 + _behind(pushes, version)) if self._slows_stale else 1.0
        rates = {} if step.rate is None else dict.fromkeys(self._tables(gradient), step.rate)
        rates |= {table: its.rate for table, its in step.own.items() if table in rates}
        rates = {table: _times(rate, share) for table, rate in rates.items()}
        number = version - 1 if step.number is None else step.number
        ends = self._ends_chapter(version)
        commit = Commit(version, gradient.updates, number, rates, ends_chapter=ends, frozen=frozen)
        if self._store.keeps_records:
            self._commit_with_record(commit, gradient, share, progress(gradient))
        else:
            # Rows first: the dense part cannot fail, and needs no way back then.
            commit_rows(self._store, commit, self._deadline_s)
            self._apply(gradient, share)
        return gradient

    def _accumulated(self, pushes: Sequence[Push], frozen: Collection[str]) -> Accumulated:
        """The gradient of a version; none, if it overflowed and the optimizer's loss scale answers that."""
        if not self._dense.may_overflow:
            return _without(accumulate(pushes, self._average), frozen)
        with np.errstate(invalid="ignore", over="ignore"):
            gradient = _without(accumulate(pushes, self._average), frozen)
        parts = [*gradient.dense, *(update.gradients for update in gradient.updates.values())]
        if all(np.isfinite(part).all() for part in parts):
            return gradient
        return replace(gradient, dense=(), updates={}, overflowed=True)

    def _tables(self, gradient: Accumulated) -> Iterable[str]:
        """Those that a step has a learning rate for: those it updates, and those whose rows follow every step."""
        if self._followers is None:
            specs = self._store.specs().values()
            self._followers = [spec.name for spec in specs if follows_steps(spec.optimizer)]
        return [*gradient.updates, *self._followers]

    def _commit_with_record(self, commit: Commit, gradient: Accumulated, share: float, progress: Progress) -> None:
        """Rows, dense part and progress stand in one moment, in the store."""
        before = self._dense.tensors()
        self._apply(gradient, share)
        try:
            record = VersionRecord(self._job, progress, self._dense.tensors()).to_bytes()
            commit_rows(self._store, replace(commit, record=record), self._deadline_s)
        except BaseException:
            self._dense.restore(before)
            raise

    def _apply(self, gradient: Accumulated, share: float) -> None:
        if gradient.overflowed:
            self._dense.overflow(gradient.states)
        elif gradient.records:
            self._dense.apply(gradient.dense, gradient.states, share)
        else:
            self._dense.skip()


def _without(gradient: Accumulated, tables: Collection[str]) -> Accumulated:
    if not tables:
        return gradient
    return replace(gradient, updates={name: each for name, each in gradient.updates.items() if name not in tables})


def _times(rate: float, share: float) -> float:
    # As the optimizer of the dense part multiplies.
    return rate if share == 1.0 else float(np.float32(rate) * np.float32(share))


def _behind(pushes: Sequence[Push], version: int) -> int:
    """By how many versions the oldest of the pushes is behind where they make `version`; unknown ages are 0."""
    return max((version - 1 - push.computed_on for push in pushes if push.computed_on is not None), default=0)


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
    attempts = count()

    def attempt() -> None:
        # Only the reply of one before may have been lost.
        if not next(attempts) or not _stands(store, commit):
            store.commit(commit)

    retry(attempt, f"commit of version {commit.version}", deadline_s, now=now, sleep=sleep)


def _stands(store: EmbeddingStore, commit: Commit) -> bool:
    """Whether the commit was made; where another master took the store over, its version of that number is not ours."""
    return store.version() == commit.version and (not store.keeps_records or store.record() == commit.record)
