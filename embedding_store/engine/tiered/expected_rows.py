"""How many rows each table of a store must have once its log is replayed: fewer have been lost, or were deleted."""

from __future__ import annotations

from collections.abc import Mapping

from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log.changes import Change, CommitImages, ResetVersion

__all__ = ["ExpectedRows"]


class ExpectedRows:
    """The last count that a state or a commit tells of a table; none after a change that tells none."""

    def __init__(self, state: StoreState | None) -> None:
        tables = () if state is None else state.tables
        self._rows = {saved.spec.name: saved.rows for saved in tables}

    def follow(self, change: Change) -> None:
        """A change is replayed."""
        if isinstance(change, CommitImages):
            self._rows.update({images.table: images.rows for images in change.tables})
        elif not isinstance(change, ResetVersion):
            self._rows.pop(change.spec.name if hasattr(change, "spec") else change.table, None)

    def require(self, tables: Mapping[str, MemoryTable], place: str) -> None:
        """Raises `StoreBroken` for the first table that has another number of rows."""
        for name, expected in self._rows.items():
            if name in tables and tables[name].count != expected:
                raise StoreBroken(
                    f"{place}: table {name!r} has {tables[name].count} rows and should have {expected}: rows are lost, "
                    "or another program has deleted or written some. Go back to a checkpoint"
                )
