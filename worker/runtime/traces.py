"""Which trace a worker's work belongs to."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

from elastable.embedding_store.measures.spans import PROCESS, VersionTrace
from elastable.master.api import Task, TaskKind

__all__ = ["micro_batch_span", "trace_of"]


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
