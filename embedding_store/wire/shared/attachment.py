"""What the owner of shared rows tells a process that attaches them, over a Unix socket.

The socket lies in the abstract namespace: it has no file, and ends with its
owner. A process connects, sends the token that it was given over gRPC and one
letter for what it wants:

* `BELL`: the descriptor of the store's board comes back, and from then on a
  byte after each change. The connection lasts as long as both processes: who
  dies hangs up.
* `OUTBOX`, with the descriptor of an outbox (`elastable.embedding_store.wire.shared.outbox`): its number comes back. It
  is good for as long as the connection.
* `LAYOUT`: messages come back, the first with the generation that the layout
  is of, then one a table with its description and the descriptors of its
  slabs, and the owner hangs up.

Each message is one packet: JSON, beside it descriptors.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_from_json, spec_to_json
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.support.memory_mapping import HUGE_PAGE_BYTES
from elastable.embedding_store.wire.shared.sealed_memory import EXTENT_BYTES
from elastable.embedding_store.wire.shared.users import require_known_user

__all__ = [
    "BELL",
    "LAYOUT",
    "OUTBOX",
    "TABLE_SLABS",
    "TOKEN_BYTES",
    "SlabShape",
    "TableLayout",
    "connected",
    "receive_packet",
    "send_packet",
    "table_from_packet",
    "table_to_packet",
]

BELL, LAYOUT, OUTBOX = b"b", b"l", b"o"
TOKEN_BYTES = 16
TABLE_SLABS = 8
"""Descriptors in a packet at most."""

_DTYPES = ("<f4", "<u2", "|u1", "<i8", "<u8")
_PACKET_BYTES = 64 << 10
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class SlabShape:
    """How a slab lies.

    Attributes:
        rows, columns, dtype: As of its NumPy array; all three checked.
        memory: Which of the descriptors beside the packet it lies in.
        offset: At which byte there it begins.
    """

    rows: int
    columns: int
    dtype: str
    memory: int
    offset: int

    def __post_init__(self) -> None:
        """Raises `ValueError` for what no slab can be."""
        counts = (self.rows, self.columns, self.memory, self.offset)
        if not all(type(count) is int and 0 <= count < 1 << 62 for count in counts):
            raise ValueError(f"a slab of {counts}")
        if self.dtype not in _DTYPES:
            raise ValueError(f"a slab of {self.dtype!r}; there are {', '.join(_DTYPES)}")
        if self.offset % HUGE_PAGE_BYTES or self.rows * self.columns > EXTENT_BYTES:
            raise ValueError(f"a slab of {self.rows} x {self.columns} at byte {self.offset}")


@dataclass(frozen=True, slots=True)
class TableLayout:
    """How the rows of a table lie.

    Attributes:
        spec: The table.
        direct: Whether row i lies at position i; else an index says where.
        directory: Slabs of its directory, as `RowDirectory.slabs` lists them.
        values: Slabs of its weights, as `RowValues.slabs` lists them.
    """

    spec: TableSpec
    direct: bool
    directory: tuple[SlabShape, ...]
    values: tuple[SlabShape, ...]


def table_to_packet(table: TableLayout) -> dict[str, Any]:
    """What a packet says of a table; beside it go the descriptors of the memories that its slabs name."""
    return {
        "spec": spec_to_json(table.spec),
        "direct": table.direct,
        "directory": [astuple(shape) for shape in table.directory],
        "values": [astuple(shape) for shape in table.values],
    }


def table_from_packet(packet: dict[str, Any]) -> TableLayout:
    """The table that a packet describes.

    Raises:
        StoreFailed: it describes none.
    """
    try:
        return TableLayout(
            spec_from_json(packet["spec"]),
            bool(packet["direct"]),
            tuple(SlabShape(*shape) for shape in packet["directory"]),
            tuple(SlabShape(*shape) for shape in packet["values"]),
        )
    except MALFORMED as error:
        raise StoreFailed(f"what the owner of shared rows says of a table makes no sense: {error!r}") from error


def connected(name: str) -> socket.socket:
    """A connection to the owner's socket.

    Raises:
        OSError: there is none on this host, or it is another user's.
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


def send_packet(connection: socket.socket, packet: dict[str, Any], descriptors: Sequence[int] = ()) -> None:
    """Sends one packet; raises `OSError`."""
    socket.send_fds(connection, [json.dumps(packet).encode()], list(descriptors))


def receive_packet(connection: socket.socket) -> tuple[dict[str, Any] | None, list[int]]:
    """One packet and its descriptors, now the caller's to close; None where the other side hung up.

    Raises:
        OSError: the connection failed, or nothing came in time.
        StoreFailed: what came is no packet.
    """
    text, descriptors, _, _ = socket.recv_fds(connection, _PACKET_BYTES, TABLE_SLABS)
    try:
        packet = json.loads(text) if text else None
        if not isinstance(packet, dict | None):
            raise ValueError(f"it is a {type(packet).__name__}")
    except MALFORMED as error:
        for descriptor in descriptors:
            os.close(descriptor)
        raise StoreFailed(f"what the owner of shared rows says makes no sense: {error}") from error
    return packet, list(descriptors)
