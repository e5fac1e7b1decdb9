"""Pushes -> the next version: accumulate, clip, commit the rows, apply the dense part."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import cast

import numpy as np

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.measures import CLOCK, Durations
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.shards.server_contract import PushedCommit, RowSums, ShardStore, TableClip
from elastable.master.api import DenseSnapshot, JobSpec, Push, Tensor
from elastable.master.commits.accumulate import Accumulated, WeightedPushes
from elastable.master.commits.dense_part import Clipping, DensePart, OptimizerStep, clip
from elastable.master.commits.row_gradients import OwnRowGradients, RowGradients
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.tasks.progress import Progress


class Committer:
    """Makes versions. Used by one thread at a time.

    Args:
        job: Its `average` says how pushes are summed (see `WeightedPushes`),
            its `staleness_modulation` how late ones are scaled.
        deadline_s: How long a failing commit is tried again.
        ends_replay_epoch: Of a version: as of `Commit`.
        phases: Where the phases "sum", "dense" and "rows" are timed; None: nobody wants to know.
        clock: Seconds since 1970 that never jump, asked once for every version: `Commit.time`.
        ahead: Whether `commit` may return while the store still logs the version; `settle` then waits for that.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        dense: DensePart,
        job: JobSpec,
        deadline_s: float,
        ends_replay_epoch: Callable[[int], bool] = lambda version: False,
        phases: Durations | None = None,
        clock: Callable[[], float] = CLOCK.now,
        ahead: bool = False,
    ) -> None:
        self._store = store
        self._ahead = ahead and store.keeps_records
        self._dense = dense
        self._average = job.average
        self._slows_stale = job.staleness_modulation == "inverse"
        self._job = job_as_json(job) if store.keeps_records else {}
        self._deadline_s = deadline_s
        self._ends_replay_epoch = ends_replay_epoch
        self._phases = phases or Durations()
        self._clock = clock
        # A version that the store may still log, and the tensors of the one before it.
        self._unlogged: tuple[OwnRowGradients, Mapping[str, Tensor]] | None = None
        # Those of the version that was recorded last, while nothing has changed them: reading all takes a millisecond.
        self._recorded: dict[str, Tensor] | None = None
        self._prepared: tuple[OptimizerStep, ...] | None = None
        # The job's tables stay what they are: a store elsewhere is asked once.
        self._tables: tuple[str, ...] | None = None
        self._followers: list[str] = []  # those whose rows follow every step

    def forget(self) -> None:
        """To be called where the dense part may have been changed since the last commit by somebody else."""
        self._recorded = None

    def publish(self, version: int) -> DenseSnapshot:
        """The dense part as it is, for workers; see `DensePart.snapshot`."""
        return self._dense.snapshot(version, self._recorded)

    def prepare_step(self) -> None:
        """Computes the learning rates of the next step now, while workers compute.

        Nothing may change them before the next `commit`.
        """
        self._prepared = self._dense.steps()

    def commit(self, version: int, pushes: Sequence[Push], progress: Callable[[Accumulated], Progress]) -> Accumulated:
        """The step from `version - 1` to `version`; returns what it was made of.

        Args:
            pushes: In micro-batch order, checked; none: a version that changes nothing but the step count.
            progress: How far the job is once `version` is committed.

        Raises:
            StoreFailed, Unavailable: the store failed until the deadline; the
                dense part is still that of `version - 1`.
            PushesLost: likewise; some pushes have to come again.
        """
        self.settle()
        if self._prepared is None:
            self.prepare_step()
        steps, self._prepared = cast(tuple[OptimizerStep, ...], self._prepared), None
        # Late pushes of async mode may be of when a table was not frozen.
        frozen = self._dense.frozen_tables
        with self._phases.timing("sum"):
            gradient, rows = self._accumulated(version, pushes, frozen)
            if gradient.records and not gradient.overflowed:
                gradient = replace(gradient, dense=_clipped(gradient.dense, rows, steps))
        share = 1.0 / (1 + _behind(pushes, version)) if self._slows_stale else 1.0
        rates = _rates([*rows.tables, *self._followers], steps, share)
        number = steps[0].number
        for step in steps:
            if step.tables != ():
                number = step.number
                break
        number = version - 1 if number is None else number
        ends = self._ends_replay_epoch(version)
        commit = PushedCommit(rows.sums, number, rates, ends_replay_epoch=ends, time=self._clock())
        if self._store.keeps_records:
            self._commit_with_record(rows, commit, gradient, share, progress(gradient))
        else:
            # Rows first: the dense part cannot fail, and needs no way back then.
            with self._phases.timing("rows"):
                rows.commit(commit)
            self._apply(gradient, share)
        return replace(gradient, updates=rows.updates, changed=tuple(rows.changed), frozen=frozen)

    @property
    def unlogged(self) -> int | None:
        """The version that was committed and is not logged yet; None: there is none."""
        unlogged = self._unlogged
        return None if unlogged is None else unlogged[0].unlogged

    def settle(self, wait: bool = True) -> None:
        """Waits until the store has logged the version that was committed last.

        Args:
            wait: False: only where it has logged it, or has failed to and is to be tried again.

        Raises:
            StoreFailed, Unavailable: the store failed until the deadline; the dense part is that of the version before.
        """
        if self._unlogged is None:
            return
        rows, before = self._unlogged
        if not (wait or rows.logging_over()):
            return
        try:
            rows.wait_logged()
        except BaseException:
            self._restore(before)
            raise
        self._unlogged = None

    def _accumulated(
        self, version: int, pushes: Sequence[Push], frozen: tuple[str, ...]
    ) -> tuple[Accumulated, RowGradients]:
        """The gradient of a version; none, if it overflowed and the optimizer's loss scale answers that."""
        if not self._dense.may_overflow:
            return self._sum(version, pushes, frozen)
        with np.errstate(invalid="ignore", over="ignore"):
            gradient, rows = self._sum(version, pushes, frozen)
        if all(np.isfinite(part).all() for part in gradient.dense) and (not gradient.records or rows.finite()):
            return gradient, rows
        rows.dropped = True
        return replace(gradient, dense=(), overflowed=True), rows

    def _sum(self, version: int, pushes: Sequence[Push], frozen: tuple[str, ...]) -> tuple[Accumulated, RowGradients]:
        weighted = WeightedPushes(pushes, self._average)
        gradient = weighted.accumulated()
        if self._tables is None:
            specs = self._store.specs()
            self._tables = tuple(specs)
            for name, spec in specs.items():
                if follows_steps(spec.optimizer):
                    self._followers.append(name)
        of = self._tables, self._deadline_s
        if isinstance(self._store, ShardStore):
            return gradient, RowGradients(self._store, weighted.row_sums(version - 1, frozen), *of)
        own, updates = RowSums(version - 1, frozen=frozen), weighted.row_updates(frozen)
        return gradient, OwnRowGradients(self._store, own, *of, updates, self._ahead)

    def _commit_with_record(
        self, rows: RowGradients, step: PushedCommit, gradient: Accumulated, share: float, progress: Progress
    ) -> None:
        before = self._dense.tensors() if self._recorded is None else self._recorded
        self._recorded = None
        self._apply(gradient, share)
        try:
            after = self._dense.tensors()
            record = VersionRecord(self._job, progress, after).to_bytes()
            with self._phases.timing("rows"):
                rows.commit(replace(step, record=record))
        except BaseException:
            self._restore(before)
            raise
        self._recorded = after
        if isinstance(rows, OwnRowGradients):
            self._unlogged = rows, before

    def _restore(self, tensors: Mapping[str, Tensor]) -> None:
        self._recorded = None
        self._dense.restore(tensors)

    def _apply(self, gradient: Accumulated, share: float) -> None:
        with self._phases.timing("dense"):
            if gradient.overflowed:
                self._dense.overflow(gradient.states)
            elif gradient.records:
                self._dense.apply(gradient.dense, gradient.states, share)
            else:
                self._dense.skip()


def _clipped(dense: tuple[Tensor, ...], rows: RowGradients, steps: Sequence[OptimizerStep]) -> tuple[Tensor, ...]:
    """Dense gradients, clipped by every optimizer as it clips what it trains; rows likewise, where they are."""
    clippings = []
    for step in steps:
        clippings.append(step.clipping)
        for each in step.own.values():
            clippings.append(each.clipping)
    if clippings.count(Clipping()) == len(clippings):
        return dense
    by_norm, clips = any(clipping.by_norm for clipping in clippings), dict[str, TableClip]()
    squares = rows.squares() if by_norm else dict.fromkeys(rows.tables, 0.0)
    for step in steps:
        places = range(len(dense)) if step.places is None else step.places
        of_step = {table: square for table, square in squares.items() if step.tables is None or table in step.tables}
        own = {table: its.clipping for table, its in step.own.items()}
        clipped, of_tables = clip([dense[place] for place in places], of_step, step.clipping, own)
        of_place = dict(zip(places, clipped, strict=True))
        dense = tuple(of_place.get(place, values) for place, values in enumerate(dense))
        clips.update(of_tables)
    rows.clips = clips
    return dense


def _rates(tables: Iterable[str], steps: Sequence[OptimizerStep], share: float) -> dict[str, float]:
    """The learning rate of every table that an optimizer has one for: its share, as that of the dense part is taken."""
    rates = {}
    for table in tables:
        for step in steps:
            rate = step.own.get(table, step).rate
            if rate is not None and (step.tables is None or table in step.tables):
                rates[table] = rate if share == 1.0 else float(np.float32(rate) * np.float32(share))
    return rates


def _behind(pushes: Sequence[Push], version: int) -> int:
    """By how many versions the oldest of the pushes is behind where they make `version`; unknown ages are 0."""
    return max((version - 1 - push.computed_on for push in pushes if push.computed_on is not None), default=0)
