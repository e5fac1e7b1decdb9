"""Rows that a tier in Redis writes a second, against the server ceiling: the same requests, encoded beforehand.

Records of 64 float32 values and their Adagrad slots, 16,384 of 262,144 a call, over 64 partitions. The ceiling sends
each call's bytes on one connection and counts the replies without reading them; no client can send the same commands
faster. Both write to the same server, in turns, each to a namespace of its own.

    python -m benchmarks.redis_flush
"""

from __future__ import annotations

import socket
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from itertools import count, cycle
from pathlib import Path

import numpy as np

from benchmarks.harness import compare, interleaved, publish, rate
from benchmarks.stores import running_redis
from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import Records, TierTable
from elastable.embedding_store.tiers.redis.record_batch import Batch
from elastable.embedding_store.tiers.redis.record_requests import encode_writes, write_sizes
from elastable.embedding_store.tiers.redis.redis_tier import RedisTier
from elastable.process.heap import keep_freed_memory

__all__ = ["main"]

_ROWS, _BATCH, _BATCHES = 262_144, 16_384, 16
_RECORD_BYTES = 2 * 64 * 4
_PARTITIONS = 64
_ROUNDS = 15
_FLOOR = 0.9
_UNANSWERED = 8  # replies that are waited for at once, of half a megabyte: the window that ours have, too
_WAIT_S = 60.0


def main() -> None:
    """Measures, prints and writes `results/redis_flush.json`."""
    random = np.random.default_rng(2026)
    rows = random.integers(0, 256, (_ROWS, _RECORD_BYTES), dtype=np.uint8)
    batches = [random.choice(_ROWS, _BATCH, replace=False).astype(np.int64) for _ in range(_BATCHES)]
    with tempfile.TemporaryDirectory(prefix="redis-flush-") as home, ExitStack() as held:
        address = held.enter_context(running_redis(Path(home), append_only=False))
        tiers = {}
        for name in ("flush", "ceiling"):
            url = f"redis://{address}?namespace={name}&partitions={_PARTITIONS}&deadline={_WAIT_S:g}"
            tiers[name] = held.enter_context(RedisTier(url))
            tiers[name].create(TierTable("t", _RECORD_BYTES))
            tiers[name].write([Records("t", np.arange(_ROWS), np.arange(_ROWS), rows)], {}, 1)
        sent = held.enter_context(socket.create_connection(_parted(address), _WAIT_S))
        contenders = {
            "flush": rate(_flushing(tiers["flush"], batches, rows[:_BATCH]), _BATCH),
            "ceiling": rate(_sending(sent, _encoded(tiers["ceiling"], batches, rows[:_BATCH])), _BATCH),
        }
        rounds = interleaved(contenders, _ROUNDS)
    name = f"rows flushed to Redis, {_RECORD_BYTES} bytes each, against the server ceiling"
    title = f"{_BATCH:,} records a call, {_PARTITIONS} partitions, one server"
    publish("redis_flush", title, [compare(name, "rows/s", rounds["flush"], rounds["ceiling"], _FLOOR)])


def _flushing(tier: RedisTier, batches: Sequence[Int64], rows: UInt8) -> Callable[[], None]:
    turns, sequences = cycle(batches), count(2)

    def flush() -> None:
        ids = next(turns)
        tier.write([Records("t", ids, ids, rows)], {}, next(sequences))

    return flush


def _encoded(tier: RedisTier, batches: Sequence[Int64], rows: UInt8) -> list[list[UInt8]]:
    """Each call's bytes, partition by partition; to each there are two replies."""
    table, known = tier._registry.table("t")
    calls = []
    for ids in batches:
        batch = Batch.to_write(table, ids, rows, np.empty(0, np.int64), known)
        requests = []
        for at in range(len(batch.parts)):
            part = batch.parts[at : at + 1]
            out = np.empty(int(write_sizes(part, table.keys, _RECORD_BYTES).sum()), np.uint8)
            stop = encode_writes(part, table.keys, batch.ids, batch.positions, batch.gone, rows, 2, False, out, 0)
            requests.append(out[:stop])
        calls.append(requests)
    return calls


def _sending(sent: socket.socket, calls: Sequence[list[UInt8]]) -> Callable[[], None]:
    turns = cycle(calls)

    def send() -> None:
        unanswered = 0
        for request in next(turns):
            sent.sendall(request.data)
            unanswered += 2
            while unanswered > _UNANSWERED:
                unanswered -= _answers(sent)
        while unanswered > 0:
            unanswered -= _answers(sent)

    return send


def _answers(sent: socket.socket) -> int:
    """How many replies have come since it was called last; at least one."""
    received = sent.recv(1 << 16)
    if b"-" in received or not received:
        raise SystemExit(f"the server answered {received[:200]!r}")
    return received.count(b"\n")


def _parted(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
