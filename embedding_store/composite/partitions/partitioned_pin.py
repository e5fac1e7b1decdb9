"""One version of all shards, pinned on each of them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial

from elastable.embedding_store.composite.partitions.partitioned_scan import scan_columns, scan_tokens
from elastable.embedding_store.composite.partitions.partitioned_source import PartitionedSource
from elastable.embedding_store.composite.partitions.shard_reads import count_rows, read_rows, read_sightings
from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.errors import StaleVersion
from elastable.embedding_store.rows.checks import require_block_rows

__all__ = ["PartitionedPin"]


class PartitionedPin(PartitionedSource, Snapshot):
    """As `Snapshot`. Where one shard's pin is gone, reads of what it holds raise `StaleVersion` and name the shard.

    Args:
        pins: Of the same version, one of each shard, in their order; released with this one.
        version: That version.
        timeout_s: As of `PartitionedSource`.
    """

    def __init__(self, pins: Sequence[Snapshot], version: int, timeout_s: float) -> None:
        super().__init__(pins, timeout_s)
        self._pins, self._version = tuple(pins), version

    def version(self) -> int:
        """The version that is pinned."""
        return self._version

    def renew(self, lease_s: float | None = None) -> None:
        """As in `Snapshot.renew`, on every shard."""
        self._require_open()
        self._calls.run({number: partial(pin.renew, lease_s) for number, pin in enumerate(self._pins)})

    def row_count(self, table: str) -> int:
        """As in `Snapshot.row_count`."""
        return count_rows(self._partition(table), self._pins, self._calls)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `Snapshot.scan`."""
        found = self._partition(table)
        scan = scan_tokens if found.by_token else scan_columns
        return scan(found, self._pins, self._calls, self._lock, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `Snapshot.read_rows`."""
        return read_rows(self._partition(table), self._pins, self._calls, ids)

    def sightings(self, table: str) -> UInt8 | None:
        """As in `Snapshot.sightings`, as `EmbeddingStore.sightings` of a partitioned store."""
        return read_sightings(self._partition(table), self._pins, self._calls)

    def close(self) -> None:
        """Closes the pin on every shard; on one that is not reached the lease runs out."""
        if not self._closed:
            self._closed = True
            try:
                self._calls.run({number: pin.close for number, pin in enumerate(self._pins)})
            finally:
                self._calls.close()

    def _require_open(self) -> None:
        if self._closed:
            raise StaleVersion(f"the pin of version {self._version} is gone: it was released")
