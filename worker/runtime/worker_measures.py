"""What a worker counts for those who watch it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

from elastable.embedding_store.measures.counters import Counts, Durations, LookupCounts, Total
from elastable.master.api import Task
from elastable.worker.runtime.step_profile import StepProfile
from elastable.worker.runtime.traces import micro_batch_span

__all__ = ["WorkerMeasures"]


class WorkerMeasures:
    """Of one worker.

    Args:
        profile: Of some micro-batches; None: none is made.

    Attributes:
        micro_batches: By kind ("train" or "evaluate") and outcome ("counted" or "dropped").
        records: Of training micro-batches that counted.
        lookups: Its lookups, wherever the rows came from.
        phases: Seconds of a micro-batch by phase: "wait" (for its version), "lookup", "compute", "push".
        sessions: That it opened; each after the first follows a broken connection or a master that was restarted.
    """

    def __init__(self, profile: StepProfile | None = None) -> None:
        self._profile = profile
        self.micro_batches, self.records = Counts(), Total()
        self.lookups, self.phases = LookupCounts(), Durations()
        self.sessions = Total()

    def note(self, kind: str, counted: bool, records: int) -> None:
        """A micro-batch of this kind is over."""
        self.micro_batches.add(kind, "counted" if counted else "dropped")
        if counted and kind == "train":
            self.records.add(records)

    @contextmanager
    def micro_batch(self, job: str, task: Task, computed_on: int, worker: str) -> Iterator[None]:
        """Around a micro-batch, from its lookup until its gradients count; arguments as of `micro_batch_span`."""
        profiled = nullcontext() if self._profile is None else self._profile.micro_batch(task)
        with micro_batch_span(job, task, computed_on, worker), profiled:
            yield

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Around a phase of a micro-batch."""
        profiled = nullcontext() if self._profile is None else self._profile.phase(label)
        with self.phases.timing(label), profiled:
            yield

    def close(self) -> None:
        """Nothing is measured any more: a profile that is being made is written."""
        if self._profile is not None:
            self._profile.close()
