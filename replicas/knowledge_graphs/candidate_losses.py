"""Schemes of losses with candidates: workers exchange embeddings or scores; scores of triples; dropout of queries."""

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.tables.grouping import coalesce, unique_ids
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Corruption, Negatives, Side, StepBatch
from elastable.replicas.knowledge_graphs.graph.randomness import stream_key
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
    """How the triples of n workers and their candidates are brought together.

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
    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        """Scores of this worker's triples.

        Args:
            batch: Its part of the step, with negatives.
            entities: float32 `[rows, entity_width]`: its shard.
            relations: float32 `[R, relation_width]`.

        Raises:
            BadInput: the batch does not fit the group or the scheme.
        """

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
        require_own(batch, self.group)
        return batch.negatives

    def _triples(self, batch: StepBatch, entities: Float32, tails: Float32, relations: Float32) -> "TripleScores":
        asked = asked_sides(self._negatives(batch).corruption, *batch.head.shape)
        heads, relation = entities[batch.head.reshape(-1)], batch.relation.reshape(-1).astype(np.int64)
        masks = None if self._dropout is None else partial(self._dropout.masks, batch)
        return TripleScores(self.score, asked, heads, relation, tails, relations, masks)

    def _summed(self, places: Int64, gradients: Float32) -> tuple[Int64, Float32]:
        """Unique rows, and the sums of their gradients."""
        update = coalesce(places, gradients, self.pool)
        return update.ids, update.gradients


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

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        negatives = self._negatives(batch)
        n, p = batch.head.shape
        drawn = negatives.rows.reshape(n, -1)
        sent = batch.tail if negatives.local else np.concatenate([batch.tail, drawn], axis=1)
        moved = self.group.all_to_all(entities[sent])
        width = entities.shape[1]
        tails = moved[:, :p].reshape(n * p, width)
        candidates = entities[drawn.reshape(-1)] if negatives.local else moved[:, p:].reshape(-1, width)
        triples = self._triples(batch, entities, tails, relations)
        ready = self.score.prepared(candidates)
        places = [_received_places(negatives, part) for part in triples.asked]
        found = [
            self.score.comparison.scores(query, ready, place, self.pool)
            for query, place in zip(triples.queries, places, strict=True)
        ]
        negative = np.empty((n * p, found[0].shape[1]), np.float32)
        for part, scores in zip(triples.asked, found, strict=True):
            negative[part.triples] = scores
        kept = triples, batch, sent, candidates, ready, places, found
        return Scored(triples.scores, negative, counted(negatives.mask, n * p), kept)

    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        triples, batch, sent, candidates, ready, places, found = scored._kept
        n, p = batch.head.shape
        to_candidates, to_queries = np.zeros_like(candidates), []
        for part, query, place, scores in zip(triples.asked, triples.queries, places, found, strict=True):
            slopes = negative[part.triples]
            to_queries.append(
                self.score.comparison.gradients(query, ready, place, scores, slopes, place, to_candidates, self.pool)
            )
        to_candidates = self.score.unprepared(candidates, to_candidates)
        to_heads, to_tails, relations, dense = triples.gradients(positive, to_queries)
        back = to_tails.reshape(n, p, -1)
        targets = [batch.head.reshape(-1), sent.reshape(-1)]
        if batch.negatives.local:
            moved = [self.group.all_to_all(back).reshape(sent.size, -1), to_candidates]
            targets.append(batch.negatives.rows.reshape(-1))
        else:
            back = np.concatenate([back, to_candidates.reshape(n, -1, back.shape[2])], axis=1)
            moved = [self.group.all_to_all(back).reshape(sent.size, -1)]
        rows, entities = self._summed(np.concatenate(targets).astype(np.int64), np.concatenate([to_heads, *moved]))
        return StepGradients(rows, entities, relations, dense)


def _received_places(negatives: Negatives, part: "Asked") -> Int64:
    """int64 `[g, n * m]`: positions of these triples' candidates in what was received, `[n, B, m]`."""
    every: Int64 = np.arange(negatives.rows.size).reshape(negatives.rows.shape)
    if negatives.per_triple:
        return np.ascontiguousarray(every[:, part.triples].transpose(1, 0, 2)).reshape(len(part.triples), -1)
    return np.ascontiguousarray(every[:, min(part.place, negatives.rows.shape[1] - 1)].reshape(1, -1))


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

    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        negatives = self._negatives(batch)
        if negatives.local and self.group.size > 1:
            raise BadInput("score-moving scores every worker's triples everywhere: draw candidates from all shards")
        n, p = batch.head.shape
        tails = self.group.all_to_all(entities[batch.tail]).reshape(n * p, -1)
        triples = self._triples(batch, entities, tails, relations)
        unique, inverse = unique_ids(negatives.rows.reshape(-1).astype(np.int64))
        in_place = self.score.as_they_are  # the shard itself is compared, or its prepared rows `unique`
        ready = entities if in_place else self.score.prepared(entities[unique])
        targets = inverse.astype(np.int64).reshape(negatives.rows.shape)
        everyone = [self.group.all_gather(query) for query in triples.queries]
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


def _local_places(negatives: Negatives, part: "Asked", targets: Int64) -> Int64:
    """int64 `[g, m']`: the local candidates of everyone's queries `[n * q]`."""
    if negatives.per_triple:
        return np.ascontiguousarray(targets[:, part.triples]).reshape(-1, targets.shape[2])
    return targets[:1, min(part.place, targets.shape[1] - 1)]  # what triples share is the same for all workers


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker's triples whose candidates replace the same end.

    Attributes:
        triples: int64 `[q]`: indices of the worker's triples.
        place: Index of the side among shared candidates: 1 for tails in corruption "ht", else 0.
    """

    side: Side
    triples: Int64
    place: int


def asked_sides(corruption: Corruption, blocks: int, each: int) -> tuple[Asked, ...]:
    """The queried ends of `blocks` blocks of `each` triples; see `graph.batch`."""
    order = np.arange(blocks * each)
    if corruption == "h":
        return (Asked("head", order, 0),)
    if corruption == "t":
        return (Asked("tail", order, 0),)
    grid = order.reshape(blocks, each)
    half = each // 2
    return Asked("head", grid[:, :half].reshape(-1), 0), Asked("tail", grid[:, half:].reshape(-1), 1)


def counted(mask: Bools | None, triples: int) -> Bools | None:
    """A mask of candidates `[triples or 1, ...]` as bool `[triples, c]`; None stays None."""
    if mask is None:
        return None
    return np.ascontiguousarray(np.broadcast_to(mask, (triples, *mask.shape[1:])).reshape(triples, -1))


class TripleScores:
    """Scores of triples with given embeddings, through the queries that also score their candidates.

    Args:
        asked: The queried ends; each triple once.
        heads: float32 `[b, entity_width]`.
        relation: int `[b]`.
        tails: float32 `[b, entity_width]`.
        relations: float32 `[R, relation_width]`.
        masks: Makes what the values of a side's queries are multiplied by (`Dropout.masks`); None: nothing.

    Attributes:
        queries: For each of `asked`, float32 `[q, query_width]`.
        scores: float32 `[b]`: scores of the triples.
    """

    def __init__(
        self,
        score: ScoreFunction,
        asked: tuple[Asked, ...],
        heads: Float32,
        relation: Int64,
        tails: Float32,
        relations: Float32,
        masks: Callable[[Side, Float32, Float32], QueryMasks] | None = None,
    ) -> None:
        self.asked = asked
        self._masks: list[QueryMasks | None] = []
        self._score, self._relation, self._relations = score, relation, relations
        self._raw = {"head": heads, "tail": tails}
        self._ready = {"head": score.prepared(heads), "tail": score.prepared(tails)}
        self.queries: list[Float32] = []
        self.scores = np.empty(len(heads), np.float32)
        for part in asked:
            score.require_side(part.side)
            given, related = self._ready[_other(part.side)][part.triples], relations[relation[part.triples]]
            self._masks.append(None if masks is None else masks(part.side, given, related))
            query = score.query(*masked(given, related, self._masks[-1]), part.side)
            self.queries.append(query)
            self.scores[part.triples] = self._compare(part, query)

    def _compare(self, part: Asked, query: Float32) -> Float32:
        answers = self._ready[part.side][part.triples]
        return self._score.comparison.scores(query, answers, np.arange(len(query))[:, None])[:, 0]

    def gradients(
        self, positive: Float32, to_queries: list[Float32]
    ) -> tuple[Float32, Float32, Float32, dict[str, Float32]]:
        """Gradients of heads and tails `[b, entity_width]`, of all relations, and of further variables.

        Args:
            positive: float32 `[b]`: gradients of the triples' scores.
            to_queries: For each of `asked`, the queries' gradients from their candidates.
        """
        found = {side: np.zeros_like(rows) for side, rows in self._raw.items()}
        to_relations = np.zeros_like(self._relations)
        dense: dict[str, Float32] = {}
        for part, query, more, masks in zip(self.asked, self.queries, to_queries, self._masks, strict=True):
            own = np.arange(len(query))[:, None]
            answers = self._ready[part.side][part.triples]
            to_answers = np.zeros_like(answers)
            to_query = more + self._score.comparison.gradients(
                query,
                answers,
                own,
                self.scores[part.triples][:, None],
                positive[part.triples][:, None],
                own,
                to_answers,
            )
            given, relation = self._ready[_other(part.side)][part.triples], self._relation[part.triples]
            used = masked(given, self._relations[relation], masks)
            to_given, to_relation, to_dense = self._score.query_gradients(*used, part.side, to_query)
            to_given, to_relation = masked(to_given, to_relation, masks)
            add_rows(to_relations, relation, np.ascontiguousarray(to_relation))
            found[part.side][part.triples] += to_answers
            found[_other(part.side)][part.triples] += to_given
            for name, gradient in to_dense.items():
                dense[name] = dense[name] + gradient if name in dense else gradient
        heads, tails = (self._score.unprepared(self._raw[side], found[side]) for side in ("head", "tail"))
        return heads, tails, to_relations, dense


def masked(given: Float32, relation: Float32, masks: QueryMasks | None) -> tuple[Float32, Float32]:
    """Both, multiplied by the masks of dropout, if there are any."""
    return (given, relation) if masks is None else (given * masks[0], relation * masks[1])


def require_own(batch: StepBatch, group: ReplicaGroup) -> None:
    """Raises BadInput for a batch of another group, or of another worker of the group."""
    if len(batch.head) != group.size or batch.worker != group.rank:
        raise BadInput(
            f"a batch of worker {batch.worker} of {len(batch.head)} was given to worker {group.rank} of {group.size}"
        )


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
