"""Records of many tables read from and written to the servers in one batch, following redirections."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import hiredis
import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.tiers.redis.connections.exchange import Conversation, Requests, exchange
from elastable.embedding_store.tiers.redis.connections.redis_connection import Connection, Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command
from elastable.embedding_store.tiers.redis.connections.topology import Route, Topology
from elastable.embedding_store.tiers.redis.records.record_batch import Batch
from elastable.embedding_store.tiers.redis.records.record_decoder import NO_STAMP
from elastable.embedding_store.tiers.redis.records.record_replies import Awaited, RecordReplies, WriteReplies
from elastable.embedding_store.tiers.redis.records.record_requests import (
    Parts,
    encode_reads,
    encode_writes,
    read_sizes,
    reply_sizes,
    write_sizes,
)
from elastable.embedding_store.tiers.redis.records.record_tables import RecordTable
from elastable.embedding_store.tiers.redis.schema import STAMP, stamp_name

__all__ = ["LostPartition", "read_records", "stamp_of", "write_records"]


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

    @classmethod
    def of(cls, server: object, table: RecordTable, partition: int, stamp: int, known: int) -> LostPartition:
        """The error for a stamp that is behind the known one."""
        gone = "its hash has no stamp"
        older = f"its last write is that of {stamp_name(stamp)}, and one of {stamp_name(known)} was confirmed"
        return cls(server, table.table.name, partition, gone if stamp == NO_STAMP else older)


@dataclass(frozen=True, slots=True)
class _Share:
    """The parts of a batch that one server has."""

    batch: Batch
    items: Int64  # of the batch's parts
    parts: Parts


class _Shares:
    """The parts of all batches, numbered through."""

    def __init__(self, batches: Sequence[Batch]) -> None:
        self._batches = [batch for batch in batches if len(batch.parts)]
        self._starts = np.cumsum([0, *(len(batch.parts) for batch in self._batches)])
        slots = [batch.table.hash_slots[batch.parts["partition"]] for batch in self._batches]
        self.hash_slots: Int64 = np.concatenate([np.empty(0, np.int64), *slots])

    def of(self, items: Int64) -> list[_Share]:
        """Those of some parts, in ascending order."""
        bounds = np.searchsorted(items, self._starts)
        shares: list[_Share] = []
        for batch, start, first, stop in zip(self._batches, self._starts, bounds, bounds[1:], strict=False):
            if first < stop:
                own = items[first:stop] - start
                shares.append(_Share(batch, own, batch.parts[own]))
        return shares


def _within(shares: Sequence[_Share], start: int, stop: int) -> Iterator[tuple[_Share, Parts]]:
    """The parts `start..stop` of some shares, share by share."""
    before = 0
    for share in shares:
        first, last = max(start - before, 0), min(stop - before, len(share.parts))
        if first < last:
            yield share, share.parts[first:last]
        before += len(share.parts)


def read_records(topology: Topology, batches: Sequence[Batch], deadline: Deadline) -> None:
    """Reads all records of some batches in one round.

    Args:
        topology: The servers.
        batches: Their `rows`, `missing` and `stamps` are written.
        deadline: Of everything together.

    Raises:
        LostPartition: a partition has no stamp, or is behind what is known of it.
        StoreFailed: a server answered with an error.
        Unavailable, DeadlineExceeded: naming address and deadline.
    """
    all_shares = _Shares(batches)

    def attempt(routes: list[Route]) -> dict[int, str]:
        talks = [_reading(all_shares.of(route.items), route) for route in routes]
        exchange(topology.pool, [talk for talk, _, _ in talks], deadline)
        for _, shares, awaited in talks:
            for share, stamps in zip(shares, awaited, strict=True):
                share.batch.stamps[share.items] = stamps.stamps
        pairs = zip(routes, talks, strict=True)
        return {int(route.items[at]): line for route, talk in pairs for at, line in talk[0].replies.failures.items()}

    topology.complete(all_shares.hash_slots, attempt, deadline)
    for batch in batches:
        partitions = batch.parts["partition"]
        behind = np.flatnonzero((batch.stamps == NO_STAMP) | (batch.stamps < batch.known[partitions]))
        if len(behind):
            at, partition = int(behind[0]), int(partitions[behind[0]])
            stamp, known = int(batch.stamps[at]), int(batch.known[partition])
            raise LostPartition.of(topology.url, batch.table, partition, stamp, known)


def _reading(shares: list[_Share], route: Route) -> tuple[Conversation, list[_Share], list[Awaited]]:
    awaited = [
        Awaited(
            share.parts, share.batch.positions, share.batch.table.table.record_bytes, share.batch.rows,
            share.batch.missing, np.full(len(share.parts), NO_STAMP, np.int64),
        )
        for share in shares
    ]  # fmt: skip
    replies = RecordReplies(awaited, asking=route.asking)
    return Conversation(route.address, _Reads(shares, route.asking), replies), shares, awaited


class _Reads(Requests):
    """The HMGETs of a route."""

    def __init__(self, shares: list[_Share], asking: bool) -> None:
        self._shares, self._asking = shares, asking
        sizes = [
            read_sizes(share.parts, share.batch.table.keys)
            + reply_sizes(share.parts, share.batch.table.table.record_bytes)
            for share in shares
        ]
        self.moved = np.concatenate(sizes)

    def encode(self, start: int, stop: int) -> UInt8:
        chosen = list(_within(self._shares, start, stop))
        room = sum(int(read_sizes(parts, share.batch.table.keys).sum()) for share, parts in chosen)
        out, at = np.empty(room, np.uint8), 0
        for share, parts in chosen:
            at = encode_reads(parts, share.batch.table.keys, share.batch.ids, self._asking, out, at)
        return out[:at]


def write_records(topology: Topology, batches: Sequence[Batch], stamp: int, deadline: Deadline) -> None:
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
    all_shares = _Shares(batches)

    def attempt(routes: list[Route]) -> dict[int, str]:
        requests = [_Writes(topology, all_shares.of(route.items), stamp, route.asking) for route in routes]
        replies = [
            WriteReplies(request.parts, asking=route.asking) for request, route in zip(requests, routes, strict=True)
        ]
        talks = [Conversation(r.address, q, a) for r, q, a in zip(routes, requests, replies, strict=True)]
        exchange(topology.pool, talks, deadline)
        failures: dict[int, str] = {}
        for route, request, reply in zip(routes, requests, replies, strict=True):
            if request.refused:
                unsaid = "TRYAGAIN as other partitions of the node did not tell their stamps"
                failures |= {item: request.refused.get(at, unsaid) for at, item in enumerate(route.items.tolist())}
            failures |= {int(route.items[at]): line for at, line in reply.failures.items()}
            lost = [at for at in reply.lost if at not in reply.failures]
            if lost:
                share, parts = next(_within(request.shares, lost[0], lost[0] + 1))
                partition = int(parts["partition"][0])
                raise LostPartition.of(topology.url, share.batch.table, partition, NO_STAMP, 0)
        if failures:
            topology.pool.drop_idle()  # a failover may be behind it: what was verified before may be so no more
        return failures

    topology.complete(all_shares.hash_slots, attempt, deadline)


class _Writes(Requests):
    """The writes of a route.

    Attributes:
        shares: What is written.
        parts: Of all shares.
        refused: Part -> the error line of the server, which did not tell its stamp; nothing is written then.
    """

    def __init__(self, topology: Topology, shares: list[_Share], sequence: int, asking: bool) -> None:
        self.shares = shares
        self.refused: dict[int, str] = {}
        self.parts = np.concatenate([share.parts for share in shares])
        self._topology, self._sequence, self._asking = topology, sequence, asking
        self.moved = np.concatenate([_write_sizes(share, share.parts) for share in shares])

    def admit(self, connection: Connection, deadline: Deadline) -> bool:
        """Reads the stamps of partitions that this connection has not written to yet."""
        asked: list[tuple[int, Batch, int]] = []
        before = 0
        for share in self.shares:
            table, partitions = share.batch.table, share.parts["partition"]
            verified = connection.verified.setdefault(table, np.zeros(table.partitions, np.bool_))
            new = np.flatnonzero(~verified[partitions])
            asked += [(before + at, share.batch, int(partitions[at])) for at in new.tolist()]
            before += len(partitions)
        words: list[Command] = []
        for _, batch, partition in asked:
            words += [("ASKING",)] * self._asking + [("HGET", batch.table.names[partition], STAMP)]
        replies = connection.call(words, deadline)[self._asking :: 1 + self._asking] if words else []
        for (at, batch, partition), reply in zip(asked, replies, strict=True):
            if isinstance(reply, hiredis.ReplyError):
                self.refused[at] = str(reply)
                continue
            table, known, stamp = batch.table, int(batch.known[partition]), stamp_of(reply)
            if stamp == NO_STAMP or stamp < known:
                raise LostPartition.of(self._topology.url, table, partition, stamp, known)
            connection.verified[table][partition] = True
        return not self.refused

    def encode(self, start: int, stop: int) -> UInt8:
        chosen = list(_within(self.shares, start, stop))
        room = sum(int(_write_sizes(share, parts).sum()) for share, parts in chosen)
        out, at = np.empty(room, np.uint8), 0
        for share, parts in chosen:
            batch = share.batch
            at = encode_writes(
                parts, batch.table.keys, batch.ids, batch.positions, batch.gone, batch.rows, self._sequence,
                self._asking, out, at,
            )  # fmt: skip
        return out[:at]


def _write_sizes(share: _Share, parts: Parts) -> Int64:
    return write_sizes(parts, share.batch.table.keys, share.batch.rows.shape[1])


def stamp_of(reply: object) -> int:
    """The stamp in a server's answer; `NO_STAMP` where there is none, or none that a tier wrote."""
    if not isinstance(reply, bytes) or len(reply) != 8:
        return NO_STAMP
    return int.from_bytes(reply, "little", signed=True)
