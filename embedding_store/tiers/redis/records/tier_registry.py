"""The tables of a tier in Redis, whether all of their partitions are there, and what was confirmed of them."""

import threading
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Self

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.tier import TierTable
from elastable.embedding_store.errors import BadInput, SpecConflict, StoreBroken, TableNotFound, TakenOver, Unavailable
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.records.record_replies import NO_STAMP
from elastable.embedding_store.tiers.redis.records.record_transfer import LostPartition, RecordTable, stamp_of
from elastable.embedding_store.tiers.redis.redis_place import RedisPlace
from elastable.embedding_store.tiers.redis.schema import STAMP, tier_state_key, tier_tables_key

_NOTHING_WRITTEN = bytes(8)  # the stamp 0


class TierRegistry:
    """Tables by name, with the stamps that no partition may be behind any more. For many threads at once."""

    def __init__(self, place: RedisPlace) -> None:
        self._place, self._namespace = place, place.url.namespace
        self._tables_key, self._state_key = tier_tables_key(self._namespace), tier_state_key(self._namespace)
        self._guard = threading.RLock()
        self._tables: dict[str, RecordTable] = {}
        self._known: dict[str, Int64] = {}

    def load(self) -> dict[str, RecordTable]:
        """Every table, from the server.

        Raises:
            LostPartition: a partition is gone, or is behind what was confirmed of it.
            StoreBroken: the registry or the state is corrupt.
        """
        deadline = self._place.deadline()
        with self._guard:
            entries = self._entries(deadline)
            while True:
                state = self.state(deadline)  # before the stamps, which only grow
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
            self._known = dict(zip(tables, stamps, strict=True))
            self._tables = {n: self._tables[n] if self._same(t) else t for n, t in tables.items()}
            return dict(self._tables)

    def _same(self, table: RecordTable) -> bool:
        known = self._tables.get(table.table.name)
        return known is not None and known.made == table.made

    def _require_all(self, table: RecordTable, stamps: Int64, state: "TierState") -> None:
        """Raises `LostPartition` unless all partitions are there and as new as was confirmed."""
        name = table.table.name
        known = state.known(table)
        if self._same(table):
            known = np.maximum(known, self._known[name])
        behind = np.flatnonzero((stamps == NO_STAMP) | (stamps < known))
        if len(behind):
            partition = int(behind[0])
            stamp, expected = int(stamps[partition]), int(known[partition])
            raise LostPartition.of(self._place.url, table, partition, stamp, expected)
        if name in state.lost:
            raise LostPartition(
                self._place.url, name, state.lost[name], "a writer found it gone, and wrote to it since"
            )

    def _require_state(self, state: "TierState", entries: Mapping[str, RecordTable]) -> None:
        """Raises `StoreBroken` where registry and state do not know the same: one of them was lost, or both were."""
        # Who drops a table takes it out of the state, and leaves its greatest stamp there.
        vanished = [name for name in self._tables if name not in entries]
        greatest = max([0, *(int(self._known[name].max()) for name in vanished)])
        lost = "its state" if entries and not state.exists else ""
        if set(state.stamps).difference(entries) or state.sequence < greatest:
            lost = f"its registry of tables, which named {', '.join(sorted({*state.stamps, *vanished}))}"
        if lost:
            raise StoreBroken(
                f"the tier at {self._place.url} (namespace {self._namespace!r}) has lost {lost}. Was the server "
                "restarted without persistence or with an older file, was it flushed, or does it evict keys "
                "(maxmemory-policy must be noeviction)? Go back to a checkpoint"
            )

    def table(self, name: str) -> tuple[RecordTable, Int64]:
        """A table, and int64 `[partitions]`: stamps that are confirmed, a copy.

        Raises:
            TableNotFound: there is none; names those there are.
            What `load` raises.
        """
        with self._guard:
            if name not in self._tables:
                self.load()
            if name not in self._tables:
                raise TableNotFound(f"no table {name!r} (tables: {', '.join(sorted(self._tables)) or 'none'})")
            return self._tables[name], self._known[name].copy()

    def confirm(self, table: RecordTable, partitions: Int64, sequence: int) -> None:
        """Notes that partitions, int64 `[n]`, have a stamp."""
        with self._guard:
            if self._same(table):
                known = self._known[table.table.name]
                known[partitions] = np.maximum(known[partitions], sequence)

    def confirmed(self) -> dict[str, Int64]:
        """Table -> int64 `[partitions]`, stamps that are confirmed, copies."""
        with self._guard:
            return {name: stamps.copy() for name, stamps in self._known.items()}

    def create(self, table: TierTable) -> None:
        """Adds an empty table, with all of its partitions."""
        deadline = self._place.deadline()
        with self._guard:
            entry = self._entries(deadline).get(table.name)
            if entry is not None and entry.dropped:
                self._drop(entry, deadline)
            elif entry is not None:
                raise SpecConflict(f"{self._place.url} (namespace {self._namespace!r}) has a table {table.name!r}")
            made = RecordTable.of(self._namespace, table, self._place.url.partitions)
            self._stamp_empty(made, deadline)  # first: a table in the registry has all its partitions
            self._register(made, deadline)
            self._tables[table.name], self._known[table.name] = made, np.zeros(made.partitions, np.int64)

    def drop(self, name: str) -> None:
        """Deletes a table with its records, also those whose entry was lost; nothing happens where there is none."""
        deadline = self._place.deadline()
        with self._guard:
            entry = self._entries(deadline).get(name)
            if entry is None:
                entry = RecordTable.of(self._namespace, TierTable(name, 1), self._place.url.partitions)
                there = self._place.topology.call([(key, ("EXISTS", key)) for key in entry.names], deadline)
                if not any(there):
                    return
            self._drop(entry, deadline)

    def greatest_stamp(self, deadline: Deadline) -> int:
        """The greatest stamp of all tables, 0 where there is none."""
        tables = [entry for entry in self._entries(deadline).values() if not entry.dropped]
        return max([0, *(int(found.max()) for found in self._stamps(tables, deadline))])

    def state(self, deadline: Deadline) -> "TierState":
        """The state as it is now."""
        key = self._state_key
        return TierState.of(self._place.topology.call([(key, ("HGETALL", key))], deadline)[0])

    def put(self, commands: Callable[[bytes, int], Sequence[Command]], deadline: Deadline) -> None:
        """Changes the state in one transaction of the owner; repeated where a connection breaks.

        Args:
            commands: From the state's key and the greatest sequence that it knows of to the commands that change it.
            deadline: Of everything together.
        """
        key = self._state_key

        def change(answers: list[bytes | None]) -> Sequence[Command]:
            return commands(key, sequence_of(answers[0]))

        question: Command = ("HGET", key, SEQUENCE)
        self._repeated(lambda: self._place.change([question], change, deadline, [key]), deadline)

    def _entries(self, deadline: Deadline) -> dict[str, RecordTable]:
        """What the registry holds, tables that are being dropped among them."""
        key = self._tables_key
        (pairs,) = self._place.topology.call([(key, ("HGETALL", key))], deadline)
        entries = zip(pairs[::2], pairs[1::2], strict=True)
        found = [RecordTable.from_json(self._namespace, name, text) for name, text in entries]
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
                    f"namespace {self._namespace!r}) that its registry does not know: the server has lost the "
                    "registry. Go back to a checkpoint, in another namespace or after you have dropped the table"
                )

    def _register(self, table: RecordTable, deadline: Deadline) -> None:
        key, text = self._tables_key, table.to_json()

        def change(answers: list[bytes | None]) -> Sequence[Command]:
            if answers[0] is not None and answers[0] != text.encode():
                raise SpecConflict(f"{self._place.url} has a table {table.table.name!r}, which another process made")
            if answers[0] is not None:
                return []
            return [("HSET", key, table.table.name, text), ("HSETNX", self._state_key, SEQUENCE, _NOTHING_WRITTEN)]

        question: Command = ("HGET", key, table.table.name)
        self._repeated(lambda: self._place.change([question], change, deadline, [key]), deadline)

    def _drop(self, entry: RecordTable, deadline: Deadline) -> None:
        """The registry knows until the end that the table is being dropped: another process ends what breaks off."""
        name, key = entry.table.name, self._tables_key
        self._tables.pop(name, None)
        self._known.pop(name, None)
        greatest = int(max([0, *(found.max() for found in self._stamps([entry], deadline))]))
        mark: Command = ("HSET", key, name, entry.to_json(dropped=True))
        self.put(lambda state, now: [mark, *TierState.forget(state, name, max(greatest, now))], deadline)
        self._place.writing(deadline).call([(row, ("UNLINK", row)) for row in entry.names], deadline)
        self.put(lambda state, now: [("HDEL", key, name)], deadline)

    def _repeated(self, act: Callable[[], None], deadline: Deadline) -> None:
        """Repeats what may be done twice, as long as a connection breaks and the deadline has not passed."""

        def broke(error: Exception) -> bool:
            if isinstance(error, Unavailable) and not isinstance(error, TakenOver):
                deadline.left(self._place.url)
                return True
            return False

        Retry(deadline.left(self._place.url), broke).call(act)


# What a tier in Redis keeps next to records: the engine's state, and the stamps confirmed when it was written


SEQUENCE = b"sequence"

_STATE, _CHECK = b"state", b"check"
_STAMPS, _LOST = b"stamps:", b"lost:"
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
    """

    exists: bool
    state: bytes | None = field(repr=False)
    check: int
    sequence: int
    stamps: Mapping[str, Int64] = field(repr=False)
    lost: Mapping[str, int]

    @classmethod
    def of(cls, pairs: list[bytes]) -> Self:
        """From the answer to HGETALL. Raises `StoreBroken` where it is something else."""
        fields = dict(zip(pairs[::2], pairs[1::2], strict=True))
        try:
            stamps = {
                name[len(_STAMPS) :].decode(): np.frombuffer(value, "<i8").astype(np.int64)
                for name, value in fields.items()
                if name.startswith(_STAMPS)
            }
            lost = {name[len(_LOST) :].decode(): int(value) for name, value in fields.items() if name.startswith(_LOST)}
            check = int.from_bytes(fields.get(_CHECK, b""), "little")
            return cls(bool(fields), fields.get(_STATE), check, sequence_of(fields.get(SEQUENCE)), stamps, lost)
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

    @staticmethod
    def put(key: bytes, state: bytes, stamps: Mapping[str, Int64], sequence: int) -> list[Command]:
        """The command that writes it anew. Raises `BadInput` for a state that is too long."""
        if len(state) > _MOST_STATE_BYTES:
            raise BadInput(f"the state has {len(state)} bytes; redis keeps at most {_MOST_STATE_BYTES} in one value")
        words: list[str | bytes | int | float] = ["HSET", key, _STATE, state, _CHECK]
        words.append(zlib.crc32(state).to_bytes(4, "little"))
        words += [SEQUENCE, sequence.to_bytes(8, "little", signed=True)]
        for name, known in stamps.items():
            words += [_STAMPS + name.encode(), known.astype("<i8").tobytes()]
        return [tuple(words)]

    @staticmethod
    def forget(key: bytes, table: str, sequence: int) -> list[Command]:
        """The commands that take a table out, `sequence` being the greatest of its stamps and all others."""
        return [("HDEL", key, _STAMPS + table.encode(), _LOST + table.encode()), *TierState.began(key, sequence)]

    @staticmethod
    def began(key: bytes, sequence: int) -> list[Command]:
        """The command that notes the greatest sequence that a write began with."""
        return [("HSET", key, SEQUENCE, sequence.to_bytes(8, "little", signed=True))]

    @staticmethod
    def mark(key: bytes, table: str, partition: int) -> list[Command]:
        """The command that notes a partition which a writer found lost."""
        return [("HSET", key, _LOST + table.encode(), partition)]


def sequence_of(value: bytes | None) -> int:
    """The sequence in a server's answer, 0 where there is none."""
    return int.from_bytes(value or b"", "little", signed=True)
