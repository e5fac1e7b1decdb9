"""Changes of a log, applied to tables again."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.log.changes import (
    Change,
    ClearTable,
    CommitImages,
    CreateTable,
    DeleteRows,
    DropTable,
    PutRows,
    PutTableState,
    ResetVersion,
)
from elastable.embedding_store.rows.checks import require_block, require_ids

__all__ = ["ReplayedTables"]


@dataclass(slots=True)
class ReplayedTables:
    """Tables to which changes are applied as they were made once.

    Attributes:
        tables: By name.
        new_table: Makes an empty one.
        version: After the last change.
        record: `Commit.record` of that version.
    """

    tables: dict[str, MemoryTable]
    new_table: Callable[[TableSpec], MemoryTable]
    version: int = 0
    record: bytes | None = field(default=None, repr=False)

    def apply(self, change: Change, version: int) -> None:
        """Applies one change, after which the store has this version.

        Raises:
            BadInput: the change does not fit the tables.
        """
        match change:
            case CommitImages():
                self._commit(change, version)
                self.record = change.record
            case CreateTable(spec):
                if spec.name in self.tables:
                    raise BadInput(f"table {spec.name!r} is created twice")
                self.tables[spec.name] = self.new_table(spec)
            case DropTable(name):
                del self.tables[self._table(name).spec.name]
            case ClearTable(name):
                self._table(name).clear()
            case PutRows(name, block):
                table = self._table(name)
                table.put(require_block(table.spec, table.slot_width, block))
            case DeleteRows(name, ids):
                table = self._table(name)
                table.delete(require_ids(table.spec, ids))
            case PutTableState(name, state):
                self._table(name).put_state(state)
            case ResetVersion(record):
                self.record = record
        self.version = version

    def _commit(self, commit: CommitImages, version: int) -> None:
        if version != self.version + 1:
            raise BadInput(f"a commit of version {version} comes after version {self.version}")
        images = {of_table.table: of_table for of_table in commit.tables}
        for name in images:
            self._table(name)
        for name, table in self.tables.items():
            frozen = name in commit.frozen
            if frozen:
                table.stay(commit.ends_chapter)
            elif name in commit.rates:
                table.replay_step(commit.step, commit.rates[name], commit.ends_chapter)
            elif table.replay is not None:
                raise BadInput(f"table {name!r}: version {version} has no learning rate for it")
            if name in images:
                table.put_images(images[name], version)
            if not frozen:
                table.replay_eviction(version, images[name].removed if name in images else None, commit.time)

    def _table(self, name: str) -> MemoryTable:
        table = self.tables.get(name)
        if table is None:
            raise BadInput(f"there is no table {name!r} yet")
        return table
