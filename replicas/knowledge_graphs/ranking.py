"""Ranks of true answers among candidates, one window at a time; mean reciprocal rank and Hits@k."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Bools, Float32, Float64, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Side

TIES = ("average", "optimistic", "pessimistic")
"""How to rank an answer among candidates with the same score."""


ExactScores = Callable[[Int64, Int64], Float64]
"""`exact(query, column)`, int64 `[P]` each: float64 `[P]`."""

_PAIRS_AT_ONCE = 1 << 18


@dataclass(frozen=True)
class Ranks:
    """The rank of each query's answer, from 1, depending on how ties are broken.

    Attributes:
        optimistic: int64 `[q]`: the answer before all candidates with the same score.
        pessimistic: int64 `[q]`: the answer after all of them.
    """

    optimistic: Int64
    pessimistic: Int64

    @property
    def average(self) -> Float64:
        """float64 `[q]`: the mean of the two, the expected rank in random order."""
        return (self.optimistic + self.pessimistic) / 2


class RankCounts:
    """Counts the candidates of each query that score higher than its answer, or the same.

    Counts of windows and shards add up: `greater` and `equal` may be summed
    over a replica group. Memory is two numbers per query, and the near candidates of a window.

    Args:
        true_scores: float64 `[q]`: scores of the queries' answers, in double precision.
        tolerance: float64 `[q]`, not negative: candidates whose scores come this close to the answer's are compared by
            their exact scores (`Comparison.rounding`).

    Attributes:
        greater: int64 `[q]`: candidates with a higher score so far. NaN counts as higher, and so does every candidate
            of an answer with NaN: a diverged model does not rank first.
        equal: int64 `[q]`: candidates with the same score so far.
    """

    def __init__(self, true_scores: Float64, tolerance: Float64) -> None:
        self._exact, near = np.ascontiguousarray(true_scores), np.ascontiguousarray(tolerance)
        if self._exact.ndim != 1:
            raise BadInput(f"true scores must be [q], one a query; got {list(self._exact.shape)}")
        if near.shape != self._exact.shape or (near < 0).any():
            raise BadInput(f"a tolerance must be [{len(self._exact)}], none below 0; got {list(near.shape)}")
        self._true = np.stack([self._exact - near, self._exact + near]).astype(np.float32)
        self.greater = np.zeros(len(near), np.int64)
        self.equal = np.zeros(len(near), np.int64)

    def add(self, scores: npt.NDArray[np.floating], counted: Bools, exact: ExactScores) -> None:
        """Counts the candidates of one window.

        Args:
            scores: float `[q, c]`, of each query with each candidate.
            counted: bool `[q, c]`: False for candidates that do not count, such as the answers themselves.
            exact: Scores of pairs of this window in double precision.

        Raises:
            BadInput: shapes that do not fit.
        """
        given: Float32 = np.ascontiguousarray(scores, np.float32)
        if given.ndim != 2 or len(given) != len(self.equal) or counted.shape != given.shape:
            raise BadInput(
                f"scores and what counts must be [{len(self.equal)}, c], a row for each query; got "
                f"{list(given.shape)} and {list(counted.shape)}"
            )
        near = np.zeros(len(given), np.int64)
        _count(given, self._true, counted, self.greater, near)
        queries = np.flatnonzero(near)
        parts = np.cumsum(near[queries]) // _PAIRS_AT_ONCE  # decided some queries at a time: memory is bounded
        for part in np.unique(parts):
            some = queries[parts == part]
            low, high = self._true[:, some, None]
            pairs = np.flatnonzero((given[some] >= low) & (given[some] <= high) & counted[some])
            query, column = some[pairs // given.shape[1]], pairs % given.shape[1]
            found, true = exact(query, column), self._exact[query]
            np.add.at(self.greater, query, ~(found <= true))
            np.add.at(self.equal, query, found == true)


class RankingMetrics:
    """Sums over queries, a few numbers for each side.

    Args:
        hits: The k of each Hits@k.
        ties: One of `TIES`.

    Raises:
        BadInput: a k below 1, or unknown ties.
    """

    def __init__(self, hits: Sequence[int] = (1, 3, 10), ties: str = "average") -> None:
        if ties not in TIES:
            raise BadInput(f"ranks {ties!r}: known are {', '.join(TIES)}")
        if not all(k >= 1 for k in hits):
            raise BadInput(f"hits at {list(hits)}: k counts from 1")
        self._hits, self._ties = tuple(hits), ties
        self.sums = np.zeros((len(SIDES), 3 + len(self._hits)), np.float64)

    sums: npt.NDArray[np.float64]
    """float64 `[2, 3 + k]`, by side: queries, sum of 1 / rank, sum of ranks, hits at each k. May be replaced by
    the sum over a group."""

    def add(self, side: Side, ranks: Ranks, mask: Bools | None = None) -> None:
        """Counts queries.

        Args:
            ranks: Ranks of their answers, `[q]`.
            mask: bool `[q]`: False at padding, which does not count.
        """
        rank = np.asarray(getattr(ranks, self._ties), np.float64)
        if mask is not None:
            rank = rank[mask]
        at = [float((rank <= k).sum()) for k in self._hits]
        self.sums[SIDES.index(side)] += [len(rank), float((1 / rank).sum()), float(rank.sum()), *at]

    def result(self) -> dict[str, float]:
        """The metrics of each side with queries ("tail_mrr", "tail_mean_rank", "tail_hits@10", ...).

        Names without a side ("mrr", ...) are the averages over the sides.

        Raises:
            BadInput: no query was counted.
        """
        sides = [side for side, sums in zip(SIDES, self.sums, strict=True) if sums[0]]
        if not sides:
            raise BadInput("ranking metrics of no queries at all")
        names = ["mrr", "mean_rank", *(f"hits@{k}" for k in self._hits)]
        of_side = {side: self.sums[SIDES.index(side), 1:] / self.sums[SIDES.index(side), 0] for side in sides}
        overall = dict(zip(names, np.mean(list(of_side.values()), axis=0).tolist(), strict=True))
        for side, means in of_side.items():
            overall |= {f"{side}_{name}": value for name, value in zip(names, means.tolist(), strict=True)}
        return overall


@kernel
def _count(scores: Float32, true: Float32, counted: Bools, greater: Int64, near: Int64) -> None:
    """`true`: float32 `[2, q]`, the lowest and highest score near the answer's."""
    for q in range(scores.shape[0]):
        low, high = true[0, q], true[1, q]
        less, same, total = 0, 0, 0
        for c in range(scores.shape[1]):
            total += counted[q, c]
            less += counted[q, c] & (scores[q, c] < low)
            same += counted[q, c] & (scores[q, c] >= low) & (scores[q, c] <= high)
        greater[q] += total - less - same
        near[q] += same
