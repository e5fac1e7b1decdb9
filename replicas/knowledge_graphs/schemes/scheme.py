"""What every scheme does: scores of a step's triples and candidates, and the gradients of what was read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.tables.grouping import coalesce
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.graph.batch import Bools, StepBatch
from elastable.replicas.knowledge_graphs.schemes.triple_scores import TripleScores
from elastable.replicas.knowledge_graphs.scores.function import ScoreFunction

__all__ = ["Scheme", "Scored", "StepGradients", "require_balance"]


@dataclass(slots=True)
class Scored:
    """Scores of one worker's own triples of a step.

    Attributes:
        positive: float32 `[b]`: of the triples, b = n * p.
        negative: float32 `[b, c]`: of their candidates.
        counted: bool `[b, c]`: which candidates count; None: all.
        gathered_rows: Of its own shard that the worker read.
    """

    positive: Float32
    negative: Float32
    counted: Bools | None
    gathered_rows: int
    _triples: TripleScores
    _kept: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class StepGradients:
    """One worker's gradients of a step.

    Attributes:
        rows: int64 `[u]`, rows of its own shard, each once.
        entities: float32 `[u, entity_width]`: their gradients, of all workers' triples.
        relations: float32 `[R, relation_width]`: of its own triples alone.
        dense: Of further variables, by name: of its own triples alone.
    """

    rows: Int64
    entities: Float32
    relations: Float32
    dense: dict[str, Float32]


class Scheme(ABC):
    """How the triples of n workers meet their candidates.

    Every worker holds a shard of the entities; relations and further variables
    are the same on all. Every member of the group calls the same methods with
    its own part of the same step.

    Args:
        group: Worker and shard are a member's rank.
        score: The score function.
        pool: Threads to compute with; they change no bit.
    """

    def __init__(self, group: ReplicaGroup, score: ScoreFunction, pool: RangePool = SERIAL) -> None:
        self.group, self.score, self.pool = group, score, pool

    @abstractmethod
    def forward(self, batch: StepBatch, entities: Float32, relations: Float32) -> Scored:
        """Scores of this worker's triples.

        Args:
            batch: Its part of the step, with negatives.
            entities: float32 `[rows, entity_width]`: its shard.
            relations: float32 `[R, relation_width]`.

        Raises:
            BadInput: the batch fits neither the group nor the scheme.
        """

    @abstractmethod
    def backward(self, scored: Scored, positive: Float32, negative: Float32) -> StepGradients:
        """Gradients, of those of the scores.

        Args:
            scored: What `forward` gave last.
            positive: float32 `[b]`.
            negative: float32 `[b, c]`.
        """

    def _require(self, batch: StepBatch) -> None:
        if batch.negatives is None:
            raise BadInput(f"step {batch.step} brings no candidates: give its sampler negatives")
        if len(batch.head) != self.group.size or batch.worker != self.group.rank:
            raise BadInput(
                f"a batch of worker {batch.worker} of {len(batch.head)} was given to worker {self.group.rank} of "
                f"{self.group.size}"
            )

    def _summed(self, places: Int64, gradients: Float32) -> tuple[Int64, Float32]:
        """Rows each once, and the sums of their gradients."""
        update = coalesce(places, gradients, self.pool)
        return update.ids, update.gradients


def require_balance(group: ReplicaGroup, gathered_rows: int) -> None:
    """Every member calls it with the rows of its shard that it read.

    Raises:
        BadInput: they are not as many on every member.
    """
    counts = group.all_gather(np.array(gathered_rows, np.int64))
    if (counts != counts[0]).any():
        raise BadInput(f"workers read {counts.tolist()} rows of their shards in one step; balanced, they are equal")
