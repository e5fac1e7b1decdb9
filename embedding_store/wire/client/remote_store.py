"""A store that another process serves, to read and to write, over gRPC."""

from __future__ import annotations

import threading
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import TypeVar

import grpc

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableStatistics
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot, require_lease
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, StoreFailed, TableNotFound, Unsupported
from elastable.embedding_store.rows.checks import require_block_rows, require_numbers
from elastable.embedding_store.tables import BaseStore
from elastable.embedding_store.tables.base_store import BaseSnapshot
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.channels.status_codes import raising
from elastable.embedding_store.wire.client.remote_source import RemoteSource
from elastable.embedding_store.wire.messages.frames import StreamingUpload, Upload
from elastable.embedding_store.wire.messages.store_messages import (
    STORE_SERVICE,
    block_frames,
    blocks_from_frames,
    commit_frames,
    ids_frames,
    spec_to_message,
    state_frames,
    state_from_frames,
)

__all__ = ["RemotePin", "RemoteStore", "WriteStub"]

Answer = TypeVar("Answer")

WriteStub = store_pb2_grpc.EmbeddingStoreStub | store_pb2_grpc.StoreServerStub
"""Both have the same small calls that change a store."""


class RemoteStore(RemoteSource, BaseStore):
    """Everything that the store of a server that allows writing can do.

    Calls whose answer is lost are repeated until the deadline, and count once:
    a commit carries a token by which the server knows it again.

    Args:
        target: `host:port`, or a `ServerConnection`, which stays its owner's to close.
        deadline_s: Seconds for each call, where `target` is an address.
        credentials: Of this client, where `target` is an address; None: those of the environment.

    `delete`, `clear`, `drop_table` and `reset_version` are for administrators (docs/security.md); others get
    `PermissionDenied`.

    Raises:
        BadInput: no such address or deadline can be, or it cannot be called with such credentials.
    """

    def __init__(
        self, target: str | ServerConnection, deadline_s: float = 30.0, credentials: Credentials | None = None
    ) -> None:
        super().__init__(target, deadline_s, credentials)
        self._writes, path, channel = self._write_calls()
        self._commit = Upload(self._connection.channel, f"/{STORE_SERVICE}/Commit", store_pb2.CommitReply.FromString)
        self._put = Upload(channel, f"{path}/Put", store_pb2.PutReply.FromString)
        self._delete = Upload(channel, f"{path}/Delete", store_pb2.DeleteReply.FromString)
        self._put_state = Upload(channel, f"{path}/PutSightings", store_pb2.PutReply.FromString)
        self._reads = RemoteReads(self._connection)

    def create_table(self, spec: TableSpec) -> bool:
        """Creates the table; False also if the answer of an earlier attempt was lost.

        Raises:
            Unsupported: this server, or any, cannot keep such a table, or is not to be written to.
        """
        request = store_pb2.CreateTableRequest(spec=spec_to_message(spec))
        return bool(self._change(lambda timeout: self._writes.CreateTable(request, timeout=timeout)).created)

    def drop_table(self, table: str, force: bool = False) -> None:
        """Drops the table; `force` gives up pins that clients of the server hold."""
        request = store_pb2.DropTableRequest(table=table, force=force)
        attempts = 0

        def attempt(timeout: float) -> None:
            nonlocal attempts
            attempts += 1
            self._writes.DropTable(request, timeout=timeout)

        self._row_bytes.pop(table, None)
        try:
            self._change(attempt)
        except TableNotFound:
            if attempts == 1:
                raise
            # An attempt whose answer was lost has dropped it.

    def commit(self, commit: Commit) -> None:
        self._send_commit(commit, uuid.uuid4().bytes, stage=False)

    def stage(self, commit: Commit) -> Callable[[], None]:
        """Stages a commit; the gradients are sent now."""
        token = uuid.uuid4().bytes
        self._send_commit(commit, token, stage=True)
        request = store_pb2.CommitStagedRequest(token=token)

        def finish() -> None:
            self._connection.call(lambda timeout: self._stub.CommitStaged(request, timeout=timeout))

        return finish

    def reset_version(self, version: int, record: bytes | None = None, force: bool = False) -> None:
        """Sets the version; `force` as in `drop_table`.

        Raises:
            Unsupported: there is a record, which only store servers take.
        """
        if record is not None:
            raise Unsupported(f"{self.address}: a parameter server keeps no records of versions")
        request = store_pb2.ResetVersionRequest(version=version, force=force)
        self._change(lambda timeout: self._writes.ResetVersion(request, timeout=timeout))

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """Pins a version at the server; the lease is at most 3,600 seconds."""
        return RemotePin(self._connection, self._look_up_pinned, self.specs, version, lease_s)

    def _look_up_pinned(self, ids: Mapping[str, Int64], token: bytes) -> dict[str, Float32]:
        return self._look_up(ids, None, 0.0, token)

    def pins(self) -> tuple[PinStatistics, ...]:
        return remote_pins(self._connection)

    def row_count(self, table: str) -> int:
        return self._reads.row_count(table)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Each block has its own deadline."""
        return self._reads.scan(table, block_rows)

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        return self._reads.read_rows(table, ids)

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """Writes each block in a call."""
        block = None
        for block in blocks:
            self._change(partial(self._send_block, table, block))
        if block is None:
            self.row_count(table)  # the table has to exist even if there are no blocks

    def _send_block(self, table: str, block: RowBlock, timeout: float) -> None:
        self._put(block_frames(table, block), timeout)

    def delete(self, table: str, ids: Int64) -> int:
        """Deletes rows; those deleted by an attempt whose answer was lost are not counted."""
        return int(self._change(lambda timeout: self._delete(ids_frames(table, ids), timeout)).rows)

    def table_statistics(self, table: str) -> TableStatistics:
        request = store_pb2.TableStatisticsRequest(table=table)
        told = self._connection.call(lambda timeout: self._stub.TableStatistics(request, timeout=timeout))
        size = told.bytes if told.HasField("bytes") else None
        return TableStatistics(told.rows, size, told.refused, told.evicted, told.deleted, told.written)

    def table_state(self, table: str) -> TableState:
        return self._reads.table_state(table)

    def put_table_state(self, table: str, state: TableState) -> None:
        self._change(lambda timeout: self._put_state(state_frames(table, state), timeout))

    def clear(self, table: str, force: bool = False) -> None:
        """Deletes all rows of a table; `force` as in `drop_table`."""
        request = store_pb2.ClearTableRequest(table=table, force=force)
        self._change(lambda timeout: self._writes.ClearTable(request, timeout=timeout))

    def _write_calls(self) -> tuple[WriteStub, str, grpc.Channel]:
        """The small calls that change the store, `/package.Service` of all of them, and the channel that they go by."""
        return self._stub, f"/{STORE_SERVICE}", self._connection.channel

    def _change(self, attempt: Callable[[float], Answer]) -> Answer:
        """Makes a call that changes the store, as `ServerConnection.call` does."""
        return self._connection.call(attempt)

    def _send_commit(self, commit: Commit, token: bytes, stage: bool) -> None:
        require_numbers(commit)
        self._connection.call(lambda timeout: self._commit(commit_frames(commit, token, stage), timeout))


# A pin of a store that another process serves


_LookUp = Callable[[Mapping[str, Int64], bytes], dict[str, Float32]]


class RemotePin(BaseSnapshot):
    """A version that the server keeps until the lease ends, also if this process is gone.

    Args:
        connection: To the server; its owner's to close.
        look_up: Looks ids up at the pin of a token.
        specs: All tables of the server's store.
        version: To pin; None: the current one.
        lease_s: Seconds, 3,600 at most.

    Raises:
        As `EmbeddingStore.pin`.
    """

    def __init__(
        self,
        connection: ServerConnection,
        look_up: _LookUp,
        specs: Callable[[], dict[str, TableSpec]],
        version: int | None,
        lease_s: float,
    ) -> None:
        self._connection, self._look_up = connection, look_up
        self._stub = store_pb2_grpc.EmbeddingStoreStub(connection.channel)
        self._token, self._lease_s = uuid.uuid4().bytes, require_lease(lease_s)
        self._reads = RemoteReads(connection, self._token)
        request = store_pb2.PinRequest(version=version, lease_s=lease_s, token=self._token)
        pinned = connection.call(lambda timeout: self._stub.Pin(request, timeout=timeout))
        super().__init__(int(pinned.version), specs)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        self._require_open()
        refuse_other_version(self._version, version)
        return self._look_up(ids, self._token)

    def renew(self, lease_s: float | None = None) -> None:
        self._require_open()
        seconds = self._lease_s if lease_s is None else require_lease(lease_s)
        request = store_pb2.RenewPinRequest(token=self._token, lease_s=seconds)
        self._connection.call(lambda timeout: self._stub.RenewPin(request, timeout=timeout))
        self._lease_s = seconds

    def row_count(self, table: str) -> int:
        self._require_open()
        return self._reads.row_count(table)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Each block has its own deadline."""
        self._require_open()
        return self._reads.scan(table, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        self._require_open()
        return self._reads.read_rows(table, ids)

    def table_state(self, table: str) -> TableState:
        self._require_open()
        return self._reads.table_state(table)

    def _release(self) -> None:
        """Raises `Unavailable` if the server is not reached; there the version is freed when its lease ends."""
        request = store_pb2.ReleasePinRequest(token=self._token)
        self._connection.call(lambda timeout: self._stub.ReleasePin(request, timeout=timeout))


def remote_pins(connection: ServerConnection) -> tuple[PinStatistics, ...]:
    """The pins of a store in another process."""
    stub, request = store_pb2_grpc.EmbeddingStoreStub(connection.channel), store_pb2.ListPinsRequest()
    told = connection.call(lambda timeout: stub.ListPins(request, timeout=timeout)).pins
    return tuple(PinStatistics(pin.version, pin.lease_left_s, pin.rows, pin.bytes) for pin in told)


# Rows with their slots, counts and sketches of a store in another process, or of a version that is pinned there


class RemoteReads:
    """The calls that copy rows out of a store.

    Args:
        connection: To its server; its owner's to close.
        pin: Token of the pin to read; empty: the store.
    """

    def __init__(self, connection: ServerConnection, pin: bytes = b"") -> None:
        self._connection, self._pin = connection, pin
        channel, path = connection.channel, f"/{STORE_SERVICE}"
        self._stub = store_pb2_grpc.EmbeddingStoreStub(channel)
        self._read_state = channel.unary_stream(
            f"{path}/ReadSightings", store_pb2.ReadSightingsRequest.SerializeToString, None
        )
        self._read_rows = StreamingUpload(channel, f"{path}/ReadRows")
        self._scan = channel.unary_stream(f"{path}/Scan", store_pb2.ScanRequest.SerializeToString, None)

    def row_count(self, table: str) -> int:
        request = store_pb2.CountRowsRequest(table=table, pin=self._pin)
        return int(self._connection.call(lambda timeout: self._stub.CountRows(request, timeout=timeout)).rows)

    def scan(self, table: str, block_rows: int) -> Iterator[RowBlock]:
        """Each block has its own deadline."""
        request = store_pb2.ScanRequest(table=table, block_rows=require_block_rows(block_rows), pin=self._pin)
        with raising(self._connection.address, self._connection.deadline_s):
            call = self._scan(request)
            try:
                blocks = blocks_from_frames(call)
                while (block := self._next_block(call, blocks)) is not None:
                    yield block
            except BadInput as error:
                raise self._unreadable(error) from error
            finally:
                call.cancel()  # type: ignore[no-untyped-call]

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        def attempt(timeout: float) -> list[RowBlock]:
            frames = self._read_rows(ids_frames(table, ids, self._pin), timeout)
            try:
                return [block for _, block in blocks_from_frames(frames)]
            except BadInput as error:
                raise self._unreadable(error) from error

        blocks = self._connection.call(attempt)
        if len(blocks) != 1:
            raise StoreFailed(f"{self._connection.address} answered with {len(blocks)} blocks instead of one")
        return blocks[0]

    def table_state(self, table: str) -> TableState:
        request = store_pb2.ReadSightingsRequest(table=table, pin=self._pin)

        def attempt(timeout: float) -> TableState:
            try:
                return state_from_frames(self._read_state(request, timeout=timeout))[1]
            except BadInput as error:
                raise self._unreadable(error) from error

        return self._connection.call(attempt)

    def _next_block(self, call: grpc.Call, blocks: Iterator[tuple[str, RowBlock]]) -> RowBlock | None:
        """The next block, None at the end; the call is cancelled at the deadline."""
        timer = threading.Timer(self._connection.deadline_s, call.cancel)
        timer.daemon = True
        timer.start()
        try:
            found = next(blocks, None)
        finally:
            timer.cancel()
        return None if found is None else found[1]

    def _unreadable(self, error: BadInput) -> StoreFailed:
        return StoreFailed(f"{self._connection.address} sent a malformed answer: {error}")
