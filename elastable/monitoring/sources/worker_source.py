"""Metrics of a worker."""

from __future__ import annotations

from collections.abc import Iterator

from elastable.monitoring.metric import Sample, counter, histogram
from elastable.worker.runtime.worker_measures import WorkerMeasures

__all__ = ["METRICS", "WorkerSource"]

_MICRO_BATCHES = counter(
    "elastable_worker_micro_batches_total",
    "micro-batches",
    "Micro-batches computed: counted, or dropped because another worker was faster.",
    "kind",
    "outcome",
)
_RECORDS = counter("elastable_worker_records_total", "records", "Records trained that counted.")
_PHASE_S = histogram(
    "elastable_worker_phase_seconds",
    "seconds",
    "A micro-batch by phase: wait (for its version), lookup, compute, push.",
    "phase",
)
_SESSIONS = counter("elastable_worker_sessions_total", "sessions", "Sessions opened with a master.")

METRICS = (_MICRO_BATCHES, _RECORDS, _PHASE_S, _SESSIONS)


class WorkerSource:
    """Of one worker.

    Args:
        measures: What it counts.
    """

    def __init__(self, measures: WorkerMeasures) -> None:
        self._measures = measures

    def __call__(self) -> Iterator[Sample]:
        for (kind, outcome), total in self._measures.micro_batches.totals().items():
            yield _MICRO_BATCHES(total, kind, outcome)
        yield _RECORDS(self._measures.records.value)
        for phase, observed in self._measures.phases.histograms().items():
            yield _PHASE_S(observed, phase)
        yield _SESSIONS(self._measures.sessions.value)
