"""Ranks of true answers among candidates that come a window at a time."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import Bools

__all__ = ["RankCounts", "Ranks"]

Float64 = npt.NDArray[np.float64]


@dataclass(frozen=True)
class Ranks:
    """The rank of each query's answer, from 1, where others score the same as it.

    Attributes:
        optimistic: int64 `[q]`: the answer before all that score the same.
        pessimistic: int64 `[q]`: behind all of them.
    """

    optimistic: Int64
    pessimistic: Int64

    @property
    def average(self) -> Float64:
        """float64 `[q]`: the mean of the two, what a random order of them gives on average."""
        return (self.optimistic + self.pessimistic) / 2

    def of(self, ties: str) -> Float64:
        """float64 `[q]`: one of "average", "optimistic", "pessimistic".

        Raises:
            BadInput: another.
        """
        if ties not in ("average", "optimistic", "pessimistic"):
            raise BadInput(f"ranks {ties!r}: known are average, optimistic, pessimistic")
        return np.asarray(getattr(self, ties), np.float64)


class RankCounts:
    """How many candidates of each query score more than its answer, or the same; memory for the queries alone.

    Counts of different windows, or of different shards, add up: `greater` and
    `equal` may be summed over a replica group.

    Args:
        true_scores: float `[q]`: of the queries' answers.
        tolerance: float `[q]`, not negative: scores as near as that to the answer's are the
            same as it (`Comparison.rounding`); None: those that have its bits.

    Attributes:
        greater: int64 `[q]`: candidates so far that score more. A score that is NaN
            counts as more, and against an answer whose score is NaN every
            candidate does: a model that has come apart does not rank first.
        equal: int64 `[q]`: candidates so far that score the same.
    """

    def __init__(
        self, true_scores: npt.NDArray[np.floating], tolerance: npt.NDArray[np.floating] | None = None
    ) -> None:
        true: Float32 = np.ascontiguousarray(true_scores, np.float32)
        if true.ndim != 1:
            raise BadInput(f"true scores must be [q], one a query; got {list(true.shape)}")
        near: Float32 = np.zeros_like(true) if tolerance is None else np.ascontiguousarray(tolerance, np.float32)
        if near.shape != true.shape or (near < 0).any():
            raise BadInput(f"a tolerance must be [{len(true)}], none below 0; got {list(near.shape)}")
        self._true = np.stack([true - near, true + near])
        self.greater = np.zeros(len(true), np.int64)
        self.equal = np.zeros(len(true), np.int64)

    def add(
        self,
        scores: npt.NDArray[np.floating],
        *,
        counted: Bools | None = None,
        without: tuple[Int64, Int64] | None = None,
    ) -> None:
        """Counts the candidates of one window. The answers themselves must not count: leave them out.

        Args:
            scores: float `[q, c]`, of each query with each candidate.
            counted: bool `[q, c]`, or broadcast to it: False where a candidate
                does not count. None: all do.
            without: (query, column), int64 `[P]` each, every pair once: what does
                not count, as `Exclusions.window` gives it.

        Raises:
            BadInput: shapes that do not fit.
        """
        given: Float32 = np.ascontiguousarray(scores, np.float32)
        if given.ndim != 2 or len(given) != len(self.equal):
            raise BadInput(f"scores must be [{len(self.equal)}, c], a row for each query; got {list(given.shape)}")
        if counted is None:
            _count(given, self._true, self.greater, self.equal)
        else:
            _count_masked(given, self._true, np.broadcast_to(counted, given.shape), self.greater, self.equal)
        if without is not None:
            query, column = without
            if counted is not None:
                still = np.broadcast_to(counted, given.shape)[query, column]
                query, column = query[still], column[still]
            _uncount(given, self._true, query, column, self.greater, self.equal)

    def ranks(self) -> Ranks:
        """The ranks among what was counted."""
        return Ranks(1 + self.greater, 1 + self.greater + self.equal)


@kernel
def _count(scores: Float32, true: Float32, greater: Int64, equal: Int64) -> None:
    """`true`: float32 `[2, q]`, the least and the greatest score that is the same as the answer's."""
    for q in range(scores.shape[0]):
        low, high = true[0, q], true[1, q]
        less, same = 0, 0
        for c in range(scores.shape[1]):
            less += scores[q, c] < low
            same += (scores[q, c] >= low) & (scores[q, c] <= high)
        greater[q] += scores.shape[1] - less - same
        equal[q] += same


@kernel
def _count_masked(scores: Float32, true: Float32, counted: Bools, greater: Int64, equal: Int64) -> None:
    for q in range(scores.shape[0]):
        for c in range(scores.shape[1]):
            if counted[q, c]:
                if (scores[q, c] >= true[0, q]) & (scores[q, c] <= true[1, q]):
                    equal[q] += 1
                elif not scores[q, c] < true[0, q]:
                    greater[q] += 1


@kernel
def _uncount(scores: Float32, true: Float32, query: Int64, column: Int64, greater: Int64, equal: Int64) -> None:
    for i in range(len(query)):
        q, score = query[i], scores[query[i], column[i]]
        if (score >= true[0, q]) & (score <= true[1, q]):
            equal[q] -= 1
        elif not score < true[0, q]:
            greater[q] -= 1
