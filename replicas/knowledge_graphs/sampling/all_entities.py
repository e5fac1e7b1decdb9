"""Every entity as a candidate of every triple."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Bools, Int32, Int64, UInt64
from elastable.replicas.knowledge_graphs.graph import SIDES, Corruption, KnownTriples, Sharding
from elastable.replicas.knowledge_graphs.sampling.negative_masks import mask_rows
from elastable.replicas.knowledge_graphs.sampling.negatives import Exclude, NegativeSampler, StepTriples

__all__ = ["AllEntities"]


class AllEntities(NegativeSampler):
    """All rows of every shard, in order, for every triple; arguments as of `NegativeSampler`."""

    def __init__(
        self,
        sharding: Sharding,
        *,
        corruption: Corruption = "t",
        exclude: Exclude = "answer",
        known: KnownTriples | None = None,
        tell_entities: bool = False,
    ) -> None:
        super().__init__(
            sharding,
            sharding.rows,
            corruption=corruption,
            shared=True,
            exclude=exclude,
            known=known,
            tell_entities=tell_entities,
        )
        self._column_of = sharding.place_of(np.arange(sharding.entities))

    @property
    def _pads(self) -> bool:
        return bool((self.sharding.counts < self.sharding.rows).any())

    def _draw(self, keys: UInt64, shards: Int64, workers: Int64, step: StepTriples) -> tuple[Int32, Bools | None]:
        rows = np.broadcast_to(np.arange(self.count, dtype=np.int32), (len(shards), 1, self.count))
        return rows, rows < self.sharding.counts[shards][:, None, None]

    def _mask(self, entities: Int64, step: StepTriples, worker: int) -> Bools:
        there = self.sharding.entity_at >= 0
        if self.exclude == "nothing":
            return there[None]
        triples = step.of(worker).triples
        mask = np.repeat(there.reshape(1, -1), len(triples), axis=0)
        for side in SIDES:
            which = self.corrupted(side, step.block)
            mask_rows(self._column_of, which, *self._excluded(side, triples[which]), mask)
        return mask.reshape(len(triples), *there.shape)
