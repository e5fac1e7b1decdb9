"""KvsAll (Dettmers et al., 2018): binary cross-entropy of every (head, relation) with all entities at once."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph import KnownTriples, Sharding, Side, StepBatch
from elastable.replicas.knowledge_graphs.schemes.dropout import Dropout
from elastable.replicas.knowledge_graphs.schemes.whole_softmax import WholeSoftmax
from elastable.replicas.knowledge_graphs.scores import ScoreFunction

__all__ = ["KvsAll", "distinct_queries"]

_ROWS_A_THREAD = 8


def distinct_queries(triples: Int32) -> Int32:
    """int32 `[Q, 3]`: the first triple of every (head, relation), in the order of the triples."""
    _, first = np.unique(triples[:, :2], axis=0, return_index=True)
    return np.ascontiguousarray(triples[np.sort(first)])


class KvsAll(WholeSoftmax):
    """The loss of a step's queries (head, relation, ?), each of which has all its known tails as answers.

    With y 1 for a known tail and 0 for any other entity, smoothed to `(1 - smoothing) y + smoothing / E`, the loss of a
    query is `sum softplus(s) - y s` over all E entities. Queries and scores move as in `WholeSoftmax`; the scores'
    gradients are computed in place.

    Args:
        group, score, held, pool, dropout: As of `WholeSoftmax`.
        sharding: Sharding of the entities.
        known: The training triples, whose tails are answers.
        smoothing: Label smoothing, 0 to 1.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        score: ScoreFunction,
        held: int,
        sharding: Sharding,
        known: KnownTriples,
        smoothing: float = 0.0,
        pool: RangePool = SERIAL,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__(group, score, held, ("tail",), pool, smoothing, sharding.entities, dropout)
        self._sharding, self._known = sharding, known

    def _loss(self, side: Side, batch: StepBatch, scores: Float32, weight: Float32) -> tuple[float, Float32]:
        query, column = self._labels(batch)
        slopes, losses = np.empty_like(scores), np.empty(len(scores), np.float64)
        rest = np.float32(self.smoothing / self._sharding.entities)
        self.pool.run(
            lambda start, stop: _pushed(scores, weight, rest, slopes, losses, start, stop), len(scores), _ROWS_A_THREAD
        )
        most = np.float32(1 - self.smoothing)
        slopes[query, column] -= most * weight[query]
        pulled = np.sum(most * weight[query] * scores[query, column], dtype=np.float64)
        return float(losses.sum() - pulled), slopes

    def _labels(self, batch: StepBatch) -> tuple[Int64, Int64]:
        """Everyone's queries and this shard's rows that are their answers, int64 `[P]` each."""
        given = self._sharding.entity_at[batch.worker, batch.head.reshape(-1)]
        mine = np.stack([given, batch.relation.reshape(-1).astype(np.int64)])
        everyones = self.group.all_gather(mine).transpose(1, 0, 2).reshape(2, -1)
        nobody = np.full(everyones.shape[1], -1, np.int64)
        answers = self._known.exclusions("tail", everyones[0], everyones[1], nobody, self._sharding)
        return answers.window(self.group.rank, 0, self.held)


@kernel
def _pushed(
    scores: Float32, weight: Float32, rest: np.float32, slopes: Float32, losses: Float64, start: int, stop: int
) -> None:
    """As if no entity were an answer, and each had the label `rest`."""
    for b in range(start, stop):
        total = 0.0
        for k in range(scores.shape[1]):
            score = scores[b, k]
            small = np.exp(-abs(score))
            total += max(score, np.float32(0)) + np.log1p(small) - rest * score
            sigmoid = (np.float32(1) if score >= 0 else small) / (np.float32(1) + small)
            slopes[b, k] = weight[b] * (sigmoid - rest)
        losses[b] = weight[b] * total
