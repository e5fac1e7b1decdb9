"""The tier in Redis or Valkey: one server, a Cluster, or what Sentinels name."""

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.errors import BadInput, StoreFailed, Unavailable
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.topology import Topology
from elastable.embedding_store.tiers.redis.records.record_transfer import (
    Batch,
    LostPartition,
    read_records,
    scanned,
    write_records,
)
from elastable.embedding_store.tiers.redis.records.tier_registry import TierRegistry, TierState
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.schema import first_stamp, sequence_of_stamp
from elastable.embedding_store.tiers.redis.url import RedisUrl

_NO_IDS = np.empty(0, np.int64)


class RedisTier(Tier):
    """Records by id, in the hashes that `schema` describes.

    Opening it takes nothing over; the first change does, and `take_over`.

    Every partition has a stamp: the sequence of its last write. Whatever reads or writes it compares the stamp with
    what was confirmed before, and `tables` compares all of them with what `put_state` recorded. So a server that comes
    back with less than it confirmed is an error, and never "no record".
    """

    def __init__(self, place: str | RedisUrl | RedisPlace) -> None:
        """Connects.

        Args:
            place: A URL; or a place that is shared with a log, which stays open when the tier is closed.

        Raises:
            What `RedisPlace` raises.
        """
        self._place = place if isinstance(place, RedisPlace) else RedisPlace(place)
        self._shared = isinstance(place, RedisPlace)
        self._registry = TierRegistry(self._place)
        self._stamp = 0  # of the last write

    @property
    def place(self) -> str:
        return f"{self._place.url} (namespace {self._place.url.namespace!r})"

    @property
    def keeps_positions(self) -> bool:
        return False

    def tables(self) -> dict[str, TierTable]:
        return {name: table.table for name, table in self._registry.load().items()}

    def create(self, table: TierTable) -> None:
        """Makes as many partitions as the URL says.

        Raises:
            SpecConflict: there is a table of that name.
            StoreBroken: there are records of a table of that name, and the registry does not know it: it was lost.
            TakenOver: another process owns the tier now.
        """
        if table.record_bytes < 1:
            raise BadInput(f"table {table.name!r}: record_bytes must be at least 1, got {table.record_bytes}")
        self._registry.create(table)

    def drop(self, table: str) -> None:
        """Also deletes records whose entry in the registry was lost."""
        self._registry.drop(table)

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        made = {records.table: self._registry.table(records.table)[0].made for records in wanted}
        try:
            return self._read(wanted)
        except StoreFailed:
            # Another process may have dropped a table and made it anew: then it is read as it is now.
            tables = self._registry.load()
            if all(name in tables and tables[name].made == text for name, text in made.items()):
                raise
            return self._read(wanted)

    def _read(self, wanted: Sequence[Records]) -> list[Int64]:
        tables = [self._registry.table(records.table) for records in wanted]
        batches = [
            Batch.of(table, records.ids, records.rows, known)
            for (table, known), records in zip(tables, wanted, strict=True)
        ]
        read_records(self._place.topology, batches, self._place.deadline())
        return [np.flatnonzero(batch.missing) for batch in batches]

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        """What changes in one partition is there whole or not at all."""
        deadline = self._place.deadline()
        batches = [batch for batch in self._to_write(changed, deleted) if len(batch.parts)]
        if not batches:
            begun = first_stamp(sequence)
            self._registry.put(lambda key, now: TierState.began(key, max(now, begun)), deadline)
            return
        stamp = self._next_stamp(sequence)
        try:
            write_records(self._place.writing(deadline), batches, stamp, deadline)
        except LostPartition as lost:
            self._mark(lost)
            raise
        for batch in batches:
            self._registry.confirm(batch.table, batch.parts["partition"], stamp)

    def _next_stamp(self, sequence: int) -> int:
        """Another one than that of any write before, so that the loss of one is noticed."""
        confirmed = self._registry.confirmed().values()
        greatest = max([self._stamp, *(int(stamps.max()) for stamps in confirmed)])
        self._stamp = max(first_stamp(sequence), greatest + 1)
        return self._stamp

    def _to_write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]]) -> Iterator[Batch]:
        gone = {name: ids for name, (ids, _) in deleted.items()}
        for records in changed:
            table, known = self._registry.table(records.table)
            yield Batch.of(table, records.ids, records.rows, known, gone.pop(records.table, _NO_IDS))
        for name, ids in gone.items():
            table, known = self._registry.table(name)
            nothing = np.empty((0, table.table.record_bytes), np.uint8)
            yield Batch.of(table, _NO_IDS, nothing, known, ids)

    def _mark(self, lost: LostPartition) -> None:
        """Lets every later process know: the write may have given the partition a stamp again."""
        with suppress(StoreFailed, Unavailable):  # the loss is what is raised
            self._registry.put(
                lambda key, now: TierState.mark(key, lost.table, lost.partition), Deadline(self._place.url.deadline)
            )

    @property
    def sequence(self) -> int:
        deadline = self._place.deadline()
        greatest = max(self._registry.state(deadline).sequence, self._registry.greatest_stamp(deadline))
        return sequence_of_stamp(greatest)

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        """The deadline holds for each request by itself."""
        found, _ = self._registry.table(table)
        record_bytes = found.table.record_bytes
        taken = record_bytes if width is None else width
        if block_rows < 1 or not 0 <= taken <= record_bytes:
            raise BadInput(
                f"table {table!r}: block_rows={block_rows} must be at least 1, and width={width} at most {record_bytes}"
            )
        return scanned(self._place.topology, found, block_rows, taken, self._place.url.deadline)

    def state(self) -> bytes | None:
        return self._registry.state(self._place.deadline()).checked(self._place.url)

    def put_state(self, state: bytes) -> None:
        confirmed = self._registry.confirmed()
        greatest = max([0, *(int(stamps.max()) for stamps in confirmed.values())])
        self._registry.put(
            lambda key, now: TierState.put(key, state, confirmed, max(greatest, now)), self._place.deadline()
        )

    def other_writer(self) -> str | None:
        return self._place.other_writer()

    def take_over(self) -> None:
        self._place.take_over()

    def require_owner(self) -> None:
        self._place.require_owner()

    def close(self) -> None:
        if self._stamp:  # once: this process has written rows
            self._stamp = 0
            ask_for_rewrites(self._place.topology)
        if not self._shared:
            self._place.close()


# Redis' append-only file after a store is closed: rewritten where most of it is entries that were trimmed since


LEAST_BYTES = 64 << 20
"""Of a file that is worth it."""

_TIMES = 1.2  # the bytes of all data in memory, of which a rewritten file has about 0.6
_LONGEST_S = 5.0
_LOG = logging.getLogger(__name__)


def ask_for_rewrites(topology: Topology) -> int:
    """Has every server rewrite its append-only file, in the background, that has grown far beyond its data.

    Servers rewrite files by themselves as they grow (`auto-aof-rewrite-percentage`), but then the log is at its
    longest, and with the last flush no write comes any more that would make them do it again.

    Returns:
        How many servers have begun. One that cannot be asked, or does not allow it, is none.
    """
    begun = 0
    deadline = Deadline(min(topology.url.deadline, _LONGEST_S))
    with suppress(StoreFailed, Unavailable):
        for address in topology.nodes():
            found = topology.call_at(address, [("INFO", "persistence"), ("INFO", "memory")], deadline)
            if not all(isinstance(answer, bytes) for answer in found) or not _is_worth_it(_fields(b"\r\n".join(found))):
                continue
            (answer,) = topology.call_at(address, [("BGREWRITEAOF",)], deadline)
            if isinstance(answer, bytes):
                begun += 1
            else:
                _LOG.info("the append-only file of redis at %s is not rewritten: %s", address, answer)
    return begun


def _fields(text: bytes) -> dict[str, str]:
    lines = (line.partition(":") for line in text.decode("utf-8", "replace").splitlines())
    return {name: value for name, _, value in lines}


def _is_worth_it(info: Mapping[str, str]) -> bool:
    try:
        size, data = int(info.get("aof_current_size", "0")), int(info.get("used_memory_dataset", "0"))
    except ValueError:
        return False
    busy = info.get("aof_rewrite_in_progress") != "0" or info.get("aof_rewrite_scheduled") != "0"
    return info.get("aof_enabled") == "1" and not busy and size >= max(LEAST_BYTES, _TIMES * data)
