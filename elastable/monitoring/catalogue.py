"""Every metric of Elastable."""

from __future__ import annotations

from collections.abc import Mapping

from elastable.monitoring.metric import Metric
from elastable.monitoring.sources import (
    checkpoint_source,
    job_source,
    process_source,
    server_source,
    shard_source,
    store_source,
    worker_source,
)

__all__ = ["METRICS"]

_SOURCES = (
    job_source,
    checkpoint_source,
    store_source,
    shard_source,
    server_source,
    worker_source,
    process_source,
)

METRICS: Mapping[str, Metric] = {metric.name: metric for source in _SOURCES for metric in source.METRICS}
"""By name, in the order of docs/metrics.md."""
