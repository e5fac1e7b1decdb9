"""What a process measures: the time, counters, histograms of a store's phases, and spans of traces."""

import logging
import threading
import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Protocol, TypeVar


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
            with span(label):
                yield
        self._count(label, time.monotonic() - begun)

    @contextmanager
    def timing_version(self, begun: float, trace: "VersionTrace") -> Iterator[None]:
        """Adds how long a version takes since `begun` (monotonic seconds): the trace of that version."""
        with nullcontext() if PROCESS.tracer is None else PROCESS.tracer.version(trace, begun):
            yield
        self._count("version", time.monotonic() - begun)

    def histograms(self) -> "dict[str, Histogram]":
        """Label -> what was observed."""
        with self._lock:
            return {label: Histogram(tuple(counts), self._seconds[label]) for label, counts in self._counts.items()}


@dataclass(eq=False)
class LookupCounts:
    """Lookups and the rows that they asked for, by table, or by table and further labels.

    Attributes:
        lookups: Labels -> lookups that asked for rows.
        rows: Labels -> rows.
    """

    lookups: Counts = field(default_factory=Counts)
    rows: Counts = field(default_factory=Counts)

    def add(self, ids: Mapping[str, Sized], *labels: str) -> None:
        """Counts one lookup of ids by table; the tables are known to exist."""
        for table, wanted in ids.items():
            self.lookups.add(table, *labels)
            self.rows.add(table, *labels, by=len(wanted))


# What a store measures of itself, as plain values: histograms of seconds, and totals by table


BOUNDS_S = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
"""Upper bounds of the buckets of every histogram, in seconds; one more bucket holds what is above the last."""


@dataclass(frozen=True, slots=True)
class Histogram:
    """How long something took, so far.

    Attributes:
        counts: Observations by bucket, one more than `BOUNDS_S`; not cumulative.
        seconds: All observations together.
    """

    counts: tuple[int, ...] = (0,) * (len(BOUNDS_S) + 1)
    seconds: float = 0.0

    @property
    def count(self) -> int:
        """Observations."""
        return sum(self.counts)

    @property
    def mean_s(self) -> float:
        """Mean of the observations, in seconds; 0 where there are none."""
        return self.seconds / self.count if self.count else 0.0

    def quantile_s(self, part: float) -> float:
        """An upper bound of this part of the observations, in seconds: that of their bucket; 0 where there are none."""
        wanted = part * self.count
        bounds = (*BOUNDS_S, BOUNDS_S[-1])
        return next((bound for bound, upto in zip(bounds, accumulate(self.counts), strict=True) if upto >= wanted), 0.0)

    @classmethod
    def of_all(cls, each: "Iterable[Histogram]") -> "Histogram":
        """All of them as one."""
        there = list(each)
        counts = tuple(map(sum, zip(*(one.counts for one in there), strict=True))) if there else cls().counts
        return cls(counts, sum(one.seconds for one in there))


@dataclass(frozen=True, slots=True)
class StoreMeasures:
    """What a store has done since it was opened.

    Attributes:
        commits: Seconds of its commits by phase: "prepare" (checks, and rows that are not in memory), "apply" (the
            optimizer), "append" (the log).
        rows_wanted: Table -> rows that lookups asked a store with a tier for.
        rows_read: Table -> of these, rows that were not in memory and came from the tier.
    """

    commits: Mapping[str, Histogram] = field(default_factory=dict)
    rows_wanted: Mapping[str, int] = field(default_factory=dict)
    rows_read: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of_all(cls, each: "Sequence[StoreMeasures]") -> "StoreMeasures":
        """Of several stores together."""
        phases = dict.fromkeys(phase for one in each for phase in one.commits)
        return cls(
            {phase: Histogram.of_all(one.commits[phase] for one in each if phase in one.commits) for phase in phases},
            _sums([one.rows_wanted for one in each]),
            _sums([one.rows_read for one in each]),
        )


def _sums(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(one.get(name, 0) for one in each) for name in dict.fromkeys(name for one in each for name in one)}


# Spans of traces, where a process is traced; nothing at all where it is not


TRACE_KEY = "traceparent"
"""Metadata of a call that says which span it belongs to, as W3C Trace Context writes it."""

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class VersionTrace:
    """The trace of one version of a job. Every process computes it by itself."""

    job: str
    version: int


class Tracer(Protocol):
    """What makes spans. Safe to use from many threads."""

    def version(self, trace: VersionTrace, begun: float) -> AbstractContextManager[None]:
        """The span that a trace consists of, open since `begun` (monotonic seconds), and current in the block."""

    def span(
        self, name: str, trace: VersionTrace | None, attributes: dict[str, str | int]
    ) -> AbstractContextManager[None]:
        """A span in a trace; None: within the current span, and nothing where there is none. Current in the block."""

    def ended(self, name: str, seconds: float) -> None:
        """A span within the current one that ends now; nothing where there is none."""

    def parent(self) -> str | None:
        """The current span as `TRACE_KEY` carries it; None: there is none."""

    def serving(self, method: str, parent: str) -> AbstractContextManager[None]:
        """The span of a call that is being answered; current in the block."""

    def begin_serving(self, method: str, parent: str) -> Callable[[], None]:
        """The same, ended by the function returned; current nowhere."""

    def carried(self, call: Callable[[], T]) -> Callable[[], T]:
        """The call, for another thread, with the current span of this one."""


class TracedProcess:
    """Whether this process is traced.

    Attributes:
        tracer: What makes its spans; None: it is not traced.
    """

    __slots__ = ("tracer",)

    def __init__(self) -> None:
        self.tracer: Tracer | None = None


PROCESS = TracedProcess()
"""This process."""


@contextmanager
def traced_by(tracer: Tracer) -> Iterator[None]:
    """Traces this process while the block runs. Channels and servers made before the block stay untraced."""
    before, PROCESS.tracer = PROCESS.tracer, tracer
    try:
        yield
    finally:
        PROCESS.tracer = before


def span(
    name: str, trace: VersionTrace | None = None, attributes: dict[str, str | int] | None = None
) -> AbstractContextManager[None]:
    """A span in a trace, current in the block; nothing in a process that is not traced."""
    return nullcontext() if PROCESS.tracer is None else PROCESS.tracer.span(name, trace, attributes or {})


def carried(call: Callable[[], T]) -> Callable[[], T]:
    """The call for another thread, with this one's span; the call itself in a process that is not traced."""
    return call if PROCESS.tracer is None else PROCESS.tracer.carried(call)


# The time of commits: that of the system when the process began, and from then on what has passed since


_LOG = logging.getLogger(__name__)
_JUMP_S = 5.0  # by which the system's clock may be set without a word

_PASSING = getattr(time, "CLOCK_BOOTTIME", time.CLOCK_MONOTONIC)  # goes on while the machine sleeps


class Clock:
    """Seconds since 1970 (UTC) that never jump: setting the system's clock changes nothing here, and is reported.

    Safe to use from many threads.

    Args:
        system: The system's clock.
        passing: Seconds that never go back.
    """

    def __init__(self, system: Callable[[], float], passing: Callable[[], float]) -> None:
        self._system, self._passing = system, passing
        self._began = system() - passing()
        self._reported = 0.0  # by how much the system's clock was ahead of this one
        self._lock = threading.Lock()

    def now(self) -> float:
        """The time."""
        now = self._began + self._passing()
        ahead = self._system() - now
        with self._lock:
            jump = ahead - self._reported
            if abs(jump) >= _JUMP_S:
                self._reported = ahead
        if abs(jump) >= _JUMP_S:
            _LOG.warning(
                "the system's clock was set %s by %.0f s; for commits of this process it is as late as if it was not",
                "ahead" if jump > 0 else "back",
                abs(jump),
            )
        return now


CLOCK = Clock(time.time, partial(time.clock_gettime, _PASSING))
"""Of this process."""
