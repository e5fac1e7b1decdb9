"""Gradient accumulation: sums over the lookups that make one step."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.tables import Coalescer, GradientPart, coalesce_many
from elastable.replicas.host_embeddings.exchange.row_exchange import RowExchange

__all__ = ["PendingSums"]


class PendingSums:
    """Sums of one member's part of a table: a left fold over lookups, replicas and positions.

    Attributes:
        lookups: Number of lookups in the sums.
    """

    def __init__(self, dim: int) -> None:
        self.lookups = 0
        self._nothing = TableUpdate(np.empty(0, np.int64), np.empty((0, dim), np.float32))
        self._sums = self._nothing
        self._coalescer = Coalescer()

    def add(self, parts: Sequence[GradientPart], of: int) -> TableUpdate | None:
        """Adds a lookup's gradients (`parts` as of `coalesce_many`).

        Returns:
            The sums once `of` lookups are in them; valid until the next call.
        """
        if of == 1 and not self.lookups:
            return self._cut(self._coalescer.coalesce_many(parts, shared_pool()))
        before: list[GradientPart] = [(self._sums.ids, self._sums.gradients, 1.0)] if self.lookups else []
        self._sums = self._cut(coalesce_many([*before, *parts], shared_pool()))
        self.lookups += 1
        if self.lookups < of:
            return None
        done, self._sums, self.lookups = self._sums, self._nothing, 0
        return done

    def _cut(self, sums: TableUpdate) -> TableUpdate:
        """A member without columns has sums without columns."""
        return sums if self._nothing.gradients.shape[1] else TableUpdate(sums.ids, sums.gradients[:, :0])

    def whole(self, exchange: RowExchange) -> tuple[Int64, Float32]:
        """The sums of all members: ids int64 `[u]`, ascending, and gradients float32 `[u, whole dim]`; collective."""
        group = exchange.group
        mine = np.ascontiguousarray(self._sums.gradients).reshape(-1)
        everyone = list(zip(group.all_gather_uneven(self._sums.ids), group.all_gather_uneven(mine), strict=True))
        kept = [exchange.kept_ids(rank)[ids] for rank, (ids, _) in enumerate(everyone)]
        ids = np.unique(np.concatenate(kept))
        gradients = np.zeros((len(ids), exchange.spec.dim), np.float32)
        for rank, (_, values) in enumerate(everyone):
            columns = exchange.columns_of(rank)
            rows = np.searchsorted(ids, kept[rank])
            gradients[rows, columns] = values.reshape(len(rows), columns.stop - columns.start)
        return ids, gradients

    def replace(self, exchange: RowExchange, ids: Int64, gradients: Float32, lookups: int) -> None:
        """Restores this member's part of what `whole` gave, of any number of members."""
        rank = exchange.group.rank
        kept = exchange.kept_ids(rank)
        mine = np.flatnonzero(np.isin(ids, kept))
        columns = exchange.columns_of(rank)
        own = np.ascontiguousarray(gradients[mine, columns])
        self._sums, self.lookups = TableUpdate(np.searchsorted(kept, ids[mine]).astype(np.int64), own), lookups
