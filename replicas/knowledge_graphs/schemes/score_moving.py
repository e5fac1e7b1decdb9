"""Score-moving: queries go to all workers, are scored with candidates in place, and the scores come back."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tables import unique_ids
from elastable.replicas.knowledge_graphs.graph.batch import Negatives, StepBatch
from elastable.replicas.knowledge_graphs.schemes.scheme import Scheme, Scored, StepGradients
from elastable.replicas.knowledge_graphs.schemes.triple_scores import Asked, TripleScores, asked_sides, counted

__all__ = ["ScoreMoving"]


@dataclass(slots=True)
class _ScoreMovingScored(Scored):
    """What `backward` needs; for each queried end: everyone's queries, the candidates' positions, and scores.

    `places` are positions among the unique rows, `read` in `ready`.
    """

    batch: StepBatch
    entities: Float32
    unique: Int64
    ready: Float32
    everyone: list[Float32]
    places: list[Int64]
    read: list[Int64]
    scores: list[Float32]


class ScoreMoving(Scheme):
    """Negatives are scored on their own shards.

    1. Every worker reads the heads of its triples from its shard, and the tails
       that each other worker needs; an all-to-all moves the tails.
    2. It computes the queries of its triples; an all-gather sends them to all.
    3. Each worker scores everyone's queries with the candidates on its shard, without copying them.
    4. An all-to-all returns the scores.

    In the backward pass, gradients of scores take the same way, and those of queries are summed at their workers.

    Bytes that a worker sends in a step: tails `4 w (n - 1) p`, queries `4 v (n - 1) n p`, scores `4 (n - 1) n p m`,
    and as many back; v is the width of a query.
    """

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> _ScoreMovingScored:
        negatives = self._negatives(batch)
        if negatives.local and self.group.size > 1:
            raise BadInput("score-moving scores every worker's triples everywhere: draw candidates from all shards")
        n, p = batch.head.shape
        heads = entities[batch.head.reshape(-1)]
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1)
        asked = asked_sides(negatives.corruption, n, p)
        relation = batch.relation.reshape(-1).astype(np.int64)
        triples = TripleScores(self.score, asked, heads, relation, tails, relations, self._masks(batch))
        unique, inverse = unique_ids(negatives.rows.reshape(-1).astype(np.int64))
        ready, in_place = self._ready(entities, unique)
        targets = inverse.astype(np.int64).reshape(negatives.rows.shape)
        everyone = [self.group.all_gather(query) for query in triples.queries]
        places = [_places(negatives, part, targets) for part in asked]
        read = [unique[place] if in_place else place for place in places]
        found = [
            self.score.comparison.scores(queries.reshape(-1, queries.shape[2]), ready, place, self.pool)
            for queries, place in zip(everyone, read, strict=True)
        ]
        negative = np.empty((n * p, n * found[0].shape[1]), np.float32)
        for part, scores in zip(asked, found, strict=True):
            back = self.group.all_to_all(scores.reshape(n, len(part.triples), -1))
            negative[part.triples] = back.transpose(1, 0, 2).reshape(len(part.triples), -1)
        common = (triples.scores, negative, counted(negatives.mask, n * p), batch.gathered_rows, triples)
        return _ScoreMovingScored(*common, batch, entities, unique, ready, everyone, places, read, found)

    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        assert isinstance(scored, _ScoreMovingScored)
        triples, batch, unique, raw = scored._triples, scored.batch, scored.unique, scored.entities
        n, p = batch.head.shape
        to_drawn = np.zeros((len(unique), raw.shape[1]), np.float32)
        to_queries = []
        for part, queries, place, read, scores in zip(
            triples.asked, scored.everyone, scored.places, scored.read, scored.scores, strict=True
        ):
            mine = negative[part.triples].reshape(len(part.triples), n, -1).transpose(1, 0, 2)
            here = self.group.all_to_all(np.ascontiguousarray(mine)).reshape(scores.shape)
            flat = queries.reshape(-1, queries.shape[2])
            to_all = self.score.comparison.gradients(flat, scored.ready, read, scores, here, place, to_drawn, self.pool)
            to_queries.append(self.group.reduce_scatter(np.ascontiguousarray(to_all).reshape(queries.shape)))
        to_drawn = self._unready(raw, unique, to_drawn)
        to_heads, to_tails, relations, dense = triples.gradients(positive, to_queries)
        back = self.group.all_to_all(to_tails.reshape(n, p, -1)).reshape(n * p, -1)
        places = np.concatenate([batch.head.reshape(-1), batch.tail.reshape(-1), unique]).astype(np.int64)
        rows, entities = self._summed(places, np.concatenate([to_heads, back, to_drawn]))
        return StepGradients(rows, entities, relations, dense)

    def _ready(self, entities: Float32, unique: Int64) -> tuple[Float32, bool]:
        """The candidates to compare: (the shard itself, True), or (its prepared rows `unique`, False)."""
        if self.score.as_they_are:
            return entities, True
        return self.score.prepared(entities[unique]), False

    def _unready(self, entities: Float32, unique: Int64, gradients: Float32) -> Float32:
        return gradients if self.score.as_they_are else self.score.unprepared(entities[unique], gradients)


def _places(negatives: Negatives, part: Asked, targets: Int64) -> Int64:
    """int64 `[g, m']`: the local candidates of everyone's queries `[n * q]`."""
    if negatives.per_triple:
        return np.ascontiguousarray(targets[:, part.triples]).reshape(-1, targets.shape[2])
    return targets[:1, min(part.place, targets.shape[1] - 1)]  # what triples share is the same for all workers
