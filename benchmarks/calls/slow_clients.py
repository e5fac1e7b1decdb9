"""Two clients that are slow: one that hardly reads what it asked for, and one that hardly says what it asks for."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import numpy as np

from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import encode
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE

_READ, _SAID = 32_768, 262_144  # ids: the reply of the one, and the question of the other, are several messages
_PAUSE_S = 5.0
_DEADLINE_S = 120.0


@contextmanager
def slow_clients(address: str, table: str) -> Iterator[None]:
    """Both, while the block runs; a call that the server ends is made again."""
    stopped = threading.Event()
    with (
        grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as reads,
        grpc.insecure_channel(address, options=[("grpc.use_local_subchannel_pool", 1)]) as says,
    ):
        clients = [
            threading.Thread(target=_again, args=(stopped, _read_slowly, reads, table), name="slow reader"),
            threading.Thread(target=_again, args=(stopped, _say_slowly, says, table), name="slow sender"),
        ]
        for client in clients:
            client.start()
        try:
            yield
        finally:
            stopped.set()
            for client in clients:
                client.join()


def _again(stopped: threading.Event, call: object, channel: grpc.Channel, table: str) -> None:
    assert callable(call)
    while not stopped.is_set():
        with suppress(grpc.RpcError):
            call(stopped, channel, table)
        stopped.wait(0.1)


def _read_slowly(stopped: threading.Event, channel: grpc.Channel, table: str) -> None:
    replies = _lookup(channel)(iter(_frames(table, _READ)), timeout=_DEADLINE_S)
    for _ in replies:
        if stopped.wait(_PAUSE_S):
            replies.cancel()  # type: ignore[no-untyped-call]
            return


def _say_slowly(stopped: threading.Event, channel: grpc.Channel, table: str) -> None:
    def frames() -> Iterator[bytes]:
        for frame in _frames(table, _SAID):
            yield frame
            if stopped.wait(_PAUSE_S):
                return

    for _ in _lookup(channel)(frames(), timeout=_DEADLINE_S):
        pass


def _lookup(channel: grpc.Channel) -> "grpc.StreamStreamMultiCallable[bytes, bytes]":
    return channel.stream_stream(f"/{STORE_SERVICE}/Lookup", None, None)


def _frames(table: str, count: int) -> list[bytes]:
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table=table, count=count)])
    return list(encode(header.SerializeToString(), [np.arange(count, dtype=np.int64) % 1_000]))
