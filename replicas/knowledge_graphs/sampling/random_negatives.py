"""Random candidates: any entity of a shard, or one of the type of the replaced entity."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Bools, Int32, UInt64
from elastable.replicas.knowledge_graphs.graph.randomness import draw_between
from elastable.replicas.knowledge_graphs.sampling.negatives import NegativeSampler, StepTriples

__all__ = ["RandomNegatives", "TypedNegatives"]


class RandomNegatives(NegativeSampler):
    """Entities of a shard, drawn uniformly with replacement."""

    @property
    def _pads(self) -> bool:
        return False

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        ends = 2 if self.corruption == "ht" else 1
        sets = ends if self.shared else self.sharding.shards * step.block
        count = self.sharding.counts[shards][:, None]
        drawn = draw_between(keys, np.zeros_like(count), count, sets * self.count)
        return drawn.reshape(len(keys), sets, self.count), None


class TypedNegatives(NegativeSampler):
    """Entities of the replaced entity's type, drawn uniformly with replacement.

    They are drawn for each triple and cannot be shared. If a shard has no
    entity of the type, its candidates are padding and masked.
    """

    _shareable = False

    @property
    def _pads(self) -> bool:
        return bool((self.sharding.type_counts == 0).any())

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        kinds = np.stack([self._types(step, int(worker)) for worker in workers])
        first = self.sharding.type_offsets[shards[:, None], kinds]
        count = self.sharding.type_counts[shards[:, None], kinds]
        rows = draw_between(keys, first, count, self.count)
        return rows, np.broadcast_to(count[..., None] > 0, rows.shape) if self._pads else None

    def _types(self, step: StepTriples, worker: int) -> Int64:
        """int64 `[n * p]`: the type of the entity that each triple's candidates replace; any type at padding."""
        triples = step.of(worker).triples
        types = np.empty(len(triples), np.int64)
        for side in SIDES:
            which = self.corrupted(side, step.block)
            types[which] = self.sharding.entity_types[triples[which, 0 if side == "head" else 2]]
        return types
