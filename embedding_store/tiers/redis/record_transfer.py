"""Records of many tables read from and written to the servers in one batch, following redirections."""

import base64
import json
import secrets
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Self

import hiredis
import numpy as np
import numpy.typing as npt
from redis.crc import key_slot

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.malformed import MALFORMED, Document
from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.errors import StoreBroken, Unsupported
from elastable.embedding_store.log.contract import Buffer
from elastable.embedding_store.tiers.redis.connection import (
    Connection,
    Deadline,
    Requests,
    exchange,
)
from elastable.embedding_store.tiers.redis.record_codec import (
    CHECK_BYTES,
    DAMAGED,
    NO_STAMP,
    PART,
    Parts,
    PlacedRecords,
    ReadWords,
    RecordReplies,
    WriteReplies,
    damaged_records,
    encoded_reads,
    encoded_write,
    framed_ids,
    framed_records,
    read_sizes,
    write_sizes,
)
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.schema import (
    SCHEMA,
    STAMP,
    check_partitions,
    grouped_by_partition,
    partition_of,
    rows_key,
    stamp_name,
)
from elastable.embedding_store.tiers.redis.topology import Route, Topology

_NAMED = 5  # ids of damaged records in a message


@dataclass(frozen=True, slots=True, eq=False)
class RecordTable:
    """A table and where its partitions are.

    Attributes:
        table: As the tier's contract describes it.
        partitions: How many.
        made: Random text, of this table and no other one of its name.
        dropped: Whether its deletion has begun.
        known: int64 `[partitions]`: stamps that are confirmed, and that no partition may be behind any more.
        names: Key of each partition.
        reads: What their reads begin with.
        hash_slots: int64 `[partitions]`.
    """

    table: TierTable
    partitions: int
    made: str
    dropped: bool
    known: Int64 = field(repr=False)
    names: tuple[bytes, ...] = field(repr=False)
    reads: ReadWords = field(repr=False)
    hash_slots: Int64 = field(repr=False)

    @classmethod
    def of(cls, namespace: str, table: TierTable, partitions: int, made: str = "", dropped: bool = False) -> Self:
        """A table under a namespace; `made` is drawn where none is given."""
        names = tuple(rows_key(namespace, table.name, p) for p in range(check_partitions(partitions)))
        slots = np.array([key_slot(name) for name in names], np.int64)
        made = made or secrets.token_hex(8)
        known = np.zeros(partitions, np.int64)
        return cls(table, partitions, made, dropped, known, names, ReadWords.of(names), slots)

    def to_json(self, dropped: bool = False) -> str:
        """The registry's value."""
        fields = {
            "schema": SCHEMA,
            "partitions": self.partitions,
            "record_bytes": self.table.record_bytes,
            "description": base64.b64encode(self.table.description).decode(),
            "made": self.made,
            **({"dropped": True} if dropped else {}),
        }
        return json.dumps(fields, sort_keys=True)

    @classmethod
    def from_json(cls, namespace: str, name: bytes, text: bytes) -> Self:
        """Reads what `to_json` wrote.

        Raises:
            StoreBroken: it is something else.
            Unsupported: it is of another key schema.
        """
        try:
            fields: Document = json.loads(text)
            if int(fields["schema"]) != SCHEMA:
                raise Unsupported(
                    f"table {name.decode(errors='replace')!r} in Redis has key schema {int(fields['schema'])}, this "
                    f"release reads {SCHEMA}: use the release that wrote it"
                )
            description = base64.b64decode(fields["description"], validate=True)
            table = TierTable(name.decode(), int(fields["record_bytes"]), description)
            made, dropped = str(fields["made"]), bool(fields.get("dropped", False))
            return cls.of(namespace, table, int(fields["partitions"]), made, dropped)
        except MALFORMED as error:
            raise StoreBroken(f"the registry of tables holds {text[:200]!r}, no table: {error}") from error


class LostPartition(StoreBroken):
    """A partition that the server lost, wholly or in part.

    Attributes:
        table: Its table.
        partition: Its number.
    """

    def __init__(self, server: object, table: str, partition: int, how: str) -> None:
        super().__init__(
            f"redis at {server} has lost data of partition {partition} of table {table!r}: {how}. Was it restarted "
            "without persistence or with an older file, did it lose the tail of its append-only file, was it flushed, "
            "does it evict keys (maxmemory-policy must be noeviction), or did a replica that lagged take over? Go "
            "back to a checkpoint"
        )
        self.table, self.partition = table, partition


def refuse_lost(
    server: object, table: RecordTable, partitions: Int64 | int, stamps: Int64 | int, known: Int64 | int
) -> None:
    """Raises `LostPartition` for the first partition, int64 `[n]` or one, without a stamp or behind the known one."""
    behind = np.flatnonzero(np.equal(stamps, NO_STAMP) | np.less(stamps, known))
    if len(behind):
        partition, stamp, expected = (int(np.ravel(of)[behind[0]]) for of in (partitions, stamps, known))
        older = f"its last write is that of {stamp_name(stamp)}, and one of {stamp_name(expected)} was confirmed"
        how = "its hash has no stamp" if stamp == NO_STAMP else older
        raise LostPartition(server, table.table.name, partition, how)


class DamagedRecords(StoreBroken):
    """Records that fail their check.

    Attributes:
        table: Their table.
        ids: int64.
    """

    def __init__(self, server: object, table: RecordTable, ids: Int64) -> None:
        partition = int(partition_of(ids[:1], table.partitions)[0])
        super().__init__(
            f"redis at {server}: {len(ids)} records of table {table.table.name!r} are damaged, those of ids "
            f"{', '.join(map(str, ids[:_NAMED]))}{', ...' if len(ids) > _NAMED else ''} (the first in partition "
            f"{partition}): they fail the check that was written with them. Open the store again, which takes from the "
            "log what it still holds of them. Go back to a checkpoint where that is refused"
        )
        self.table, self.ids = table.table.name, ids


@dataclass(frozen=True, slots=True)
class _Work:
    """Parts of some batches, numbered through.

    Attributes:
        batches: All of them.
        owners: int64 `[n]`: the batch of each part, ascending.
        parts: `PART` `[n]`.
    """

    batches: "Sequence[Batch]"
    owners: Int64
    parts: Parts

    @classmethod
    def of(cls, batches: "Sequence[Batch]") -> Self:
        """All their parts."""
        owners = np.repeat(np.arange(len(batches)), [len(batch.parts) for batch in batches])
        parts = np.concatenate([np.empty(0, PART), *(batch.parts for batch in batches)], dtype=PART)
        return cls(batches, owners, parts)

    def some(self, items: Int64 | slice) -> "_Work":
        """Some of these parts, numbered anew."""
        return _Work(self.batches, self.owners[items], self.parts[items])

    def by_batch(self) -> "Iterator[tuple[Batch, Parts]]":
        """The batches that have parts here, with those."""
        for number, batch in enumerate(self.batches):
            parts = self.parts if len(self.batches) == 1 else self.parts[self.owners == number]
            if len(parts):
                yield batch, parts

    def values(self, of: "Callable[[Batch, Parts], Int64]") -> Int64:
        """int64 `[n]`: a value of each part."""
        return np.concatenate([np.empty(0, np.int64), *(of(batch, parts) for batch, parts in self.by_batch())])

    def hash_slots(self) -> Int64:
        """int64 `[n]`."""
        return self.values(lambda batch, parts: batch.table.hash_slots[parts["partition"]])

    def partition(self, item: int) -> "tuple[Batch, int]":
        """The batch of a part, and its partition."""
        return self.batches[self.owners[item]], int(self.parts["partition"][item])


def read_records(topology: Topology, batches: "Sequence[Batch]", deadline: Deadline) -> None:
    """Reads all records of some batches in one round.

    Args:
        topology: The servers.
        batches: Their `rows` and `missing` are written.
        deadline: Of everything together.

    Raises:
        LostPartition: a partition has no stamp, or is behind what is known of it.
        StoreFailed: a server answered with an error.
        Unavailable, DeadlineExceeded: naming address and deadline.
    """
    work = _Work.of(batches)
    stamps = np.full(len(work.parts), NO_STAMP, np.int64)

    def attempt(routes: list[Route]) -> dict[int, str]:
        reads = [_Reads(work.some(route.items), route) for route in routes]
        exchange(topology.pool, reads, deadline)
        failures: dict[int, str] = {}
        for route, read in zip(routes, reads, strict=True):
            stamps[route.items] = read.replies.stamps
            failures |= {int(route.items[at]): line for at, line in read.replies.failures.items()}
        return failures

    topology.complete(work.hash_slots(), attempt, deadline)
    for number, batch in enumerate(batches):
        held = batch.parts["partition"]
        refuse_lost(topology.url, batch.table, held, stamps[work.owners == number], batch.known[held])
    for batch in batches:
        if len(damaged := np.flatnonzero(batch.missing[batch.positions] == DAMAGED)):
            raise DamagedRecords(topology.url, batch.table, batch.ids[damaged])


class _Reads(Requests):
    replies: RecordReplies

    def __init__(self, work: _Work, route: Route) -> None:
        self.address, self._asking, self._work = route.address, route.asking, work
        self.moved = work.values(lambda batch, parts: read_sizes(parts, batch.width))
        self.replies = RecordReplies(list(work.by_batch()), asking=route.asking)

    def encode(self, start: int, stop: int) -> Sequence[Buffer]:
        return [
            encoded_reads(parts, batch.table.reads, batch.ids, self._asking)
            for batch, parts in self._work.some(slice(start, stop)).by_batch()
        ]


def write_records(topology: Topology, batches: "Sequence[Batch]", stamp: int, deadline: Deadline) -> None:
    """Deletes and writes all records of some batches, each partition at once or not at all.

    Before a connection writes to a partition for the first time, the stamp is
    read on it: a server that came back with less data is met on a new connection.

    Args:
        topology: The servers, with connections that may write.
        batches: What to write.
        stamp: Of the partitions from now on.
        deadline: Of everything together.

    Raises:
        LostPartition: a partition has no stamp, or is behind what is known of it.
        StoreFailed, Unavailable, DeadlineExceeded: some partitions may have been written.
    """
    work = _Work.of(batches)

    def attempt(routes: list[Route]) -> dict[int, str]:
        writes = [_Writes(topology, work.some(route.items), stamp, route) for route in routes]
        exchange(topology.pool, writes, deadline)
        failures: dict[int, str] = {}
        for route, write in zip(routes, writes, strict=True):
            if write.refused:
                unsaid = "TRYAGAIN as other partitions of the node did not tell their stamps"
                failures |= {item: write.refused.get(at, unsaid) for at, item in enumerate(route.items.tolist())}
            failures |= {int(route.items[at]): line for at, line in write.replies.failures.items()}
            lost = [at for at in write.replies.lost if at not in write.replies.failures]
            if lost:
                batch, partition = work.partition(route.items[lost[0]])
                refuse_lost(topology.url, batch.table, partition, NO_STAMP, 0)
        if failures:
            topology.pool.drop_idle()  # a failover may be behind it: what was verified before may be so no more
        return failures

    topology.complete(work.hash_slots(), attempt, deadline)


class _Writes(Requests):
    """The writes of a route.

    Attributes:
        refused: Part -> the error line of the server, which did not tell its stamp; nothing is written then.
    """

    replies: WriteReplies

    def __init__(self, topology: Topology, work: _Work, stamp: int, route: Route) -> None:
        self.address = route.address
        self.refused: dict[int, str] = {}
        self.replies = WriteReplies(work.parts, route.address, asking=route.asking)
        self._topology, self._work, self._asking = topology, work, route.asking
        self._stamp = stamp.to_bytes(8, "little", signed=True)
        self.moved = work.values(lambda batch, parts: write_sizes(parts, batch.width))

    def admit(self, connection: Connection, deadline: Deadline) -> bool:
        """Reads the stamps of partitions that this connection has not written to yet."""

        def verified(table: RecordTable) -> npt.NDArray[np.bool_]:
            return connection.verified.setdefault(table, np.zeros(table.partitions, np.bool_))

        new = np.flatnonzero(self._work.values(lambda batch, parts: ~verified(batch.table)[parts["partition"]]))
        asked = [(at, *self._work.partition(at)) for at in new.tolist()]
        words: list[Command] = []
        for _, batch, partition in asked:
            words += [("ASKING",)] * self._asking + [("HGET", batch.table.names[partition], STAMP)]
        replies = connection.call(words, deadline)[self._asking :: 1 + self._asking] if words else []
        for (at, batch, partition), reply in zip(asked, replies, strict=True):
            if isinstance(reply, hiredis.ReplyError):
                self.refused[at] = str(reply)
                continue
            refuse_lost(self._topology.url, batch.table, partition, stamp_of(reply), batch.known[partition])
            verified(batch.table)[partition] = True
        return not self.refused

    def encode(self, start: int, stop: int) -> Sequence[Buffer]:
        pieces = list[Buffer]()
        for batch, parts in self._work.some(slice(start, stop)).by_batch():
            at, ends = 0, np.cumsum(parts["rows"])
            chosen = np.arange(ends[-1]) + np.repeat(parts["row_at"] - ends + parts["rows"], parts["rows"])
            framed = framed_records(batch.ids[chosen], batch.positions[chosen], batch.rows)
            for partition, _, rows, gone_at, gone in parts.tolist():
                deleted = framed_ids(batch.gone[gone_at : gone_at + gone]) if gone else b""
                key, records = batch.table.names[partition], framed[at : at + rows]
                pieces += encoded_write(key, records, deleted, self._stamp, self._asking)
                at += rows
        return pieces


def stamp_of(reply: object) -> int:
    """The stamp in a server's answer; `NO_STAMP` where there is none, or none that a tier wrote."""
    if not isinstance(reply, bytes) or len(reply) != 8:
        return NO_STAMP
    return int.from_bytes(reply, "little", signed=True)


# What a read or a write has to do with each partition of a table. Pure planning


@dataclass(frozen=True, slots=True)
class Batch(PlacedRecords):
    """What a read or a write has to do.

    Attributes:
        table: The table.
        parts: `PART`, one for each partition that has something to do.
        gone: int64: ids to delete, in the same order.
        known: int64 `[partitions]`: `RecordTable.known` as it was when the batch was made.
    """

    table: RecordTable
    parts: Parts
    gone: Int64
    known: Int64

    @classmethod
    def of(cls, table: RecordTable, records: Records, gone: Int64 | None = None) -> Self:
        """Groups records by partition.

        Args:
            table: The table.
            records: Each id once.
            gone: int64: ids to delete, where whole records are to be written; None: records are to be read.

        Raises:
            BadInput: as `Records.require_fit`.
        """
        records.require_fit(table.table.record_bytes, whole=gone is not None)
        grouped, positions, counts = grouped_by_partition(np.ascontiguousarray(records.ids), table.partitions)
        gone_ids, gone_counts = np.empty(0, np.int64), np.zeros(table.partitions, np.int64)
        if gone is not None and len(gone):
            gone_ids, _, gone_counts = grouped_by_partition(np.ascontiguousarray(gone, np.int64), table.partitions)
        held = np.flatnonzero(counts + gone_counts)
        parts = np.zeros(len(held), PART)
        parts["partition"] = held
        parts["rows"], parts["gone"] = counts[held], gone_counts[held]
        parts["row_at"] = np.cumsum(parts["rows"]) - parts["rows"]
        parts["gone_at"] = np.cumsum(parts["gone"]) - parts["gone"]
        missing, width = np.zeros(len(grouped) if gone is None else 0, np.uint8), table.table.record_bytes
        return cls(grouped, positions, width, records.rows, missing, table, parts, gone_ids, table.known.copy())


# Every record of a table in Redis, a bounded piece at a time


_PIECE_BYTES = 8 << 20  # of all replies to one request, about
_FIELD_BYTES = 32  # of an id and what frames a field
_AT_ONCE = 32  # partitions

Damaged = Callable[[Int64], None]
"""Is told the ids, int64 `[n]`, of records that were scanned and fail their check."""


def scanned(
    topology: Topology, table: RecordTable, block_rows: int, width: int, seconds: float, damaged: Damaged
) -> Iterator[Records]:
    """Blocks of at most `block_rows` records, as `Tier.scan` gives them; `seconds`: deadline of each request."""
    waiting: list[_Found] = []
    count = 0
    for found in _found(topology, table, width, seconds, damaged):
        waiting.append(found)
        count += len(found[0])
        while count >= block_rows:
            ids, rows = _joined(waiting, width)
            yield _block(table, ids[:block_rows], rows[:block_rows])
            waiting = [(ids[block_rows:], rows[block_rows:])]
            count -= block_rows
    if count:
        yield _block(table, *_joined(waiting, width))


_Found = tuple[Int64, UInt8]
"""Ids and the first bytes of their records."""


def _joined(found: Sequence[_Found], width: int) -> _Found:
    ids = np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in found)])
    return ids, np.concatenate([np.empty((0, width), np.uint8), *(rows for _, rows in found)])


def _block(table: RecordTable, ids: Int64, rows: UInt8) -> Records:
    return Records(table.table.name, ids.copy(), np.full(len(ids), -1, np.int64), rows.copy())


def _found(topology: Topology, table: RecordTable, width: int, seconds: float, damaged: Damaged) -> Iterator[_Found]:
    """Ids, each once, with the first bytes of their records."""
    lengths = _lengths(topology, table, seconds)
    field_bytes = _FIELD_BYTES + (table.table.record_bytes if width else 0)
    for start in range(0, table.partitions, _AT_ONCE):
        partitions = range(start, min(start + _AT_ONCE, table.partitions))
        small = [p for p in partitions if lengths[p] * field_bytes <= _PIECE_BYTES // _AT_ONCE]
        if small:
            yield _whole(topology, table, small, width, seconds, damaged)
        for partition in set(partitions).difference(small):
            yield from _pieces(topology, table, partition, width, seconds, damaged)


def _lengths(topology: Topology, table: RecordTable, seconds: float) -> list[int]:
    """Fields of each partition, its stamp included. Raises `LostPartition`."""
    lengths: list[int] = topology.call([(name, ("HLEN", name)) for name in table.names], Deadline(seconds))
    if 0 in lengths:
        raise LostPartition(topology.url, table.table.name, lengths.index(0), "its hash is gone")
    return lengths


def _whole(
    topology: Topology, table: RecordTable, partitions: Sequence[int], width: int, seconds: float, damaged: Damaged
) -> _Found:
    """Small partitions, a command each."""
    names = [table.names[p] for p in partitions]
    replies = topology.call([(name, ("HGETALL" if width else "HKEYS", name)) for name in names], Deadline(seconds))
    pairs = (reply if width else [x for key in reply for x in (key, b"")] for reply in replies)
    return _joined([_taken(table, one, width, damaged) for one in pairs], width)


def _pieces(
    topology: Topology, table: RecordTable, partition: int, width: int, seconds: float, damaged: Damaged
) -> Iterator[_Found]:
    """A large partition. HSCAN may show an id twice while the hash grows or shrinks: it is given once."""
    name, cursor, seen = table.names[partition], b"0", np.empty(0, np.int64)
    count = max(1, _PIECE_BYTES // (_FIELD_BYTES + table.table.record_bytes))
    while True:
        words = "HSCAN", name, cursor, "COUNT", count
        ((cursor, pairs),) = topology.call([(name, words)], Deadline(seconds))
        ids, rows = _taken(table, pairs, width, damaged)
        ids, first = np.unique(ids, return_index=True)
        new = np.isin(ids, seen, assume_unique=True, invert=True)
        yield ids[new], rows[first[new]]
        if cursor == b"0":
            return
        seen = np.union1d(seen, ids[new])


def _taken(table: RecordTable, pairs: list[bytes], width: int, damaged: Damaged) -> _Found:
    """Ids and the first bytes of records, from fields and values in turn."""
    fields, values = pairs[::2], pairs[1::2]
    while STAMP in fields:  # HSCAN may show a field twice
        at = fields.index(STAMP)
        del fields[at], values[at]
    record_bytes = table.table.record_bytes
    stored = record_bytes + CHECK_BYTES
    text = b"".join(fields)
    if len(text) != 8 * len(fields) or (width and any(len(value) != stored for value in values)):
        raise StoreBroken(
            f"table {table.table.name!r} in Redis holds fields that are no ids, or values that are no records of "
            f"{record_bytes} bytes with their check: another program wrote them"
        )
    ids = np.frombuffer(text, "<i8").astype(np.int64)
    if not width:
        return ids, np.empty((len(ids), 0), np.uint8)
    rows = np.frombuffer(b"".join(values), np.uint8)
    if len(failed := damaged_records(ids, rows, record_bytes)):
        damaged(ids[failed])
    return ids, rows.reshape(len(ids), stored)[:, :width]
