"""Blocks of rows read from and written to the servers, following redirections."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import hiredis
import numpy as np

from embedding_store.errors import StoreFailed
from embedding_store.redis_block import Block
from embedding_store.redis_connection import Deadline
from embedding_store.redis_exchange import Conversation, exchange
from embedding_store.redis_schema import hash_slot
from embedding_store.redis_topology import Route, Topology
from embedding_store.resp_codec import NO_STAMP, Bytes, Commands, encode_reads, encode_writes, read_sizes, write_sizes
from embedding_store.resp_replies import ChangeReplies, RowReplies
from embedding_store.store import Int64

__all__ = ["Reading", "read_block", "write_block"]

_PIECE_BYTES = 1 << 17  # encoded while the server works on the piece before


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
        block: Its `rows` and `missing` are written.
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
        return (
            Conversation(route.address, self._requests(commands, asks_version, route.asking), replies),
            items,
            replies,
        )

    def _requests(self, commands: Commands, asks_version: bool, asking: bool) -> Iterator[Bytes]:
        # The version goes first: what is read after it is not older.
        if asks_version:
            yield np.frombuffer((hiredis.pack_command(("ASKING",)) if asking else b"") + self._question, np.uint8)
        keys = self._block.catalog.keys
        for piece in _pieces(read_sizes(commands, keys)):
            yield encode_reads(commands[piece], keys, self._block.ids, asking)


def write_block(topology: Topology, block: Block, chosen: Int64, deadline: Deadline, stamp: int = NO_STAMP) -> None:
    """Writes the rows of some of a block's partitions, each partition at once or not at all.

    Args:
        topology: The servers.
        block: Its `rows` are written to the servers.
        chosen: int64: which of the block's commands.
        deadline: Of everything together.
        stamp: The version that each partition is now of; `NO_STAMP` leaves stamps as they are.

    Raises:
        StoreFailed, Unavailable, DeadlineExceeded: some partitions may have been written.
    """
    weights, slots = block.weights[chosen], block.slots[chosen]
    queued = 1 + (slots["width"] > 0).astype(np.int64)
    keys = block.catalog.keys

    def requests(route: Route) -> Iterator[Bytes]:
        its_weights, its_slots = weights[route.items], slots[route.items]
        for piece in _pieces(write_sizes(its_weights, its_slots, keys)):
            yield encode_writes(
                its_weights[piece], its_slots[piece], keys, block.ids, block.positions, block.rows, stamp, route.asking
            )

    def attempt(routes: list[Route]) -> dict[int, str]:
        replies = [ChangeReplies(queued[route.items], asking=route.asking) for route in routes]
        talks = [Conversation(r.address, requests(r), reply) for r, reply in zip(routes, replies, strict=True)]
        exchange(topology.pool, talks, deadline)
        pairs = zip(routes, replies, strict=True)
        return {int(route.items[at]): line for route, reply in pairs for at, line in reply.failures.items()}

    topology.complete(block.hash_slots()[chosen], attempt, deadline, repeat_lost=False)


def _pieces(sizes: Int64) -> Iterator[slice]:
    """Stretches of commands of about `_PIECE_BYTES` encoded, at least one command each."""
    ends = np.cumsum(sizes)
    start = 0
    while start < len(ends):
        limit = (ends[start - 1] if start else 0) + _PIECE_BYTES
        stop = max(start + 1, int(np.searchsorted(ends, limit, "right")))
        yield slice(start, stop)
        start = stop


def _lost_partition(topology: Topology, block: Block, command: int) -> StoreFailed:
    name = next(name for name, rows in block.tables.items() if rows.commands.start <= command < rows.commands.stop)
    partition = int(block.weights["key"][command]) - block.catalog.tables[name].first
    return StoreFailed(
        f"redis at {topology.url} has lost partition {partition} of table {name!r}: its key is gone. "
        "Was the server restarted without persistence, flushed, or does it evict keys?"
    )
