"""Lookups in tables that lie on several stores: every store writes its rows where they belong."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from elastable.embedding_store.composite.splits.partition import Partition
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.tables import LookupRequest, deliver

__all__ = ["SplitLookup"]


class SplitLookup:
    """Requests for whole tables, split into requests for stores; `finish` completes them once those are answered.

    Attributes:
        asked: Shard -> its requests. Their outputs are parts of those of the whole requests.
    """

    def __init__(self, tables: Sequence[Partition], requests: Sequence[LookupRequest]) -> None:
        """`tables`: that of each request, whose ids have been checked."""
        self.asked: dict[int, list[LookupRequest]] = {}
        self._folds: list[tuple[LookupRequest, Float32]] = []
        for table, request in zip(tables, requests, strict=True):
            if table.strategy == "whole":
                self.asked.setdefault(table.holders[0], []).append(request)
            elif table.strategy == "token":
                self._split_rows(table, request)
            else:
                self._split_columns(table, request)

    @property
    def values(self) -> int:
        """How many values the shards have to write, about."""
        return sum(len(request.ids) * request.out.shape[1] for of in self.asked.values() for request in of)

    def finish(self) -> None:
        """Folds bags whose rows came from several shards."""
        for request, rows in self._folds:
            deliver(request, rows)

    def _split_columns(self, table: Partition, request: LookupRequest) -> None:
        """Bags are folded at the shards: columns do not meet there."""
        for part in table.parts(request.ids):
            columns = table.columns[part.shard]
            self.asked.setdefault(part.shard, []).append(replace(request, out=request.out[:, columns]))

    def _split_rows(self, table: Partition, request: LookupRequest) -> None:
        out, given = request.out, request.places
        if request.offsets is not None:
            # Sums of parts of a bag would be rounded otherwise than the bag's own.
            out = np.empty((len(request.ids), table.spec.dim), np.float32)
            self._folds.append((request, out))
        for part in table.parts(request.ids):
            places = part.places
            if given is not None:  # a shard that is split again
                places = given if places is None else given[places]
            self.asked.setdefault(part.shard, []).append(LookupRequest(request.table, part.ids, out, places=places))
