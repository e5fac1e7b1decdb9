"""Filtered ranking metrics: every triple's head and tail, ranked among all entities."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.evaluation.all_scores import AllScores
from elastable.replicas.knowledge_graphs.evaluation.ranking import RankingMetrics
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Int32, Side
from elastable.replicas.knowledge_graphs.graph.known_triples import KnownTriples
from elastable.replicas.knowledge_graphs.graph.partition import with_inverses
from elastable.replicas.knowledge_graphs.model import ShardedModel
from elastable.replicas.knowledge_graphs.sampling.queries import QueryBatches

__all__ = ["Evaluation", "as_asked"]

_QUERIES = 256  # of all workers in a batch


class Evaluation:
    """Ranks triples over the group; every member calls it with the same triples and gets the same metrics.

    Args:
        model: This worker's part of the model.
        reciprocal: Whether head queries are tail queries of inverse relations.
        relations: Number of relations, without inverse ones.
        known: True triples `[N, 3]` that do not compete: all splits.
        ties: "average", "optimistic" or "pessimistic" ranks.
        pool: Threads of this worker.
    """

    def __init__(
        self,
        model: ShardedModel,
        reciprocal: bool,
        relations: int,
        *known: Int32,
        ties: str = "average",
        pool: RangePool = SERIAL,
    ) -> None:
        self._model, self._reciprocal, self._relations, self._ties = model, reciprocal, relations, ties
        every = np.concatenate(known) if known else np.empty((0, 3), np.int32)
        if reciprocal:
            every = with_inverses(every, relations)
        self._known = KnownTriples.create(model.sharding.entities, len(model.relations), every)
        self._scores = AllScores(model, pool=pool)

    def metrics(self, triples: Int32) -> dict[str, float]:
        """MRR, mean rank and Hits@1, 3 and 10 of `triples` (int32 `[N, 3]`); see `RankingMetrics.result`.

        Raises:
            BadInput: there are no triples.
        """
        if not len(triples):
            raise BadInput("there are no triples to evaluate")
        group, sharding = self._model.group, self._model.sharding
        found = RankingMetrics(ties=self._ties)
        for side in SIDES:
            asked, of = as_asked(triples, side, self._relations, self._reciprocal)
            batches = QueryBatches(asked, sharding, of, max(1, _QUERIES // group.size))
            for index in range(batches.batches):
                queries = batches.batch(index, group.rank)
                found.add(side, self._scores.ranks(queries, self._known), queries.mask)
        found.sums = group.all_reduce(found.sums)
        return found.result()


def as_asked(triples: Int32, side: Side, relations: int, reciprocal: bool) -> tuple[Int32, Side]:
    """The triples and side of the model's query: with reciprocal relations, tails of inverse triples."""
    if side == "head" and reciprocal:
        return triples[:, ::-1] + np.array([0, relations, 0], np.int32), "tail"
    return triples, side
