"""The pace of the Redis server itself: our requests, encoded beforehand; its replies, received and thrown away."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import cycle
from typing import Any

import numpy as np

from benchmarks.peers import workloads
from benchmarks.peers.rounds import Turn
from benchmarks.peers.sides.elastable_redis import filled_store
from embedding_store.redis_block import Block
from embedding_store.redis_catalog import Catalog
from embedding_store.redis_connection import ConnectionPool, Deadline
from embedding_store.redis_exchange import Conversation, Requests, exchange
from embedding_store.redis_schema import TableRecord
from embedding_store.resp_codec import Bytes, Keys, encode_reads, encode_writes, read_sizes, reply_sizes, write_sizes
from embedding_store.resp_replies import Replies
from embedding_store.store import Int64

__all__ = ["prepare"]

_TRANSACTION_BYTES = len(b"+OK\r\n+QUEUED\r\n*1\r\n:0\r\n")
_SECONDS = 60.0


class _Encoded(Requests):
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


def prepare(race: str, settings: Mapping[str, Any]) -> Turn:
    """`redis lookup` or `redis write`."""
    batches = workloads.redis_ids(settings["rows"], settings["batch"])
    store = filled_store(race, settings)
    catalog = Catalog.of(store.url.namespace, [TableRecord(store.specs()["t"], settings["partitions"])])
    store.close()
    encode = _reads if race == "redis lookup" else _writes
    turns = cycle([encode(Block.of(catalog, {"t": ids}), catalog.keys) for ids in batches])
    pool = ConnectionPool(store.url)

    def talk() -> None:
        commands, moved, sizes = next(turns)
        conversation = Conversation(store.url.seeds[0], _Encoded(commands, moved), _Counted(sizes))
        exchange(pool, [conversation], Deadline(_SECONDS))

    return Turn("redis-server", talk, settings["batch"])


def _reads(block: Block, keys: Keys) -> tuple[list[Bytes], Int64, Int64]:
    """Each command encoded, the bytes it moves, and those of its reply."""
    commands = block.weights
    encoded = [encode_reads(commands[i : i + 1], keys, block.ids) for i in range(len(commands))]
    lines = [len(b"*%d\r\n" % (rows + 1)) + len(b"$8\r\n01234567\r\n") for rows in commands["rows"].tolist()]
    row_bytes = len(b"$%d\r\n\r\n" % (4 * workloads.DIM)) + 4 * workloads.DIM
    return (
        encoded,
        read_sizes(commands, keys) + reply_sizes(commands),
        np.array(lines, np.int64) + row_bytes * commands["rows"],
    )


def _writes(block: Block, keys: Keys) -> tuple[list[Bytes], Int64, Int64]:
    weights, slots = block.weights, block.slots
    encoded = [
        encode_writes(weights[i : i + 1], slots[i : i + 1], keys, block.ids, block.positions, block.rows)
        for i in range(len(weights))
    ]
    return encoded, write_sizes(weights, slots, keys), np.full(len(weights), _TRANSACTION_BYTES)
