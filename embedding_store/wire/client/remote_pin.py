"""A pin of a store that another process serves."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.pins import PinStatistics, require_lease
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.rows.checks import require_block_rows
from elastable.embedding_store.tables import BaseSnapshot
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.client.remote_reads import RemoteReads

__all__ = ["RemotePin", "remote_pins"]

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
