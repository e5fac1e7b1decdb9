"""Any store, the hot rows of its tables in memory."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.pins import PinStatistics
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.tables.base_store import BaseStore
from elastable.embedding_store.tiers.cached.cached_source import CachedSource

__all__ = ["CachedStore"]


class CachedStore(CachedSource, BaseStore):
    """Keeps hot rows of a store that this process alone changes.

    Changes go through to the store, and rows they change are held no more, so
    that the next lookup reads them anew; no change makes a row hot. A lookup
    that names no version does not ask for one: it sees what this process
    committed last. Should another process have committed after all, lookups
    find out as soon as a row is not held, and forget everything.

    Scans, checkpoints and whatever else reads rows with their slots read the
    store, and leave the cache alone.
    """

    def __init__(
        self,
        store: EmbeddingStore,
        *,
        rows: int | None = None,
        bytes: int | None = None,  # noqa: A002 - as one says it
        threads: int | None = None,
        timeout_s: float = 60.0,
    ) -> None:
        super().__init__(store, rows=rows, bytes=bytes, threads=threads, timeout_s=timeout_s)
        self._store = store
        self._at = store.version()

    @property
    def store(self) -> EmbeddingStore:
        """The store behind; rows that are changed there are not noticed here."""
        return self._store

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        return RowSource.lookup_when(self, ids, version, wait_s)

    def create_table(self, spec: TableSpec) -> bool:
        return self._store.create_table(spec)

    def drop_table(self, table: str) -> None:
        with self._changing(table):
            self._store.drop_table(table)
            self._caches.pop(table, None)  # another of its name may have another spec

    def commit(self, commit: Commit) -> None:
        self._commit(commit, lambda: self._store.commit(commit))

    def stage(self, commit: Commit) -> Callable[[], None]:
        finish = self._store.stage(commit)
        return lambda: self._commit(commit, finish)

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """As in `EmbeddingStore.pin`: of the store behind; what is read there leaves the cache alone."""
        return self._store.pin(version, lease_s)

    def pins(self) -> tuple[PinStatistics, ...]:
        return self._store.pins()

    @property
    def keeps_records(self) -> bool:
        return self._store.keeps_records

    def record(self) -> bytes | None:
        return self._store.record()

    def other_writer(self) -> str | None:
        return self._store.other_writer()

    def require_owner(self) -> None:
        self._store.require_owner()

    def recover(self, version: int | None = None) -> int:
        """As in `EmbeddingStore.recover`, of the store behind; the cache begins anew."""
        try:
            return self._store.recover(version)
        finally:
            self.forget()

    def reset_version(self, version: int) -> None:
        with self._lock.writing():
            self._require_open()
            self._store.reset_version(version)
            self._at = version
            self._epoch += 1

    def row_count(self, table: str) -> int:
        return self._store.row_count(table)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`; the cache is left alone."""
        return self._store.scan(table, block_rows)

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`; the cache is left alone."""
        return self._store.read_rows(table, ids)

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """As in `EmbeddingStore.put`, one block after the other."""
        self._store.put(table, [])  # is there such a table?
        for block in blocks:
            with self._changing(table, block.ids):
                self._store.put(table, [block])

    def delete(self, table: str, ids: Int64) -> int:
        with self._changing(table, ids):
            return self._store.delete(table, ids)

    def clear(self, table: str) -> None:
        with self._changing(table):
            self._store.clear(table)

    def table_statistics(self, table: str) -> TableStatistics:
        return self._store.table_statistics(table)

    def table_state(self, table: str) -> TableState:
        return self._store.table_state(table)

    def put_table_state(self, table: str, state: TableState) -> None:
        self._store.put_table_state(table, state)

    def _current(self) -> int:
        at = self._at
        return self._store.version() if at is None else at

    def _mistaken(self, version: int) -> None:
        with self._lock.writing():
            if self._at == version:
                self._move(self._store.version())

    def _commit(self, commit: Commit, work: Callable[[], None]) -> None:
        with self._lock.writing():
            self._require_open()
            try:
                work()
            except BaseException:
                for name in commit.updates:  # it may have changed rows before it failed
                    self._clear(name)
                raise
            if self._at != commit.version - 1:
                self._move(commit.version)
            self._at = commit.version
            self._remove({name: update.ids for name, update in commit.updates.items()})
            self._clear_followers()
            for name, cache in self._caches.items():
                if cache.spec.eviction is not None:
                    self._clear(name)  # which rows were evicted is not told

    @contextmanager
    def _changing(self, table: str, ids: Int64 | None = None) -> Iterator[None]:
        """Rows of a table change: those of `ids`, or all."""
        with self._lock.writing():
            self._require_open()
            try:
                yield
            except BaseException:
                self._clear(table)
                raise
            if ids is None:
                self._clear(table)
            else:
                self._remove({table: ids})

    def _clear(self, table: str) -> None:
        if table in self._caches:
            self._caches[table].clear()
        self._epoch += 1
