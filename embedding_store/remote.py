"""Rows of a store in another process, over gRPC."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain

import numpy as np

from embedding_store.errors import BadIds, BadInput, StoreFailed
from embedding_store.frames import MAX_BODY_BYTES, ONE_FRAME_BYTES, BodyPlan, FrameReader, encode
from embedding_store.rpc_connection import Connection
from embedding_store.spec import TableSpec
from embedding_store.spec_messages import STORE_SERVICE, spec_from_message, spec_to_message
from embedding_store.store import Float32, Int64, RowSource
from embedding_store.v1 import store_pb2, store_pb2_grpc

__all__ = ["RemoteSource"]

_FLOAT32 = np.dtype(np.float32)
_FEW_TABLES = 1_000  # whose names leave room for rows in a reply of one frame


class RemoteSource(RowSource):
    """Looks rows up at a store that another process serves; one call for all tables.

    Every call ends within the deadline: a server that is not reached is tried
    again until then, as all of them may be repeated without harm.

    Args:
        target: `host:port`, or a `Connection`, which stays its owner's to close.
        deadline_s: Seconds for each call, where `target` is an address.

    Raises:
        BadInput: no such address or deadline can be.
    """

    def __init__(self, target: str | Connection, deadline_s: float = 30.0) -> None:
        self._owns = isinstance(target, str)
        self._connection = Connection(target, deadline_s) if isinstance(target, str) else target
        channel = self._connection.channel
        self._stub = store_pb2_grpc.EmbeddingStoreStub(channel)
        path = f"/{STORE_SERVICE}"
        self._lookup_small = channel.unary_unary(f"{path}/LookupSmall", None, None)
        # One method in two shapes: they are one on the wire, but gRPC starts a
        # thread for each call that sends a stream.
        self._lookup_one_frame = channel.unary_stream(f"{path}/Lookup", None, None)
        self._lookup = channel.stream_stream(f"{path}/Lookup", None, None)
        self._row_bytes: dict[str, int] = {}  # of the tables seen so far

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self._connection.address

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name."""
        return {status.spec.name: spec_from_message(status.spec) for status in self._tables().tables}

    def version(self) -> int:
        """The current version at the server."""
        return self._tables().version

    def create_table(self, spec: TableSpec) -> bool:
        """Makes the table at the server; True if it was not there before.

        Where an answer is lost and the call repeated, False may stand for a
        table that this very call made.

        Raises:
            SpecConflict: a table of that name has another spec.
        """
        request = store_pb2.CreateTableRequest(spec=spec_to_message(spec))
        return bool(self._connection.call(lambda timeout: self._stub.CreateTable(request, timeout=timeout)).created)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows of many tables in one call; see `RowSource.lookup`.

        Raises:
            Unavailable, DeadlineExceeded: naming address and deadline.
        """
        return self._look_up(ids, version, 0.0)

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        """As `lookup`, in one call that waits at the server; see `RowSource.lookup_when`."""
        return self._look_up(ids, version, wait_s)

    def _look_up(self, ids: Mapping[str, Int64], version: int | None, wait_s: float) -> dict[str, Float32]:
        for table, wanted in ids.items():
            _refuse_bad_ids(table, wanted)
        request = store_pb2.LookupHeader(version=version, wait_ms=round(wait_s * 1000))
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

    def _tables(self) -> store_pb2.ListTablesReply:
        request = store_pb2.ListTablesRequest()
        reply: store_pb2.ListTablesReply = self._connection.call(
            lambda timeout: self._stub.ListTables(request, timeout=timeout)
        )
        return reply

    def _send(self, header: bytes, ids: Mapping[str, Int64], timeout: float) -> Iterable[bytes]:
        """Makes the call in the cheapest shape that carries it; its reply's frames."""
        frames = encode(header, ids.values())
        first, second = next(frames), next(frames, None)
        if second is not None:
            return self._lookup(chain((first, second), frames), timeout=timeout)
        if self._reply_is_small(ids):
            return [self._lookup_small(first, timeout=timeout)]
        return self._lookup_one_frame(first, timeout=timeout)

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
            raise StoreFailed(f"{self.address} gave an answer that cannot be read: {error}") from error
        return dict(zip(ids, rows, strict=True))


def _refuse_bad_ids(table: str, ids: Int64) -> None:
    """The frame has no room for another dtype or shape, so the server cannot refuse these."""
    if not isinstance(ids, np.ndarray) or ids.dtype != np.int64 or ids.ndim != 1:
        given = f"{ids.dtype} {list(ids.shape)}" if isinstance(ids, np.ndarray) else type(ids).__name__
        raise BadIds(f"ids of table {table!r} must be an int64 array of one dimension, got {given}")
