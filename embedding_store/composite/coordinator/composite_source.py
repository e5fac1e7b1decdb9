"""Rows of tables that lie on several sources, all at one version."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Generic, TypeVar

from elastable.embedding_store.composite.coordinator.store_calls import StoreCalls
from elastable.embedding_store.composite.splits.partition import Partition
from elastable.embedding_store.composite.splits.split_lookup import SplitLookup
from elastable.embedding_store.composite.splits.table_splits import TableSplits
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine import MemoryPin, MemoryStore
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed, TableNotFound
from elastable.embedding_store.measures.counters import LookupCounts
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables import LookupRequest, require_width, rows_request

__all__ = ["CompositeSource"]

_FEW_VALUES = 1 << 14  # stores in memory write fewer before a thread has started

Source = TypeVar("Source", bound=RowSource)
Answer = TypeVar("Answer")


class CompositeSource(RowSource, Generic[Source]):
    """Several sources as one. All of them are asked at the same time, and errors name the one they come from.

    Attributes:
        lookups: That succeeded, by table and number of the source.

    Args:
        sources: Closed with this one.
        splits: Which of them holds which part of a table, in the same order.
        timeout_s: Seconds that a lookup waits for a commit of this process, or a commit for lookups, before
            `DeadlineExceeded`.

    Raises:
        BadInput: there are no sources, or one is given twice.
    """

    def __init__(self, sources: Sequence[Source], splits: TableSplits, timeout_s: float = 60.0) -> None:
        if not sources:
            raise BadInput("a store of several stores needs at least one")
        if len({id(source) for source in sources}) < len(sources):
            raise BadInput("a store of several stores needs different ones: one is given twice")
        self._sources = tuple(sources)
        self._splits = splits
        self._calls = StoreCalls(splits.stores, self._why_lost)
        self._lock = ReadersWriterLock(timeout_s, "the stores")
        self._partitions: dict[str, Partition] = {}
        self._reloading = threading.Lock()
        self._in_memory = all(isinstance(source, MemoryStore | MemoryPin) for source in sources)
        self._apart: str | None = None  # why rows of different stores may be of different versions
        self._closed = False
        self.lookups = LookupCounts()

    def specs(self) -> dict[str, TableSpec]:
        """Whole tables; one of which a store lacks its part is left out."""
        self._reload()
        return {name: found.spec for name, found in self._partitions.items()}

    def version(self) -> int:
        """The version that every store has reached."""
        return min(self._versions().values())

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        end = time.monotonic() + timeout_s

        def wait(source: Source) -> bool:
            return source.wait_for_version(version, max(0.0, end - time.monotonic()))

        return all(self._each(wait).values())

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows of many tables. A `version` is checked on every store, also on those that hold none of the rows."""
        requests = [rows_request(self._partition(name).spec, of) for name, of in ids.items()]
        self.lookup_into(requests, version)
        return {request.table: request.out for request in requests}

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        with self._lock.reading():
            self._require_open()
            if version is None and self._apart is not None:
                self._require_one_version()
            tables = [self._partition(request.table) for request in requests]
            for table, request in zip(tables, requests, strict=True):
                require_width(request, table.spec.dim)
                require_ids(table.spec, request.ids)
            lookup = SplitLookup(tables, requests)
            stores = lookup.asked if version is None else range(len(self._sources))
            calls = {n: partial(self._sources[n].lookup_into, lookup.asked.get(n, []), version, split) for n in stores}
            self._calls.run(calls, together=not self._in_memory or lookup.values > _FEW_VALUES)
            lookup.finish()
        for number, asked in lookup.asked.items():
            for each in asked:
                self.lookups.add({each.table: each.ids}, str(number))

    def forget(self) -> None:
        for source in self._sources:
            source.forget()
        with self._reloading:
            self._partitions = {}

    def close(self) -> None:
        self._closed = True
        self._calls.close()
        for source in self._sources:
            source.close()

    def _each(
        self, call: Callable[[Source], Answer], stores: Iterable[int] | None = None, together: bool = True
    ) -> dict[int, Answer]:
        """Calls some stores (None: all), and returns their answers by store."""
        numbers = range(len(self._sources)) if stores is None else stores
        return self._calls.run({number: partial(call, self._sources[number]) for number in numbers}, together)

    def _versions(self) -> dict[int, int]:
        self._require_open()
        return self._each(lambda source: source.version(), together=not self._in_memory)

    def _require_one_version(self) -> int:
        """The version of all stores; raises `StoreFailed` if they are at different ones."""
        versions = self._versions()
        by_version: dict[int, list[str]] = {}
        for store, version in versions.items():
            by_version.setdefault(version, []).append(self._splits.stores[store])
        if len(by_version) > 1:
            found = "; ".join(f"version {version} on {', '.join(on)}" for version, on in sorted(by_version.items()))
            raise StoreFailed(f"the stores are at different versions ({found}): {self._apart or 'repeat the commit'}")
        self._apart = None
        return min(by_version)

    def _partition(self, name: str) -> Partition:
        found = self._partitions.get(name)
        if found is None:
            self._require_open()
            self._reload()
            found = self._partitions.get(name)
        if found is None:
            raise TableNotFound(f"no table {name!r}; tables here: {', '.join(sorted(self._partitions)) or 'none'}")
        return found

    def _reload(self) -> None:
        """Reads from the stores which tables there are."""
        found = {name: self._splits.read(name, held) for name, held in self._held().items()}
        whole = {name: table for name, (table, lacking) in found.items() if not lacking}
        with self._reloading:
            self._partitions = whole

    def _held(self) -> dict[str, list[TableSpec | None]]:
        """What each store holds of each table."""
        self._require_open()
        return self._by_table(self._each(lambda source: source.specs(), together=not self._in_memory))

    def _by_table(self, specs: Mapping[int, Mapping[str, TableSpec]]) -> dict[str, list[TableSpec | None]]:
        found: dict[str, list[TableSpec | None]] = {}
        for name in sorted({name for of in specs.values() for name in of}):
            stores = range(len(self._sources))
            held = [specs.get(store, {}).get(name) if self._splits.owns(store, name) else None for store in stores]
            if any(spec is not None for spec in held):
                found[name] = held
        return found

    def _why_lost(self, store: int, error: ElastableError) -> str:
        """The sign that a store has lost its rows; "" if there is none: a table may have been dropped everywhere."""
        if not isinstance(error, TableNotFound):
            return ""
        specs, _ = self._calls.outcomes({number: source.specs for number, source in enumerate(self._sources)})
        if store not in specs:
            return ""
        lost = [name for name, held in self._by_table(specs).items() if store in self._splits.read(name, held)[1]]
        return f"it lacks tables that others hold ({', '.join(lost)})" if lost else ""

    def _require_open(self) -> None:
        if self._closed:
            raise StoreFailed("the store is closed")
