"""The rank of every query's answer, and the metrics of any part of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastable.embedding_store.contract.arrays import Bools, Int64
from elastable.replicas.knowledge_graphs.evaluation.ranking import RankingMetrics, Ranks
from elastable.replicas.knowledge_graphs.graph import SIDES

__all__ = ["HITS", "QueryRanks"]

HITS = (1, 3, 10)
"""The k of each Hits@k that is reported by default."""


@dataclass(frozen=True)
class QueryRanks:
    """The ranks of the answers of Q queries: head queries first, each side in the order of the triples.

    Attributes:
        triple: int64 `[Q]`: the query's triple, a position in the array that was ranked.
        side: int64 `[Q]`: the queried end, an index of `graph.batch.SIDES` (0: head, 1: tail).
        ranks: Their ranks, `[Q]`.
    """

    triple: Int64
    side: Int64
    ranks: Ranks

    def __len__(self) -> int:
        return len(self.triple)

    def part(self, which: Bools) -> QueryRanks:
        """The queries that `which` (bool `[Q]`) selects."""
        ranks = Ranks(self.ranks.optimistic[which], self.ranks.pessimistic[which])
        return QueryRanks(self.triple[which], self.side[which], ranks)

    def metrics(self, hits: Sequence[int] = HITS, ties: str = "average") -> dict[str, float]:
        """MRR, mean rank and Hits@k, as `RankingMetrics.result`.

        Raises:
            BadInput: there are no queries, a k below 1, or unknown ties.
        """
        found = RankingMetrics(hits, ties)
        for place, side in enumerate(SIDES):
            found.add(side, self.ranks, self.side == place)
        return found.result()
