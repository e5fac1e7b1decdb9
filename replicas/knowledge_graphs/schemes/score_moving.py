"""Score-moving: queries go to the candidates of all workers, are scored in place, and the scores come back."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.tables.grouping import unique_ids
from elastable.replicas.knowledge_graphs.graph.batch import Negatives, StepBatch
from elastable.replicas.knowledge_graphs.schemes.scheme import Scheme, Scored, StepGradients
from elastable.replicas.knowledge_graphs.schemes.triple_scores import Asked, TripleScores, asked_sides, counted

__all__ = ["ScoreMoving"]


class ScoreMoving(Scheme):
    """Negatives are scored where they lie.

    1. Every worker reads from its own shard the heads of its triples, and the
       tails that each other worker needs; an all-to-all moves the tails.
    2. It makes the queries of its triples; an all-gather gives them to all.
    3. Each worker scores everyone's queries with the candidates on its own
       shard, where they lie: no candidate is copied.
    4. An all-to-all brings the scores back to the triples.

    Backwards, gradients of scores take the way of scores, and those of queries
    are summed where the queries were made. Candidates that are shared are
    scored with everyone's triples: n times as many as embedding-moving scores.

    Bytes that a worker sends in a step: tails `4 w (n - 1) p`, queries
    `4 v (n - 1) n p`, scores `4 (n - 1) n p m'`, and as many back; v the width
    of a query, m' = m of candidates per triple and n m of shared ones.
    """

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        """As in `Scheme.forward`.

        Raises:
            BadInput: also where candidates are local, as they never meet other workers' triples.
        """
        self._require(batch)
        negatives = batch.negatives
        assert negatives is not None
        if negatives.local and self.group.size > 1:
            raise BadInput("score-moving scores every worker's triples everywhere: draw candidates from all shards")
        n, p = batch.head.shape
        heads = entities[batch.head.reshape(-1)]
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1)
        asked = asked_sides(negatives.corruption, n, p)
        relation = batch.relation.reshape(-1).astype(np.int64)
        triples = TripleScores(self.score, asked, heads, relation, tails, relations)
        unique, inverse = unique_ids(negatives.rows.reshape(-1).astype(np.int64))
        ready, in_place = self._ready(entities, unique)
        targets = inverse.astype(np.int64).reshape(negatives.rows.shape)
        everyone = [self.group.all_gather(query) for query in triples.queries]
        # [n, q, m'] of everyone's queries, with what lies here.
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
        once = negatives.per_triple or negatives.common or n == 1
        if not once and negatives.mask is not None and negatives.mask_of_all is None:
            raise BadInput(
                "score-moving needs masks of all workers' shared candidates: draw them with mask_of_all=True"
            )
        mask = negatives.mask if once else negatives.mask_of_all
        kept = {
            "batch": batch,
            "unique": unique,
            "raw": entities,
            "ready": ready,
            "everyone": everyone,
            "places": places,
            "read": read,
            "scores": found,
        }
        return Scored(triples.scores, negative, counted(mask, n * p), batch.gathered_rows, triples, kept)

    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        kept, triples = scored._kept, scored._triples
        batch: StepBatch = kept["batch"]
        n, p = batch.head.shape
        unique: Int64 = kept["unique"]
        to_drawn = np.zeros((len(unique), kept["raw"].shape[1]), np.float32)
        to_queries = []
        for part, queries, place, read, scores in zip(
            triples.asked, kept["everyone"], kept["places"], kept["read"], kept["scores"], strict=True
        ):
            mine = negative[part.triples].reshape(len(part.triples), n, -1).transpose(1, 0, 2)
            here = self.group.all_to_all(np.ascontiguousarray(mine)).reshape(scores.shape)
            flat = queries.reshape(-1, queries.shape[2])
            to_all = self.score.comparison.gradients(
                flat, kept["ready"], read, scores, here, place, to_drawn, self.pool
            )
            to_queries.append(self.group.reduce_scatter(np.ascontiguousarray(to_all).reshape(queries.shape)))
        to_drawn = self._unready(kept["raw"], unique, to_drawn)
        to_heads, to_tails, relations, dense = triples.gradients(positive, to_queries)
        back = self.group.all_to_all(to_tails.reshape(n, p, -1)).reshape(n * p, -1)
        places = np.concatenate([batch.head.reshape(-1), batch.tail.reshape(-1), unique]).astype(np.int64)
        rows, entities = self._summed(places, np.concatenate([to_heads, back, to_drawn]))
        return StepGradients(rows, entities, relations, dense)

    def _ready(self, entities: Float32, unique: Int64) -> tuple[Float32, bool]:
        """What candidates are compared as: the shard itself, or its rows `unique` made ready; and which of the two."""
        if self.score.as_they_are:
            return entities, True
        return self.score.prepared(entities[unique]), False

    def _unready(self, entities: Float32, unique: Int64, gradients: Float32) -> Float32:
        return gradients if self.score.as_they_are else self.score.unprepared(entities[unique], gradients)


def _places(negatives: Negatives, part: Asked, targets: Int64) -> Int64:
    """int64 `[g, m']`: of everyone's queries `[n * q]`, their candidates here."""
    if negatives.per_triple:
        return np.ascontiguousarray(targets[:, part.triples]).reshape(-1, targets.shape[2])
    if negatives.common:
        return targets[:1, min(part.place, targets.shape[1] - 1)]
    return np.ascontiguousarray(targets[:, part.place].reshape(1, -1))
