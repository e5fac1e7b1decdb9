"""Metrics of a job, read from its master."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from elastable.master.api import JobStatus
from elastable.monitoring.metric import Sample, counter, gauge, histogram

if TYPE_CHECKING:
    from elastable.master.jobs.job_master import Master

__all__ = ["METRICS", "STATES", "JobSource"]

STATES = ("waiting", "training", "evaluating", "stopping", "finished", "failed")

_INFO = gauge("elastable_job_info", "1", "The job, its mode and its store.", "job", "mode", "store")
_STATE = gauge("elastable_job_state", "0 or 1", "1 for the state that the job is in.", "state")
_VERSION = gauge("elastable_job_version", "version", "Version that is current.")
_VERSIONS = gauge("elastable_job_versions", "versions", "Versions of the whole job.")
_EPOCH = gauge("elastable_job_epoch", "epoch", "Epoch that is current, counted from 1.")
_RECORDS = counter("elastable_job_records_total", "records", "Records trained, earlier runs included.")
_EXPECTED = gauge("elastable_job_expected_records", "records", "Records of all epochs.")
_METRIC = gauge("elastable_job_metric", "as the metric", "Loss and metrics of the model.", "name")
_VERSION_S = histogram("elastable_version_seconds", "seconds", "Time from one version to the next.")
_PHASE_S = histogram(
    "elastable_version_phase_seconds",
    "seconds",
    "The same by phase: wait (for workers), sum, dense, rows, callbacks.",
    "phase",
)
_WORKERS = gauge("elastable_workers", "workers", "Workers: working (they hold micro-batches), idle, gone.", "state")
_LEASES = gauge("elastable_leases", "micro-batches", "Micro-batches that workers hold.")
_JOINED = counter("elastable_workers_joined_total", "sessions", "Sessions that workers opened.")
_LEFT = counter("elastable_workers_left_total", "sessions", "Workers that left while there was work, or died.")
_FAILURES = gauge("elastable_worker_failures", "workers", "Workers that said why they failed, by error.", "error")
_PUSHES = counter("elastable_pushes_total", "pushes", "Pushes: accepted, duplicate, stale, skipped.", "outcome")
_REFUSED = counter("elastable_refused_pushes_total", "pushes", "Pushes refused, by error.", "error")

_OF_JOB = (_INFO, _STATE, _VERSION, _VERSIONS, _EPOCH, _RECORDS, _EXPECTED, _METRIC, _VERSION_S, _PHASE_S)
METRICS = (*_OF_JOB, _WORKERS, _LEASES, _JOINED, _LEFT, _FAILURES, _PUSHES, _REFUSED)


class JobSource:
    """Of one job.

    Args:
        master: Whose state is read.
    """

    def __init__(self, master: Master) -> None:
        self._master = master

    def __call__(self) -> Iterator[Sample]:
        status, measures = self._master.status(), self._master.measures
        yield from _job(status)
        for observed in measures.versions.histograms().values():
            yield _VERSION_S(observed)
        for phase, observed in measures.phases.histograms().items():
            yield _PHASE_S(observed, phase)
        yield from _workers(status)
        yield _JOINED(measures.joined.value)
        yield _LEFT(measures.left.value)
        for outcome, total in measures.pushes.by_name().items():
            yield _PUSHES(total, outcome)
        for error, total in measures.refused.by_name().items():
            yield _REFUSED(total, error)


def _job(status: JobStatus) -> Iterator[Sample]:
    yield _INFO(1, status.job, status.mode, status.store)
    for state in STATES:
        yield _STATE(state == status.state, state)
    yield _VERSION(status.version)
    yield _VERSIONS(status.versions_total)
    yield _EPOCH(status.epoch + 1)
    yield _RECORDS(status.records_trained)
    yield _EXPECTED(status.records_total)
    for name, value in status.metrics.items():
        yield _METRIC(value, name)


def _workers(status: JobStatus) -> Iterator[Sample]:
    working = sum(1 for worker in status.workers if worker.leases)
    yield _WORKERS(working, "working")
    yield _WORKERS(len(status.workers) - working, "idle")
    yield _WORKERS(len(status.gone), "gone")
    yield _LEASES(sum(worker.leases for worker in status.workers))
    failures: dict[str, int] = {}
    for refusal in status.refusals:
        failures[refusal.error] = failures.get(refusal.error, 0) + refusal.count
    for error, count in failures.items():
        yield _FAILURES(count, error)
