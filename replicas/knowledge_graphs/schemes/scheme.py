"""The base of schemes: a step on one worker, from rows to gradients; its triples' scores, and dropout of queries."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.tables.grouping import coalesce
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph import SIDES, Corruption, Negatives, Side, StepBatch, stream_key
from elastable.replicas.knowledge_graphs.scores import ScoreFunction
from elastable.replicas.knowledge_graphs.scores.kernels import add_rows

__all__ = [
    "Asked",
    "Dropout",
    "QueryMasks",
    "Scheme",
    "Scored",
    "StepGradients",
    "TripleScores",
    "asked_sides",
    "counted",
]


@dataclass(slots=True)
class Scored:
    """Scores of one worker's own triples of a step.

    Attributes:
        positive: float32 `[b]`: scores of the triples, b = n * p.
        negative: float32 `[b, c]`: scores of their candidates.
        counted: bool `[b, c]`: which candidates count; None: all.
        gathered_rows: Rows of its own shard that the worker read.
    """

    positive: Float32
    negative: Float32
    counted: Bools | None
    gathered_rows: int
    _triples: TripleScores


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
        score: The score function.
        pool: Threads to compute with; they do not affect results.
        dropout: Of the given entities and relations of queries; None: none.
    """

    def __init__(
        self, group: ReplicaGroup, score: ScoreFunction, pool: RangePool = SERIAL, dropout: Dropout | None = None
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
        if len(batch.head) != self.group.size or batch.worker != self.group.rank:
            raise BadInput(
                f"a batch of worker {batch.worker} of {len(batch.head)} was given to worker {self.group.rank} of "
                f"{self.group.size}"
            )
        return batch.negatives

    def _masks(self, batch: StepBatch) -> Callable[[Side, Float32, Float32], QueryMasks] | None:
        """Makes the masks of one side's queries, if there is dropout."""
        return None if self._dropout is None else partial(self._dropout.masks, batch)

    def _summed(self, places: Int64, gradients: Float32) -> tuple[Int64, Float32]:
        """Unique rows, and the sums of their gradients."""
        update = coalesce(places, gradients, self.pool)
        return update.ids, update.gradients


@dataclass(frozen=True, slots=True)
class Asked:
    """A worker's triples whose candidates replace the same end.

    Attributes:
        side: The queried end.
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
        score: The score function.
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
            query = score.query(*_masked(given, related, self._masks[-1]), part.side)
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
            used = _masked(given, self._relations[relation], masks)
            to_given, to_relation, to_dense = self._score.all_gradients(*used, part.side, to_query)
            to_given, to_relation = _masked(to_given, to_relation, masks)
            add_rows(to_relations, relation, np.ascontiguousarray(to_relation))
            found[part.side][part.triples] += to_answers
            found[_other(part.side)][part.triples] += to_given
            for name, gradient in to_dense.items():
                dense[name] = dense[name] + gradient if name in dense else gradient
        heads, tails = (self._score.unprepared(self._raw[side], found[side]) for side in ("head", "tail"))
        return heads, tails, to_relations, dense


def _masked(given: Float32, relation: Float32, masks: QueryMasks | None) -> tuple[Float32, Float32]:
    return (given, relation) if masks is None else (given * masks.given, relation * masks.relation)


def _other(side: Side) -> Side:
    return "head" if side == "tail" else "tail"


_STREAM = 0x4452  # of the seed


@dataclass(frozen=True, slots=True)
class QueryMasks:
    """What the values of a side's queries are multiplied by: 0, or 1 / (1 - share).

    Attributes:
        given: float32 `[b, entity_width]`.
        relation: float32 `[b, relation_width]`.
    """

    given: Float32
    relation: Float32


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
        return QueryMasks(*(self._mask(draw, rows.shape) for rows in (given, relation)))

    def _mask(self, draw: np.random.Generator, shape: tuple[int, ...]) -> Float32:
        kept = draw.random(shape, np.float32) >= self.share
        return np.where(kept, np.float32(1 / (1 - self.share)), np.float32(0))
