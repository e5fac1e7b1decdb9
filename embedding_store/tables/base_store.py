"""Defaults that most sources and stores share, made of the methods that each implements."""

from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.native.row_fold import fold_bags
from elastable.embedding_store.native.row_gather import scatter_rows
from elastable.embedding_store.tables.lookups import require_width
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.embedding_store.tables.table_update import commit_next


class BaseSource(RowSource):
    """A source that answers requests by its plain `lookup`, one for all of them."""

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        parts: dict[str, list[Int64]] = {}
        for request in requests:
            parts.setdefault(request.table, []).append(request.ids)
        wanted = dict[str, Int64]()
        for name, ids in parts.items():
            wanted[name] = np.concatenate(ids) if len(ids) > 1 else ids[0]
        rows = self.lookup(wanted, version)
        begin = dict.fromkeys(parts, 0)
        for request in requests:
            start = begin[request.table]
            begin[request.table] = stop = start + len(request.ids)
            deliver(request, rows[request.table][start:stop])


class BaseStore(BaseSource, EmbeddingStore):
    """A store whose tables are `EmbeddingTable`s."""

    update = commit_next

    def table(self, of: TableSpec | str) -> EmbeddingTable:
        if isinstance(of, TableSpec):
            self.create_table(of)
        return EmbeddingTable(self, of.name if isinstance(of, TableSpec) else of)


def deliver(request: LookupRequest, rows: Float32) -> None:
    """Writes a request's output from the rows float32 `[m, dim]` of its ids."""
    if request.out.shape[1] != rows.shape[1]:
        require_width(request, rows.shape[1])
    if request.offsets is None:
        if request.places is None:
            request.out[...] = rows
        else:
            scatter_rows(np.ascontiguousarray(rows), request.places, request.out)
        return
    rows = np.ascontiguousarray(rows)
    order = np.arange(len(rows))
    fold_bags(rows, rows[:0], order, request.offsets, request.weights, request.combiner, request.out)
