"""Sources of metrics as a collector of prometheus_client: everything is read when Prometheus asks."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from itertools import accumulate

from prometheus_client import CollectorRegistry
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.measures.values import BOUNDS_S, Histogram
from elastable.monitoring.metric import Metric, MetricKind, Sample, Source
from elastable.monitoring.sources.process_source import SOURCE_FAILED

__all__ = ["registry_of"]

_log = logging.getLogger(__name__)


def registry_of(sources: Mapping[str, Source]) -> CollectorRegistry:
    """A registry of these sources by name and of the process itself; no other process or server shares it."""
    registry = CollectorRegistry()
    registry.register(_Sources(sources))
    ProcessCollector(registry=registry)
    return registry


class _Sources(Collector):
    def __init__(self, sources: Mapping[str, Source]) -> None:
        self._sources = dict(sources)

    def describe(self) -> list[Family]:
        """Nothing: registering must not read a store."""
        return []

    def collect(self) -> Iterator[Family]:
        by_metric: dict[Metric, list[Sample]] = {}
        for name, source in self._sources.items():
            failed = 0
            try:
                samples = list(source())
            except ElastableError as error:  # a store that is away hides no other metric
                _log.debug("metrics of the %s are left out: %s", name, error)
                samples, failed = [], 1
            for sample in (*samples, SOURCE_FAILED(failed, name)):
                by_metric.setdefault(sample.metric, []).append(sample)
        for metric, found in by_metric.items():
            yield _family(metric, found)


def _family(metric: Metric, samples: list[Sample]) -> Family:
    if metric.kind is MetricKind.HISTOGRAM:
        histograms = HistogramMetricFamily(metric.name, metric.meaning, labels=metric.labels)
        for sample in samples:
            assert isinstance(sample.value, Histogram), metric.name
            histograms.add_metric(sample.labels, _buckets(sample.value), sample.value.seconds)
        return histograms
    kind = CounterMetricFamily if metric.kind is MetricKind.COUNTER else GaugeMetricFamily
    family = kind(metric.name, metric.meaning, labels=metric.labels)
    for sample in samples:
        assert not isinstance(sample.value, Histogram), metric.name
        family.add_metric(sample.labels, sample.value)
    return family


def _buckets(histogram: Histogram) -> list[tuple[str, float]]:
    """Cumulative counts by upper bound."""
    bounds = [*(repr(bound) for bound in BOUNDS_S), "+Inf"]
    return list(zip(bounds, map(float, accumulate(histogram.counts)), strict=True))
