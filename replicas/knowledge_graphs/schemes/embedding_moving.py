"""Embedding-moving: one all-to-all sends the candidates' embeddings to their triples."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64
from elastable.replicas.knowledge_graphs.graph import Negatives, StepBatch
from elastable.replicas.knowledge_graphs.schemes.scheme import Scheme, Scored, StepGradients
from elastable.replicas.knowledge_graphs.schemes.triple_scores import Asked, TripleScores, asked_sides, counted

__all__ = ["EmbeddingMoving"]


@dataclass(slots=True)
class _EmbeddingMovingScored(Scored):
    """What `backward` needs: the rows sent, the candidates received, and their scores for each queried end."""

    batch: StepBatch
    sent: Int32
    candidates: Float32
    ready: Float32
    places: list[Int64]
    scores: list[Float32]


class EmbeddingMoving(Scheme):
    """Negatives are scored where the triples are, on the shard of their heads.

    1. Every worker reads the heads of its triples from its shard, and for each
       other worker the tails and candidates that it needs.
    2. One balanced all-to-all moves tails and candidates.
    3. Triples and candidates are scored.
    4. The gradients of what was moved are sent back the same way.

    Bytes that a worker sends in a step: `4 w (n - 1) (p + B m)` forward, and as many
    back; w is the width of an embedding, other letters are those of `graph.batch`.
    """

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> _EmbeddingMovingScored:
        negatives = self._negatives(batch)
        n, p = batch.head.shape
        heads = entities[batch.head.reshape(-1)]
        drawn = negatives.rows.reshape(n, -1)
        sent = batch.tail if negatives.local else np.concatenate([batch.tail, drawn], axis=1)
        moved = self.group.all_to_all(entities[sent])
        width = entities.shape[1]
        tails = moved[:, :p].reshape(n * p, width)
        candidates = entities[drawn.reshape(-1)] if negatives.local else moved[:, p:].reshape(-1, width)
        asked = asked_sides(negatives.corruption, n, p)
        triples = TripleScores(
            self.score, asked, heads, batch.relation.reshape(-1).astype(np.int64), tails, relations, self._masks(batch)
        )
        ready = self.score.prepared(candidates)
        places = [_places(negatives, part) for part in asked]
        found = [
            self.score.comparison.scores(query, ready, place, self.pool)
            for query, place in zip(triples.queries, places, strict=True)
        ]
        negative = np.empty((n * p, found[0].shape[1]), np.float32)
        for part, scores in zip(asked, found, strict=True):
            negative[part.triples] = scores
        mask = counted(negatives.mask, n * p)
        return _EmbeddingMovingScored(
            triples.scores, negative, mask, batch.gathered_rows, triples, batch, sent, candidates, ready, places, found
        )

    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        assert isinstance(scored, _EmbeddingMovingScored)
        triples, batch, negatives = scored._triples, scored.batch, self._negatives(scored.batch)
        n, p = batch.head.shape
        to_candidates = np.zeros_like(scored.candidates)
        to_queries = [
            self.score.comparison.gradients(
                query, scored.ready, place, scores, negative[part.triples], place, to_candidates, self.pool
            )
            for part, query, place, scores in zip(
                triples.asked, triples.queries, scored.places, scored.scores, strict=True
            )
        ]
        to_candidates = self.score.unprepared(scored.candidates, to_candidates)
        to_heads, to_tails, relations, dense = triples.gradients(positive, to_queries)
        back = to_tails.reshape(n, p, -1)
        places = [batch.head.reshape(-1), scored.sent.reshape(-1)]
        if negatives.local:
            moved = [self.group.all_to_all(back).reshape(len(places[1]), -1), to_candidates]
            places.append(negatives.rows.reshape(-1))
        else:
            back = np.concatenate([back, to_candidates.reshape(n, -1, back.shape[2])], axis=1)
            moved = [self.group.all_to_all(back).reshape(len(places[1]), -1)]
        rows, entities = self._summed(np.concatenate(places).astype(np.int64), np.concatenate([to_heads, *moved]))
        return StepGradients(rows, entities, relations, dense)


def _places(negatives: Negatives, part: Asked) -> Int64:
    """int64 `[g, n * m]`: positions of these triples' candidates in what was received, `[n, B, m]`."""
    every: Int64 = np.arange(negatives.rows.size).reshape(negatives.rows.shape)
    if negatives.per_triple:
        return np.ascontiguousarray(every[:, part.triples].transpose(1, 0, 2)).reshape(len(part.triples), -1)
    return np.ascontiguousarray(every[:, min(part.place, negatives.rows.shape[1] - 1)].reshape(1, -1))
