"""What the owner of shared rows tells a process that attaches them, over a Unix socket.

The socket lies in the abstract namespace: it has no file, and ends with its
owner. A process connects, sends the token that it was given over gRPC and one
letter for what it wants:

* `BELL`: the descriptor of the store's board comes back, and from then on a
  byte after each change. The connection lasts as long as both processes: who
  dies hangs up.
* `OUTBOX`, with the descriptor of an outbox (`elastable.embedding_store.shared.outbox`): its number comes back. It is
  good for as long as the connection.
* `LAYOUT`: messages come back, the first with the generation that the layout
  is of, then one a table with its description and the descriptors of its
  slabs, and the owner hangs up.

Each message is one packet: JSON, beside it descriptors.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from elastable.embedding_store.spec import TableSpec
from elastable.embedding_store.spec_json import spec_from_json, spec_to_json

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

_PACKET_BYTES = 64 << 10
_ANSWER_S = 5.0


@dataclass(frozen=True, slots=True)
class SlabShape:
    """Rows, columns and NumPy dtype of a slab."""

    rows: int
    columns: int
    dtype: str


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
    """What a packet says of a table; its descriptors are those of `directory`, then of `values`."""
    return {
        "spec": spec_to_json(table.spec),
        "direct": table.direct,
        "directory": [[shape.rows, shape.columns, shape.dtype] for shape in table.directory],
        "values": [[shape.rows, shape.columns, shape.dtype] for shape in table.values],
    }


def table_from_packet(packet: dict[str, Any]) -> TableLayout:
    """The table that a packet describes."""
    return TableLayout(
        spec_from_json(packet["spec"]),
        bool(packet["direct"]),
        tuple(SlabShape(*shape) for shape in packet["directory"]),
        tuple(SlabShape(*shape) for shape in packet["values"]),
    )


def connected(name: str) -> socket.socket:
    """A connection to the owner's socket; raises `OSError` where there is none on this host."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(_ANSWER_S)
    try:
        connection.connect(f"\0{name}")
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
    """
    text, descriptors, _, _ = socket.recv_fds(connection, _PACKET_BYTES, TABLE_SLABS)
    return (json.loads(text) if text else None), list(descriptors)
