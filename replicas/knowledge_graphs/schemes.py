"""Schemes: how triples and their candidates meet, by moving embeddings, scores or sums over all; dropout."""

from abc import ABC, abstractmethod
from dataclasses import dataclass
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
    Corruption,
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

QueryMasks = tuple[Float32, Float32]
"""What the values of a side's queries are multiplied by, 0 or 1 / (1 - share): of given entities, of relations."""


@dataclass(slots=True)
class Scored:
    """Scores of one worker's own triples of a step.

    Attributes:
        positive: float32 `[b]`: scores of the triples, b = n * p.
        negative: float32 `[b, c]`: scores of their candidates.
        counted: bool `[b, c]`: which candidates count; None: all.
    """

    positive: Float32
    negative: Float32
    counted: Bools | None
    _kept: tuple[Any, ...]  # for the backward pass of the scheme


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


class Scheme(ABC):
    """How the triples of n workers are scored, and what the gradients of their loss are.

    Every worker holds a shard of the entities; relations and further variables are the same on all. Every member of the
    group calls the same methods with its own part of the same step.

    Args:
        group: Worker and shard are a member's rank.
        pool: Threads to compute with; they do not affect results.
        dropout: Of the given entities and relations of queries; None: none.
    """

    def __init__(
        self, group: ReplicaGroup, score: ScoreFunction, pool: RangePool = SERIAL, dropout: "Dropout | None" = None
    ) -> None:
        self.group, self.score, self.pool, self._dropout = group, score, pool, dropout

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


class CandidateScheme(Scheme):
    """A scheme whose triples are scored with the candidates of their batch; `loss` compares both.

    Args:
        group, score, pool, dropout: As of `Scheme`.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        score: ScoreFunction,
        loss: Loss,
        pool: RangePool = SERIAL,
        dropout: "Dropout | None" = None,
    ) -> None:
        super().__init__(group, score, pool, dropout)
        self._loss = loss

    def step(
        self, batch: StepBatch, entities: Float32, relations: Float32, weight: Float32
    ) -> tuple[float, StepGradients]:
        scored = self.forward(batch, entities, relations)
        loss, *slopes = self._loss(scored.positive, scored.negative, weight.reshape(-1), scored.counted, self.pool)
        return loss, self.backward(scored, *slopes)

    @abstractmethod
    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        """Scores of this worker's triples; arguments and errors as of `step`."""

    @abstractmethod
    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        """Gradients from those of the scores.

        Args:
            scored: The last result of `forward`.
            positive: float32 `[b]`.
            negative: float32 `[b, c]`.
        """

    def _negatives(self, batch: StepBatch) -> Negatives:
        """The candidates of a batch that fits the group."""
        if batch.negatives is None:
            raise BadInput(f"step {batch.step} has no candidates: give its sampler negatives")
        self._require_own(batch)
        return batch.negatives

    def _triples(self, batch: StepBatch, entities: Float32, tails: Float32, relations: Float32) -> "TripleScores":
        heads = entities[batch.head.reshape(-1)]
        return TripleScores(
            self.score, batch, self._negatives(batch).corruption, heads, tails, relations, self._dropout
        )

    def _summed(self, places: Int64, gradients: Float32) -> tuple[Int64, Float32]:
        """Unique rows, and the sums of their gradients."""
        update = coalesce(places, gradients, self.pool)
        return update.ids, update.gradients


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
        negatives = self._negatives(batch)
        n, p = batch.head.shape
        drawn = negatives.rows.reshape(n, -1)
        sent = np.concatenate([batch.tail, drawn], axis=1)
        moved = self.group.all_to_all(entities[sent])
        width = entities.shape[1]
        tails = moved[:, :p].reshape(n * p, width)
        candidates = moved[:, p:].reshape(-1, width)
        triples = self._triples(batch, entities, tails, relations)
        ready = self.score.prepared(candidates)
        places = [_received_places(negatives, part) for part in triples.asked]
        found = triples.compared(ready, places, self.pool)
        negative = np.empty((n * p, found[0].shape[1]), np.float32)
        for part, scores in zip(triples.asked, found, strict=True):
            negative[part.triples] = scores
        kept = triples, batch, sent, candidates, ready, places, found
        return Scored(triples.scores, negative, counted(negatives.mask, n * p), kept)

    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        triples, batch, sent, candidates, ready, places, found = scored._kept
        n, p = batch.head.shape
        to_candidates, to_queries = np.zeros_like(candidates), []
        for part, asked, place, scores in zip(triples.asked, triples.queries, places, found, strict=True):
            slopes = negative[part.triples]
            to_queries.append(
                self.score.comparison.gradients(
                    asked.query, ready, place, scores, slopes, place, to_candidates, self.pool
                )
            )
        to_candidates = self.score.unprepared(candidates, to_candidates)
        to_heads, to_tails, relations, dense = triples.gradients(positive, to_queries)
        back = np.concatenate([to_tails.reshape(n, p, -1), to_candidates.reshape(n, -1, to_tails.shape[1])], axis=1)
        moved = self.group.all_to_all(back).reshape(sent.size, -1)
        targets = np.concatenate([batch.head.reshape(-1), sent.reshape(-1)]).astype(np.int64)
        rows, entities = self._summed(targets, np.concatenate([to_heads, moved]))
        return StepGradients(rows, entities, relations, dense)


def _received_places(negatives: Negatives, part: Asked) -> Int64:
    """int64 `[g, n * m]`: positions of these triples' candidates in what was received, `[n, B, m]`."""
    every: Int64 = np.arange(negatives.rows.size).reshape(negatives.rows.shape)
    if negatives.per_triple:
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
        negatives = self._negatives(batch)
        n, p = batch.head.shape
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1)
        triples = self._triples(batch, entities, tails, relations)
        unique, inverse = unique_ids(negatives.rows.reshape(-1).astype(np.int64))
        in_place = self.score.as_they_are  # the shard itself is compared, or its prepared rows `unique`
        ready = entities if in_place else self.score.prepared(entities[unique])
        targets = inverse.astype(np.int64).reshape(negatives.rows.shape)
        everyone = [self.group.all_gather(asked.query) for asked in triples.queries]
        places = [_local_places(negatives, part, targets) for part in triples.asked]
        read = [unique[place] if in_place else place for place in places]
        found = [
            self.score.comparison.scores(queries.reshape(-1, queries.shape[2]), ready, place, self.pool)
            for queries, place in zip(everyone, read, strict=True)
        ]
        negative = np.empty((n * p, n * found[0].shape[1]), np.float32)
        for part, scores in zip(triples.asked, found, strict=True):
            back = self.group.all_to_all(scores.reshape(n, len(part.triples), -1))
            negative[part.triples] = back.transpose(1, 0, 2).reshape(len(part.triples), -1)
        # `places` are positions among the unique rows, `read` in `ready`.
        kept = triples, batch, entities, unique, ready, everyone, places, read, found
        return Scored(triples.scores, negative, counted(negatives.mask, n * p), kept)

    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        triples, batch, raw, unique, ready, everyone, places, reads, found = scored._kept
        n, p = batch.head.shape
        to_drawn = np.zeros((len(unique), raw.shape[1]), np.float32)
        to_queries = []
        for part, queries, place, read, scores in zip(triples.asked, everyone, places, reads, found, strict=True):
            mine = negative[part.triples].reshape(len(part.triples), n, -1).transpose(1, 0, 2)
            here = self.group.all_to_all(np.ascontiguousarray(mine)).reshape(scores.shape)
            flat = queries.reshape(-1, queries.shape[2])
            to_all = self.score.comparison.gradients(flat, ready, read, scores, here, place, to_drawn, self.pool)
            to_queries.append(self.group.reduce_scatter(np.ascontiguousarray(to_all).reshape(queries.shape)))
        if not self.score.as_they_are:
            to_drawn = self.score.unprepared(raw[unique], to_drawn)
        to_heads, to_tails, relations, dense = triples.gradients(positive, to_queries)
        back = self.group.all_to_all(to_tails.reshape(n, p, -1)).reshape(n * p, -1)
        targets = np.concatenate([batch.head.reshape(-1), batch.tail.reshape(-1), unique]).astype(np.int64)
        rows, entities = self._summed(targets, np.concatenate([to_heads, back, to_drawn]))
        return StepGradients(rows, entities, relations, dense)


def _local_places(negatives: Negatives, part: Asked, targets: Int64) -> Int64:
    """int64 `[g, m']`: the local candidates of everyone's queries `[n * q]`."""
    if negatives.per_triple:
        return np.ascontiguousarray(targets[:, part.triples]).reshape(-1, targets.shape[2])
    return targets[:1, part.place]  # what triples share is the same for all workers


def counted(mask: Bools | None, triples: int) -> Bools | None:
    """A mask of candidates `[triples or 1, ...]` as bool `[triples, c]`; None stays None."""
    if mask is None:
        return None
    return np.ascontiguousarray(np.broadcast_to(mask, (triples, *mask.shape[1:])).reshape(triples, -1))


class SideQueries:
    """Queries for one end of some triples, and the way back from their gradients.

    Args:
        given: float32 `[q, entity_width]`: prepared entities at the other end.
        relation: int64 `[q]`.
        relations: float32 `[R, relation_width]`.
        dropout, batch: What masks the queries' values; None: nothing does.

    Attributes:
        query: float32 `[q, query_width]`.
    """

    def __init__(
        self,
        score: ScoreFunction,
        side: Side,
        given: Float32,
        relation: Int64,
        relations: Float32,
        dropout: "Dropout | None",
        batch: StepBatch,
    ) -> None:
        score.require_side(side)
        self._score, self._side, self._relation = score, side, relation
        used = given, relations[relation]
        self._masks = None if dropout is None else dropout.masks(batch, side, *used)
        self._used = self._masked(*used)
        self.query = score.query(*self._used, side)

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
    """Scores of triples with given embeddings, through the queries that also score their candidates.

    Args:
        batch: Its triples.
        corruption: Which end of each is queried.
        heads, tails: float32 `[b, entity_width]`.
        relations: float32 `[R, relation_width]`.
        dropout: Of the queries' values.

    Attributes:
        asked: The queried ends; each triple once.
        queries: For each of `asked`.
        scores: float32 `[b]`: scores of the triples.
    """

    def __init__(
        self,
        score: ScoreFunction,
        batch: StepBatch,
        corruption: Corruption,
        heads: Float32,
        tails: Float32,
        relations: Float32,
        dropout: "Dropout | None",
    ) -> None:
        self.asked = asked_sides(corruption, *batch.head.shape)
        self._score, self._relations = score, relations
        self._raw = {"head": heads, "tail": tails}
        self._ready = {"head": score.prepared(heads), "tail": score.prepared(tails)}
        relation = batch.relation.reshape(-1).astype(np.int64)
        self.queries: list[SideQueries] = []
        self.scores = np.empty(len(heads), np.float32)
        for part in self.asked:
            given = self._ready[_other(part.side)][part.triples]
            asked = SideQueries(score, part.side, given, relation[part.triples], relations, dropout, batch)
            self.queries.append(asked)
            answers, own = self._ready[part.side][part.triples], np.arange(len(given))[:, None]
            self.scores[part.triples] = score.comparison.scores(asked.query, answers, own)[:, 0]

    def compared(self, rows: Float32, places: list[Int64], pool: RangePool) -> list[Float32]:
        """For each of `asked`, float32 `[q, c]`: scores of its candidates, `places` (int64 `[g, c]`) in `rows`."""
        pairs = zip(self.queries, places, strict=True)
        return [self._score.comparison.scores(asked.query, rows, place, pool) for asked, place in pairs]

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
            scores, slopes = (each[part.triples][:, None] for each in (self.scores, positive))
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
        share: The share of values that become 0, from 0 to below 1.
        seed: Seed of the masks.

    Raises:
        BadInput: another share.
    """

    share: float
    seed: int

    def __post_init__(self) -> None:
        if not 0 <= self.share < 1:
            raise BadInput(f"dropout {self.share}: the share of values that become 0 is from 0 to below 1")

    def masks(self, batch: StepBatch, side: Side, given: Float32, relation: Float32) -> QueryMasks:
        """The masks of one side's queries of a worker's step, for rows of these shapes."""
        key = stream_key(self.seed, _STREAM, batch.step, batch.worker, SIDES.index(side))
        draw = np.random.Generator(np.random.Philox(key=int(key)))
        return self._mask(draw, given.shape), self._mask(draw, relation.shape)

    def _mask(self, draw: np.random.Generator, shape: tuple[int, ...]) -> Float32:
        kept = draw.random(shape, np.float32) >= self.share
        return np.where(kept, np.float32(1 / (1 - self.share)), np.float32(0))


# Losses over all entities


_ROWS_A_THREAD = 8


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

    def __init__(
        self,
        group: ReplicaGroup,
        score: ScoreFunction,
        sharding: Sharding,
        sides: tuple[Side, ...] = ("tail",),
        smoothing: float = 0.0,
        pool: RangePool = SERIAL,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__(group, score, pool, dropout)
        for side in sides:
            score.require_side(side)
        self._sharding, self._sides, self._smoothing = sharding, sides, smoothing
        self._held = int(sharding.counts[group.rank])  # entities of this shard; further rows are padding

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
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1) if "head" in self._sides else heads
        to_ends, to_relations = dict[Side, Float32](), np.zeros_like(relations)
        dense, loss = dict[str, Float32](), 0.0
        for side in self._sides:
            given, to_related = heads if side == "tail" else tails, np.zeros_like(relations)
            relation = batch.relation.reshape(-1).astype(np.int64)
            asked = SideQueries(self.score, side, self.score.prepared(given), relation, relations, self._dropout, batch)
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
        most = np.float32(1 - self._smoothing)
        slopes[asked, answers] -= most * weight[asked]
        losses = np.log(totals[asked], dtype=np.float64) + highest[asked] - most * scores[asked, answers]
        loss = float(np.sum(losses * weight[asked]))
        if self._smoothing:
            rest = np.float32(self._smoothing / self._sharding.entities) * weight
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
        group, score, sharding, smoothing, pool, dropout: As of `WholeSoftmax`.
        known: The training triples, whose tails are answers.
    """

    def __init__(
        self,
        group: ReplicaGroup,
        score: ScoreFunction,
        sharding: Sharding,
        known: KnownTriples,
        smoothing: float = 0.0,
        pool: RangePool = SERIAL,
        dropout: Dropout | None = None,
    ) -> None:
        super().__init__(group, score, sharding, ("tail",), smoothing, pool, dropout)
        self._known = known

    def _loss(self, side: Side, batch: StepBatch, scores: Float32, weight: Float32) -> tuple[float, Float32]:
        query, column = self._labels(batch)
        slopes, losses = np.empty_like(scores), np.empty(len(scores), np.float64)
        rest = np.float32(self._smoothing / self._sharding.entities)
        self.pool.run(
            lambda start, stop: _pushed(scores, weight, rest, slopes, losses, start, stop), len(scores), _ROWS_A_THREAD
        )
        most = np.float32(1 - self._smoothing)
        slopes[query, column] -= most * weight[query]
        pulled = np.sum(most * weight[query] * scores[query, column], dtype=np.float64)
        return float(losses.sum() - pulled), slopes

    def _labels(self, batch: StepBatch) -> tuple[Int64, Int64]:
        """Everyone's queries and this shard's rows that are their answers, int64 `[P]` each."""
        given = self._sharding.entity_at[batch.worker, batch.head.reshape(-1)]
        mine = np.stack([given, batch.relation.reshape(-1).astype(np.int64)])
        asked, relation = self.group.all_gather(mine).transpose(1, 0, 2).reshape(2, -1)
        return self._known.answers_on("tail", asked, relation, self._sharding, self.group.rank)


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
