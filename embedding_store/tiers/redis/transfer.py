"""Blocks of rows read from and written to the servers, following redirections."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.exchange import Conversation, Requests, exchange
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.reply_shapes import Command, packed_command
from elastable.embedding_store.tiers.redis.resp_codec import (
    NO_STAMP,
    Bytes,
    Commands,
    block_encode_reads,
    block_encode_writes,
    block_read_sizes,
    block_reply_sizes,
    block_write_sizes,
)
from elastable.embedding_store.tiers.redis.resp_replies import ChangeReplies, RowReplies
from elastable.embedding_store.tiers.redis.schema import hash_slot
from elastable.embedding_store.tiers.redis.topology import Route, Topology

__all__ = ["Reading", "read_block", "write_block"]


@dataclass(frozen=True, slots=True)
class Reading:
    """What came back beside the rows.

    Attributes:
        stamps: int64, the version stamp of each of the block's partitions.
        answers: To the questions that were asked, in order, as hiredis gives them.
    """

    stamps: Int64
    answers: Sequence[object]


def read_block(
    topology: Topology, block: Block, deadline: Deadline, questions: Sequence[tuple[bytes, Command]] = ()
) -> Reading:
    """Reads all rows of a block in one round, and what else is asked for with them.

    Args:
        topology: The servers.
        block: Its `rows` and `missing` are written, and its tables' weights unpacked.
        deadline: Of everything together.
        questions: Commands that only read, with keys that all lie in one hash
            slot. They go first: rows on the same server are not older than the answers.

    Raises:
        StoreFailed: a server answered with an error, or has lost a partition.
        Unavailable, DeadlineExceeded: naming address and deadline.
    """
    reader = _BlockReader(topology, block, deadline, questions)
    topology.complete(reader.hash_slots, reader.attempt, deadline)
    stamps = reader.stamps[: len(block.weights)]
    if len(stamps) and stamps.min() == NO_STAMP:
        raise _lost_partition(topology, block, int(stamps.argmin()))
    for rows in block.tables.values():
        rows.unpack()
    return Reading(stamps, reader.answers)


class _BlockReader:
    """The commands that read a block, and as the last item all questions together."""

    def __init__(
        self, topology: Topology, block: Block, deadline: Deadline, questions: Sequence[tuple[bytes, Command]]
    ) -> None:
        self._topology, self._block, self._deadline = topology, block, deadline
        self._commands: Commands = np.concatenate((block.weights, block.slots[block.slots["width"] > 0]))
        self._questions = questions
        asked_at = [hash_slot(questions[0][0])] if questions else []
        self.hash_slots: Int64 = np.append(block.catalog.hash_slots[self._commands["key"]], asked_at).astype(np.int64)
        self.stamps = np.full(len(self._commands), NO_STAMP, np.int64)
        self.answers: list[object] = []

    def attempt(self, routes: list[Route]) -> dict[int, str]:
        talks = [self._talk(route) for route in routes]
        exchange(self._topology.pool, [talk for talk, _, _ in talks], self._deadline)
        failures: dict[int, str] = {}
        for _, items, replies in talks:
            self.stamps[items] = replies.stamps
            self.answers = replies.answers or self.answers
            for command, line in replies.failures.items():
                failures[len(self._commands) if command < 0 else int(items[command])] = line
        if len(self._commands) in failures:
            # Rows must not be older than the answers: they are read again with the questions.
            failures = {**dict.fromkeys(range(len(self._commands)), "TRYAGAIN with the questions"), **failures}
        return failures

    def _talk(self, route: Route) -> tuple[Conversation, Int64, RowReplies]:
        items = route.items[route.items < len(self._commands)]
        questions = self._questions if len(items) < len(route.items) else ()
        commands = self._commands[items]
        replies = RowReplies(
            commands,
            self._block.positions,
            self._block.rows,
            self._block.missing,
            questions=len(questions),
            asking=route.asking,
        )
        asking = packed_command(("ASKING",)) if route.asking else b""
        asked = b"".join(asking + packed_command(words) for _, words in questions)
        requests = _Reads(self._block, commands, asked, route.asking)
        return Conversation(route.address, requests, replies), items, replies


class _Reads(Requests):
    """The HMGETs of a route, after the questions if they are to be asked."""

    def __init__(self, block: Block, commands: Commands, question: bytes, asking: bool) -> None:
        self._block, self._commands, self._question, self._asking = block, commands, question, asking
        moved = block_read_sizes(commands, block.catalog.keys) + block_reply_sizes(commands)
        self.moved = moved if len(commands) or not question else np.array([len(question)], np.int64)

    def encode(self, start: int, stop: int) -> Bytes:
        rows = block_encode_reads(self._commands[start:stop], self._block.catalog.keys, self._block.ids, self._asking)
        if start or not self._question:
            return rows
        return np.concatenate((np.frombuffer(self._question, np.uint8), rows))


def write_block(
    topology: Topology,
    block: Block,
    deadline: Deadline,
    stamp: int | Int64 = NO_STAMP,
    more: MoreCommands | None = None,
    packed: bool = False,
) -> None:
    """Writes a block's rows, each partition at once or not at all.

    Args:
        topology: The servers.
        block: Its tables' weights are packed, and its `rows` written to the servers.
        deadline: Of everything together.
        stamp: The version that each partition is now of, or int64 `[commands]`
            of them; `NO_STAMP` leaves stamps as they are.
        more: Further commands of each partition's transaction.
        packed: Whether its weights are in the block already, as they lie in the servers.

    Raises:
        StoreFailed, Unavailable, DeadlineExceeded: some partitions may have been written.
    """
    for rows in () if packed else block.tables.values():
        rows.pack()
    stamps = np.full(len(block.weights), stamp, np.int64)
    further = MoreCommands.none(len(stamps)) if more is None else more
    queued = 1 + (block.slots["width"] > 0).astype(np.int64) + further.count

    def attempt(routes: list[Route]) -> dict[int, str]:
        replies = [ChangeReplies(queued[route.items], asking=route.asking) for route in routes]
        talks = [
            Conversation(r.address, _Writes(block, stamps, further, r), reply)
            for r, reply in zip(routes, replies, strict=True)
        ]
        exchange(topology.pool, talks, deadline)
        pairs = zip(routes, replies, strict=True)
        return {int(route.items[at]): line for route, reply in pairs for at, line in reply.failures.items()}

    topology.complete(block.hash_slots(), attempt, deadline, repeat_lost=False)


class _Writes(Requests):
    """The transactions of a route."""

    def __init__(self, block: Block, stamps: Int64, more: MoreCommands, route: Route) -> None:
        self._block, self._asking = block, route.asking
        self._weights, self._slots = block.weights[route.items], block.slots[route.items]
        self._stamps, self._more = stamps[route.items], more.chosen(route.items)
        self.moved = block_write_sizes(self._weights, self._slots, block.catalog.keys) + np.diff(self._more.at)

    def encode(self, start: int, stop: int) -> Bytes:
        block = self._block
        return block_encode_writes(
            self._weights[start:stop], self._slots[start:stop], block.catalog.keys, block.ids, block.positions,
            block.rows, self._stamps[start:stop], self._asking, self._more.of(start, stop),
        )  # fmt: skip


def _lost_partition(topology: Topology, block: Block, command: int) -> StoreFailed:
    name = next(name for name, rows in block.tables.items() if rows.commands.start <= command < rows.commands.stop)
    partition = int(block.weights["key"][command]) - block.catalog.tables[name].first
    return StoreFailed(
        f"redis at {topology.url} has lost partition {partition} of table {name!r}: its key is gone. "
        "Was the server restarted without persistence, flushed, or does it evict keys?"
    )
