"""Lookups in tables in memory, of a store or of a version that is pinned there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_lookup import answer_requests
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.rows.checks import require_block_rows, require_ids
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.lookup_request import LookupRequest, rows_request
from elastable.embedding_store.tables.table_reader import TableReader

__all__ = ["StoreReads", "TableLookups"]


class TableLookups(RowSource):
    """What looks rows up in tables that lie in memory, all requests of a call at one version."""

    _lock: ReadersWriterLock
    """Is held, with other readers, while anything is looked up."""
    _pool: RangePool

    @abstractmethod
    def _readers(self, tables: Iterable[str], version: int | None) -> Sequence[TableReader]:
        """What reads each of the tables at a version; the lock is held.

        Raises:
            TableNotFound, StaleVersion, FutureVersion: as `lookup`.
        """

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        with self._lock.reading():
            tables = self._readers(ids, version)
            requests = [rows_request(table.spec, of) for table, of in zip(tables, ids.values(), strict=True)]
            answer_requests(tables, requests, self._pool)
        return {request.table: request.out for request in requests}

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        """As in `RowSource.lookup_into`: rows are folded where they lie."""
        with self._lock.reading():
            tables = self._readers([request.table for request in requests], version)
            answer_requests(tables, requests, self._pool if split else SERIAL)

    def lookup_in_order(self, requests: Iterable[LookupRequest], version: int | None) -> Generator[None, None, None]:
        """As in `RowSource.lookup_in_order`, by the caller's thread; the store is locked until the last is answered."""
        with self._lock.reading():
            found: dict[str, TableReader] = {}
            for request in requests:
                if request.table not in found:
                    found[request.table] = self._readers([request.table], version)[0]
                answer_requests([found[request.table]], [request], SERIAL)
                yield


class StoreReads(TableLookups, EmbeddingStore):
    """What else is read of a store in memory, at its current version."""

    _table: Callable[[str], MemoryTable]
    _require_open: Callable[[], None]
    _tables: dict[str, MemoryTable]
    _version: int

    def specs(self) -> dict[str, TableSpec]:
        with self._lock.reading():
            return {name: table.spec for name, table in self._tables.items()}

    def version(self) -> int:
        return self._version

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        return self._lock.wait_until(lambda: self._version >= version, timeout_s)

    def row_count(self, table: str) -> int:
        with self._lock.reading():
            return self._table(table).count

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`; a commit between two blocks shows in the later ones."""
        with self._lock.reading():
            found = self._table(table)
        return self._blocks(found, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        with self._lock.reading():
            found = self._table(table)
            return found.stored(require_ids(found.spec, ids))

    def table_statistics(self, table: str) -> TableStatistics:
        with self._lock.reading():
            return self._table(table).statistics()

    def table_state(self, table: str) -> TableState:
        with self._lock.reading():
            return self._table(table).state()

    def _blocks(self, table: MemoryTable, block_rows: int) -> Iterator[RowBlock]:
        cursor = 0
        while True:
            with self._lock.reading():
                self._require_open()
                block, cursor = table.scan(cursor, block_rows)
            if not len(block.ids):
                return
            yield block
