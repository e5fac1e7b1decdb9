"""Rows of all store servers of a job saved at once, of the current version or of a pinned one."""

from __future__ import annotations

from abc import ABC
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import TypeVar

from elastable.embedding_store.composite.coordinator.composite_reads import CompositeReads
from elastable.embedding_store.composite.coordinator.composite_snapshot import CompositeSnapshot
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.shards.shard_store import RowSave, SavedRows, SavedTable, ServedRows

__all__ = ["RowsOnServers", "ServersSnapshot"]

Readable = TypeVar("Readable", bound=Snapshot)


class RowsOnServers(CompositeReads[Readable], ServedRows, ABC):
    """Has every server save what it holds; all of them have ended when this returns or raises."""

    def save_rows(self, save: RowSave) -> SavedRows:
        holders = {of.table: self._partition(of.table).holders for of in save.tables}
        calls: dict[int, Callable[[], SavedRows]] = {}
        for number, source in enumerate(self._sources):
            if not isinstance(source, ServedRows):
                raise StoreFailed(f"{self._splits.stores[number]} is no store server")
            tables = tuple(
                replace(of, prefix=f"{of.prefix}-s{number:03d}") for of in save.tables if number in holders[of.table]
            )
            probe = f"{save.probe}-s{number:03d}" if save.probe else ""
            calls[number] = partial(source.save_rows, replace(save, tables=tables, probe=probe))
        return _joined(self._calls.run(calls))


class ServersSnapshot(RowsOnServers[Snapshot], CompositeSnapshot):
    """One version, pinned on every server; see `CompositeSnapshot`."""


def _joined(every: Mapping[int, SavedRows]) -> SavedRows:
    tables: dict[str, SavedTable] = {}
    for saved in every.values():
        for table, of in saved.tables.items():
            before = tables.get(table, SavedTable(0, 0, ()))
            tables[table] = SavedTable(
                before.rows + of.rows, before.written + of.written, before.files + of.files, before.live + of.live
            )
    return SavedRows(tables, {name: file for saved in every.values() for name, file in saved.files.items()})
