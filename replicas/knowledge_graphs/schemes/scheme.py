"""The interface of schemes: scores of a step's triples and candidates, and their gradients."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from elastable.embedding_store.contract.arrays import Bools, Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.tables import coalesce
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph.batch import Negatives, Side, StepBatch
from elastable.replicas.knowledge_graphs.schemes.dropout import Dropout, QueryMasks
from elastable.replicas.knowledge_graphs.schemes.triple_scores import TripleScores
from elastable.replicas.knowledge_graphs.scores.function import ScoreFunction

__all__ = ["Scheme", "Scored", "StepGradients"]


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
