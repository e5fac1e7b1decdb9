"""Rows of a store in another process, over gRPC."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.tables import BaseSource
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.messages.frames import (
    MAX_BODY_BYTES,
    ONE_FRAME_BYTES,
    BodyPlan,
    FrameReader,
    StreamingUpload,
    encode,
)
from elastable.embedding_store.wire.messages.store_messages import (
    LONGEST_WAIT_S,
    STORE_SERVICE,
    require_wire_ids,
    spec_from_message,
)

__all__ = ["RemoteSource"]

_FLOAT32 = np.dtype(np.float32)
_FEW_TABLES = 1_000  # whose names leave room for rows in a reply of one frame


class RemoteSource(BaseSource):
    """Looks rows up at a store that another process serves; one call for all tables.

    Every call ends within the deadline: a server that is not reached is tried again until then, as all of them may be
    repeated without harm.

    Args:
        target: `host:port`, or a `ServerConnection`, which stays its owner's to close.
        deadline_s: Seconds for each call, where `target` is an address.
        credentials: Of this client, where `target` is an address; None: those of the environment.

    Raises:
        BadInput: no such address or deadline can be, or it cannot be called with such credentials.
    """

    _moves = False  # as of `ServerConnection`

    def __init__(
        self, target: str | ServerConnection, deadline_s: float = 30.0, credentials: Credentials | None = None
    ) -> None:
        self._owns = isinstance(target, str)
        if isinstance(target, str):
            target = ServerConnection(target, deadline_s, credentials, self._moves)
        self._connection = target
        channel = self._connection.channel
        self._stub = store_pb2_grpc.EmbeddingStoreStub(channel)
        path = f"/{STORE_SERVICE}"
        self._lookup_small = channel.unary_unary(f"{path}/LookupSmall", None, None)
        self._lookup = StreamingUpload(channel, f"{path}/Lookup")
        self._row_bytes: dict[str, int] = {}  # of the tables seen so far

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self._connection.address

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name."""
        request = store_pb2.ListTablesRequest()
        reply = self._connection.call(lambda timeout: self._stub.ListTables(request, timeout=timeout))
        return {status.spec.name: spec_from_message(status.spec) for status in reply.tables}

    def version(self) -> int:
        """The current version."""
        return self._version_when(0, 0.0)

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """The server waits, for a minute per call at most."""
        end = time.monotonic() + timeout_s
        while True:
            left = max(end - time.monotonic(), 0.0)
            if self._version_when(version, min(left, LONGEST_WAIT_S)) >= version:
                return True
            if left <= LONGEST_WAIT_S:
                return False

    def attach(self) -> tuple[str, bytes]:
        """The name of the socket where the store's memory is to be had, and what to say there.

        Raises:
            Unsupported: its memory is not shared.
        """
        request = store_pb2.AttachRequest()
        reply = self._connection.call(lambda timeout: self._stub.Attach(request, timeout=timeout))
        return reply.socket, reply.token

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows of many tables in one call; see `RowSource.lookup`.

        Raises:
            Unavailable, DeadlineExceeded: naming address and deadline.
        """
        return self._look_up(ids, version, 0.0)

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        """One call, which waits at the server."""
        return self._look_up(ids, version, wait_s)

    def _look_up(
        self, ids: Mapping[str, Int64], version: int | None, wait_s: float, pin: bytes = b""
    ) -> dict[str, Float32]:
        for table, wanted in ids.items():
            require_wire_ids(table, wanted)
        request = store_pb2.LookupHeader(version=version, wait_ms=round(wait_s * 1000), pin=pin)
        for table, wanted in ids.items():
            request.tables.add(table=table, count=len(wanted))
        header = request.SerializeToString()

        def attempt(timeout: float) -> dict[str, Float32]:
            return self._read(self._send(header, ids, timeout), ids)

        return self._connection.call(attempt, wait_s)

    def close(self) -> None:
        """Closes the connection, where it is this source's own. Closing twice is harmless."""
        if self._owns:
            self._connection.close()

    def _version_when(self, at_least: int, wait_s: float) -> int:
        """The version, once it is `at_least` or after `wait_s` seconds."""
        request = store_pb2.GetVersionRequest(at_least=at_least, wait_ms=round(wait_s * 1000))
        reply = self._connection.call(lambda timeout: self._stub.GetVersion(request, timeout=timeout), wait_s)
        return int(reply.version)

    def _send(self, header: bytes, ids: Mapping[str, Int64], timeout: float) -> Iterable[bytes]:
        """Makes the call in the cheapest shape that carries it; its reply's frames."""
        frames = encode(header, ids.values())
        if not self._reply_is_small(ids):
            return self._lookup(frames, timeout)
        first, second = next(frames), next(frames, None)
        if second is None:
            return [self._lookup_small(first, timeout=timeout)]
        return self._lookup(chain((first, second), frames), timeout)

    def _reply_is_small(self, ids: Mapping[str, Int64]) -> bool:
        """Whether the reply is known to be one that LookupSmall may carry."""
        sizes = (len(wanted) * self._row_bytes.get(table, MAX_BODY_BYTES) for table, wanted in ids.items())
        return len(ids) <= _FEW_TABLES and sum(sizes) <= ONE_FRAME_BYTES

    def _read(self, frames: Iterable[bytes], ids: Mapping[str, Int64]) -> dict[str, Float32]:
        """The rows in a reply."""
        try:
            reader = FrameReader(frames, "LookupReply")
            header = reader.header(store_pb2.LookupReplyHeader)
            plan = BodyPlan("LookupReply")
            if len(header.tables) != len(ids):
                raise BadInput(f"LookupReply: it holds {len(header.tables)} tables where {len(ids)} were asked for")
            for entry, (table, wanted) in zip(header.tables, ids.items(), strict=True):
                if entry.table != table or entry.count != len(wanted):
                    raise BadInput(
                        f"LookupReply: it holds {entry.count} rows of table {entry.table!r} "
                        f"where {len(wanted)} of {table!r} were asked for"
                    )
                if entry.dtype != "float32":
                    raise BadInput(f"LookupReply: rows of table {table!r} are {entry.dtype!r}, not 'float32'")
                plan.add(f"rows of table {table!r}", (entry.count, entry.dim), _FLOAT32)
                self._row_bytes[table] = 4 * entry.dim
            rows = reader.read(plan)
        except BadInput as error:
            # Not what the caller handed in, but what the server handed back.
            raise StoreFailed(f"{self.address} sent a malformed answer: {error}") from error
        return dict(zip(ids, rows, strict=True))
