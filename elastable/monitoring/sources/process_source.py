"""Metrics of any process of Elastable, next to `process_*` of prometheus_client (memory, processor time, files)."""

from __future__ import annotations

import threading
from collections.abc import Iterator

from elastable.embedding_store.support.retry import RETRIES
from elastable.monitoring.metric import Sample, counter, gauge
from elastable.process.version import distribution_version

__all__ = ["METRICS", "SOURCE_FAILED", "process_source"]

_BUILD = gauge("elastable_build_info", "1", "Release of Elastable that runs, and its role.", "version", "role")
_THREADS = gauge("elastable_threads", "threads", "Threads of the interpreter.")
_RETRIES = counter(
    "elastable_retries_total", "calls", "Calls made again because the last try failed, by its error.", "error"
)
SOURCE_FAILED = gauge(
    "elastable_metrics_source_failed",
    "0 or 1",
    "Whether metrics of this source are missing from this answer, because it failed.",
    "source",
)

METRICS = (_BUILD, _THREADS, _RETRIES, SOURCE_FAILED)


def process_source(role: str) -> Iterator[Sample]:
    """Of this process, whose role is `role`."""
    yield _BUILD(1, distribution_version(), role)
    yield _THREADS(threading.active_count())
    for error, count in RETRIES.by_name().items():
        yield _RETRIES(count, error)
