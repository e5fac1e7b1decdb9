"""Filtered ranking metrics: every triple's head and tail, ranked among all entities."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.evaluation.all_scores import AllScores
from elastable.replicas.knowledge_graphs.evaluation.queries import Candidates, QueryBatches, TripleCandidates
from elastable.replicas.knowledge_graphs.evaluation.ranking import RankingMetrics, Ranks
from elastable.replicas.knowledge_graphs.graph import SIDES, KnownTriples, Queries, Side, with_inverses
from elastable.replicas.knowledge_graphs.model import ShardedModel

__all__ = ["HITS", "Evaluation", "QueryRanks", "as_asked"]

_QUERIES = 256  # of all workers in a batch


class Evaluation:
    """Ranks triples over the group; every member calls it with the same triples and gets the same metrics.

    Args:
        model: This worker's part of the model.
        reciprocal: Whether head queries are tail queries of inverse relations.
        relations: Number of relations, without inverse ones.
        known: True triples `[N, 3]` that do not compete: all splits.
        ties: "average", "optimistic" or "pessimistic" ranks.
        among: The entities that answers are ranked among, for all queries or for each triple; all by default.
        pool: Threads of this worker.
    """

    def __init__(
        self,
        model: ShardedModel,
        reciprocal: bool,
        relations: int,
        *known: Int32,
        ties: str = "average",
        among: Candidates | TripleCandidates | None = None,
        pool: RangePool = SERIAL,
    ) -> None:
        self._model, self._reciprocal, self._relations, self._ties = model, reciprocal, relations, ties
        every = np.concatenate(known) if known else np.empty((0, 3), np.int32)
        if reciprocal:
            every = with_inverses(every, relations)
        self._known = KnownTriples.create(model.sharding.entities, len(model.relations), every)
        self._scores, self._among = AllScores(model, pool=pool), among or Candidates()

    def metrics(self, triples: Int32, stop: Callable[[], bool] | None = None) -> dict[str, float]:
        """MRR, mean rank and Hits@1, 3 and 10 of `triples` (int32 `[N, 3]`); see `RankingMetrics.result`.

        Args:
            triples: The same on every member.
            stop: Asked at every batch, on every member if on any; where one says True, the result is {}.

        Raises:
            BadInput: there are no triples.
        """
        found = RankingMetrics(ties=self._ties)
        for side, queries, ranks in self._ranked(triples):
            found.add(side, ranks, queries.mask)
            if stop is not None and self._model.group.all_reduce(np.array([int(stop())]), "max")[0]:
                return {}
        found.sums = self._model.group.all_reduce(found.sums)
        return found.result()

    def ranks(self, triples: Int32) -> QueryRanks:
        """The ranks of the heads and tails of `triples` (int32 `[N, 3]`): those of all workers, on every worker.

        Raises:
            BadInput: there are no triples.
        """
        parts = [np.empty((0, 4), np.int64)]
        for side, queries, ranks in self._ranked(triples):
            columns = [
                queries.triple,
                np.full(len(queries.triple), SIDES.index(side)),
                ranks.optimistic,
                ranks.pessimistic,
            ]
            parts.append(np.stack(columns, axis=1)[queries.mask])
        everyones = np.concatenate(self._model.group.all_gather_uneven(np.concatenate(parts)))
        triple, side_of, optimistic, pessimistic = everyones[np.lexsort((everyones[:, 0], everyones[:, 1]))].T
        return QueryRanks(triple, side_of, Ranks(optimistic, pessimistic))

    def _ranked(self, triples: Int32) -> Iterator[tuple[Side, Queries, Ranks]]:
        """This worker's batches of queries, with the ranks of their answers."""
        if not len(triples):
            raise BadInput("there are no triples to evaluate")
        if isinstance(self._among, TripleCandidates):
            self._among.require(len(triples))
        group, sharding = self._model.group, self._model.sharding
        for side in SIDES:
            asked, of = as_asked(triples, side, self._relations, self._reciprocal)
            batches = QueryBatches(asked, sharding, of, max(1, _QUERIES // group.size))
            for index in range(batches.batches):
                queries = batches.batch(index, group.rank)
                yield side, queries, self._ranks(side, queries)

    def _ranks(self, side: Side, queries: Queries) -> Ranks:
        if isinstance(self._among, TripleCandidates):
            return self._scores.ranks_among(queries, self._among.of_queries(side, queries.triple), self._known)
        return self._scores.ranks(queries, self._known, self._among)


def as_asked(triples: Int32, side: Side, relations: int, reciprocal: bool) -> tuple[Int32, Side]:
    """The triples and side of the model's query: with reciprocal relations, tails of inverse triples."""
    if side == "head" and reciprocal:
        return triples[:, ::-1] + np.array([0, relations, 0], np.int32), "tail"
    return triples, side


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
