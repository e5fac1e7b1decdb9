"""The store that keeps its rows in the memory of its own process."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot, require_lease
from elastable.embedding_store.contract.spec import TableSpec, refuse_conflict
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.pins.memory_pin import MemoryPin
from elastable.embedding_store.engine.pins.store_pins import StorePins
from elastable.embedding_store.engine.tiered.store_commits import StoreCommits
from elastable.embedding_store.errors import StoreBroken, StoreFailed, TableNotFound
from elastable.embedding_store.log import changes
from elastable.embedding_store.measures.counters import Counts, Durations
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.rows.checks import require_block, require_ids, require_version
from elastable.embedding_store.support.memory_budget import before_image_bytes_here, direct_bytes_here
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.base_store import BaseStore
from elastable.embedding_store.tables.table_reader import TableReader

__all__ = ["MemoryStore"]

_MOST_THREADS = 8


class MemoryStore(StoreCommits, BaseStore):
    """Rows in memory. Lookups share the store, commits have it alone: a lookup sees one version whole, named or not."""

    def __init__(
        self,
        threads: int | None = None,
        *,
        direct_bytes: int | None = None,
        before_image_bytes: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        """An empty store at version 0.

        Args:
            threads: For large gathers and updates; None: one a core, at most 8. Results do not depend on it.
            direct_bytes: A fixed table up to this size (weights and slots) is laid out whole, row i at position i; a
                larger one only holds the rows that were touched. None: an eighth of the memory here, at least 1 GiB.
                Results do not depend on it.
            before_image_bytes: Of memory, for rows as they were at pinned versions; where they would take more, the
                oldest pin is given up. None: a quarter of the memory here.
            timeout_s: Seconds that a lookup waits for a commit, or a commit
                for lookups, before `DeadlineExceeded`.
        """
        self._tables: dict[str, MemoryTable] = {}
        self._gone: dict[str, int] = {}
        self.new_slab: SlabMaker = anonymous_slab
        self._version = 0
        self._changes = 0  # calls that changed anything
        self._closed = False
        self._phases, self._wanted = Durations(), Counts()
        self._failure: BaseException | None = None  # that came in the middle of a change
        self._direct_bytes = direct_bytes_here() if direct_bytes is None else direct_bytes
        most = before_image_bytes_here() if before_image_bytes is None else before_image_bytes
        self._pins = StorePins(self._tables, most)
        self._pool = RangePool(min(available_cores(), _MOST_THREADS) if threads is None else threads)
        self._lock = ReadersWriterLock(timeout_s, "the memory store")

    def create_table(self, spec: TableSpec) -> bool:
        """As in `EmbeddingStore.create_table`; raises `BadSpec` for an unknown optimizer."""
        with self._lock.writing():
            self._require_open()
            if self._has_table(spec):  # which changes nothing: the store stays with the process that writes it
                return False
            self._own()
            if self._has_table(spec):  # another process has made it
                return False
            made = self._new_table(spec)
            try:
                self._log(changes.CreateTable(spec))
            except BaseException:
                made.drop()
                raise
            made.follow_gone(self._gone.pop(spec.name, 0))
            self._tables[spec.name] = made
            self._pins.welcome(made)
            return True

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        seconds = require_lease(lease_s)
        while True:
            with self._lock.writing():
                self._require_open()
                if not self._base_differs:
                    lease = self._pins.take(self._version, version, seconds)
                    break
            self._abandon_base()  # a new one begins with a later commit
        return MemoryPin(self._lock, self._pool, self._table, self.specs, self._pins, lease)

    def pins(self) -> tuple[PinStatistics, ...]:
        if self._pins.overdue:
            with self._lock.writing():
                self._pins.sweep()
        with self._lock.reading():
            return self._pins.statistics()

    def reset_version(self, version: int, record: bytes | None = None) -> None:
        require_version(version)
        self._abandon_base()
        with self._lock.writing():
            self._own()
            self._pins.refuse_change(f"the version cannot be reset to {version}")
            self._log(changes.ResetVersion(record), version)
            self._version, self._record = version, record
            self._changes += 1

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """As in `EmbeddingStore.put`, one block after the other."""
        with self._lock.reading():
            found = self._table(table)
        for block in blocks:
            checked = require_block(found.spec, found.slot_width, block)
            self._make_way()
            with self._lock.writing():
                self._require_open()
                self._own()
                found = self._table(table)
                found.make_ready_to_put(checked.ids)
                self._log(changes.PutRows(table, checked))
                with self._whole_or_broken():
                    found.put(checked)
                self._changes += 1

    def delete(self, table: str, ids: Int64) -> int:
        self._make_way()
        with self._lock.writing():
            self._own()
            found = self._table(table)
            checked = require_ids(found.spec, ids)
            found.make_ready_to_delete(checked)
            self._log(changes.DeleteRows(table, checked))
            with self._whole_or_broken():
                count = found.delete(checked)
            self._changes += 1
            return count

    def put_table_state(self, table: str, state: TableState) -> None:
        if state.untouched_decay is not None:
            self._abandon_base()
        with self._lock.writing():
            self._own()
            found = self._table(table)
            if state.untouched_decay is not None:  # of which pins keep no image: it follows steps
                self._pins.refuse_change(f"the decay of other rows of table {table!r} cannot be restored")
            before = found.state()
            found.put_state(state)
            try:
                self._log(changes.PutTableState(table, state))
            except BaseException:
                found.put_state(before)
                raise
            self._changes += 1

    def clear(self, table: str) -> None:
        self._abandon_base()
        with self._lock.writing():
            self._own()
            found = self._table(table)
            self._pins.refuse_change(f"table {table!r} cannot be cleared")
            self._log(changes.ClearTable(table))
            found.clear()
            self._changes += 1

    def drop_table(self, table: str) -> None:
        self._abandon_base()
        with self._lock.writing():
            self._own()
            dropped = self._table(table)
            self._pins.refuse_change(f"table {table!r} cannot be dropped")
            self._log(changes.DropTable(table))
            del self._tables[table]
            self._gone[table] = dropped.written_once_gone
            dropped.drop()
            self._changes += 1

    def close(self) -> None:
        """Frees the memory; afterwards every table is unknown."""
        self._end_appending()
        try:
            self._flush_last()
        finally:
            self._close_history()
        with self._lock.writing():
            self._closed = True
            self._pins.close()
            self._tables.clear()
            self._changes += 1
        self._pool.close()

    def _readers(self, tables: Iterable[str], version: int | None) -> Sequence[TableReader]:
        found = [self._table(table) for table in tables]
        if version is None or version == self._version:
            return found
        self._pins.require(version, self._version)
        return [table.at(version) for table in found]

    def _has_table(self, spec: TableSpec) -> bool:
        """Whether the table is there; raises `SpecConflict` where it has another spec."""
        known = self._tables.get(spec.name)
        if known is not None:
            refuse_conflict(known.spec, spec)
        return known is not None

    def _new_table(self, spec: TableSpec) -> MemoryTable:
        if self._store_tier is not None:
            return self._store_tier.new_table(spec, self._direct_bytes)
        return MemoryTable(spec, self._direct_bytes, self.new_slab)

    def _table(self, name: str) -> MemoryTable:
        self._require_open()
        table = self._tables.get(name)
        if table is None:
            raise TableNotFound(f"no table {name!r}; tables here: {', '.join(sorted(self._tables)) or 'none'}")
        return table

    def _require_open(self) -> None:
        self._refuse_unlogged()
        if self._failure is not None:
            remedy = "restore a checkpoint" if self._history is None else f"open {self._history.place} again"
            raise StoreBroken(
                f"the memory store failed in the middle of a commit; {remedy}: {self._failure}"
            ) from self._failure
        if self._closed:
            raise StoreFailed("the memory store is closed")
