"""What a store measures of itself, as plain values: histograms of seconds, and totals by table."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

__all__ = ["BOUNDS_S", "Histogram", "StoreMeasures"]

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
    def of_all(cls, each: Iterable[Histogram]) -> Histogram:
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
    def of_all(cls, each: Sequence[StoreMeasures]) -> StoreMeasures:
        """Of several stores together."""
        phases = dict.fromkeys(phase for one in each for phase in one.commits)
        return cls(
            {phase: Histogram.of_all(one.commits[phase] for one in each if phase in one.commits) for phase in phases},
            _sums([one.rows_wanted for one in each]),
            _sums([one.rows_read for one in each]),
        )


def _sums(each: Sequence[Mapping[str, int]]) -> dict[str, int]:
    return {name: sum(one.get(name, 0) for one in each) for name in dict.fromkeys(name for one in each for name in one)}
