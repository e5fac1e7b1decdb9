"""Schemes of losses over all entities: whole-softmax, and kvsall."""

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.candidate_losses import Dropout, StepGradients, masked, require_own
from elastable.replicas.knowledge_graphs.graph.batch import Side, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, Sharding
from elastable.replicas.knowledge_graphs.losses import exponentials, row_total
from elastable.replicas.knowledge_graphs.scores.dot_products import add_rows
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction

_ROWS_A_THREAD = 8


class WholeSoftmax:
    """The loss of a step, `-log softmax` of the answers among all entities, and its gradients.

    With label smoothing, the answer has the label `1 - smoothing + smoothing / E`, every other entity `smoothing / E`.

    1. Every worker reads the heads of its triples, and the tails of other workers'
       head queries; it computes its queries, and an all-gather sends them to all.
    2. Each scores everyone's queries with all entities of its shard.
    3. Each query's highest score and sum of exponentials are all-reduced: two
       numbers, where score-moving returns as many as there are entities.
    4. Gradients of scores are computed in place, and those of queries summed at their workers.

    Args:
        group: Worker and shard are a member's rank.
        held: Entities of this shard; further rows are padding.
        sides: The queried ends of every triple.
        pool: Threads to compute with; they do not affect results.
        smoothing: Label smoothing, 0 to 1.
        count: Number of all entities, E; needed for smoothing.
        dropout: Of the given entities and relations; None: none.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        score: ScoreFunction,
        held: int,
        sides: tuple[Side, ...] = ("tail",),
        pool: RangePool = SERIAL,
        smoothing: float = 0.0,
        count: int = 0,
        dropout: Dropout | None = None,
    ) -> None:
        for side in sides:
            score.require_side(side)
        self.group, self.score, self.held, self.sides, self.pool = group, score, held, sides, pool
        self.smoothing, self._count, self._dropout = smoothing, count, dropout

    def step(
        self, batch: StepBatch, entities: Float32, relations: Float32, weight: Float32
    ) -> tuple[float, StepGradients]:
        """One step: this shard's part of the weighted sum of losses, and the gradients.

        Args:
            batch: This worker's part; its candidates are ignored.
            entities: float32 `[rows, entity_width]`: its shard.
            relations: float32 `[R, relation_width]`.
            weight: float32 `[n, p]`, weights of its triples.

        Raises:
            BadInput: a batch of another group.
        """
        require_own(batch, self.group)
        n, p = batch.head.shape
        everyones = self.group.all_gather(weight)
        raw = entities[: self.held]
        ready = self.score.prepared(raw)
        to_all = np.zeros_like(ready)
        heads = entities[batch.head.reshape(-1)]
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1) if "head" in self.sides else heads
        to_heads, to_tails = np.zeros_like(heads), np.zeros_like(tails)
        to_relations, dense, loss = np.zeros_like(relations), dict[str, Float32](), 0.0
        for side in self.sides:
            given = heads if side == "tail" else tails
            value, to_given, to_related, more = self._side(side, batch, given, relations, ready, to_all, everyones)
            loss += value
            to_relations += to_related
            target = to_heads if side == "tail" else to_tails
            target += to_given
            for name, gradient in more.items():
                dense[name] = dense[name] + gradient if name in dense else gradient
        to_rows = np.zeros_like(entities)
        to_rows[: self.held] = self.score.unprepared(raw, to_all)
        add_rows(to_rows, batch.head.reshape(-1).astype(np.int64), to_heads)
        if "head" in self.sides:
            back = self.group.all_to_all(to_tails.reshape(n, p, -1)).reshape(n * p, -1)
            add_rows(to_rows, batch.tail.reshape(-1).astype(np.int64), back)
        return loss, StepGradients(np.arange(self.held), to_rows[: self.held], to_relations, dense)

    def _side(
        self,
        side: Side,
        batch: StepBatch,
        given: Float32,
        relations: Float32,
        ready: Float32,
        to_all: Float32,
        weights: Float32,
    ) -> tuple[float, Float32, Float32, dict[str, Float32]]:
        """The loss of one side's queries; the gradients of what is given, of relations and of further variables."""
        n, p = batch.head.shape
        relation = batch.relation.reshape(-1).astype(np.int64)
        mine, related = self.score.prepared(given), relations[relation]
        masks = None if self._dropout is None else self._dropout.masks(batch, side, mine, related)
        mine, related = masked(mine, related, masks)
        query = self.score.query(mine, related, side)
        everyone = self.group.all_gather(query)
        flat = everyone.reshape(n * n * p, -1)
        places = np.arange(self.held)[None]
        scores = self.score.comparison.scores(flat, ready, places, self.pool)
        loss, slopes = self._loss(side, batch, scores, weights.reshape(-1))
        to_everyone = self.score.comparison.gradients(flat, ready, places, scores, slopes, places, to_all, self.pool)
        to_query = self.group.reduce_scatter(np.ascontiguousarray(to_everyone).reshape(everyone.shape))
        to_given, to_relation, dense = self.score.query_gradients(mine, related, side, to_query)
        to_given, to_relation = masked(to_given, to_relation, masks)
        to_relations = np.zeros_like(relations)
        add_rows(to_relations, relation, np.ascontiguousarray(to_relation))
        return loss, self.score.unprepared(given, to_given), to_relations, dense

    def _loss(self, side: Side, batch: StepBatch, scores: Float32, weight: Float32) -> tuple[float, Float32]:
        """This shard's part of everyone's loss, and the gradients of the scores.

        Args:
            scores: float32 `[n * n * p, held]`: of everyone's queries with this shard's entities.
            weight: float32 `[n * n * p]`, of everyone's triples.
        """
        answers, asked = self._answers(side, batch)
        highest = self.group.all_reduce(scores.max(axis=1), "max")
        slopes, totals = np.empty_like(scores), np.empty(len(scores), np.float32)
        self.pool.run(
            lambda start, stop: _exponentials(scores, highest, slopes, totals, start, stop), len(scores), _ROWS_A_THREAD
        )
        totals = self.group.all_reduce(totals)
        self.pool.run(lambda start, stop: _shares(slopes, totals, weight, start, stop), len(scores), _ROWS_A_THREAD)
        most = np.float32(1 - self.smoothing)
        slopes[asked, answers] -= most * weight[asked]
        losses = np.log(totals[asked], dtype=np.float64) + highest[asked] - most * scores[asked, answers]
        loss = float(np.sum(losses * weight[asked]))
        if self.smoothing:
            rest = np.float32(self.smoothing / self._count) * weight
            loss -= float(np.sum(rest * scores.sum(axis=1, dtype=np.float64)))
            slopes -= rest[:, None]
        return loss, slopes

    def _answers(self, side: Side, batch: StepBatch) -> tuple[Int64, Int64]:
        """The answers on this shard: their rows, and their queries among everyone's."""
        n, p = batch.head.shape
        asked = np.arange(n * n * p).reshape(n, n, p)  # by worker, block, place
        if side == "tail":
            return batch.tail.reshape(-1).astype(np.int64), asked[:, self.group.rank].reshape(-1)
        return batch.head.reshape(-1).astype(np.int64), asked[self.group.rank].reshape(-1)


@kernel
def _exponentials(scores: Float32, highest: Float32, out: Float32, totals: Float32, start: int, stop: int) -> None:
    for b in range(start, stop):
        exponentials(scores[b], highest[b], out[b])
        totals[b] = row_total(out[b])


@kernel
def _shares(exponentials: Float32, totals: Float32, weight: Float32, start: int, stop: int) -> None:
    for b in range(start, stop):
        scale = weight[b] / totals[b]
        for k in range(exponentials.shape[1]):
            exponentials[b, k] *= scale


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
        group, score, held, pool, smoothing, dropout: As of `WholeSoftmax`.
        known: The training triples, whose tails are answers.
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
