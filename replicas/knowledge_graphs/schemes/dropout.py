"""Dropout of the given entities and relations of a step's queries: a pure function of seed, step, worker and side."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph import SIDES, Side, StepBatch, stream_key

__all__ = ["Dropout", "QueryMasks"]

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
