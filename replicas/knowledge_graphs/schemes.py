"""Schemes: how triples and their candidates meet, by moving embeddings, scores or sums over all; dropout."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass, field
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Float64, Int32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.tables.grouping import coalesce, unique_ids
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph.batch import (
    SIDES,
    Asked,
    Negatives,
    Side,
    StepBatch,
    asked_sides,
)
from elastable.replicas.knowledge_graphs.graph.randomness import stream_key
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, Sharding
from elastable.replicas.knowledge_graphs.losses import Loss, exponentials, row_total
from elastable.replicas.knowledge_graphs.scores.dot_products import add_rows
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction


@dataclass(frozen=True, slots=True)
class StepGradients:
    """One worker's gradients of a step.

    Attributes:
        rows: int64 `[u]`, unique rows of its own shard.
        entities: float32 `[u, entity_width]`: their gradients, from all workers' triples.
        relations: float32 `[R, relation_width]`: from its own triples only.
        dense: Gradients of further variables by name, from its own triples only.
    """

    rows: Int64
    entities: Float32
    relations: Float32
    dense: dict[str, Float32]


@dataclass(frozen=True, slots=True)
class Scored:
    """Scores of one worker's own triples of a step.

    Attributes:
        positive: float32 `[b]`: scores of the triples, b = n * p.
        negative: float32 `[b, c]`: scores of their candidates.
        counted: bool `[b, c]`: which candidates count; None: all.
        backward: The gradients of the step from those of `positive` and `negative`; every member calls it once.
    """

    positive: Float32
    negative: Float32
    counted: Bools | None
    backward: Callable[[Float32, Float32], StepGradients]


@dataclass(eq=False)
class Scheme(ABC):
    """How the triples of n workers are scored, and what the gradients of their loss are.

    Every worker holds a shard of the entities; relations and further variables are the same on all. Every member of the
    group calls the same methods with its own part of the same step.

    Args:
        group: Worker and shard are a member's rank.
        pool: Threads to compute with; they do not affect results.
        dropout: Of the given entities and relations of queries; None: none.
    """

    group: ReplicaGroup
    score: ScoreFunction
    _: KW_ONLY
    pool: RangePool = SERIAL
    dropout: "Dropout | None" = None

    @abstractmethod
    def step(
        self, batch: StepBatch, entities: Float32, relations: Float32, weight: Float32
    ) -> tuple[float, StepGradients]:
        """One step: this worker's part of the weighted sum of losses, and the gradients.

        Args:
            batch: Its part of the step.
            entities: float32 `[rows, entity_width]`: its shard.
            relations: float32 `[R, relation_width]`.
            weight: float32 `[n, p]`, weights of its triples.

        Raises:
            BadInput: the batch does not fit the group or the scheme.
        """

    def _require_own(self, batch: StepBatch) -> None:
        """Raises BadInput for a batch of another group, or of another worker of the group."""
        size, rank = self.group.size, self.group.rank
        if len(batch.head) != size or batch.worker != rank:
            raise BadInput(
                f"a batch of worker {batch.worker} of {len(batch.head)} was given to worker {rank} of {size}"
            )


@dataclass(eq=False)
class CandidateScheme(Scheme):
    """A scheme whose triples are scored with the candidates of their batch; `loss` compares both.

    Args:
        group, score, pool, dropout: As of `Scheme`.
    """

    loss: Loss

    def step(
        self, batch: StepBatch, entities: Float32, relations: Float32, weight: Float32
    ) -> tuple[float, StepGradients]:
        scored = self.forward(batch, entities, relations)
        loss, *slopes = self.loss(scored.positive, scored.negative, weight.reshape(-1), scored.counted, self.pool)
        return loss, scored.backward(*slopes)

    @abstractmethod
    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        """Scores of this worker's triples; arguments and errors as of `step`."""

    def _negatives(self, batch: StepBatch) -> Negatives:
        """The candidates of a batch that fits the group."""
        if batch.negatives is None:
            raise BadInput(f"step {batch.step} has no candidates: give its sampler negatives")
        self._require_own(batch)
        return batch.negatives

    def _summed(self, places: list[Int32 | Int64], parts: list[Float32], *others: Any) -> StepGradients:
        """Gradients by unique rows, where several of `places` may be one."""
        rows = np.concatenate([place.reshape(-1) for place in places]).astype(np.int64)
        update = coalesce(rows, np.concatenate(parts), self.pool)
        return StepGradients(update.ids, update.gradients, *others)


class EmbeddingMoving(CandidateScheme):
    """Negatives are scored where the triples are, on the shard of their heads.

    1. Every worker reads the heads of its triples from its shard, and for each
       other worker the tails and candidates that it needs.
    2. One balanced all-to-all moves tails and candidates.
    3. Triples and candidates are scored.
    4. The gradients of what was moved are sent back the same way.

    Bytes that a worker sends in a step: `4 w (n - 1) (p + B m)` forward, and as many
    back; w is the width of an embedding, other letters are those of `graph.batch`.
    """

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        negatives, compared = self._negatives(batch), self.score.comparison
        (n, p), width = batch.head.shape, entities.shape[1]
        sent = np.concatenate([batch.tail, negatives.rows.reshape(n, -1)], axis=1)
        moved = self.group.all_to_all(entities[sent])
        candidates = moved[:, p:].reshape(-1, width)
        triples = TripleScores(self, batch, entities, moved[:, :p].reshape(n * p, width), relations)
        ready = self.score.prepared(candidates)
        every: Int64 = np.arange(negatives.rows.size).reshape(negatives.rows.shape)
        places = [_received_places(every, negatives.per_triple, part) for part in triples.asked]
        found = [
            compared.scores(asked.query, ready, place, self.pool)
            for asked, place in zip(triples.queries, places, strict=True)
        ]

        def backward(positive: Float32, negative: Float32) -> StepGradients:
            to_candidates = np.zeros_like(candidates)
            to_queries = [
                compared.gradients(
                    asked.query, ready, place, scores, negative[part.triples], place, to_candidates, self.pool
                )
                for part, asked, place, scores in zip(triples.asked, triples.queries, places, found, strict=True)
            ]
            to_candidates = self.score.unprepared(candidates, to_candidates)
            to_heads, to_tails, *others = triples.gradients(positive, to_queries)
            back = np.concatenate([to_tails.reshape(n, p, -1), to_candidates.reshape(n, -1, width)], axis=1)
            to_sent = self.group.all_to_all(back).reshape(sent.size, -1)
            return self._summed([batch.head, sent], [to_heads, to_sent], *others)

        return triples.scored(found, backward)


def _received_places(every: Int64, per_triple: bool, part: Asked) -> Int64:
    """int64 `[g, n * m]`: positions of these triples' candidates in what was received, `[n, B, m]`."""
    if per_triple:
        return np.ascontiguousarray(every[:, part.triples].transpose(1, 0, 2)).reshape(len(part.triples), -1)
    return np.ascontiguousarray(every[:, part.place].reshape(1, -1))


class ScoreMoving(CandidateScheme):
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

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        negatives, compared, group = self._negatives(batch), self.score.comparison, self.group
        n, p = batch.head.shape
        tails = group.all_to_all(entities[batch.tail]).reshape(n * p, -1)
        triples = TripleScores(self, batch, entities, tails, relations)
        unique, inverse = unique_ids(negatives.rows.reshape(-1).astype(np.int64))
        in_place = self.score.as_they_are  # the shard itself is compared, or its prepared rows `unique`
        ready = entities if in_place else self.score.prepared(entities[unique])
        targets = inverse.astype(np.int64).reshape(negatives.rows.shape)
        everyone = [group.all_gather(asked.query) for asked in triples.queries]
        flat = [queries.reshape(-1, queries.shape[2]) for queries in everyone]
        places = [_local_places(targets, negatives.per_triple, part) for part in triples.asked]  # among the unique rows
        read = [unique[place] if in_place else place for place in places]  # in `ready`
        found = [compared.scores(queries, ready, place, self.pool) for queries, place in zip(flat, read, strict=True)]

        def returned(part: Asked, scores: Float32) -> Float32:
            back = group.all_to_all(scores.reshape(n, len(part.triples), -1))
            return back.transpose(1, 0, 2).reshape(len(part.triples), -1)

        def backward(positive: Float32, negative: Float32) -> StepGradients:
            to_drawn, to_queries = np.zeros((len(unique), entities.shape[1]), np.float32), []
            for k, (part, scores) in enumerate(zip(triples.asked, found, strict=True)):
                mine = negative[part.triples].reshape(len(part.triples), n, -1).transpose(1, 0, 2)
                here = group.all_to_all(np.ascontiguousarray(mine)).reshape(scores.shape)
                to_all = compared.gradients(flat[k], ready, read[k], scores, here, places[k], to_drawn, self.pool)
                to_queries.append(group.reduce_scatter(np.ascontiguousarray(to_all).reshape(everyone[k].shape)))
            if not in_place:
                to_drawn = self.score.unprepared(entities[unique], to_drawn)
            to_heads, to_tails, *others = triples.gradients(positive, to_queries)
            back = group.all_to_all(to_tails.reshape(n, p, -1)).reshape(n * p, -1)
            return self._summed([batch.head, batch.tail, unique], [to_heads, back, to_drawn], *others)

        return triples.scored([returned(*each) for each in zip(triples.asked, found, strict=True)], backward)


def _local_places(targets: Int64, per_triple: bool, part: Asked) -> Int64:
    """int64 `[g, m']`: the local candidates of everyone's queries `[n * q]`."""
    if per_triple:
        return np.ascontiguousarray(targets[:, part.triples]).reshape(-1, targets.shape[2])
    return targets[:1, part.place]  # what triples share is the same for all workers


class SideQueries:
    """Queries for one end of some triples, and the way back from their gradients.

    Args:
        scheme: Its score and its dropout.
        given: float32 `[q, entity_width]`: prepared entities at the other end.
        relation: int64 `[q]`.
        relations: float32 `[R, relation_width]`.

    Attributes:
        query: float32 `[q, query_width]`.
    """

    def __init__(
        self, scheme: Scheme, batch: StepBatch, side: Side, given: Float32, relation: Int64, relations: Float32
    ) -> None:
        scheme.score.require_side(side)
        self._score, self._side, self._relation = scheme.score, side, relation
        used = given, relations[relation]
        self._masks = None if scheme.dropout is None else scheme.dropout.masks(batch, side, *used)
        self._used = self._masked(*used)
        self.query = scheme.score.query(*self._used, side)

    def gradients(self, to_query: Float32, to_relations: Float32, dense: dict[str, Float32]) -> Float32:
        """Gradients of `given`, from those of the queries; adds those of all relations and of further variables."""
        to_given, to_relation, to_dense = self._score.query_gradients(*self._used, self._side, to_query)
        to_given, to_relation = self._masked(to_given, to_relation)
        add_rows(to_relations, self._relation, np.ascontiguousarray(to_relation))
        for name, gradient in to_dense.items():
            dense[name] = dense[name] + gradient if name in dense else gradient
        return to_given

    def _masked(self, given: Float32, relation: Float32) -> tuple[Float32, Float32]:
        return (given, relation) if self._masks is None else (given * self._masks[0], relation * self._masks[1])


class TripleScores:
    """Scores of a worker's triples, through the queries that also score their candidates.

    Args:
        entities, relations: As of `Scheme.step`.
        tails: float32 `[b, entity_width]`: those of its triples.

    Attributes:
        asked: The queried ends; each triple once.
        queries: For each of `asked`.
    """

    def __init__(
        self, scheme: CandidateScheme, batch: StepBatch, entities: Float32, tails: Float32, relations: Float32
    ) -> None:
        assert batch.negatives is not None
        self._negatives = batch.negatives
        self.asked = asked_sides(self._negatives.corruption, *batch.head.shape)
        self._score, self._relations = scheme.score, relations
        self._raw = {"head": entities[batch.head.reshape(-1)], "tail": tails}
        self._ready = {side: self._score.prepared(rows) for side, rows in self._raw.items()}
        relation = batch.relation.reshape(-1).astype(np.int64)
        self.queries: list[SideQueries] = []
        self._scores = np.empty(len(tails), np.float32)
        for part in self.asked:
            given = self._ready[_other(part.side)][part.triples]
            asked = SideQueries(scheme, batch, part.side, given, relation[part.triples], relations)
            self.queries.append(asked)
            answers, own = self._ready[part.side][part.triples], np.arange(len(given))[:, None]
            self._scores[part.triples] = self._score.comparison.scores(asked.query, answers, own)[:, 0]

    def scored(self, found: list[Float32], backward: Callable[[Float32, Float32], StepGradients]) -> Scored:
        """With the scores of candidates, float32 `[q, c]` for each of `asked`."""
        negative = np.empty((len(self._scores), found[0].shape[1]), np.float32)
        for part, scores in zip(self.asked, found, strict=True):
            negative[part.triples] = scores
        counted = mask = self._negatives.mask
        if mask is not None:
            counted = np.ascontiguousarray(np.broadcast_to(mask, (len(negative), *mask.shape[1:])))
            counted = counted.reshape(len(negative), -1)
        return Scored(self._scores, negative, counted, backward)

    def gradients(
        self, positive: Float32, to_queries: list[Float32]
    ) -> tuple[Float32, Float32, Float32, dict[str, Float32]]:
        """Gradients of heads and tails `[b, entity_width]`, of all relations, and of further variables.

        Args:
            positive: float32 `[b]`: gradients of the triples' scores.
            to_queries: For each of `asked`, the queries' gradients from their candidates.
        """
        found = {side: np.zeros_like(rows) for side, rows in self._raw.items()}
        to_relations, dense = np.zeros_like(self._relations), dict[str, Float32]()
        for part, asked, more in zip(self.asked, self.queries, to_queries, strict=True):
            answers, own = self._ready[part.side][part.triples], np.arange(len(part.triples))[:, None]
            scores, slopes = (each[part.triples][:, None] for each in (self._scores, positive))
            to_answers = np.zeros_like(answers)
            to_query = more + self._score.comparison.gradients(
                asked.query, answers, own, scores, slopes, own, to_answers
            )
            found[part.side][part.triples] += to_answers
            found[_other(part.side)][part.triples] += asked.gradients(to_query, to_relations, dense)
        heads, tails = (self._score.unprepared(self._raw[side], found[side]) for side in SIDES)
        return heads, tails, to_relations, dense


def _other(side: Side) -> Side:
    return "head" if side == "tail" else "tail"


_STREAM = 0x4452  # of the seed


@dataclass(frozen=True, slots=True)
class Dropout:
    """Sets values to 0 and scales the others, so that their expectation stays.

    Masks do not depend on what was drawn before, so a resumed run has the same ones.

    Args:
        share: The share of values that become 0, from 0 to below 1 (`TrainSettings` sees to it).
        seed: Seed of the masks.
    """

    share: float
    seed: int

    def masks(self, batch: StepBatch, side: Side, given: Float32, relation: Float32) -> tuple[Float32, Float32]:
        """What the values of one side's queries are multiplied by, of given entities and of relations of these shapes:
        0 or 1 / (1 - share)."""
        key = stream_key(self.seed, _STREAM, batch.step, batch.worker, SIDES.index(side))
        draw = np.random.Generator(np.random.Philox(key=int(key)))
        return self._mask(draw, given.shape), self._mask(draw, relation.shape)

    def _mask(self, draw: np.random.Generator, shape: tuple[int, ...]) -> Float32:
        kept = draw.random(shape, np.float32) >= self.share
        return np.where(kept, np.float32(1 / (1 - self.share)), np.float32(0))


# Losses over all entities


_ROWS_A_THREAD = 8


@dataclass(eq=False)
class WholeSoftmax(Scheme):
    """The loss of a step, `-log softmax` of the answers among all entities, and its gradients.

    With label smoothing, the answer has the label `1 - smoothing + smoothing / E`, every other entity `smoothing / E`.

    1. Every worker reads the heads of its triples, and the tails of other workers'
       head queries; it computes its queries, and an all-gather sends them to all.
    2. Each scores everyone's queries with all entities of its shard.
    3. Each query's highest score and sum of exponentials are all-reduced: two
       numbers, where score-moving returns as many as there are entities.
    4. Gradients of scores are computed in place, and those of queries summed at their workers.

    Args:
        group, score, pool, dropout: As of `Scheme`.
        sharding: Of the entities.
        sides: The queried ends of every triple.
        smoothing: Label smoothing, 0 to 1.
    """

    sharding: Sharding
    sides: tuple[Side, ...] = ("tail",)
    smoothing: float = 0.0

    def __post_init__(self) -> None:
        for side in self.sides:
            self.score.require_side(side)
        self._held = int(self.sharding.counts[self.group.rank])  # entities of this shard; further rows are padding

    def step(
        self, batch: StepBatch, entities: Float32, relations: Float32, weight: Float32
    ) -> tuple[float, StepGradients]:
        """As `Scheme.step`; the batch's candidates, if any, are ignored."""
        self._require_own(batch)
        n, p = batch.head.shape
        everyones = self.group.all_gather(weight)
        raw = entities[: self._held]
        ready = self.score.prepared(raw)
        to_all = np.zeros_like(ready)
        heads = entities[batch.head.reshape(-1)]
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1) if "head" in self.sides else heads
        to_ends, to_relations = dict[Side, Float32](), np.zeros_like(relations)
        dense, loss = dict[str, Float32](), 0.0
        for side in self.sides:
            given, to_related = heads if side == "tail" else tails, np.zeros_like(relations)
            relation = batch.relation.reshape(-1).astype(np.int64)
            asked = SideQueries(self, batch, side, self.score.prepared(given), relation, relations)
            value, to_query = self._compared(side, batch, asked.query, ready, to_all, everyones)
            to_ends[_other(side)] = self.score.unprepared(given, asked.gradients(to_query, to_related, dense))
            loss += value
            to_relations += to_related
        to_rows = np.zeros_like(entities)
        to_rows[: self._held] = self.score.unprepared(raw, to_all)
        if "head" in to_ends:
            add_rows(to_rows, batch.head.reshape(-1).astype(np.int64), to_ends["head"])
        if "tail" in to_ends:
            back = self.group.all_to_all(to_ends["tail"].reshape(n, p, -1)).reshape(n * p, -1)
            add_rows(to_rows, batch.tail.reshape(-1).astype(np.int64), back)
        return loss, StepGradients(np.arange(self._held), to_rows[: self._held], to_relations, dense)

    def _compared(
        self, side: Side, batch: StepBatch, query: Float32, ready: Float32, to_all: Float32, weights: Float32
    ) -> tuple[float, Float32]:
        """This shard's part of the loss of one side's queries, and their gradients; adds those of its entities."""
        everyone = self.group.all_gather(query)
        flat, places = everyone.reshape(-1, query.shape[1]), np.arange(self._held)[None]
        scores = self.score.comparison.scores(flat, ready, places, self.pool)
        loss, slopes = self._loss(side, batch, scores, weights.reshape(-1))
        to_everyone = self.score.comparison.gradients(flat, ready, places, scores, slopes, places, to_all, self.pool)
        return loss, self.group.reduce_scatter(np.ascontiguousarray(to_everyone).reshape(everyone.shape))

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
            rest = np.float32(self.smoothing / self.sharding.entities) * weight
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


@dataclass(eq=False)
class KvsAll(WholeSoftmax):
    """The loss of a step's queries (head, relation, ?), each of which has all its known tails as answers.

    With y 1 for a known tail and 0 for any other entity, smoothed to `(1 - smoothing) y + smoothing / E`, the loss of a
    query is `sum softplus(s) - y s` over all E entities. Queries and scores move as in `WholeSoftmax`; the scores'
    gradients are computed in place.

    Args:
        group, score, sharding, smoothing, pool, dropout: As of `WholeSoftmax`.
        known: The training triples, whose tails are answers.
    """

    known: KnownTriples = field(kw_only=True)

    def _loss(self, side: Side, batch: StepBatch, scores: Float32, weight: Float32) -> tuple[float, Float32]:
        query, column = self._labels(batch)
        slopes, losses = np.empty_like(scores), np.empty(len(scores), np.float64)
        rest = np.float32(self.smoothing / self.sharding.entities)
        self.pool.run(
            lambda start, stop: _pushed(scores, weight, rest, slopes, losses, start, stop), len(scores), _ROWS_A_THREAD
        )
        most = np.float32(1 - self.smoothing)
        slopes[query, column] -= most * weight[query]
        pulled = np.sum(most * weight[query] * scores[query, column], dtype=np.float64)
        return float(losses.sum() - pulled), slopes

    def _labels(self, batch: StepBatch) -> tuple[Int64, Int64]:
        """Everyone's queries and this shard's rows that are their answers, int64 `[P]` each."""
        given = self.sharding.entity_at[batch.worker, batch.head.reshape(-1)]
        mine = np.stack([given, batch.relation.reshape(-1).astype(np.int64)])
        asked, relation = self.group.all_gather(mine).transpose(1, 0, 2).reshape(2, -1)
        return self.known.answers_on("tail", asked, relation, self.sharding, self.group.rank)


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
