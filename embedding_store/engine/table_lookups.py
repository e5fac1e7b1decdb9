"""Lookups in tables in memory, of a store or of a version that is pinned there."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_lookup import answer_requests
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.lookup_request import LookupRequest, rows_request
from elastable.embedding_store.tables.table_reader import TableReader

__all__ = ["TableLookups"]


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
