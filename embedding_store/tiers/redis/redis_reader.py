"""Reading tables that lie in Redis: all that a worker needs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.tables.base_store import BaseSource
from elastable.embedding_store.tables.lookup_request import LookupRequest, require_width
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.pinned_reader import PinnedReader
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.registry import version_of
from elastable.embedding_store.tiers.redis.resp_codec import Bytes
from elastable.embedding_store.tiers.redis.row_update import block_with_slots
from elastable.embedding_store.tiers.redis.schema_1 import TableRecord, tables_key, version_key
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transfer import Reading, read_block
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["RedisReader"]


class RedisReader(BaseSource):
    """Rows from Redis or Valkey, one server or a Cluster, straight from where they lie.

    A lookup that names a version reads exactly that version, if the version
    was committed before the lookup began; or one that any process has pinned.
    Without a version each row is whole, but rows of different partitions may
    lie one commit apart.
    """

    def __init__(self, url: str | RedisUrl) -> None:
        """Connects.

        Args:
            url: As `RedisUrl` describes it.

        Raises:
            BadInput: it is no Redis URL.
            Unavailable, DeadlineExceeded: no server answers; names address and deadline.
            StoreFailed: a server refused the login.
        """
        self.url = url if isinstance(url, RedisUrl) else RedisUrl.parse(url)
        self._topology = Topology(self.url)
        self._catalog = Catalog.of(self.url.namespace, ())
        self._pinned = PinnedReader(self._topology, self.url.namespace)

    def specs(self) -> dict[str, TableSpec]:
        """As in `RowSource.specs`, asked of the server."""
        self._reload(self._deadline())
        return {name: table.spec for name, table in self._catalog.tables.items()}

    def version(self) -> int:
        """As in `RowSource.version`, asked of the server."""
        key = version_key(self.url.namespace)
        return version_of(self._topology.call([(key, ("GET", key))], self._deadline())[0])

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """As in `RowSource.lookup`: all tables in one round trip."""
        return self._read(ids, version, self._deadline())

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        """As in `RowSource.lookup_into`; float32 rows of one table are received in place."""
        deadline = self._deadline()
        wanted = requests[0] if len(requests) == 1 else None
        if wanted is None or wanted.offsets is not None or wanted.places is not None:
            super().lookup_into(requests, version, split)
            return
        spec = self._catalog_with((wanted.table,), deadline).tables[wanted.table].spec
        require_width(wanted, spec.dim)
        if spec.dtype == "float32" and wanted.out.flags.c_contiguous:
            self._read({wanted.table: wanted.ids}, version, deadline, wanted.out.reshape(-1).view(np.uint8))
        else:
            wanted.out[...] = self._read({wanted.table: wanted.ids}, version, deadline)[wanted.table]

    def _read(
        self, ids: Mapping[str, Int64], version: int | None, deadline: Deadline, into: Bytes | None = None
    ) -> dict[str, Float32]:
        """The rows of many tables, or those of one table received in the memory `into`."""
        catalog = self._catalog_with(ids, deadline)
        checked = {name: require_ids(catalog.tables[name].spec, some) for name, some in ids.items()}
        block = Block.of(catalog, checked, rows=into)
        key = version_key(self.url.namespace)
        reading = read_block(self._topology, block, deadline, [] if version is None else [(key, ("GET", key))])
        if version is not None and not _is_of(reading, version):
            self._pinned.read(block, version, None, deadline)
        return _rows_by_table(block)

    def lookup_then(self, ids: Mapping[str, Int64], version: int, token: bytes) -> dict[str, Float32]:
        """As `lookup` at a version, as long as one of its pins stands.

        Args:
            ids: As of `lookup`.
            version: That is pinned.
            token: Of the pin.

        Raises:
            StaleVersion: the pin is gone.
        """
        deadline = self._deadline()
        catalog = self._catalog_with(ids, deadline)
        checked = {name: require_ids(catalog.tables[name].spec, some) for name, some in ids.items()}
        block = Block.of(catalog, checked)
        self._pinned.read(block, version, token, deadline)
        return _rows_by_table(block)

    def block_then(self, ids: Mapping[str, Int64], version: int, token: bytes) -> Block:
        """Rows with their slots, of ids that stand once each; otherwise as `lookup_then`."""
        deadline = self._deadline()
        block = block_with_slots(self._catalog_with(ids, deadline), ids)
        self._pinned.read(block, version, token, deadline)
        return block

    def forget(self) -> None:
        """As in `RowSource.forget`: tables may have been made anew."""
        self._catalog = Catalog.of(self.url.namespace, ())
        self._pinned.forget()

    def close(self) -> None:
        """Closes the connections."""
        self._topology.close()

    def _deadline(self) -> Deadline:
        return Deadline(self.url.deadline)

    def _catalog_with(self, names: Iterable[str], deadline: Deadline) -> Catalog:
        """The catalog, read again if it lacks a name. Raises `TableNotFound`."""
        names = list(names)
        if any(name not in self._catalog.tables for name in names):
            self._reload(deadline)
        catalog = self._catalog
        for name in names:
            catalog.table(name)
        return catalog

    def _reload(self, deadline: Deadline) -> Catalog:
        key = tables_key(self.url.namespace)
        registry = self._topology.call([(key, ("HGETALL", key))], deadline)[0]
        records = [TableRecord.from_json(text) for text in registry[1::2]]
        self._catalog = Catalog.of(self.url.namespace, sorted(records, key=lambda record: record.spec.name))
        return self._catalog


def _is_of(reading: Reading, wanted: int) -> bool:
    """Whether what was read is of the version `wanted`, every partition of it."""
    return version_of(reading.answers[0]) == wanted and int(reading.stamps.max(initial=0)) <= wanted


def _rows_by_table(block: Block) -> dict[str, Float32]:
    for rows in block.tables.values():
        rows.fill_missing()
        rows.spread()
    return {name: rows.weights for name, rows in block.tables.items()}
