"""Random candidates: any entity of a shard, or one of the type of the replaced entity."""

from __future__ import annotations

from typing import Any

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.replicas.knowledge_graphs.graph import SIDES, Sharding, derived_keys, draw_between, stream_key
from elastable.replicas.knowledge_graphs.sampling.negatives import NegativeSampler, StepTriples
from elastable.replicas.knowledge_graphs.sampling.type_members import TypeMembers

__all__ = ["RandomNegatives", "TypedNegatives"]


_STREAM = 0x7E9E  # of a sampler's seed: which of an entity's types


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

    They are drawn for each triple and cannot be shared. If a shard has no entity of the type, its candidates are
    padding and masked. For a triple whose replaced entity has several types, one of them is drawn first.

    Args:
        sharding, count: As of `NegativeSampler`.
        further_types: int `[K, 2]`: entity and type, besides the types of the sharding; None: each entity has one.
        settings: Further arguments of `NegativeSampler`.
    """

    _shareable = False

    def __init__(self, sharding: Sharding, count: int, *, further_types: Int32 | None = None, **settings: Any) -> None:
        super().__init__(sharding, count, **settings)
        self._members = TypeMembers.create(sharding, further_types)

    def settings(self) -> str:
        return f"{super().settings()} types={len(self._members.types)}"

    @property
    def _pads(self) -> bool:
        return self._members.some_shard_lacks_a_type

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        kinds = np.stack([self._types(step, int(worker)) for worker in workers])
        first, count = self._members.spans(shards[:, None], kinds)
        rows = self._members.rows[draw_between(keys, first, count, self.count)]
        return rows, np.broadcast_to(count[..., None] > 0, rows.shape) if self._pads else None

    def _types(self, step: StepTriples, worker: int) -> Int64:
        """int64 `[n * p]`: the type of the entity that each triple's candidates replace; any type at padding."""
        triples = step.of(worker).triples
        replaced = np.empty(len(triples), np.int64)
        for side in SIDES:
            which = self.corrupted(side, step.block)
            replaced[which] = triples[which, 0 if side == "head" else 2]
        key = derived_keys(stream_key(self.seed, _STREAM, step.step), np.array([worker]))
        return self._members.drawn_type(replaced, key)
