"""Reading tables that lie on several stores."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from functools import partial

from elastable.embedding_store.composite.partitions.partition import Partition, partition_of_shards
from elastable.embedding_store.composite.partitions.partitioned_lookup import SplitLookup
from elastable.embedding_store.composite.partitions.shard_calls import ShardCalls
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.table_lookups import TableLookups
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed, TableNotFound
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.lookup_request import LookupRequest, require_width, rows_request

__all__ = ["PartitionedSource"]

_FEW_VALUES = 1 << 14  # which stores in memory have written before a thread has started


class PartitionedSource(RowSource):
    """Rows of tables whose shards lie in several sources, all of one version.

    How a table was split is read from the shards. All shards are asked at the
    same time, and each writes its rows where they belong. Errors say which
    shard they come from.
    """

    def __init__(self, shards: Sequence[RowSource], timeout_s: float = 60.0) -> None:
        """Takes the sources over: they are closed with this one.

        Args:
            shards: In the order in which the tables were split over them.
            timeout_s: Seconds that a lookup waits for a commit of this
                process, or a commit for lookups, before `DeadlineExceeded`.

        Raises:
            BadInput: there are none, or one stands twice.
        """
        if not shards:
            raise BadInput("a partitioned store needs at least one shard")
        if len({id(shard) for shard in shards}) < len(shards):
            raise BadInput("a partitioned store needs shards that differ: one stands twice")
        self._sources = tuple(shards)
        self._calls = ShardCalls(len(shards), self._why_lost)
        self._lock = ReadersWriterLock(timeout_s, "the partitioned store")
        self._partitions: dict[str, Partition] = {}
        self._reloading = threading.Lock()
        self._in_memory = all(isinstance(shard, TableLookups) for shard in shards)
        self._apart: str | None = None  # why rows of different shards may be of different versions
        self._closed = False

    @property
    def shards(self) -> int:
        """How many there are."""
        return len(self._sources)

    def specs(self) -> dict[str, TableSpec]:
        """As in `RowSource.specs`: whole tables. One that a shard lacks is not there."""
        self._reload()
        return {name: found.spec for name, found in self._partitions.items()}

    def version(self) -> int:
        """As in `RowSource.version`: the one that stands on every shard."""
        return min(self._versions().values())

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """As in `RowSource.wait_for_version`, on every shard."""
        end = time.monotonic() + timeout_s
        return all(shard.wait_for_version(version, max(0.0, end - time.monotonic())) for shard in self._sources)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """As in `RowSource.lookup`. A version is looked at on every shard, also where no row is asked for."""
        requests = [rows_request(self._partition(name).spec, of) for name, of in ids.items()]
        self.lookup_into(requests, version)
        return {request.table: request.out for request in requests}

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        """As in `RowSource.lookup_into`, all requests at one version."""
        with self._lock.reading():
            self._require_open()
            if version is None and self._apart is not None:
                self._look_whether_together()
            tables = [self._partition(request.table) for request in requests]
            for table, request in zip(tables, requests, strict=True):
                require_width(request, table.spec.dim)
                require_ids(table.spec, request.ids)
            lookup = SplitLookup(tables, requests)
            asked = lookup.asked if version is None else {n: lookup.asked.get(n, []) for n in range(self.shards)}
            together = not self._in_memory or lookup.values > _FEW_VALUES
            self._calls.run(
                {n: partial(self._sources[n].lookup_into, of, version, split) for n, of in asked.items()}, together
            )
            lookup.finish()

    def forget(self) -> None:
        """As in `RowSource.forget`, at every shard."""
        for shard in self._sources:
            shard.forget()
        with self._reloading:
            self._partitions = {}

    def close(self) -> None:
        """Closes every shard. Closing twice is harmless."""
        self._closed = True
        self._calls.close()
        for shard in self._sources:
            shard.close()

    def _versions(self) -> dict[int, int]:
        self._require_open()
        calls = {number: shard.version for number, shard in enumerate(self._sources)}
        return self._calls.run(calls, together=not self._in_memory)

    def _look_whether_together(self) -> None:
        versions = self._versions()
        if len(set(versions.values())) > 1:
            raise StoreFailed(f"{told(versions)}: {self._apart}")
        self._apart = None

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
        """Reads from the shards what tables there are."""
        held = self._held()
        found = {name: partition_of_shards(name, specs) for name, specs in held.items()}
        whole = {name: table for name, (table, lacking) in found.items() if not lacking}
        with self._reloading:
            self._partitions = whole

    def _held(self) -> dict[str, list[TableSpec | None]]:
        """By table, what every shard holds of it."""
        self._require_open()
        calls: dict[int, Callable[[], dict[str, TableSpec]]] = {n: s.specs for n, s in enumerate(self._sources)}
        specs = self._calls.run(calls, together=not self._in_memory)
        names = sorted({name for of in specs.values() for name in of})
        return {name: [specs[shard].get(name) for shard in range(self.shards)] for name in names}

    def _why_lost(self, shard: int, error: ElastableError) -> str:
        """How one sees that a shard has lost its rows; "" where it has not: a table may be dropped on all shards."""
        if not isinstance(error, TableNotFound):
            return ""
        told, _ = self._calls.outcomes({number: source.specs for number, source in enumerate(self._sources)})
        lacked = set().union(*told.values()) - set(told.get(shard, ()))
        return f"it lacks tables that others hold ({', '.join(sorted(lacked))})" if shard in told and lacked else ""

    def _require_open(self) -> None:
        if self._closed:
            raise StoreFailed("the partitioned store is closed")


def told(versions: Mapping[int, int]) -> str:
    """Which version stands on which shards, in words."""
    by_version: dict[int, list[str]] = {}
    for shard, version in sorted(versions.items()):
        by_version.setdefault(version, []).append(str(shard))
    parts = [f"version {version} on shard {', '.join(shards)}" for version, shards in sorted(by_version.items())]
    return f"the shards stand at different versions ({'; '.join(parts)})"
