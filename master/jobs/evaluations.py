"""The evaluations of a job: while it is trained on, or while training waits for them."""

from __future__ import annotations

from collections.abc import Callable

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.support.retry import retry
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.jobs.concurrent_evaluation import LEASE_S, ConcurrentEvaluation
from elastable.master.jobs.hooks import Hooks
from elastable.master.jobs.job_state import JobState, Work
from elastable.master.jobs.waits import Waits
from elastable.master.keras.metrics import ModelMetrics
from elastable.master.master_options import MasterOptions

__all__ = ["Evaluations"]

# Versions that are evaluated concurrently with training. Training waits before another one starts, so that every
# version that is due is evaluated however slow the workers are, and before-images do not pile up.
_MOST_CONCURRENT = 2


class Evaluations:
    """Has versions evaluated, which the store has logged. Used by the thread that drives the job.

    Args:
        state: Of the job.
        waits: The calls that wait for it.
        store: Holds the job's tables.
        metrics: The model's metrics.
        options: Deadlines and intervals.
        next_work: Waits for something to do.

    Attributes:
        hooks: Are told how evaluations end.
    """

    def __init__(
        self,
        state: JobState,
        waits: Waits,
        store: EmbeddingStore,
        metrics: ModelMetrics,
        options: MasterOptions,
        next_work: Callable[[], Work],
    ) -> None:
        self._state = state
        self._waits = waits
        self._store = store
        self._metrics = metrics
        self._options = options
        self._next_work = next_work
        self.hooks = Hooks()

    def is_due(self) -> bool:
        """Whether the current version is to be evaluated, although it ends no epoch."""
        every = self._options.evaluate_every
        there = self._state.snapshot is not None and self._state.schedule.evaluation_tasks
        return bool(every and self._state.version % every == 0 and there)

    def begin_due(self) -> None:
        """Evaluates the current version, concurrently with training or before it continues."""
        version, snapshot = self._state.version, self._state.snapshot
        assert snapshot is not None
        if self._options.concurrent_evaluation:
            self._begin_concurrent(snapshot)
        elif (total := self.evaluate()) is not None:
            self.hooks.on_evaluation(version, self._metrics.results(total, "val_"))

    def evaluate(self) -> tuple[Tensor, ...] | None:
        """Summed metric state of the validation split on the current version; None if the job is ending."""
        if not self._state.schedule.evaluation_tasks:
            return ()
        version = self._state.version
        self.hooks.on_evaluation_begin(version)
        with self._waits.changing():
            self._state.begin_evaluation(version)
            self._waits.tasks_free()
        while (work := self._next_work()).evaluated != version:
            if work.over or work.evaluated is None:
                return None
            self.end_concurrent(work.evaluated)
        with self._waits.changing():
            return self._state.take_evaluation_total(version)

    def end_concurrent(self, version: int) -> None:
        """A concurrent evaluation is complete."""
        with self._waits.changing():
            total = self._state.take_evaluation_total(version)
            evaluation = self._state.concurrent.pop(version)
        evaluation.end()
        self.hooks.on_evaluation(version, self._metrics.results(total, "val_"))

    def give_up_unreadable(self) -> None:
        """Ends the concurrent evaluations whose version can no longer be read."""
        for version, evaluation in tuple(self._state.concurrent.items()):
            if not evaluation.readable():
                with self._waits.changing():
                    self._state.take_evaluation_total(version)
                    del self._state.concurrent[version]
                evaluation.end()

    def _begin_concurrent(self, snapshot: DenseSnapshot) -> None:
        while len(self._state.concurrent) >= _MOST_CONCURRENT:
            work = self._next_work()
            if work.over or work.evaluated is None:
                return
            self.end_concurrent(work.evaluated)
        evaluation = ConcurrentEvaluation(
            snapshot, retry(self._pin, "pinning a version", self._options.commit_deadline_s)
        )
        with self._waits.changing():
            self._state.begin_concurrent(evaluation)
            self._waits.tasks_free()

    def _pin(self) -> Snapshot:
        return self._store.pin(self._state.version, LEASE_S)
