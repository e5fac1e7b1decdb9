"""Exchange by callbacks: the table is in an embedding store; indices out, rows in, gradients out.

Every replica looks its own ids up in the store. Gradients go to rank 0, which sums them by replica and then by
position, and commits once: the same bits as remote buffers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import FutureVersion
from elastable.embedding_store.tables import GradientPart, IndexedSlices, TableSlices, update_tables
from elastable.replicas.groups.agreement import fail_together
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.exchange.gathered_ids import GatheredIds
from elastable.replicas.host_embeddings.exchange.row_exchange import RowExchange, rows_with_slots

__all__ = ["Callbacks"]

_COMMITS = 0  # the rank that changes the store
_SEEN_S = 60.0


class Callbacks(RowExchange):
    """A table of a store that all replicas reach, through one object or one each."""

    def __init__(self, group: ReplicaGroup, spec: TableSpec, store: EmbeddingStore | None) -> None:
        """Creates the table, unless the store has it already.

        Args:
            group: The replicas.
            spec: The table.
            store: The store that all of them reach; None, for one replica alone: a memory store.

        Raises:
            SpecConflict: the store has another table of that name.
            StoreFailed: another replica could not create it; names the rank.
        """
        super().__init__(group, spec)
        self._own = MemoryStore() if store is None else None
        self._store: EmbeddingStore = self._own or cast(EmbeddingStore, store)
        for turn in (True, False):  # rank 0 creates the table before others look for it
            with fail_together(group):
                if turn is (group.rank == _COMMITS):
                    self._store.create_table(spec)

    def lookup(self, batch: GatheredIds) -> Float32:
        with fail_together(self.group):
            return self._store.lookup({self.spec.name: batch.ids_of(self.group.rank)})[self.spec.name]

    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """All of them on rank 0, nothing on others."""
        nothing = np.empty((0, self.dim), np.float32)
        blocks = [gradients if rank == _COMMITS else nothing for rank in range(self.group.size)]
        everyone = self.group.all_to_all_uneven(blocks)
        if self.group.rank != _COMMITS:
            return [(np.empty(0, np.int64), nothing, 1.0)]
        return [(batch.ids_of(rank), theirs, float(scales[rank])) for rank, theirs in enumerate(everyone)]

    def apply(self, update: TableUpdate, step: int, learning_rate: float) -> None:
        """Returns once every replica's store has the new version.

        Raises:
            StoreFailed: rank 0's commit failed; no row has changed.
            FutureVersion: a replica's store does not see the commit.
        """
        version = 0
        with fail_together(self.group):
            if self.group.rank == _COMMITS:
                own = self.spec.optimizer
                values = dict(own.hyperparameters) | {"learning_rate": learning_rate}
                optimizer = OptimizerSpec.of(own.name, lazy=own.lazy, **values)
                slices = IndexedSlices(update.gradients, update.ids)
                version = update_tables(self._store, [TableSlices(self.spec, slices, optimizer)], step=step)
        version = int(self.group.broadcast(np.array(version, np.int64), _COMMITS))
        with fail_together(self.group):
            self._require_version(version)

    def columns_of(self, rank: int) -> slice:
        return slice(0, self.spec.dim)

    def kept_ids(self, rank: int) -> Int64:
        return np.arange(int(self.spec.vocabulary_size or 0) if rank == _COMMITS else 0)

    def whole(self) -> RowBlock:
        return rows_with_slots(self._store, self.spec)

    def replace(self, block: RowBlock) -> None:
        with fail_together(self.group):
            if self.group.rank == _COMMITS:
                self._store.put(self.spec.name, [block])

    def close(self) -> None:
        if self._own is not None:
            self._own.close()

    def _require_version(self, version: int) -> None:
        if not self._store.wait_for_version(version, _SEEN_S):
            raise FutureVersion(
                f"host embedding {self.spec.name!r}: the store of rank {self.group.ranks[self.group.rank]} is at "
                f"version {self._store.version()}, and rank {self.group.ranks[_COMMITS]} has committed {version}: "
                "replicas must be given the same store"
            )
