"""The protocol by which a process attaches to shared rows, over a Unix socket.

The socket is in the abstract namespace: it has no file and ends with the owner of the rows. A process connects and
sends the token that it was given over gRPC, and one byte that says what it wants:

* `NOTIFICATIONS`: the reply has the descriptor of the store's version board, and from then on a byte arrives after each
  change. The connection lasts as long as both processes.
* `CHANNEL`, with the descriptor of a shared-memory channel (`elastable.embedding_store.wire.shared.shared_channel`):
  the reply has the number of the channel, which lives as long as the connection.
* `LAYOUT`: the first packet has the generation of the layout; each further packet describes a table, with the
  descriptors of its slabs. Then the owner closes the connection.

Each packet is JSON, with descriptors attached.
"""

import json
import logging
import os
import socket
import struct
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Generic, TypeVar

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.malformed import MALFORMED, Document
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.errors import StoreFailed, Unavailable, Unsupported
from elastable.embedding_store.support.memory_mapping import HUGE_PAGE_BYTES
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.shared.sealed_memory import EXTENT_BYTES

NOTIFICATIONS, LAYOUT, CHANNEL = b"b", b"l", b"o"
CHANNEL_NUMBER = "outbox"
"""Key of a channel's number in its packet; like the bytes above it is older than its name here."""

Packet = Document
"""Parsed JSON, of which nothing is known yet."""

TOKEN_BYTES = 16
TABLE_SLABS = 8
"""The most descriptors in a packet."""

_DTYPES = ("<f4", "<u2", "|u1", "<i8", "<u8")
_PACKET_BYTES = 64 << 10
_ANSWER_S = 5.0
_LOOK_AGAIN_S = 5.0
_LOG = logging.getLogger(__name__)

Memory = TypeVar("Memory", bound=Closing)


@dataclass(frozen=True, slots=True)
class SlabShape:
    """The shape of a slab and its position in shared memory.

    Attributes:
        rows, columns, dtype: Of its NumPy array; all three are checked.
        memory: Index of the memory's descriptor in the packet.
        offset: First byte of the slab in that memory.
    """

    rows: int
    columns: int
    dtype: str
    memory: int
    offset: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for an impossible slab."""
        counts = (self.rows, self.columns, self.memory, self.offset)
        if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
            raise ValueError(f"a slab of {counts}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"a slab of {self.dtype!r}; there are {', '.join(_DTYPES)}")
        if self.offset % HUGE_PAGE_BYTES or self.rows * self.columns > EXTENT_BYTES:
            raise ValueError(f"a slab of {self.rows} x {self.columns} at byte {self.offset}")


@dataclass(frozen=True, slots=True)
class TableLayout:
    """Where the rows of a table are.

    Attributes:
        direct: Whether row i is at position i; else an index has its position.
        directory: Slabs of its directory, as `RowDirectory.slabs` lists them.
        values: Slabs of its weights, as `RowValues.slabs` lists them.
    """

    spec: TableSpec
    direct: bool
    directory: tuple[SlabShape, ...]
    values: tuple[SlabShape, ...]


def table_to_packet(table: TableLayout) -> Packet:
    """A table as a packet; the descriptors of the memories that its slabs name are attached to it."""
    return {
        "spec": spec_to_json(table.spec),
        "direct": table.direct,
        "directory": [astuple(shape) for shape in table.directory],
        "values": [astuple(shape) for shape in table.values],
    }


def table_from_packet(packet: Packet) -> TableLayout:
    """The table that a packet describes."""
    try:
        return TableLayout(
            spec_from_json(packet["spec"]),
            bool(packet["direct"]),
            tuple(SlabShape(*shape) for shape in packet["directory"]),
            tuple(SlabShape(*shape) for shape in packet["values"]),
        )
    except MALFORMED as error:
        raise StoreFailed(f"the owner of shared rows sent a malformed table: {error!r}") from error


def connected(name: str) -> socket.socket:
    """A connection to the owner's socket.

    Raises:
        OSError: there is none on this host, or it belongs to another user.
    """
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(f"\0{name}")
        require_known_user(connection)
    except BaseException:
        connection.close()
        raise
    return connection


def send_packet(connection: socket.socket, packet: Packet, descriptors: Sequence[int] = ()) -> None:
    """Sends one packet; raises `OSError`."""
    socket.send_fds(connection, [json.dumps(packet).encode()], list(descriptors))


def receive_packet(connection: socket.socket) -> tuple[Packet, list[int]]:
    """One packet and its descriptors, which the caller closes.

    Raises:
        OSError: the connection failed, the other side has closed it, or nothing arrived in time.
        StoreFailed: the packet is malformed.
    """
    text, descriptors, _, _ = socket.recv_fds(connection, _PACKET_BYTES, TABLE_SLABS)
    if not text and not descriptors:
        raise ConnectionError("the owner of the memory hung up")
    try:
        packet = json.loads(text)
        if not isinstance(packet, dict):
            raise ValueError(f"it is a {type(packet).__name__}")
    except MALFORMED as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise StoreFailed(f"the owner of shared rows sent a malformed packet: {error}") from error
    return packet, list(descriptors)


# Whose processes may share memory with this one: those of the same user, and of root


_ROOT = 0  # who reads this process' memory anyhow
_CREDENTIALS = struct.Struct("=iII")  # pid, uid, gid


def require_known_user(connection: socket.socket) -> int:
    """The user of the process at the other end of a Unix socket.

    Raises:
        PermissionError: it is neither this one's nor root.
        OSError: the system does not say.
    """
    packed = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, user, _ = _CREDENTIALS.unpack(packed)
    ours = os.geteuid()
    if user not in (ours, _ROOT):
        raise PermissionError(f"the process at the other end is of user {user}, this one of {ours}")
    return int(user)


# What a process has attached of a server: tried again now and then while it cannot be


class Attached(Closing, Generic[Memory]):
    """Memory that is shared with a server: attached when it is first asked for, and asked for again while it is not.

    Safe to use from many threads.

    Args:
        connection: To the server; stays open.
        attach: Attaches its memory.
        near, far: What is logged with the server's address: once that succeeds; why it cannot be.

    Attributes:
        memory: What is attached now; None: nothing.
    """

    def __init__(
        self, connection: ServerConnection, attach: Callable[[], Memory], near: str, far: str, now: bool = False
    ) -> None:
        """`now`: raises what `attach` does, where it cannot be at once."""
        self._connection, self._attach, self._near, self._far = connection, attach, near, far
        self._attaching = threading.Lock()
        self._look_again = 0.0
        self._reason: str | None = None  # why it cannot be, as it was logged
        self._closed = False
        self.memory = attach() if now else None

    def find(self) -> Memory | None:
        """The memory, attached now where it is time to try. Raises `Unavailable`: the server is not reached."""
        if self.memory is not None or self._closed or time.monotonic() < self._look_again:
            return self.memory
        with self._attaching:
            if self.memory is None and not self._closed and time.monotonic() >= self._look_again:
                self._look_again = time.monotonic() + _LOOK_AGAIN_S
                try:
                    self.memory = self._attach()
                    self._reason = None
                    _LOG.info(self._near, self._connection.address)
                except Unavailable:  # an OSError, too
                    raise
                except (OSError, Unsupported) as error:
                    self._log(error)
        return self.memory

    def leave(self, memory: Memory | None, why: Exception | None = None) -> None:
        """Gives memory back that is of no use any more; without a reason it is tried again at once."""
        with self._attaching:
            if memory is not None and self.memory is memory:
                self.memory = None
                self._look_again = 0.0 if why is None else time.monotonic() + _LOOK_AGAIN_S
        if why is not None:
            self._log(why)
        if memory is not None:
            memory.close()

    def close(self) -> None:
        with self._attaching:
            self._closed = True
        self.leave(self.memory)

    def _log(self, why: Exception) -> None:
        if str(why) != self._reason:  # it is tried again every few seconds
            self._reason = str(why)
            _LOG.info(self._far, self._connection.address, why)
