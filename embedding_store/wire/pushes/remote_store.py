"""A store that another process serves, to read and to write, over gRPC."""

import os
import threading
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Protocol, TypeVar

import grpc
import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableStatistics, TableUpdate
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import NotFinite, StoreFailed, TableNotFound, Unsupported
from elastable.embedding_store.shards.server_contract import PushTerms, RowPush, Slices
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.tables.checks import require_numbers
from elastable.embedding_store.tables.table import BaseStore
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.messages import store_messages as messages
from elastable.embedding_store.wire.messages.frames import Upload, require_wire_ids
from elastable.embedding_store.wire.messages.plain_data import from_message
from elastable.embedding_store.wire.pushes.push_messages import row_push_frames
from elastable.embedding_store.wire.remote_source import RemotePin, RemoteSource

Answer = TypeVar("Answer")
_FLOAT32 = np.dtype(np.float32)
_NO_IDS = np.zeros(0, np.int64)
_FEW_TABLES = 1_000  # whose names leave room for rows in a reply of one frame


class Calls(Protocol):
    """How calls to one server are made: `ServerConnection`, or as that does, for whoever the server lets write."""

    @property
    def channel(self) -> grpc.Channel: ...

    def call(self, attempt: Callable[[float], Answer]) -> Answer: ...


class RemoteStore(RemoteSource, BaseStore):
    """Everything that the store of a server that allows writing can do.

    Calls whose answer is lost are repeated until the deadline, and count once: a commit is a push, which the server
    knows again by its name.

    Args:
        target, deadline_s, credentials: As of `RemoteSource`.
        writes: How the calls that change the store are made; None: as all others.

    `delete`, `clear`, `drop_table` and `reset_version` are for administrators (docs/security.md); others get
    `PermissionDenied`.
    """

    def __init__(
        self,
        target: str | ServerConnection,
        deadline_s: float = 30.0,
        credentials: Credentials | None = None,
        writes: Calls | None = None,
    ) -> None:
        super().__init__(target, deadline_s, credentials)
        self._of_thread = threading.local()
        self._writes: Calls = self.connection if writes is None else writes
        channel, path = self._writes.channel, f"/{messages.STORE_SERVICE}"
        self._write_stub = store_pb2_grpc.StoreStub(channel)
        self._push_rows = Upload(self.connection.channel, f"{path}/PushRows", store_pb2.RowPushReply.FromString)
        self._put = Upload(channel, f"{path}/Put", store_pb2.PutReply.FromString)
        self._delete = Upload(channel, f"{path}/Delete", store_pb2.DeleteReply.FromString)
        self._reset_version = Upload(channel, f"{path}/ResetVersion", store_pb2.ResetVersionReply.FromString)

    def create_table(self, spec: TableSpec) -> bool:
        """Creates the table; False also if the answer of an earlier attempt was lost.

        Raises:
            Unsupported: this server, or any, cannot keep such a table, or is not to be written to.
        """
        request = store_pb2.CreateTableRequest(spec=messages.spec_to_message(spec))
        return self._writes.call(lambda timeout: self._write_stub.CreateTable(request, timeout=timeout)).created

    def drop_table(self, table: str, force: bool = False) -> None:
        """Drops the table; `force` gives up pins that clients of the server hold."""
        request = store_pb2.DropTableRequest(table=table, force=force)
        attempts = 0

        def attempt(timeout: float) -> None:
            nonlocal attempts
            attempts += 1
            self._write_stub.DropTable(request, timeout=timeout)

        self._row_bytes.pop(table, None)
        try:
            self._writes.call(attempt)
        except TableNotFound:
            if attempts == 1:
                raise
            # An attempt whose answer was lost has dropped it.

    def commit(self, commit: Commit) -> None:
        self._push(self._next_name(), commit.updates, _terms_of(commit))

    def stage(self, commit: Commit) -> Callable[[], None]:
        """Stages a commit; the gradients are sent now."""
        name = self._next_name()
        self._push(name, commit.updates, replace(_terms_of(commit), stage=True))

        def finish() -> None:
            self._push(name, {}, PushTerms(staged=True))

        return finish

    def update(
        self, updates: Mapping[str, TableUpdate], learning_rates: Mapping[str, float], step: int | None = None
    ) -> int:
        """One call, whichever version comes next.

        Where the answer of an earlier attempt was lost, the version that is returned is the server's by now: others may
        have made versions since.
        """
        if step is not None:
            require_numbers(Commit(1, updates, step, learning_rates))
        terms = PushTerms(step=step, learning_rates=learning_rates, summed=True)
        return self._push(self._next_name(), updates, terms)

    def _next_name(self) -> tuple[str, int]:
        """Of a push of this thread, which sends one after the other."""
        process, sender, last = getattr(self._of_thread, "last", (0, "", 0))
        if process != (here := os.getpid()):  # a fork has the thread's memory, and is another client
            sender, last = uuid.uuid4().hex, 0
        self._of_thread.last = here, sender, last + 1
        return sender, last + 1

    def _push(self, name: tuple[str, int], updates: Mapping[str, TableUpdate], terms: PushTerms) -> int:
        """The version that a push makes; after a lost answer, the server's by then.

        Raises:
            NotFinite: the server skips it.
            StoreFailed: it was answered as one that had come before, and had not: nothing of it counts.
        """
        attempts = 0

        def attempt(timeout: float) -> store_pb2.RowPushReply:
            nonlocal attempts
            attempts += 1
            return self._push_rows(row_push_frames(push), timeout)

        parts = {table: Slices(of.ids, of.gradients, of.row_squares) for table, of in updates.items()}
        push = RowPush("", 0, name[1], (parts,), name[0], terms)
        reply = self.connection.call(attempt)
        if reply.outcome == store_pb2.RowPushReply.OUTCOME_SKIPPED:
            raise NotFinite(printable(reply.reason, 1024))
        if reply.outcome == store_pb2.RowPushReply.OUTCOME_STALE or (
            reply.outcome == store_pb2.RowPushReply.OUTCOME_DUPLICATE and attempts == 1
        ):
            raise StoreFailed(
                f"{self.address}: a later push of this client is there: this one counts no more; make it again"
            )
        return int(reply.version)

    def reset_version(self, version: int, record: bytes | None = None, force: bool = False) -> None:
        """Sets the version; `force` as in `drop_table`.

        Raises:
            Unsupported: there is a record, which only store servers take.
        """
        if record is not None:
            raise Unsupported(f"{self.address}: a parameter server keeps no records of versions")
        self.send_reset(None, version, force=force)

    def send_reset(
        self, record: bytes | None, version: int | None, *, force: bool = False, take_back: bool = False
    ) -> store_pb2.ResetVersionReply:
        frames = partial(messages.record_frames, record, version, force=force, take_back=take_back)
        return self._writes.call(lambda timeout: self._reset_version(frames(), timeout))

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """Pins a version at the server; the lease is at most 3,600 seconds."""
        return RemotePin(self, version, lease_s)

    def pins(self) -> tuple[PinStatistics, ...]:
        pins = self.status(pins=True).pins
        return tuple(from_message(PinStatistics, pin) for pin in pins)

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """Writes each block in a call."""
        block = None
        for block in blocks:
            self._writes.call(partial(self._send_block, table, block))
        if block is None:
            self.row_count(table)  # the table has to exist even if there are no blocks

    def _send_block(self, table: str, block: RowBlock, timeout: float) -> None:
        self._put(messages.block_frames(table, block), timeout)

    def delete(self, table: str, ids: Int64) -> int:
        """Deletes rows; those deleted by an attempt whose answer was lost are not counted."""
        return int(self._writes.call(lambda timeout: self._delete(messages.ids_frames(table, ids), timeout)).rows)

    def table_statistics(self, table: str) -> TableStatistics:
        reply = self.connection.send(self._stub.TableStatistics, store_pb2.TableStatisticsRequest(table=table))
        return from_message(TableStatistics, reply)

    def put_table_state(self, table: str, state: TableState) -> None:
        self._writes.call(lambda timeout: self._put(messages.state_frames(table, state), timeout))

    def clear(self, table: str, force: bool = False) -> None:
        """Deletes all rows of a table; `force` as in `drop_table`."""
        request = store_pb2.DropTableRequest(table=table, force=force, keep=True)
        self._writes.call(lambda timeout: self._write_stub.DropTable(request, timeout=timeout))


def _terms_of(commit: Commit) -> PushTerms:
    require_numbers(commit)
    for table, update in commit.updates.items():
        require_wire_ids(table, update.ids)
    rates, ends, frozen = commit.learning_rates, commit.ends_replay_epoch, commit.frozen
    return PushTerms(commit.version, commit.step, rates, ends, frozen, commit.time, summed=True)
