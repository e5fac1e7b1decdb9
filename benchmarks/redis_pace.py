"""The server ceiling of Redis: requests encoded beforehand, replies received and discarded.

No client can send the same commands faster; the difference is the cost of
encoding, decoding, and ordering rows.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.connection_pool import ConnectionPool
from elastable.embedding_store.tiers.redis.exchange import Conversation, Replies, Requests, exchange
from elastable.embedding_store.tiers.redis.record_requests import Keys
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.resp_codec import (
    Bytes,
    Commands,
    block_encode_reads,
    block_encode_writes,
    block_read_sizes,
    block_reply_sizes,
    block_write_sizes,
)
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["commit_pace", "lookup_pace", "write_pace"]

_SECONDS = 60.0

_Encoded = tuple[list[Bytes], Int64, Int64]
"""Each command's request, the bytes that it moves, and those of its reply."""


def lookup_pace(url: RedisUrl, catalog: Catalog, batches: Sequence[Int64]) -> Callable[[], None]:
    """Looks rows of the table "t" up, a batch a call; every row must be there."""
    return _in_turn(url, [[_reads(block.weights, block)] for block in _blocks(catalog, batches, 0)])


def write_pace(url: RedisUrl, catalog: Catalog, batches: Sequence[Int64]) -> Callable[[], None]:
    """Overwrites rows of the table "t", a batch a call, without slots."""
    return _in_turn(url, [[_writes(block)] for block in _blocks(catalog, batches, 0)])


def commit_pace(url: RedisUrl, catalog: Catalog, batches: Sequence[Int64], slot_width: int) -> Callable[[], None]:
    """Writes weights and slots of a batch: what a commit has to do, of rows that its writer remembers."""
    return _in_turn(url, [[_writes(block)] for block in _blocks(catalog, batches, slot_width)])


def _in_turn(url: RedisUrl, rounds: Sequence[Sequence[_Encoded]]) -> Callable[[], None]:
    turns, pool = cycle(rounds), ConnectionPool(url)

    def talk() -> None:
        for commands, moved, sizes in next(turns):
            conversation = Conversation(url.seeds[0], _Requests(commands, moved), _Counted(sizes))
            exchange(pool, [conversation], Deadline(_SECONDS))

    return talk


class _Requests(Requests):
    def __init__(self, commands: list[Bytes], moved: Int64) -> None:
        self._commands, self.moved = commands, moved

    def encode(self, start: int, stop: int) -> Bytes:
        return np.concatenate(self._commands[start:stop])


class _Counted(Replies):
    """Knows the length of every reply, and looks at none of them."""

    def __init__(self, sizes: Int64) -> None:
        super().__init__()
        self._ends = np.cumsum(sizes)
        self._received = 0

    def feed(self, received: Bytes, start: int, stop: int) -> int:
        self._received += stop - start
        self.completed = int(np.searchsorted(self._ends, self._received, "right"))
        self.done = self.completed == len(self._ends)
        return stop


def _blocks(catalog: Catalog, batches: Sequence[Int64], slot_width: int) -> list[Block]:
    """A block for each batch; its rows are ones."""
    blocks = [Block.of(catalog, {"t": ids}, {"t": slot_width}) for ids in batches]
    for block in blocks:
        block.rows.view(np.float32)[:] = 1.0
    return blocks


def _reads(commands: Commands, block: Block) -> _Encoded:
    keys: Keys = block.catalog.keys
    encoded = [block_encode_reads(commands[i : i + 1], keys, block.ids) for i in range(len(commands))]
    sizes = [
        len(b"*%d\r\n" % (rows + stamped)) + stamped * len(b"$8\r\n01234567\r\n") + rows * _row_bytes(width)
        for rows, width, stamped in commands[["rows", "width", "stamped"]].tolist()
    ]
    return encoded, block_read_sizes(commands, keys) + block_reply_sizes(commands), np.array(sizes, np.int64)


def _row_bytes(width: int) -> int:
    return len(b"$%d\r\n" % width) + width + len(b"\r\n")


def _writes(block: Block) -> _Encoded:
    """All fields exist, so every HSET answers 0."""
    weights, slots, keys = block.weights, block.slots, block.catalog.keys
    encoded = [
        block_encode_writes(weights[i : i + 1], slots[i : i + 1], keys, block.ids, block.positions, block.rows)
        for i in range(len(weights))
    ]
    hsets = 1 + (slots["width"] > 0).astype(np.int64)
    sizes = len(b"+OK\r\n*1\r\n") + hsets * len(b"+QUEUED\r\n:0\r\n")
    return encoded, block_write_sizes(weights, slots, keys), sizes
