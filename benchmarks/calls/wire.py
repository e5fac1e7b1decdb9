"""Lookups over gRPC compared with plain gRPC of as many bytes, and lookups from shared memory with local ones.

One process serves the store and the raw calls; another calls it.

    python -m benchmarks.calls.wire
"""

import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from functools import partial
from itertools import cycle

import grpc
import numpy as np

from benchmarks.harness import Row, Work, compare, publish, rates, versus
from benchmarks.processes import child, line_of
from benchmarks.tables.table_work import fill
from elastable.embedding_store.contract.row_source import LookupRequest, RowSource
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.tables.lookups import lookup_request
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.channels.server_connection import channel
from elastable.embedding_store.wire.messages.frames import FRAME_BYTES
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_source import SharedSource
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore
from elastable.process.heap import keep_freed_memory

_ROWS, _DIM, _BATCH = 2_000_000, 64, 65_536
_BATCHES, _OUTS = 24, 4  # in rotation, so that no row is still in a cache
_SPEC = TableSpec("t", _DIM, _ROWS, optimizer=OptimizerSpec.of("sgd", learning_rate=0.01))
_FRAMES = _BATCH * _DIM * 4 // FRAME_BYTES
_ROUNDS = 9
_RAW = "benchmarks.Raw"
_SERVES_S = 600.0


def main() -> None:
    """Measures, prints and writes `results/wire.json`."""
    with child("benchmarks.calls.wire", "--serve") as server:
        address = line_of(server)
        with RemoteSource(address) as source, channel(address) as raw:
            rows = [*_bulk(source, raw), _one_row(source, raw)]
        rows.append(_shared(address))
    publish("wire", "Lookups from another process: over gRPC on loopback, and from shared memory", rows)


def _bulk(source: RemoteSource, raw: grpc.Channel) -> list[Row]:
    random = np.random.default_rng(2026)
    batches = cycle([random.integers(0, _ROWS, _BATCH) for _ in range(_BATCHES)])
    stream, copied = (raw.unary_stream(f"/{_RAW}/{name}", None, None) for name in ("Stream", "Copied"))

    def read() -> None:
        assert sum(len(frame) for frame in stream(b"", timeout=60.0)) == _BATCH * _DIM * 4

    def read_copied() -> None:
        rows, start = np.empty(_BATCH * _DIM * 4, np.uint8), 0
        for frame in copied(next(batches).tobytes(), timeout=60.0):
            rows[start : start + len(frame)] = np.frombuffer(frame, np.uint8)
            start += len(frame)
        assert start == len(rows)

    megabytes = _BATCH * _DIM * 4 / 1e6
    works: dict[str, Work] = {"ours": lambda: source.lookup({"t": next(batches)}), "raw": read, "copied": read_copied}
    rounds = rates(works, megabytes, _ROUNDS)
    name = f"lookup of {_BATCH:,} rows x {_DIM}, against"
    return [
        compare(f"{name} a raw byte stream", "MB/s", rounds["ours"], rounds["raw"], floor=0.8),
        compare(f"{name} a raw byte stream that is copied at both ends", "MB/s", rounds["ours"], rounds["copied"]),
        compare(
            "raw byte stream that is copied at both ends, against one that is not",
            "MB/s",
            rounds["copied"],
            rounds["raw"],
        ),
    ]


def _one_row(source: RemoteSource, raw: grpc.Channel) -> Row:
    empty = raw.unary_unary(f"/{_RAW}/Empty", None, None)
    one = np.arange(1)
    source.lookup({"t": one})  # its size is known from now on
    works: dict[str, Work] = {"ours": lambda: source.lookup({"t": one}), "theirs": lambda: empty(b"", timeout=60.0)}
    rounds = rates(works, 1e-6, _ROUNDS)
    times = {name: [1 / figure for figure in figures] for name, figures in rounds.items()}
    name = "lookup of 1 row, round trip, against an empty call"
    return compare(name, "us", times["ours"], times["theirs"], floor=round(1 / 1.5, 2))


def _shared(address: str) -> Row:
    """Rows of the other process' memory, against the same rows in a store of one's own."""
    random = np.random.default_rng(2027)
    outs = [np.empty((_BATCH, _DIM), np.float32) for _ in range(_OUTS)]
    ids = [random.integers(0, _ROWS, _BATCH) for _ in range(_BATCHES)]
    requests = cycle([[lookup_request(_SPEC, of, outs[n % _OUTS])] for n, of in enumerate(ids)])
    megabytes = _BATCH * _DIM * 4 / 1e6
    with MemoryStore() as own, SharedSource(RemoteSource(address), required=True) as attached:
        fill(own, _SPEC)
        for source in (attached, own):
            source.lookup_into(next(requests))
        name = f"lookup of {_BATCH:,} rows x {_DIM} from shared memory, against in-process"
        ours, theirs = (partial(_look_up, source, requests) for source in (attached, own))
        row = versus(name, "MB/s", ours, theirs, megabytes, _ROUNDS, floor=0.9)
        assert attached.attached
    return row


def _look_up(source: RowSource, requests: Iterator[list[LookupRequest]]) -> None:
    source.lookup_into(next(requests))


def _serve() -> None:
    """Serves a table whose rows are all there, and raw calls, until it is killed."""
    frame = bytes(FRAME_BYTES)
    # As large as the table: what is copied comes from memory, as rows do.
    memory = np.ones(_ROWS * _DIM, np.float32).view(np.uint8).data
    starts = cycle(range(0, len(memory) - FRAME_BYTES, FRAME_BYTES))

    def copied(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        return (bytes(memory[start : start + FRAME_BYTES]) for start, _ in zip(starts, range(_FRAMES), strict=False))

    def stream(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        return (frame for _ in range(_FRAMES))

    raw = Service(
        _RAW,
        {
            "Stream": grpc.unary_stream_rpc_method_handler(stream),
            "Copied": grpc.unary_stream_rpc_method_handler(copied),
            "Empty": grpc.unary_unary_rpc_method_handler(lambda request, context: b""),
        },
    )
    with SharedMemoryStore() as store:
        fill(store, _SPEC)
        with suppress(OSError):  # a kernel that cannot: the figure says what that costs
            store.make_huge()
        with GrpcServer("127.0.0.1:0", [store_service(store), raw], anonymous=Role.ADMINISTRATOR) as server:
            print(server.address, flush=True)
            time.sleep(_SERVES_S)


if __name__ == "__main__":
    keep_freed_memory()  # as every process of the `elastable` command does
    _serve() if "--serve" in sys.argv else main()
