"""Our server on threads against `grpc.aio`, while 200 sessions wait at each: small lookups, waits that end, streams.

Both serve the same methods of the same store, each in a process of its own, and one client calls both in turns.

    python -m benchmarks.calls.waiting
"""

import asyncio
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import Future
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from itertools import cycle
from typing import Any

import grpc
import grpc.aio
import numpy as np

from benchmarks.harness import compare, interleaved, publish, rate
from benchmarks.processes import child, line_of
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.wire.access.credentials import Role
from elastable.embedding_store.wire.channels.server_connection import MESSAGE_OPTIONS, channel
from elastable.embedding_store.wire.messages.frames import FRAME_BYTES, REQUEST_KEY
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.server.handlers import Later
from elastable.embedding_store.wire.service.store_service import StoreServicer, store_service
from elastable.process.heap import keep_collections_short, keep_freed_memory

_SESSIONS, _CLIENTS, _WAITS, _FRAMES, _ROUNDS = 200, 8, 64, 64, 15
_DIM, _ROWS, _BATCH = 64, 100_000, 65_536
_WAITING = "benchmarks.Waiting"
_DEADLINE_S = 120.0
_SERVERS = ("ours", "aio")


def main() -> None:
    """Measures, prints and writes `results/waiting.json`."""
    with ExitStack() as held:
        clients = {name: held.enter_context(_client(name)) for name in _SERVERS}
        rows = []
        for what, unit, measure in _MEASURED:
            figures = interleaved({name: partial(measure, client) for name, client in clients.items()}, _ROUNDS)
            name = f"{what}, {_SESSIONS} sessions waiting, against grpc.aio"
            rows.append(compare(name, unit, figures["ours"], figures["aio"]))
    publish("waiting", "Our server on threads and grpc.aio, while sessions wait", rows)


@dataclass
class _Client:
    """Calls one server, at which it has sessions that wait."""

    source: RemoteSource
    raw: grpc.Channel
    channels: list[grpc.Channel]
    frames: Iterator[bytes] = field(
        default_factory=lambda: cycle([np.random.default_rng(n).bytes(FRAME_BYTES) for n in range(8)])
    )

    def lookup_us(self) -> float:
        """Microseconds of a lookup of one row."""
        one = np.arange(1)
        return 1e6 / rate(lambda: self.source.lookup({"t": one}), 1.0)()

    def rows(self) -> float:
        """Megabytes a second of lookups of many rows."""
        ids = np.random.default_rng(2026).integers(0, _ROWS, _BATCH)
        return rate(lambda: self.source.lookup({"t": ids}), _BATCH * _DIM * 4 / 1e6)()

    def waits_us(self) -> float:
        """Microseconds from what calls wait for to the last of their answers."""
        one = self.raw.unary_unary(f"/{_WAITING}/Wait", None, None)
        release = self.raw.unary_unary(f"/{_WAITING}/Release", None, None)
        took = []
        for _ in range(10):
            waits = [one.future(b"", timeout=_DEADLINE_S) for _ in range(_WAITS)]
            while True:  # until all wait
                began = time.perf_counter()
                if release(b"", timeout=_DEADLINE_S):
                    break
                time.sleep(0.01)
            assert all(wait.result() == b"over" for wait in waits)
            took.append(time.perf_counter() - began)
        return 1e6 * float(np.median(took))

    def down(self) -> float:
        """Megabytes a second of a stream of chunks to the client."""
        stream = self.raw.unary_stream(f"/{_WAITING}/Down", None, None)

        def read() -> None:
            assert sum(len(chunk) for chunk in stream(b"", timeout=_DEADLINE_S)) == _FRAMES * FRAME_BYTES

        return rate(read, _FRAMES * FRAME_BYTES / 1e6)()

    def up(self) -> float:
        """And to the server."""
        stream = self.raw.stream_unary(f"/{_WAITING}/Up", None, None)

        def send() -> None:
            reply = stream((next(self.frames) for _ in range(_FRAMES)), timeout=_DEADLINE_S)
            assert int(reply) == _FRAMES * FRAME_BYTES

        return rate(send, _FRAMES * FRAME_BYTES / 1e6)()


_MEASURED: list[tuple[str, str, Callable[[_Client], float]]] = [
    ("lookup of 1 row", "us", _Client.lookup_us),
    (f"lookup of {_BATCH:,} rows x {_DIM}", "MB/s", _Client.rows),
    (f"{_WAITS} calls that wait, until the last one is answered", "us", _Client.waits_us),
    (f"stream of {_FRAMES} chunks of 1 MiB to the client", "MB/s", _Client.down),
    (f"stream of {_FRAMES} chunks of 1 MiB to the server", "MB/s", _Client.up),
]


@contextmanager
def _client(name: str) -> Iterator[_Client]:
    with ExitStack() as held:
        address = line_of(held.enter_context(child("benchmarks.calls.waiting", "--serve", name)))
        source, raw = held.enter_context(RemoteSource(address)), held.enter_context(channel(address))
        others = [
            held.enter_context(grpc.insecure_channel(address, [("grpc.use_local_subchannel_pool", 1)]))
            for _ in range(_CLIENTS)
        ]
        for number in range(_SESSIONS):
            session = others[number % _CLIENTS].unary_stream(f"/{_WAITING}/Session", None, None)(b"")
            assert next(iter(session)) == b"open"
            held.callback(session.cancel)
        yield _Client(source, raw, others)


# The servers


@contextmanager
def _store() -> Iterator[MemoryStore]:
    with MemoryStore() as store:
        store.create_table(TableSpec("t", _DIM, _ROWS))
        yield store


class _Waits:
    """What calls wait for."""

    def __init__(self) -> None:
        self._waiting: list[Future[bytes]] = []

    def begin(self) -> Future[bytes]:
        """A call that waits from now on."""
        result: Future[bytes] = Future()
        self._waiting.append(result)
        return result

    def release(self) -> bytes:
        """Answers them all once as many wait as there shall be; what it gives says whether it did."""
        if len(self._waiting) < _WAITS:
            return b""
        over, self._waiting = self._waiting, []
        for each in over:
            each.set_result(b"over")
        return b"released"


def _serve_ours() -> None:
    waits, chunk = _Waits(), bytes(FRAME_BYTES)

    def session(request: bytes, context: grpc.ServicerContext) -> Later[bytes]:
        return Later(Future[bytes](), lambda reply: reply, (b"open",))

    handlers = {
        "Wait": grpc.unary_unary_rpc_method_handler(lambda _, context: Later(waits.begin(), lambda reply: reply)),
        "Session": grpc.unary_stream_rpc_method_handler(session),
        "Release": grpc.unary_unary_rpc_method_handler(lambda _, context: waits.release()),
        "Down": grpc.unary_stream_rpc_method_handler(lambda _, context: (chunk for _ in range(_FRAMES))),
        "Up": grpc.stream_unary_rpc_method_handler(lambda chunks, context: b"%d" % sum(map(len, chunks))),
    }
    service = Service(_WAITING, handlers, sessions=frozenset({"Session"}), waiting=frozenset({"Wait"}))
    with (
        _store() as store,
        GrpcServer("127.0.0.1:0", [store_service(store), service], anonymous=Role.ADMINISTRATOR) as server,
    ):
        print(server.address, flush=True)
        time.sleep(_DEADLINE_S)


async def _serve_aio() -> None:
    waits, chunk, never = _Waits(), bytes(FRAME_BYTES), asyncio.Event()

    async def wait(request: bytes, context: object) -> bytes:
        return await asyncio.wrap_future(waits.begin())

    async def session(request: bytes, context: object) -> AsyncIterator[bytes]:
        yield b"open"
        await never.wait()

    async def release(request: bytes, context: object) -> bytes:
        return waits.release()

    async def down(request: bytes, context: object) -> AsyncIterator[bytes]:
        for _ in range(_FRAMES):
            yield chunk

    async def up(chunks: AsyncIterator[bytes], context: object) -> bytes:
        size = 0
        async for each in chunks:
            size += len(each)
        return b"%d" % size

    with _store() as store:
        rows = StoreServicer(store)

        async def lookup(frame: bytes, context: grpc.ServicerContext) -> object:
            sent: Any = dict(context.invocation_metadata())
            return rows.lookup_small(sent.get(REQUEST_KEY, frame), context.peer())

        async def lookup_many(frames: AsyncIterator[bytes], context: grpc.ServicerContext) -> AsyncIterator[bytes]:
            """Rows are gathered in other threads: whatever takes long in the loop's delays all other calls."""
            loop, received = asyncio.get_running_loop(), [frame async for frame in frames]
            later = await loop.run_in_executor(None, rows.lookup, iter(received), context.peer())
            replies: Iterator[bytes] = iter(later.at_once())  # type: ignore[arg-type]
            take: Callable[[], bytes | None] = partial(next, replies, None)
            while (frame := await loop.run_in_executor(None, take)) is not None:
                yield frame

        server = grpc.aio.server(options=MESSAGE_OPTIONS)
        handlers = {
            "Wait": grpc.unary_unary_rpc_method_handler(wait),
            "Session": grpc.unary_stream_rpc_method_handler(session),
            "Release": grpc.unary_unary_rpc_method_handler(release),
            "Down": grpc.unary_stream_rpc_method_handler(down),
            "Up": grpc.stream_unary_rpc_method_handler(up),
        }
        server.add_generic_rpc_handlers(
            (
                grpc.method_handlers_generic_handler(_WAITING, handlers),
                grpc.method_handlers_generic_handler(
                    STORE_SERVICE,
                    {
                        "LookupSmall": grpc.unary_unary_rpc_method_handler(lookup),
                        "Lookup": grpc.stream_stream_rpc_method_handler(lookup_many),
                    },
                ),
            )
        )
        port = server.add_insecure_port("127.0.0.1:0")
        await server.start()
        print(f"127.0.0.1:{port}", flush=True)
        await asyncio.sleep(_DEADLINE_S)


if __name__ == "__main__":
    keep_freed_memory()
    if sys.argv[1:2] == ["--serve"]:
        keep_collections_short()
        _serve_ours() if sys.argv[2] == "ours" else asyncio.run(_serve_aio())
    else:
        main()
