"""The server ceiling of Redis: requests encoded beforehand, replies received and discarded.

No client can send the same records faster; the difference is the cost of
encoding, decoding, ordering and checking them.
"""

from collections.abc import Callable, Sequence
from itertools import cycle

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connection import (
    ConnectionPool,
    Deadline,
    Replies,
    Requests,
    exchange,
)
from elastable.embedding_store.tiers.redis.record_codec import CHECK_BYTES, encoded_reads, read_sizes
from elastable.embedding_store.tiers.redis.record_transfer import Batch, RecordTable
from elastable.embedding_store.tiers.redis.url import RedisUrl

_SECONDS = 60.0

_Encoded = tuple[list[bytes], Int64, Int64]
"""Each command's request, the bytes that it moves, and those of its reply."""


def read_pace(url: RedisUrl, table: RecordTable, batches: Sequence[Int64]) -> Callable[[], None]:
    """Reads records, a batch a call; every one must be there."""
    return _in_turn(url, [_reads(_batch(table, ids)) for ids in batches])


def write_pace(url: RedisUrl, table: RecordTable, batches: Sequence[Int64]) -> Callable[[], None]:
    """Overwrites records, a batch a call: one HSET a partition, and nothing else."""
    return _in_turn(url, [_writes(_batch(table, ids)) for ids in batches])


def _in_turn(url: RedisUrl, rounds: Sequence[_Encoded]) -> Callable[[], None]:
    turns, pool = cycle(rounds), ConnectionPool(url)

    def talk() -> None:
        commands, moved, sizes = next(turns)
        exchange(pool, [_Requests(url.seeds[0], commands, moved, _Counted(sizes))], Deadline(_SECONDS))

    return talk


class _Requests(Requests):
    def __init__(self, address: Address, commands: list[bytes], moved: Int64, replies: Replies) -> None:
        self.address, self._commands, self.moved, self.replies = address, commands, moved, replies

    def encode(self, start: int, stop: int) -> list[bytes]:
        return [b"".join(self._commands[start:stop])]


class _Counted(Replies):
    """Knows the length of every reply, and looks at none of them."""

    def __init__(self, sizes: Int64) -> None:
        super().__init__()
        self._ends = np.cumsum(sizes)
        self._received = 0

    def feed(self, received: UInt8, start: int, stop: int) -> int:
        self._received += stop - start
        self.completed = int(np.searchsorted(self._ends, self._received, "right"))
        self.done = self.completed == len(self._ends)
        return stop


def _batch(table: RecordTable, ids: Int64) -> Batch:
    rows = np.ones((len(ids), table.table.record_bytes), np.uint8)
    return Batch.of(table, Records(table.table.name, ids, ids, rows), ids[:0])


def _reads(batch: Batch) -> _Encoded:
    parts, width = batch.parts, batch.rows.shape[1]
    reads = batch.table.reads
    encoded = [
        bytes(encoded_reads(parts[number : number + 1], reads, batch.ids, False)) for number in range(len(parts))
    ]
    record_bytes = len(b"$%d\r\n" % (width + CHECK_BYTES)) + width + CHECK_BYTES + len(b"\r\n")
    sizes = [
        len(b"*%d\r\n" % (1 + rows)) + len(b"$8\r\n01234567\r\n") + rows * record_bytes
        for rows in parts["rows"].tolist()
    ]
    return encoded, read_sizes(parts, width), np.array(sizes, np.int64)


def _writes(batch: Batch) -> _Encoded:
    """All fields exist, so every HSET answers 0."""
    encoded = []
    for part in batch.parts:
        chosen = slice(part["row_at"], part["row_at"] + part["rows"])
        words = [b"HSET", batch.table.names[part["partition"]]]
        for row_id, position in zip(batch.ids[chosen].tolist(), batch.positions[chosen].tolist(), strict=True):
            words += [row_id.to_bytes(8, "little", signed=True), batch.rows[position].tobytes() + bytes(CHECK_BYTES)]
        text = b"*%d\r\n" % len(words) + b"".join(b"$%d\r\n%b\r\n" % (len(word), word) for word in words)
        encoded.append(text)
    moved = np.array([len(command) for command in encoded], np.int64)
    return encoded, moved, np.full(len(encoded), len(b":0\r\n"), np.int64)
