"""What a metric is: its name, kind, unit and meaning, and one value of it."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum

from elastable.embedding_store.measures import Histogram

__all__ = ["Metric", "MetricKind", "Sample", "Source", "counter", "gauge", "histogram"]


class MetricKind(StrEnum):
    """What a value of a metric says."""

    GAUGE = "gauge"
    COUNTER = "counter"
    HISTOGRAM = "histogram"


@dataclass(frozen=True, slots=True)
class Metric:
    """One metric, named as Prometheus' conventions want it.

    Attributes:
        name: Begins with `elastable_` and ends with its unit; counters end with `_total`.
        kind: Gauge, counter or histogram.
        unit: Of its values, in words.
        meaning: One phrase.
        labels: Names of its labels.
    """

    name: str
    kind: MetricKind
    unit: str
    meaning: str
    labels: tuple[str, ...] = ()

    def __call__(self, value: float | Histogram, *labels: str) -> Sample:
        """A value of it, with a value for each of its labels."""
        assert len(labels) == len(self.labels), self.name
        return Sample(self, value, labels)


def gauge(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    """A metric whose values go up and down."""
    return Metric(name, MetricKind.GAUGE, unit, meaning, labels)


def counter(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    """A metric whose values grow from 0 on."""
    return Metric(name, MetricKind.COUNTER, unit, meaning, labels)


def histogram(name: str, unit: str, meaning: str, *labels: str) -> Metric:
    """A metric of how long something takes."""
    return Metric(name, MetricKind.HISTOGRAM, unit, meaning, labels)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of a metric."""

    metric: Metric
    value: float | Histogram
    labels: tuple[str, ...] = ()


Source = Callable[[], Iterable[Sample]]
"""Reads the current values of some metrics; called by one thread at a time, when somebody asks."""
