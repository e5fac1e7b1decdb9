"""A pin of a store in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.snapshot import Snapshot, require_lease
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.pinned_table import PinnedTable
from elastable.embedding_store.engine.pins.store_pins import PinLease, StorePins
from elastable.embedding_store.engine.table_lookups import TableLookups
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.rows.checks import require_block_rows, require_ids
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

__all__ = ["MemoryPin"]


class MemoryPin(TableLookups, Snapshot):
    """As `Snapshot`. A read shares the store with lookups, and so waits for a commit that is being made, and no longer.

    Args:
        lock, pool: Of the store.
        table: Finds a table of the store by its name, or raises.
        specs: Of the store.
        pins: Of the store.
        lease: Of this pin.
    """

    def __init__(
        self,
        lock: ReadersWriterLock,
        pool: RangePool,
        table: Callable[[str], MemoryTable],
        specs: Callable[[], dict[str, TableSpec]],
        pins: StorePins,
        lease: PinLease,
    ) -> None:
        self._lock, self._pool = lock, pool
        self._table, self._store_specs = table, specs
        self._pins, self._lease = pins, lease

    def specs(self) -> dict[str, TableSpec]:
        """As in `RowSource.specs`; tables that were made later are there, and empty."""
        return self._store_specs()

    def version(self) -> int:
        """The version that is pinned."""
        return self._lease.version

    def renew(self, lease_s: float | None = None) -> None:
        seconds = None if lease_s is None else require_lease(lease_s)
        with self._lock.reading():
            self._pins.renew(self._lease, seconds)

    def row_count(self, table: str) -> int:
        with self._lock.reading():
            return self._at(table).count

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `Snapshot.scan`: the rows that have not changed since first, then the others."""
        with self._lock.reading():
            self._at(table)
        return self._blocks(table, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        with self._lock.reading():
            found = self._at(table)
            return found.stored(require_ids(found.spec, ids))

    def table_state(self, table: str) -> TableState:
        with self._lock.reading():
            return self._at(table).state()

    def close(self) -> None:
        if self._lease.gone is None:
            with self._lock.writing():
                self._pins.release(self._lease)

    def _blocks(self, table: str, block_rows: int) -> Iterator[RowBlock]:
        cursor, ends, sequences = 0, list[int](), list[int]()
        while True:
            with self._lock.reading():
                found = self._at(table)
                block, cursor = found.unchanged(cursor, block_rows)
                if block is None:
                    ids = found.changed(ends, sequences)
                    break
                ends.append(cursor)
                sequences.append(found.sequence)
            if len(block.ids):
                yield block
        for start in range(0, len(ids), block_rows):
            with self._lock.reading():
                block = self._at(table).stored(ids[start : start + block_rows])
            yield block

    def _readers(self, tables: Iterable[str], version: int | None) -> Sequence[PinnedTable]:
        refuse_other_version(self._lease.version, version)
        return [self._at(table) for table in tables]

    def _at(self, table: str) -> PinnedTable:
        """The table at the pinned version; the lock is held."""
        found = self._table(table)
        self._pins.require_lease(self._lease)
        return found.at(self._lease.version)
