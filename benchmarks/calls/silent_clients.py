"""Clients that open a call and then stay silent (a minimal HTTP/2 client, thousands per thread), and slow ones."""

import selectors
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

import grpc
import numpy as np

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import encode
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE

_PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _RESET, _SETTINGS, _PING = 0, 1, 3, 4, 6
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4
_WAIT_S = 0.1


class SilentClients(Closing):
    """Connections with one open call each, whose message never comes; a call that the server ends is made again.

    Args:
        address: `host:port` of a gRPC server in plain text.
        method: `/package.Service/Method`.
        count: Of connections; every other one does not even open a call.
        pause_s: Seconds after which a call that was ended is made again.

    Attributes:
        ended: Calls that the server ended so far.
    """

    def __init__(self, address: str, method: str, count: int, pause_s: float = 1.0) -> None:
        host, _, port = address.rpartition(":")
        self._method = method
        self._stopped = threading.Event()
        self._waiting = selectors.DefaultSelector()
        self._received: dict[socket.socket, bytearray] = {}
        self._streams: dict[socket.socket, int] = {}
        self._again: dict[socket.socket, float] = {}  # when an ended call is made again
        self._pause_s = pause_s
        self.ended = 0
        for number in range(count):
            one = socket.create_connection((host, int(port)), timeout=60.0)
            one.setblocking(False)
            self._received[one] = bytearray()
            self._waiting.register(one, selectors.EVENT_READ)
            if number % 2 == 0:
                self._send(one, _PREFACE + _frame(_SETTINGS, 0, 0, b""))
                self._call(one, 1)
        self._thread = threading.Thread(target=self._listen, name="silent", daemon=True)
        self._thread.start()

    @property
    def connected(self) -> int:
        """Connections that the server has not closed."""
        return len(self._received)

    def close(self) -> None:
        """Closes all connections."""
        self._stopped.set()
        self._thread.join()
        for one in list(self._received):
            self._drop(one)
        self._waiting.close()

    def _listen(self) -> None:
        while not self._stopped.is_set():
            for key, _ in self._waiting.select(_WAIT_S):
                assert isinstance(key.fileobj, socket.socket)
                self._hear(key.fileobj)
            now = time.monotonic()
            for one in [one for one, at in self._again.items() if at <= now]:
                del self._again[one]
                if one in self._streams:
                    self._call(one, self._streams[one] + 2)

    def _hear(self, one: socket.socket) -> None:
        try:
            said = one.recv(1 << 16)
        except BlockingIOError:
            return
        except OSError:
            said = b""
        if not said:
            self._drop(one)
            return
        held = self._received[one]
        held += said
        while len(held) >= 9:
            length = int.from_bytes(held[:3], "big")
            if len(held) < 9 + length:
                return
            kind, flags, stream = held[3], held[4], int.from_bytes(held[5:9], "big")
            payload = bytes(held[9 : 9 + length])
            del held[: 9 + length]
            self._answer(one, kind, flags, stream, payload)

    def _answer(self, one: socket.socket, kind: int, flags: int, stream: int, payload: bytes) -> None:
        if one not in self._streams:
            return
        if kind in (_SETTINGS, _PING) and not flags & _ACK:
            self._send(one, _frame(kind, _ACK, 0, payload if kind == _PING else b""))
        elif stream == self._streams.get(one) and (
            kind == _RESET or (kind in (_HEADERS, _DATA) and flags & _END_STREAM)
        ):
            self.ended += 1
            self._again[one] = time.monotonic() + self._pause_s

    def _call(self, one: socket.socket, stream: int) -> None:
        self._streams[one] = stream
        fields = {":method": "POST", ":scheme": "http", ":path": self._method, ":authority": "silent", "te": "trailers"}
        fields["content-type"] = "application/grpc"
        headers = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
        self._send(one, _frame(_HEADERS, _END_HEADERS, stream, headers))

    def _send(self, one: socket.socket, said: bytes) -> None:
        with suppress(OSError):  # the end is seen when it is listened to
            one.send(said)

    def _drop(self, one: socket.socket) -> None:
        with suppress(KeyError):
            self._waiting.unregister(one)
        self._received.pop(one, None)
        self._streams.pop(one, None)
        one.close()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _text(value: str) -> bytes:
    """A literal of HPACK, shorter than 127 bytes."""
    return bytes((len(value),)) + value.encode()


# Two clients that are slow: one that hardly reads what it asked for, and one that hardly says what it asks for


_READ, _SAID = 32_768, 262_144  # ids: the reply of the one, and the question of the other, are several messages
_SLOW_PAUSE_S = 5.0
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
        if stopped.wait(_SLOW_PAUSE_S):
            replies.cancel()  # type: ignore[no-untyped-call]
            return


def _say_slowly(stopped: threading.Event, channel: grpc.Channel, table: str) -> None:
    def frames() -> Iterator[bytes]:
        for frame in _frames(table, _SAID):
            yield frame
            if stopped.wait(_SLOW_PAUSE_S):
                return

    for _ in _lookup(channel)(frames(), timeout=_DEADLINE_S):
        pass


def _lookup(channel: grpc.Channel) -> "grpc.StreamStreamMultiCallable[bytes, bytes]":
    return channel.stream_stream(f"/{STORE_SERVICE}/Lookup", None, None)


def _frames(table: str, count: int) -> list[bytes]:
    header = store_pb2.LookupHeader(tables=[store_pb2.TableIds(table=table, count=count)])
    return list(encode(header.SerializeToString(), [np.arange(count, dtype=np.int64) % 1_000]))
