"""Pushes -> the next version: accumulate, clip, commit the rows, apply the dense part."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

import numpy as np

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import FutureVersion, StoreBroken
from elastable.embedding_store.measures.counters import Durations
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.support.retry import retry
from elastable.master.api import JobSpec, Push
from elastable.master.commits.accumulate import Accumulated, accumulate
from elastable.master.commits.clipping import clip
from elastable.master.commits.dense_part import DensePart, OptimizerStep
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.tasks.progress import Progress

__all__ = ["Committer", "commit_rows"]


class Committer:
    """Makes versions. Used by one thread at a time.

    Args:
        store: Where the rows are.
        dense: The dense part of the model.
        job: Its `average` says how pushes are summed (see `elastable.master.commits.accumulate`),
            its `staleness_modulation` how late ones are scaled.
        deadline_s: How long a failing commit is tried again.
        ends_chapter: Of a version: as of `Commit`.
        phases: Where the phases "sum", "dense" and "rows" are timed; None: nobody wants to know.
        clock: Seconds since 1970, asked once for every version: `Commit.time`.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        dense: DensePart,
        job: JobSpec,
        deadline_s: float,
        ends_chapter: Callable[[int], bool] = lambda version: False,
        phases: Durations | None = None,
        clock: Callable[[], float] = time.time,
    ) -> None:
        self._store = store
        self._dense = dense
        self._average = job.average
        self._slows_stale = job.staleness_modulation == "inverse"
        self._job = job_as_json(job)
        self._deadline_s = deadline_s
        self._ends_chapter = ends_chapter
        self._phases = phases or Durations()
        self._clock = clock
        self._prepared: tuple[OptimizerStep, ...] | None = None
        self._followers: list[str] | None = None

    def prepare_step(self, version: int) -> None:
        """Computes the learning rates of the step from `version` now, while workers compute.

        Nothing may change them before the next `commit`.
        """
        self._prepared = self._dense.steps(version)

    def commit(self, version: int, pushes: Sequence[Push], progress: Callable[[Accumulated], Progress]) -> Accumulated:
        """The step from `version - 1` to `version`; returns what it was made of.

        Args:
            version: The version to commit.
            pushes: In micro-batch order, checked; none: a version that changes
                nothing but the step count.
            progress: How far the job is once `version` is committed.

        Raises:
            StoreFailed, Unavailable: the store failed until the deadline; the
                dense part is still that of `version - 1`.
        """
        if self._prepared is None:
            self.prepare_step(version - 1)
        steps, self._prepared = cast(tuple[OptimizerStep, ...], self._prepared), None
        # Late pushes of async mode may be of when a table was not frozen.
        frozen = self._dense.frozen_tables
        with self._phases.timing("sum"):
            gradient = _clipped(self._accumulated(pushes, frozen), steps)
        share = 1.0 / (1 + _behind(pushes, version)) if self._slows_stale else 1.0
        rates = {table: _times(rate, share) for table, rate in _rates(self._tables(gradient), steps).items()}
        number = next((step.number for step in steps if step.tables != ()), steps[0].number)
        number = version - 1 if number is None else number
        ends = self._ends_chapter(version)
        commit = Commit(version, gradient.updates, number, rates, ends_chapter=ends, frozen=frozen, time=self._clock())
        if self._store.keeps_records:
            self._commit_with_record(commit, gradient, share, progress(gradient))
        else:
            # Rows first: the dense part cannot fail, and needs no way back then.
            with self._phases.timing("rows"):
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
        """Commits rows, dense part and progress together, in the store."""
        before = self._dense.tensors()
        self._apply(gradient, share)
        try:
            record = VersionRecord(self._job, progress, self._dense.tensors()).to_bytes()
            with self._phases.timing("rows"):
                commit_rows(self._store, replace(commit, record=record), self._deadline_s)
        except BaseException:
            self._dense.restore(before)
            raise

    def _apply(self, gradient: Accumulated, share: float) -> None:
        with self._phases.timing("dense"):
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


def _clipped(gradient: Accumulated, steps: Sequence[OptimizerStep]) -> Accumulated:
    """The gradient, clipped by every optimizer as it clips what it trains."""
    for step in steps:
        own = {table: its.clipping for table, its in step.own.items()}
        if step.places is None or step.tables is None:
            gradient = clip(gradient, step.clipping, own)
        elif gradient.dense or gradient.updates:
            tables = {table: gradient.updates[table] for table in step.tables if table in gradient.updates}
            dense = tuple(gradient.dense[place] for place in step.places)
            clipped = clip(Accumulated(dense=dense, updates=tables), step.clipping, own)
            of_place = dict(zip(step.places, clipped.dense, strict=True))
            gradient = replace(
                gradient,
                dense=tuple(of_place.get(place, values) for place, values in enumerate(gradient.dense)),
                updates={**gradient.updates, **clipped.updates},
            )
    return gradient


def _rates(tables: Iterable[str], steps: Sequence[OptimizerStep]) -> dict[str, float]:
    """The learning rate of every table that an optimizer has one for."""
    rates = {}
    for table in tables:
        for step in steps:
            if step.rate is not None and (step.tables is None or table in step.tables):
                rates[table] = step.own[table].rate if table in step.own else step.rate
    return rates


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
        StoreBroken: the store is at an earlier version than was committed to it.
    """
    attempts = count()

    def attempt() -> None:
        # Only the reply of one before may have been lost.
        if next(attempts) and _is_committed(store, commit):
            return
        try:
            store.commit(commit)
        except FutureVersion as error:
            raise StoreBroken(f"the store has lost versions that were committed to it: {error}") from error

    retry(attempt, f"commit of version {commit.version}", deadline_s, now=now, sleep=sleep)


def _is_committed(store: EmbeddingStore, commit: Commit) -> bool:
    """Whether the commit was made; where another master took the store over, its version of that number is not ours."""
    return store.version() == commit.version and (not store.keeps_records or store.record() == commit.record)
