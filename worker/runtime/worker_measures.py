"""What a worker counts, and which trace its work belongs to."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from elastable.embedding_store.measures import PROCESS, Counts, Durations, LookupCounts, Total, VersionTrace
from elastable.master.api import Task, TaskKind
from elastable.worker.runtime.step_profile import StepProfile

__all__ = ["WorkerMeasures", "trace_of"]


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


# Which trace a worker's work belongs to


def trace_of(job: str, task: Task, computed_on: int) -> VersionTrace:
    """The version that a task is for: the one after `computed_on` where it trains, that one where it evaluates."""
    return VersionTrace(job, computed_on + (task.kind is TaskKind.TRAIN))


def micro_batch_span(job: str, task: Task, computed_on: int, worker: str) -> AbstractContextManager[None]:
    """The span of a micro-batch, from its lookup until its gradients count.

    Args:
        job: Its name.
        task: What is computed.
        computed_on: The version that it is computed on.
        worker: Incarnation of the worker.
    """
    if PROCESS.tracer is None:
        return nullcontext()
    attributes: dict[str, str | int] = {"micro_batch": task.micro_batch, "kind": task.kind.value, "worker": worker}
    return PROCESS.tracer.span("micro-batch", trace_of(job, task, computed_on), attributes)
