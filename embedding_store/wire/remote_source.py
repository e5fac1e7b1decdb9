"""A store that another process serves, to read over gRPC: its current version, and pinned ones."""

import threading
import time
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from itertools import chain
from typing import TypeVar

import grpc
import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.snapshot import Snapshot, require_lease
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, StaleVersion, StoreFailed
from elastable.embedding_store.support.array_body import MAX_BODY_BYTES, BodyPlan
from elastable.embedding_store.tables.checks import require_block_rows
from elastable.embedding_store.tables.table import BaseSource
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.channels.server_connection import ServerConnection, answered
from elastable.embedding_store.wire.channels.status_codes import raising
from elastable.embedding_store.wire.messages import store_messages as messages
from elastable.embedding_store.wire.messages.frames import (
    METADATA_BYTES,
    ONE_FRAME_BYTES,
    REQUEST_KEY,
    FrameReader,
    Upload,
    encode,
    require_wire_ids,
)

Answer = TypeVar("Answer")
Kept = TypeVar("Kept", RowBlock, TableState)
_FLOAT32 = np.dtype(np.float32)
_NO_IDS = np.zeros(0, np.int64)
_FEW_TABLES = 1_000  # whose names leave room for rows in a reply of one frame


class RemoteReads(BaseSource):
    """The calls that read a store, or a version that is pinned there.

    Args:
        connection: To its server.
        token: Of the pin to read; empty: the store.

    Attributes:
        connection: To its server; its owner's to close.
    """

    def __init__(self, connection: ServerConnection, token: bytes = b"") -> None:
        self.connection, self._token = connection, token
        channel, path = connection.channel, f"/{messages.STORE_SERVICE}"
        self._stub = store_pb2_grpc.StoreStub(channel)
        self._lookup_small = channel.unary_unary(f"{path}/LookupSmall", None, None)
        self._lookup_waiting = channel.unary_unary(f"{path}/Lookup", None, None)
        self._lookup: Upload[Iterable[bytes]] = Upload(channel, f"{path}/Lookup", None)
        self._read_rows: Upload[Iterable[bytes]] = Upload(channel, f"{path}/ReadRows", None)
        self._scan = channel.unary_stream(f"{path}/ReadRows", None, None)
        self._row_bytes: dict[str, int] = {}  # of the tables seen so far

    def require_open(self) -> None:
        """Refuses to read what is closed."""

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name; those created after a pin are empty in it."""
        return {of.spec.name: messages.spec_from_message(of.spec) for of in self.status(tables=True).tables}

    def status(self, wait_s: float = 0.0, **wanted: bool | int) -> store_pb2.StoreStatus:
        """What the server says of its store: fields of `StoreStatusRequest`."""
        request = store_pb2.StoreStatusRequest(wait_ms=round(wait_s * 1000), **wanted)  # type: ignore[arg-type]
        return self.connection.send(self._stub.GetStoreStatus, request, wait_s)

    def row_count(self, table: str) -> int:
        self.require_open()
        request = store_pb2.TableStatisticsRequest(table=table, pin=self._token)
        return int(self.connection.send(self._stub.TableStatistics, request).rows)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Each block has its own deadline."""
        self.require_open()
        (request,) = messages.ids_frames(table, _NO_IDS, self._token, block_rows=require_block_rows(block_rows))
        return self._blocks(request)

    def _blocks(self, request: bytes) -> Iterator[RowBlock]:
        with raising(self.connection.address, self.connection.deadline_s):
            call = self._scan(request)
            try:
                blocks = messages.only(RowBlock, call)
                while (block := self._next_block(call, blocks)) is not None:
                    yield block
            finally:
                call.cancel()  # type: ignore[no-untyped-call]

    def _next_block(self, call: grpc.Call, blocks: Iterator[RowBlock]) -> RowBlock | None:
        """The next block, None at the end; the call is cancelled at the deadline."""
        timer = threading.Timer(self.connection.deadline_s, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            return self.connection.decoded(lambda blocks: next(blocks, None), blocks)
        finally:
            timer.cancel()

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        return self._read_one(RowBlock, table, ids)

    def table_state(self, table: str) -> TableState:
        return self._read_one(TableState, table, _NO_IDS, state=True)

    def _read_one(self, kind: type[Kept], table: str, ids: Int64, state: bool = False) -> Kept:
        self.require_open()

        def attempt(timeout: float) -> list[Kept]:
            frames = self._read_rows(messages.ids_frames(table, ids, self._token, state=state), timeout)
            return self.connection.decoded(lambda frames: list(messages.only(kind, frames)), frames)

        answer = self.connection.call(attempt)
        if len(answer) != 1:
            raise StoreFailed(f"{self.connection.address} answered with {len(answer)} blocks instead of one")
        return answer[0]

    def _look_up(self, ids: Mapping[str, Int64], version: int | None, wait_s: float) -> dict[str, Float32]:
        for table, wanted in ids.items():
            require_wire_ids(table, wanted)
        request = store_pb2.LookupHeader(version=version, wait_ms=round(wait_s * 1000), pin=self._token)
        for table, wanted in ids.items():
            request.tables.add(table=table, count=len(wanted))
        header = request.SerializeToString()

        small = self._lookup_waiting if wait_s else self._lookup_small

        def attempt(timeout: float) -> dict[str, Float32]:
            return self.connection.decoded(self._rows, self._send(header, ids, small, timeout), ids)

        return self.connection.call(attempt, wait_s)

    def _send(
        self, header: bytes, ids: Mapping[str, Int64], small: Callable[..., bytes], timeout: float
    ) -> Iterable[bytes]:
        """Makes the call in the cheapest shape that carries it; its reply's frames."""
        frames, size = encode(header, ids.values()), 0
        for table, wanted in ids.items():
            size += len(wanted) * self._row_bytes.get(table, MAX_BODY_BYTES)
        if len(ids) > _FEW_TABLES or size > ONE_FRAME_BYTES:  # or not known: no reply of one frame
            return self._lookup(frames, timeout)
        first, second = next(frames), next(frames, None)
        if second is not None:
            return self._lookup(chain((first, second), frames), timeout)
        if small is self._lookup_small and len(first) <= METADATA_BYTES:
            return [answered(small(b"", timeout=timeout, metadata=((REQUEST_KEY, first),)))]
        return [answered(small(first, timeout=timeout))]

    def _rows(self, frames: Iterable[bytes], ids: Mapping[str, Int64]) -> dict[str, Float32]:
        """The rows in a reply."""
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
        return dict(zip(ids, reader.read(plan), strict=True))


class RemoteSource(RemoteReads):
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

    def __init__(
        self, target: str | ServerConnection, deadline_s: float = 30.0, credentials: Credentials | None = None
    ) -> None:
        self._owns = isinstance(target, str)
        super().__init__(ServerConnection(target, deadline_s, credentials) if isinstance(target, str) else target)

    @property
    def address(self) -> str:
        """`host:port` of the server."""
        return self.connection.address

    def version(self) -> int:
        """The current version."""
        return self._version_when(0, 0.0)

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """The server waits, for a minute per call at most."""
        end = time.monotonic() + timeout_s
        while True:
            left = max(end - time.monotonic(), 0.0)
            if self._version_when(version, min(left, messages.LONGEST_WAIT_S)) >= version:
                return True
            if left <= messages.LONGEST_WAIT_S:
                return False

    def attach(self) -> tuple[str, bytes]:
        """The name of the socket where the store's memory is to be had, and what to say there.

        Raises:
            Unsupported: its memory is not shared.
        """
        reply = self.connection.send(self._stub.Attach, store_pb2.AttachRequest())
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

    def close(self) -> None:
        """Closes the connection, where it is this source's own. Closing twice is harmless."""
        if self._owns:
            self.connection.close()

    def _version_when(self, at_least: int, wait_s: float) -> int:
        """The version, once it is `at_least` or after `wait_s` seconds."""
        return int(self.status(wait_s, at_least=at_least).version)


class RemotePin(RemoteReads, Snapshot):
    """A version that the server keeps until the lease ends, also if this process is gone.

    Attributes:
        token: By which the server knows the pin.

    Args:
        source: Reads the store; stays open.
        version: To pin; None: the current one.
        lease_s: Seconds, 3,600 at most.

    Raises:
        As `EmbeddingStore.pin`.
    """

    def __init__(self, source: RemoteSource, version: int | None, lease_s: float) -> None:
        self.token, self._lease_s = uuid.uuid4().bytes, require_lease(lease_s)
        super().__init__(source.connection, self.token)
        request = store_pb2.PinRequest(version=version, lease_s=lease_s, token=self.token)
        self._version = int(self.connection.send(self._stub.Pin, request).version)
        self._closed = False

    def version(self) -> int:
        return self._version

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        self.require_open()
        refuse_other_version(self._version, version)
        return self._look_up(ids, None, 0.0)

    def renew(self, lease_s: float | None = None) -> None:
        self.require_open()
        seconds = self._lease_s if lease_s is None else require_lease(lease_s)
        self.connection.send(self._stub.Pin, store_pb2.PinRequest(token=self.token, lease_s=seconds, renew=True))
        self._lease_s = seconds

    def close(self) -> None:
        """Raises `Unavailable` if the server is not reached; there the version is freed when its lease ends."""
        if not self._closed:
            self._closed = True
            self.connection.send(self._stub.Pin, store_pb2.PinRequest(token=self.token))

    def require_open(self) -> None:
        """Raises `StaleVersion` once the pin is closed."""
        if self._closed:
            raise StaleVersion(f"the pin of version {self._version} is gone: it was released")
