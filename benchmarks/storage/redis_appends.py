"""How fast entries are appended to a log in Redis, against the same bytes added to a stream through a plain socket.

Both send parts of 512 KiB. The log checks its entries, appends each in one transaction that a superseded process is
refused, and waits for each; the socket sends XADD commands and waits after the last part of each payload. Nothing is
persisted.

    python -m benchmarks.storage.redis_appends
"""

import socket
import time
from contextlib import closing

import numpy as np

from benchmarks.harness import Row, compare, interleaved, publish
from benchmarks.processes import redis_server
from elastable.embedding_store.tiers.redis.redis_log import RedisLog
from elastable.embedding_store.tiers.redis.reply_shapes import packed_command
from elastable.embedding_store.tiers.redis.stream_records import PART_BYTES
from elastable.process.heap import keep_freed_memory
from tests.servers import Server

_ROUNDS, _A_ROUND_BYTES = 15, 1 << 26
_SIZES = (1 << 18, 1 << 20, 1 << 23)


def main() -> None:
    """Measures, prints and writes `results/redis_appends.json`."""
    with redis_server() as server:
        rows = [_appends(server, size) for size in _SIZES]
    publish("redis_appends", "entries of a log in Redis, nothing persisted", rows)


def _appends(server: Server, size: int) -> Row:
    payload, times = np.random.default_rng(1).bytes(size), _A_ROUND_BYTES // size
    with RedisLog(server.url) as log, closing(socket.create_connection(("127.0.0.1", server.port))) as plain:
        plain.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

        def ours() -> float:
            began = time.perf_counter()
            for _ in range(times):
                log.append(log.last + 1, 0, [payload])
            seconds = time.perf_counter() - began
            log.trim(log.last)
            return times * size / seconds / 1e6

        def theirs() -> float:
            began = time.perf_counter()
            for _ in range(times):
                _add(plain, payload)
            seconds = time.perf_counter() - began
            plain.sendall(packed_command(("DEL", "plain")))
            _receive_lines(plain, 1)
            return times * size / seconds / 1e6

        ours(), theirs()
        rounds = interleaved({"log": ours, "socket": theirs}, _ROUNDS)
    return compare(f"entries of {size >> 10:,} KiB, vs. a plain socket", "MB/s", rounds["log"], rounds["socket"])


def _add(plain: socket.socket, payload: bytes) -> None:
    parts = [payload[at : at + PART_BYTES] for at in range(0, len(payload), PART_BYTES)]
    for part in parts:
        plain.sendall(b"*5\r\n$4\r\nXADD\r\n$5\r\nplain\r\n$1\r\n*\r\n$1\r\np\r\n$%d\r\n" % len(part))
        plain.sendall(part)
        plain.sendall(b"\r\n")
    _receive_lines(plain, 2 * len(parts))


def _receive_lines(plain: socket.socket, lines: int) -> None:
    received = b""
    while received.count(b"\r\n") < lines:
        received += plain.recv(1 << 16)


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    main()
