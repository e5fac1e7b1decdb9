"""Blocks of rows read from and written to the servers, following redirections."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import hiredis
import numpy as np

from embedding_store.errors import StoreFailed
from embedding_store.redis.block import Block
from embedding_store.redis.connection import Deadline
from embedding_store.redis.exchange import Conversation, Requests, exchange
from embedding_store.redis.resp_codec import (
    NO_STAMP,
    Bytes,
    Commands,
    encode_reads,
    encode_writes,
    read_sizes,
    reply_sizes,
    write_sizes,
)
from embedding_store.redis.resp_replies import ChangeReplies, RowReplies
from embedding_store.redis.schema import hash_slot
from embedding_store.redis.topology import Route, Topology
from embedding_store.store import Int64

__all__ = ["Reading", "read_block", "write_block"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What came back beside the rows.

    Attributes:
        stamps: int64, the version stamp of each of the block's partitions.
        version: The store's version, 0 where it was not asked for or never set.
    """

    stamps: Int64
    version: int


def read_block(topology: Topology, block: Block, deadline: Deadline, version_key: bytes | None = None) -> Reading:
    """Reads all rows of a block in one round, and the version with them.

    Args:
        topology: The servers.
        block: Its `rows` and `missing` are written, and its tables' weights unpacked.
        deadline: Of everything together.
        version_key: Of the version to ask for; None: it is not asked for.

    Raises:
        StoreFailed: a server answered with an error, or has lost a partition.
        Unavailable, DeadlineExceeded: naming address and deadline.
    """
    reader = _BlockReader(topology, block, deadline, version_key)
    topology.complete(reader.hash_slots, reader.attempt, deadline)
    stamps = reader.stamps[: len(block.weights)]
    if len(stamps) and stamps.min() == NO_STAMP:
        raise _lost_partition(topology, block, int(stamps.argmin()))
    for rows in block.tables.values():
        rows.unpack()
    return Reading(stamps, reader.version)


class _BlockReader:
    """The commands that read a block, and last of all the question for the version."""

    def __init__(self, topology: Topology, block: Block, deadline: Deadline, version_key: bytes | None) -> None:
        self._topology, self._block, self._deadline = topology, block, deadline
        self._commands: Commands = np.concatenate((block.weights, block.slots[block.slots["width"] > 0]))
        words: tuple[Any, ...] = ("GET", version_key)
        self._question: bytes = b"" if version_key is None else hiredis.pack_command(words)
        question_at = [] if version_key is None else [hash_slot(version_key)]
        self.hash_slots: Int64 = np.append(block.catalog.hash_slots[self._commands["key"]], question_at).astype(
            np.int64
        )
        self.stamps = np.full(len(self._commands), NO_STAMP, np.int64)
        self.version = 0

    def attempt(self, routes: list[Route]) -> dict[int, str]:
        talks = [self._talk(route) for route in routes]
        exchange(self._topology.pool, [talk for talk, _, _ in talks], self._deadline)
        failures: dict[int, str] = {}
        for _, items, replies in talks:
            self.stamps[items] = replies.stamps
            self.version = max(self.version, replies.version)
            for command, line in replies.failures.items():
                failures[len(self._commands) if command < 0 else int(items[command])] = line
        return failures

    def _talk(self, route: Route) -> tuple[Conversation, Int64, RowReplies]:
        items = route.items[route.items < len(self._commands)]
        asks_version = len(items) < len(route.items)
        commands = self._commands[items]
        replies = RowReplies(
            commands,
            self._block.positions,
            self._block.rows,
            self._block.missing,
            asks_version=asks_version,
            asking=route.asking,
        )
        asking = hiredis.pack_command(("ASKING",)) if route.asking else b""
        question = asking + self._question if asks_version else b""
        requests = _Reads(self._block, commands, question, route.asking)
        return Conversation(route.address, requests, replies), items, replies


class _Reads(Requests):
    """The HMGETs of a route, after the question for the version if it is to be asked."""

    def __init__(self, block: Block, commands: Commands, question: bytes, asking: bool) -> None:
        self._block, self._commands, self._question, self._asking = block, commands, question, asking
        # The version goes first, with the first rows: what is read after it is not older.
        moved = read_sizes(commands, block.catalog.keys) + reply_sizes(commands)
        self.moved = moved if len(commands) or not question else np.array([len(question)], np.int64)

    def encode(self, start: int, stop: int) -> Bytes:
        rows = encode_reads(self._commands[start:stop], self._block.catalog.keys, self._block.ids, self._asking)
        if start or not self._question:
            return rows
        return np.concatenate((np.frombuffer(self._question, np.uint8), rows))


def write_block(topology: Topology, block: Block, chosen: Int64, deadline: Deadline, stamp: int = NO_STAMP) -> None:
    """Writes the rows of some of a block's partitions, each partition at once or not at all.

    Args:
        topology: The servers.
        block: Its tables' weights are packed, and its `rows` written to the servers.
        chosen: int64: which of the block's commands.
        deadline: Of everything together.
        stamp: The version that each partition is now of; `NO_STAMP` leaves stamps as they are.

    Raises:
        StoreFailed, Unavailable, DeadlineExceeded: some partitions may have been written.
    """
    for rows in block.tables.values():
        rows.pack()
    weights, slots = block.weights[chosen], block.slots[chosen]
    queued = 1 + (slots["width"] > 0).astype(np.int64)

    def attempt(routes: list[Route]) -> dict[int, str]:
        replies = [ChangeReplies(queued[route.items], asking=route.asking) for route in routes]
        talks = [
            Conversation(r.address, _Writes(block, weights[r.items], slots[r.items], stamp, r.asking), reply)
            for r, reply in zip(routes, replies, strict=True)
        ]
        exchange(topology.pool, talks, deadline)
        pairs = zip(routes, replies, strict=True)
        return {int(route.items[at]): line for route, reply in pairs for at, line in reply.failures.items()}

    topology.complete(block.hash_slots()[chosen], attempt, deadline, repeat_lost=False)


class _Writes(Requests):
    """The transactions of a route."""

    def __init__(self, block: Block, weights: Commands, slots: Commands, stamp: int, asking: bool) -> None:
        self._block, self._weights, self._slots, self._stamp, self._asking = block, weights, slots, stamp, asking
        self.moved = write_sizes(weights, slots, block.catalog.keys)

    def encode(self, start: int, stop: int) -> Bytes:
        block = self._block
        return encode_writes(
            self._weights[start:stop], self._slots[start:stop], block.catalog.keys, block.ids, block.positions,
            block.rows, self._stamp, self._asking,
        )  # fmt: skip


def _lost_partition(topology: Topology, block: Block, command: int) -> StoreFailed:
    name = next(name for name, rows in block.tables.items() if rows.commands.start <= command < rows.commands.stop)
    partition = int(block.weights["key"][command]) - block.catalog.tables[name].first
    return StoreFailed(
        f"redis at {topology.url} has lost partition {partition} of table {name!r}: its key is gone. "
        "Was the server restarted without persistence, flushed, or does it evict keys?"
    )
