"""Rows with their slots, counts and sketches of a store in another process, or of a version that is pinned there."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import grpc

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.errors import BadInput, StoreFailed
from elastable.embedding_store.rows.checks import require_block_rows
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.channels.status_codes import raising
from elastable.embedding_store.wire.messages.spec_messages import STORE_SERVICE
from elastable.embedding_store.wire.messages.store_messages import blocks_from_frames, ids_frames, state_from_frames
from elastable.embedding_store.wire.messages.upload import StreamingUpload

__all__ = ["RemoteReads"]


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
