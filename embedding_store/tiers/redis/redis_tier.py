"""The tier in Redis or Valkey: one server, a Cluster, or what Sentinels name."""

import logging
import threading
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.errors import (
    BadInput,
    SpecConflict,
    StoreBroken,
    StoreFailed,
    TableNotFound,
    Unavailable,
)
from elastable.embedding_store.tiers.redis.connection import Deadline
from elastable.embedding_store.tiers.redis.record_transfer import (
    Batch,
    DamagedRecords,
    LostPartition,
    RecordTable,
    read_records,
    refuse_lost,
    scanned,
    stamp_of,
    write_records,
)
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.schema import (
    STAMP,
    first_stamp,
    sequence_of_stamp,
    tier_state_key,
    tier_tables_key,
)
from elastable.embedding_store.tiers.redis.topology import Topology, server_facts
from elastable.embedding_store.tiers.redis.url import RedisUrl

_NO_IDS = np.empty(0, np.int64)
_NOTHING_WRITTEN = bytes(8)  # the stamp 0


class RedisTier(Tier):
    """Records by id, in the hashes that `schema` describes.

    Opening it takes nothing over; the first change does, and `take_over`.

    Every partition has a stamp: the sequence of its last write. Whatever reads or writes it compares the stamp with
    what was confirmed before, and `tables` compares all of them with what `put_state` recorded. So a server that comes
    back with less than it confirmed is an error, and never "no record".
    """

    keeps_positions = False

    def __init__(self, place: str | RedisUrl | RedisPlace) -> None:
        """Connects.

        Args:
            place: A URL; or a place that is shared with a log, which stays open when the tier is closed.

        Raises:
            What `RedisPlace` raises.
        """
        self._place = place if isinstance(place, RedisPlace) else RedisPlace(place)
        self._shared = isinstance(place, RedisPlace)
        namespace = self._place.url.namespace
        self._tables_key, self._state_key = tier_tables_key(namespace), tier_state_key(namespace)
        self._guard = threading.RLock()  # of the tables, and of what is known of each
        self._tables: dict[str, RecordTable] = {}
        self._stamp = 0  # of the last write
        # Of each table ids whose records failed their check: in the last scan, and in a read by whoever writes here.
        self._doubtful: dict[str, set[int]] = {}
        self._marked: dict[str, set[int]] = {}

    @property
    def place(self) -> str:
        return f"{self._place.url} (namespace {self._place.url.namespace!r})"

    def tables(self) -> dict[str, TierTable]:
        return {name: table.table for name, table in self._load().items()}

    def create(self, table: TierTable) -> None:
        """Makes as many partitions as the URL says.

        Raises:
            SpecConflict: there is a table of that name.
            StoreBroken: there are records of a table of that name, and the registry does not know it: it was lost.
            TakenOver: another process owns the tier now.
        """
        deadline = self._place.deadline()
        with self._guard:
            entry = self._entries(deadline).get(table.name)
            if entry is not None and entry.dropped:
                self._drop(entry, deadline)
            elif entry is not None:
                raise SpecConflict(f"{self.place} has a table {table.name!r}")
            made = RecordTable.of(self._place.url.namespace, table, self._place.url.partitions)
            self._stamp_empty(made, deadline)  # first: a table in the registry has all its partitions
            self._register(made, deadline)
            self._tables[table.name] = made

    def drop(self, table: str) -> None:
        """Also deletes records whose entry in the registry was lost."""
        deadline = self._place.deadline()
        with self._guard:
            entry = self._entries(deadline).get(table)
            if entry is None:
                entry = RecordTable.of(self._place.url.namespace, TierTable(table, 1), self._place.url.partitions)
                there = self._place.topology.call([(key, ("EXISTS", key)) for key in entry.names], deadline)
                if not any(there):
                    return
            self._drop(entry, deadline)

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        made = {records.table: self._table(records.table).made for records in wanted}
        try:
            return self._read(wanted)
        except DamagedRecords as damaged:
            self._mark_damaged(damaged)
            raise
        except StoreFailed:
            # Another process may have dropped a table and made it anew: then it is read as it is now.
            tables = self._load()
            if all(name in tables and tables[name].made == text for name, text in made.items()):
                raise
            return self._read(wanted)

    def _read(self, wanted: Sequence[Records]) -> list[Int64]:
        batches = [Batch.of(self._table(records.table), records) for records in wanted]
        read_records(self._place.topology, batches, self._place.deadline())
        return [np.flatnonzero(batch.missing) for batch in batches]

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        """What changes in one partition is there whole or not at all."""
        deadline = self._place.deadline()
        batches = [batch for batch in self._to_write(changed, deleted) if len(batch.parts)]
        if not batches:
            self._put({}, deadline, sequence=first_stamp(sequence))
            return
        stamp = self._next_stamp(sequence)
        try:
            write_records(self._place.writing(deadline), batches, stamp, deadline)
        except LostPartition as lost:
            self._mark(lost)
            raise
        for batch in batches:
            known, written = batch.table.known, batch.parts["partition"]
            with self._guard:
                known[written] = np.maximum(known[written], stamp)
            for doubtful in (self._doubtful, self._marked):
                if ids := doubtful.get(batch.table.table.name):
                    ids.difference_update((*batch.ids.tolist(), *batch.gone.tolist()))

    def _next_stamp(self, sequence: int) -> int:
        """Another one than that of any write before, so that the loss of one is noticed."""
        self._stamp = max(first_stamp(sequence), self._stamp + 1, _greatest(self._confirmed().values()) + 1)
        return self._stamp

    def _to_write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]]) -> Iterator[Batch]:
        gone = {name: ids for name, (ids, _) in deleted.items()}
        for records in changed:
            yield Batch.of(self._table(records.table), records, gone.pop(records.table, _NO_IDS))
        for name, ids in gone.items():
            table = self._table(name)
            nothing = np.empty((0, table.table.record_bytes), np.uint8)
            yield Batch.of(table, Records(name, _NO_IDS, _NO_IDS, nothing), ids)

    def _mark(self, lost: LostPartition) -> None:
        """Lets every later process know: the write may have given the partition a stamp again."""
        with suppress(StoreFailed, Unavailable):  # the loss is what is raised
            self._put({_LOST + lost.table.encode(): lost.partition}, self._place.deadline())

    def _mark_damaged(self, damaged: DamagedRecords) -> None:
        """Lets whoever opens the store next know, who does not read every record and may have them in the log."""
        marked = self._marked.setdefault(damaged.table, set())
        marked.update(damaged.ids.tolist())
        if self._place.owner is not None:
            with suppress(StoreFailed, Unavailable):  # the damage is what is raised
                self._put({}, self._place.deadline())

    @property
    def sequence(self) -> int:
        deadline = self._place.deadline()
        tables = [entry for entry in self._entries(deadline).values() if not entry.dropped]
        stamps = [int(found.max()) for found in self._stamps(tables, deadline)]
        return sequence_of_stamp(max([self._state(deadline).sequence, *stamps]))

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        """The deadline holds for each request by itself."""
        found = self._table(table)
        taken = found.table.record_bytes if width is None else width
        found.table.require_scan(block_rows, taken)
        doubtful = self._doubtful[table] = set()
        damaged = lambda ids: doubtful.update(ids.tolist())  # noqa: E731
        return scanned(self._place.topology, found, block_rows, taken, self._place.url.deadline, damaged)

    def doubtful(self, table: str) -> Int64:
        return np.array(sorted(self._doubtful.get(table, set()) | self._marked.get(table, set())), np.int64)

    def state(self) -> bytes | None:
        return self._state(self._place.deadline()).checked(self._place.url)

    def put_state(self, state: bytes) -> None:
        if len(state) > _MOST_STATE_BYTES:
            raise BadInput(f"the state has {len(state)} bytes; redis keeps at most {_MOST_STATE_BYTES} in one value")
        confirmed = self._confirmed()
        fields: dict[bytes, bytes | int] = {_STATE: state, _CHECK: zlib.crc32(state).to_bytes(4, "little")}
        fields |= {_STAMPS + name.encode(): known.astype("<i8").tobytes() for name, known in confirmed.items()}
        self._put(fields, self._place.deadline(), sequence=_greatest(confirmed.values()))

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

    # Tables, and the stamps that no partition may be behind any more

    def _load(self) -> dict[str, RecordTable]:
        """Every table, from the server.

        Raises:
            LostPartition: a partition is gone, or is behind what was confirmed of it.
            StoreBroken: the registry or the state is corrupt.
        """
        deadline = self._place.deadline()
        with self._guard:
            entries = self._entries(deadline)
            while True:
                state = self._state(deadline)  # before the stamps, which only grow
                tables = {name: entry for name, entry in entries.items() if not entry.dropped}
                stamps = self._stamps(tables.values(), deadline)
                again = self._entries(deadline)
                if {n: (e.made, e.dropped) for n, e in again.items()} == {
                    n: (e.made, e.dropped) for n, e in entries.items()
                }:
                    break
                entries = again  # another process creates or drops tables
            self._require_state(state, entries)
            for table, found in zip(tables.values(), stamps, strict=True):
                self._require_all(table, found, state)
            self._marked = {name: set(ids.tolist()) for name, ids in state.damaged.items() if name in tables}
            self._tables = {n: self._tables[n] if self._same(t) else t for n, t in tables.items()}
            for table, found in zip(self._tables.values(), stamps, strict=True):
                table.known[:] = found
            return dict(self._tables)

    def _same(self, table: RecordTable) -> bool:
        known = self._tables.get(table.table.name)
        return known is not None and known.made == table.made

    def _require_all(self, table: RecordTable, stamps: Int64, state: "TierState") -> None:
        """Raises `LostPartition` unless all partitions are there and as new as was confirmed."""
        name = table.table.name
        known = state.known(table)
        if self._same(table):
            known = np.maximum(known, self._tables[name].known)
        refuse_lost(self._place.url, table, np.arange(table.partitions), stamps, known)
        if name in state.lost:
            raise LostPartition(
                self._place.url, name, state.lost[name], "a writer found it gone, and wrote to it since"
            )

    def _require_state(self, state: "TierState", entries: Mapping[str, RecordTable]) -> None:
        """Raises `StoreBroken` where registry and state do not know the same: one of them was lost, or both were."""
        # Who drops a table takes it out of the state, and leaves its greatest stamp there.
        vanished = [name for name in self._tables if name not in entries]
        greatest = _greatest(self._tables[name].known for name in vanished)
        lost = "its state" if entries and not state.exists else ""
        if set(state.stamps).difference(entries) or state.sequence < greatest:
            lost = f"its registry of tables, which named {', '.join(sorted({*state.stamps, *vanished}))}"
        if lost:
            raise StoreBroken(
                f"the tier at {self.place} has lost {lost}. Was the server "
                "restarted without persistence or with an older file, was it flushed, or does it evict keys "
                "(maxmemory-policy must be noeviction)? Go back to a checkpoint"
            )

    def _table(self, name: str) -> RecordTable:
        """A table.

        Raises:
            TableNotFound: there is none; names those there are.
            What `_load` raises.
        """
        with self._guard:
            if name not in self._tables:
                self._load()
            if name not in self._tables:
                raise TableNotFound(f"no table {name!r} (tables: {', '.join(sorted(self._tables)) or 'none'})")
            return self._tables[name]

    def _confirmed(self) -> dict[str, Int64]:
        """Table -> int64 `[partitions]`, stamps that are confirmed, copies."""
        with self._guard:
            return {name: table.known.copy() for name, table in self._tables.items()}

    def _state(self, deadline: Deadline) -> "TierState":
        """The state as it is now."""
        key = self._state_key
        return TierState.of(self._place.topology.call([(key, ("HGETALL", key))], deadline)[0])

    def _put(
        self,
        fields: Mapping[bytes, bytes | int],
        deadline: Deadline,
        *others: Command,
        gone: Sequence[bytes] = (),
        sequence: int = 0,
    ) -> None:
        """Changes the state in one transaction of the owner, and lets it know of all ids that are damaged.

        Args:
            fields: Field -> its value from now on.
            deadline: Of everything together.
            others: Commands of the same transaction.
            gone: Fields that it has no more.
            sequence: A stamp: the state knows of the greatest so far.
        """
        # Copies: a read that finds more of them may do so meanwhile.
        key, marked = self._state_key, {_DAMAGED + name.encode(): tuple(ids) for name, ids in [*self._marked.items()]}
        damaged = {name: np.array(sorted(ids), "<i8").tobytes() for name, ids in marked.items() if ids}
        gone = [*gone, *(name for name in marked if name not in damaged)]

        def change(answers: list[bytes | None]) -> Sequence[Command]:
            greatest = max(sequence, sequence_of(answers[0])).to_bytes(8, "little", signed=True)
            words = [word for pair in {**damaged, SEQUENCE: greatest, **fields}.items() for word in pair]
            changed: list[Command] = [("HSET", key, *words), ("HDEL", key, *gone)]
            return [*others, *changed[: 2 if gone else 1]]

        self._place.change([("HGET", key, SEQUENCE)], change, deadline, [key])

    def _entries(self, deadline: Deadline) -> dict[str, RecordTable]:
        """What the registry holds, tables that are being dropped among them."""
        key = self._tables_key
        (pairs,) = self._place.topology.call([(key, ("HGETALL", key))], deadline)
        entries = zip(pairs[::2], pairs[1::2], strict=True)
        found = [RecordTable.from_json(self._place.url.namespace, name, text) for name, text in entries]
        return {entry.table.name: entry for entry in found}

    def _stamps(self, tables: Iterable[RecordTable], deadline: Deadline) -> list[Int64]:
        """Of each table int64 `[partitions]`; `NO_STAMP` where there is none."""
        tables = list(tables)
        words: list[tuple[bytes, Command]] = [(name, ("HGET", name, STAMP)) for table in tables for name in table.names]
        replies = iter(self._place.topology.call(words, deadline))
        return [np.array([stamp_of(next(replies)) for _ in table.names], np.int64) for table in tables]

    def _stamp_empty(self, table: RecordTable, deadline: Deadline) -> None:
        """Gives every partition of a new table its stamp. Raises `StoreBroken` where there are records already."""
        writing = self._place.writing(deadline)
        asked: list[tuple[bytes, Command]] = []
        for key in table.names:
            asked += [
                (key, ("HSETNX", key, STAMP, _NOTHING_WRITTEN)),
                (key, ("HLEN", key)),
                (key, ("HGET", key, STAMP)),
            ]
        replies = writing.call(asked, deadline)
        for partition in range(table.partitions):
            _, length, stamp = replies[3 * partition : 3 * partition + 3]
            if length > 1 or stamp != _NOTHING_WRITTEN:
                raise StoreBroken(
                    f"redis at {self._place.url} holds records of a table {table.table.name!r} (partition {partition}, "
                    f"namespace {self._place.url.namespace!r}) that its registry does not know: the server has lost "
                    "the registry. Go back to a checkpoint, in another namespace or after you have dropped the table"
                )

    def _register(self, table: RecordTable, deadline: Deadline) -> None:
        key, text = self._tables_key, table.to_json()

        def change(answers: list[bytes | None]) -> Sequence[Command]:
            if answers[0] is not None and answers[0] != text.encode():
                raise SpecConflict(f"{self._place.url} has a table {table.table.name!r}, which another process made")
            if answers[0] is not None:
                return []
            return [("HSET", key, table.table.name, text), ("HSETNX", self._state_key, SEQUENCE, _NOTHING_WRITTEN)]

        self._place.change([("HGET", key, table.table.name)], change, deadline, [key])

    def _drop(self, entry: RecordTable, deadline: Deadline) -> None:
        """The registry knows until the end that the table is being dropped: another process ends what breaks off."""
        name, key = entry.table.name, self._tables_key
        for known in (self._tables, self._marked, self._doubtful):
            known.pop(name, None)
        greatest, about = _greatest(self._stamps([entry], deadline)), [kind + name.encode() for kind in _KINDS]
        mark: Command = ("HSET", key, name, entry.to_json(dropped=True))
        self._put({}, deadline, mark, gone=about, sequence=greatest)
        self._place.writing(deadline).call([(row, ("UNLINK", row)) for row in entry.names], deadline)
        self._put({}, deadline, ("HDEL", key, name))


def _greatest(stamps: Iterable[Int64]) -> int:
    """Of all stamps, int64 `[partitions]` each; 0: there is none."""
    return max([0, *(int(some.max()) for some in stamps)])


# What a tier in Redis keeps next to records: the engine's state, and the stamps confirmed when it was written


SEQUENCE = b"sequence"

_STATE, _CHECK = b"state", b"check"
_KINDS = _STAMPS, _LOST, _DAMAGED = b"stamps:", b"lost:", b"damaged:"
_MOST_STATE_BYTES = 512 << 20  # of one value, in Redis


@dataclass(frozen=True, slots=True)
class TierState:
    """The state hash, as it was read.

    Attributes:
        exists: Whether there is one; it is from the creation of the first table on.
        state: Of the engine; None: none was ever put.
        check: CRC-32 of it.
        sequence: The greatest stamp that it knows of.
        stamps: Table -> int64 `[partitions]`, confirmed before the state was put.
        lost: Table -> a partition that a writer found lost.
        damaged: Table -> int64, ids whose records a writer found damaged.
    """

    exists: bool
    state: bytes | None = field(repr=False)
    check: int
    sequence: int
    stamps: Mapping[str, Int64] = field(repr=False)
    lost: Mapping[str, int]
    damaged: Mapping[str, Int64]

    @classmethod
    def of(cls, pairs: list[bytes]) -> Self:
        """From the answer to HGETALL. Raises `StoreBroken` where it is something else."""
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        try:
            stamps, damaged = (
                {
                    name[len(kind) :].decode(): np.frombuffer(value, "<i8").astype(np.int64)
                    for name, value in fields.items()
                    if name.startswith(kind)
                }
                for kind in (_STAMPS, _DAMAGED)
            )
            lost = {name[len(_LOST) :].decode(): int(value) for name, value in fields.items() if name.startswith(_LOST)}
            check = int.from_bytes(fields.get(_CHECK, b""), "little")
            sequence = sequence_of(fields.get(SEQUENCE))
            return cls(bool(fields), fields.get(_STATE), check, sequence, stamps, lost, damaged)
        except MALFORMED as error:
            raise StoreBroken(f"the state of the tier in Redis is corrupt: {error}") from error

    def checked(self, place: object) -> bytes | None:
        """The engine's state. Raises `StoreBroken` where it is not what was put."""
        if self.state is not None and zlib.crc32(self.state) != self.check:
            raise StoreBroken(
                f"the state of the store at {place} is corrupt: its {len(self.state)} bytes do not have the checksum "
                "that was written with them. Go back to a checkpoint"
            )
        return self.state

    def known(self, table: RecordTable) -> Int64:
        """int64 `[partitions]`: stamps that no partition of the table may be behind, 0 where none was confirmed."""
        known = self.stamps.get(table.table.name)
        if known is None:
            return np.zeros(table.partitions, np.int64)
        if len(known) != table.partitions:
            raise StoreBroken(
                f"the tier in Redis confirmed {len(known)} stamps of table {table.table.name!r}, which has "
                f"{table.partitions} partitions"
            )
        return known


def sequence_of(value: bytes | None) -> int:
    """The sequence in a server's answer, 0 where there is none."""
    return int.from_bytes(value or b"", "little", signed=True)


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
    for address in topology.nodes():
        with suppress(StoreFailed, Unavailable):
            if not _is_worth_it(server_facts(topology, address, deadline, "persistence", "memory")):
                continue
            (answer,) = topology.call_at(address, [("BGREWRITEAOF",)], deadline)
            if isinstance(answer, bytes):
                begun += 1
            else:
                _LOG.info("the append-only file of redis at %s is not rewritten: %s", address, answer)
    return begun


def _is_worth_it(info: Mapping[str, str]) -> bool:
    try:
        size, data = int(info.get("aof_current_size", "0")), int(info.get("used_memory_dataset", "0"))
    except ValueError:
        return False
    busy = info.get("aof_rewrite_in_progress") != "0" or info.get("aof_rewrite_scheduled") != "0"
    return info.get("aof_enabled") == "1" and not busy and size >= max(LEAST_BYTES, _TIMES * data)
