"""Mean reciprocal rank and Hits@k, of head and of tail queries, and their average."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.ranking import Ranks
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Bools, Side

__all__ = ["TIES", "RankingMetrics"]

TIES = ("average", "optimistic", "pessimistic")
"""Which rank an answer has among candidates that score the same."""


class RankingMetrics:
    """Sums over queries, a few numbers for each side, whatever the number of queries.

    Args:
        hits: The k of each Hits@k.
        ties: One of `TIES`.

    Raises:
        BadInput: a k below 1, or no such way with ties.
    """

    def __init__(self, hits: Sequence[int] = (1, 3, 10), ties: str = "average") -> None:
        if ties not in TIES:
            raise BadInput(f"ranks {ties!r}: known are {', '.join(TIES)}")
        if not all(k >= 1 for k in hits):
            raise BadInput(f"hits at {list(hits)}: k counts from 1")
        self._hits, self._ties = tuple(hits), ties
        self.sums = np.zeros((len(SIDES), 3 + len(self._hits)), np.float64)

    sums: npt.NDArray[np.float64]
    """float64 `[2, 3 + k]`, by side: queries, sum of 1 / rank, sum of ranks, hits at each k. Those of the members
    of a group may be added up and put here."""

    def add(self, side: Side, ranks: Ranks, mask: Bools | None = None) -> None:
        """Counts queries.

        Args:
            side: Which end they ask for.
            ranks: Of their answers, `[q]`.
            mask: bool `[q]`: False at padding, which does not count.
        """
        rank = ranks.of(self._ties)
        if mask is not None:
            rank = rank[mask]
        at = [float((rank <= k).sum()) for k in self._hits]
        self.sums[SIDES.index(side)] += [len(rank), float((1 / rank).sum()), float(rank.sum()), *at]

    def result(self) -> dict[str, float]:
        """The metrics: for each side that has queries "tail_mrr", "tail_mean_rank", "tail_hits@10" and so on.

        And without a side's name ("mrr", ...) the average over the sides, each
        counting the same.

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
