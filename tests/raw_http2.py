"""HTTP/2 by hand, for clients that no library would be: they stop anywhere, and read nothing."""

import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LIMIT_S = 120.0
_AGAIN_S = 0.002  # else it is the tests' own process that answers nobody
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
_DATA, _HEADERS, _SETTINGS, _PING = 0, 1, 4, 6
_INITIAL_WINDOW = 4
_ACK, _END_STREAM, _END_HEADERS = 1, 1, 4


def frame(kind: int, flags: int, stream: int, body: bytes = b"") -> bytes:
    return struct.pack("!I", len(body))[1:] + bytes([kind, flags]) + struct.pack("!I", stream) + body


def begun(window: int = 65_535) -> bytes:
    """What a connection begins with; `window`: bytes of each answer that may be sent to it."""
    return PREFACE + frame(_SETTINGS, 0, 0, struct.pack("!HI", _INITIAL_WINDOW, window)) + frame(_SETTINGS, _ACK, 0)


def ping() -> bytes:
    return frame(_PING, 0, 0, bytes(8))


def call(stream: int, method: str, message: bytes = b"", ends: bool = True, token: str | None = None) -> bytes:
    """A call and its one message; `stream`: odd, and higher from call to call."""
    fields = {":method": "POST", ":scheme": "http", ":path": method, ":authority": "localhost", "te": "trailers"}
    fields["content-type"] = "application/grpc"
    if token is not None:
        fields["authorization"] = f"Bearer {token}"
    head = b"".join(b"\0" + _text(name) + _text(value) for name, value in fields.items())
    body = b"\0" + struct.pack("!I", len(message)) + message
    flags = _END_STREAM if ends else 0
    return frame(_HEADERS, _END_HEADERS, stream, head) + frame(_DATA, flags, stream, body)


def half_a_call(stream: int) -> bytes:
    """A head that does not end."""
    return frame(_HEADERS, 0, stream, b"\0" + _text(":method") + _text("POST"))


def _text(text: str) -> bytes:
    return _length(len(text)) + text.encode()


def _length(length: int) -> bytes:
    if length < 127:
        return bytes([length])
    left, coded = length - 127, bytearray(b"\x7f")
    while left >= 128:
        coded.append(left % 128 | 128)
        left //= 128
    return bytes([*coded, left])


def connected(address: str, said: bytes = b"", source: str = "") -> socket.socket:
    """A connection from the address `source` of this host ("": any)."""
    host, _, port = address.rpartition(":")
    client = socket.create_connection((host, int(port)), timeout=LIMIT_S, source_address=(source, 0))
    client.sendall(said)
    return client


def is_open(client: socket.socket) -> bool:
    """Whether the server has not ended the connection; what it has said until now is read and dropped."""
    try:
        client.setblocking(False)
        while client.recv(1 << 16):
            pass
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def until_ended(client: socket.socket) -> None:
    """Returns once the server has ended the connection."""
    end = time.monotonic() + LIMIT_S
    client.settimeout(LIMIT_S)
    try:
        while client.recv(1 << 16):
            assert time.monotonic() < end, "it goes on"
    except ConnectionError:
        pass


@contextmanager
def flood(address: str, said: bytes, count: int = 200) -> Iterator[list[int]]:
    """So many connections, each of which is opened again as often as it is ended; which ones were, in order."""
    over, ended = threading.Event(), list[int]()
    held = [connected(address, said) for _ in range(count)]

    def open_again() -> None:
        while not over.is_set():
            for at, client in enumerate(held):
                if not is_open(client) and not over.is_set():
                    client.close()
                    ended.append(at)
                    over.wait(_AGAIN_S)
                    with suppress(OSError):
                        held[at] = connected(address, said)

    thread = threading.Thread(target=open_again)
    thread.start()
    try:
        yield ended
    finally:
        over.set()
        thread.join()
        for client in held:
            client.close()
