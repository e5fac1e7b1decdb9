"""Counters of a process: totals by label, and seconds by label. Any thread may add to them."""

from __future__ import annotations

import threading
import time
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sized
from contextlib import contextmanager

from elastable.embedding_store.measures.spans import PROCESS, VersionTrace
from elastable.embedding_store.measures.values import BOUNDS_S, Histogram

__all__ = ["Counts", "Durations", "LookupCounts", "Total"]


class Counts:
    """Totals by labels, from 0 on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._totals: dict[tuple[str, ...], int] = {}

    def add(self, *labels: str, by: int = 1) -> None:
        """Adds to the total of these labels."""
        with self._lock:
            self._totals[labels] = self._totals.get(labels, 0) + by

    def totals(self) -> dict[tuple[str, ...], int]:
        """Labels -> total."""
        with self._lock:
            return dict(self._totals)

    def by_name(self) -> dict[str, int]:
        """The same, of counts with one label."""
        return {labels[0]: total for labels, total in self.totals().items()}


class Total:
    """One total, from 0 on."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.value = 0

    def add(self, by: int) -> None:
        """Adds to it."""
        with self._lock:
            self.value += by


class Durations:
    """Histograms of seconds by label; in a process that is traced, what is timed is a span, too."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._counts: dict[str, list[int]] = {}
        self._seconds: dict[str, float] = {}

    def add(self, label: str, seconds: float) -> None:
        """Adds one observation, which ends now."""
        if PROCESS.tracer is not None:
            PROCESS.tracer.ended(label, seconds)
        self._count(label, seconds)

    def _count(self, label: str, seconds: float) -> None:
        bucket = bisect_left(BOUNDS_S, seconds)
        with self._lock:
            counts = self._counts.get(label)
            if counts is None:
                counts = self._counts[label] = [0] * (len(BOUNDS_S) + 1)
            counts[bucket] += 1
            self._seconds[label] = self._seconds.get(label, 0.0) + seconds

    @contextmanager
    def timing(self, label: str) -> Iterator[None]:
        """Adds how long the block takes, unless it raises."""
        begun = time.monotonic()
        if PROCESS.tracer is None:
            yield
        else:
            with PROCESS.tracer.span(label, None, {}):
                yield
        self._count(label, time.monotonic() - begun)

    @contextmanager
    def timing_version(self, begun: float, trace: VersionTrace) -> Iterator[None]:
        """As `timing` of the label "version", since `begun` (monotonic seconds): the trace of that version."""
        if PROCESS.tracer is None:
            yield
        else:
            with PROCESS.tracer.version(trace, begun):
                yield
        self._count("version", time.monotonic() - begun)

    def histograms(self) -> dict[str, Histogram]:
        """Label -> what was observed."""
        with self._lock:
            return {label: Histogram(tuple(counts), self._seconds[label]) for label, counts in self._counts.items()}


class LookupCounts:
    """Lookups and the rows that they asked for, by table, or by table and further labels.

    Attributes:
        lookups: Labels -> lookups that asked for rows.
        rows: Labels -> rows.
    """

    def __init__(self) -> None:
        self.lookups, self.rows = Counts(), Counts()

    def add(self, ids: Mapping[str, Sized], *labels: str) -> None:
        """Counts one lookup of ids by table; the tables are known to exist."""
        for table, wanted in ids.items():
            self.lookups.add(table, *labels)
            self.rows.add(table, *labels, by=len(wanted))
