"""A store that another process serves, to read and to write, over gRPC; and a store server, as its owner calls it."""

import os
import secrets
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import NoReturn, TypeVar

from google.protobuf.message import Message

from elastable.embedding_store import errors
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableStatistics, TableUpdate
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.shards import server_contract as contract
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.tables.checks import require_numbers
from elastable.embedding_store.tables.table import BaseStore
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Credentials, Proof
from elastable.embedding_store.wire.channels.server_connection import MetadataChannel, ServerConnection, answered
from elastable.embedding_store.wire.channels.status_codes import raising
from elastable.embedding_store.wire.messages import store_messages as messages
from elastable.embedding_store.wire.messages.frames import Upload, require_wire_ids
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.pushes import push_messages as pushes
from elastable.embedding_store.wire.remote_source import RemotePin, RemoteSource

Answer = TypeVar("Answer")


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
        writes: "OwnerCalls | None" = None,
    ) -> None:
        super().__init__(target, deadline_s, credentials)
        self._of_thread = threading.local()
        self._writes = writes or self.connection
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
        return bool(self._writes.send(self._write_stub.CreateTable, request).created)

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
        except errors.TableNotFound:
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
            self._push(name, {}, contract.PushTerms(staged=True))

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
        terms = contract.PushTerms(step=step, learning_rates=learning_rates, summed=True)
        return self._push(self._next_name(), updates, terms)

    def _next_name(self) -> tuple[str, int]:
        """Of a push of this thread, which sends one after the other."""
        process, sender, last = getattr(self._of_thread, "last", (0, "", 0))
        if process != (here := os.getpid()):  # a fork has the thread's memory, and is another client
            sender, last = uuid.uuid4().hex, 0
        self._of_thread.last = here, sender, last + 1
        return sender, last + 1

    def _push(self, name: tuple[str, int], updates: Mapping[str, TableUpdate], terms: contract.PushTerms) -> int:
        """The version that a push makes; after a lost answer, the server's by then.

        Raises:
            NotFinite: the server skips it.
            StoreFailed: it was answered as one that had come before, and had not: nothing of it counts.
        """
        attempts = 0

        def attempt(timeout: float) -> store_pb2.RowPushReply:
            nonlocal attempts
            attempts += 1
            return self._push_rows(pushes.row_push_frames(push), timeout)

        parts = {table: contract.Slices(of.ids, of.gradients, of.row_squares) for table, of in updates.items()}
        push = contract.RowPush("", 0, name[1], (parts,), name[0], terms)
        reply = self.connection.call(attempt)
        if reply.outcome == store_pb2.RowPushReply.OUTCOME_SKIPPED:
            raise errors.NotFinite(printable(reply.reason, 1024))
        if reply.outcome == store_pb2.RowPushReply.OUTCOME_STALE or (
            reply.outcome == store_pb2.RowPushReply.OUTCOME_DUPLICATE and attempts == 1
        ):
            raise errors.StoreFailed(
                f"{self.address}: a later push of this client is there: this one counts no more; make it again"
            )
        return int(reply.version)

    def reset_version(self, version: int, record: bytes | None = None, force: bool = False) -> None:
        """Sets the version; `force` as in `drop_table`.

        Raises:
            Unsupported: there is a record, which only store servers take.
        """
        if record is not None:
            raise errors.Unsupported(f"{self.address}: a parameter server keeps no records of versions")
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
        self._writes.send(self._write_stub.DropTable, request)


def _terms_of(commit: Commit) -> contract.PushTerms:
    require_numbers(commit)
    for table, update in commit.updates.items():
        require_wire_ids(table, update.ids)
    rates, ends, frozen = commit.learning_rates, commit.ends_replay_epoch, commit.frozen
    return contract.PushTerms(commit.version, commit.step, rates, ends, frozen, commit.time, summed=True)


# A store server, as its owner and as workers call it


_SAVE_MS = 5_000  # that one call of a save waits for its end
_MOST_EARLY = 20  # answers that a save is not done, before half the time to wait has passed
_STATUS_S = 2.0  # for its status, which the next look asks for again


class OwnerCalls:
    """The calls of the owner of a store server: claims it with the first, and again where it was started again.

    Attributes:
        claim: What the next claim says.
        claimed: Whether the server has been claimed.
    """

    def __init__(self, connection: ServerConnection) -> None:
        self._connection = connection
        self.channel = MetadataChannel(connection.channel, PROOF_KEYS[Proof.OWNER], secrets.token_bytes(16))
        self.stub = store_pb2_grpc.StoreStub(self.channel)
        self.claim = store_pb2.ClaimRequest(owner=f"{socket.gethostname()}:{os.getpid()}")
        self.claimed = False
        self._claiming = threading.Lock()

    def call(self, attempt: Callable[[float], Answer]) -> Answer:
        """Makes a call, as `ServerConnection.call` does."""
        if not self.claimed:
            self.send_claim(first=True)
        try:
            return self._connection.call(attempt)
        except errors.NotReady:
            self.send_claim(first=False)  # the server was started again
            return self._connection.call(attempt)

    def send(self, method: Callable[..., Answer], request: Message) -> Answer:
        """Makes a call of one small message each way."""
        return self.call(lambda timeout: answered(method(request, timeout=timeout)))

    def send_claim(self, first: bool) -> None:
        """Claims the server; `first`: from whoever owns it, if this client has not claimed it before."""
        with self._claiming:
            if first and self.claimed:
                return
            self.claim.first = first
            try:
                self._connection.send(self.stub.Claim, self.claim)
            except errors.BadInput as error:
                raise errors.BadInput(f"store server {self._connection.address}: {error}") from error
            self.claimed = True


class ShardClient(RemoteStore, contract.ShardServer):
    """A store server in another process. What changes it, this client does as its owner.

    It claims the server with the first change, from whoever owned it before: `other_writer` says whether that is a
    live process. Another one that claims it later makes every change here fail with `TakenOver`. A server that was
    started again is claimed again.

    Args:
        target, deadline_s, credentials: As of `RemoteSource`, which also says what is raised.
    """

    def __init__(
        self, target: str | ServerConnection, deadline_s: float = 30.0, credentials: Credentials | None = None
    ) -> None:
        owns = isinstance(target, str)
        if isinstance(target, str):
            target = ServerConnection(target, deadline_s, credentials, moves=True)
        self._owner = OwnerCalls(target)
        super().__init__(target, writes=self._owner)
        self._owns = owns
        self._keeps_records: bool | None = None
        channel, path = self._owner.channel, f"/{messages.STORE_SERVICE}"
        self._session = MetadataChannel(target.channel, PROOF_KEYS[Proof.SESSION], b"")
        push = Upload(self._session, f"{path}/PushRows", store_pb2.RowPushReply.FromString)
        self._pushes = pushes.SharedUpload(target, push, pushes.row_push_frames, self.attach)
        self._commit_pushed = Upload(channel, f"{path}/CommitPushed", store_pb2.CommitPushedReply.FromString)
        self._record_frames = channel.unary_stream(
            f"{path}/ReadRecord", store_pb2.ReadRecordRequest.SerializeToString, None
        )

    def take_position(self, number: int, servers: int) -> None:
        self._owner.claim.number, self._owner.claim.servers = number, servers

    def begin_job(self, job: str, may_overflow: bool, session_key: bytes) -> None:
        claim = self._owner.claim
        claim.job, claim.may_overflow, claim.session_key = job, may_overflow, session_key
        self._owner.send_claim(first=not self._owner.claimed)

    def show_session(self, session: bytes) -> None:
        self._session.value = session

    def require_owner(self) -> None:
        if self._owner.claimed:
            self._owner.send(self._write_stub.GetStoreStatus, store_pb2.StoreStatusRequest(owned=True))

    def other_writer(self) -> str | None:
        return self.status(owner=True).owner or None

    @property
    def keeps_records(self) -> bool:
        if self._keeps_records is None:
            self._keeps_records = bool(self.status(owner=True).keeps_records)
        return self._keeps_records

    def push_rows(self, push: contract.RowPush) -> contract.RowPushOutcome:
        return self.connection.decoded(partial(from_message, contract.RowPushReply), self._pushes.send(push)).outcome

    def shard_status(self) -> contract.ShardStatus:
        request = store_pb2.StoreStatusRequest(shard=True)
        try:
            with raising(self.address, _STATUS_S):
                return pushes.shard_status_from_message(
                    self._write_stub.GetStoreStatus(request, timeout=_STATUS_S).shard
                )
        except (errors.Unavailable, errors.DeadlineExceeded):
            self.connection.look_elsewhere()
            raise

    def follow(self, find: Callable[[], str | None]) -> None:
        self.connection.follow(find)

    def share_memory(self) -> None:
        """Lets a server on this host take gradients from memory; see `SharedUpload.share_memory`."""
        self._pushes.share_memory()

    def measure(self, sums: contract.RowSums) -> contract.Measured:
        reply = self._owner.send(self._write_stub.Prepare, store_pb2.PrepareRequest(sums=pushes.sums_to_message(sums)))
        return self.connection.decoded(pushes.measured_from_message, reply)

    def offer_rows(
        self, commit: contract.PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]
    ) -> contract.RowOffers:
        request = pushes.offer_request_to_message(commit, most, ids)
        reply = self._owner.send(self._write_stub.Prepare, request)
        return self.connection.decoded(pushes.offers_from_message, reply)

    def commit_pushed(self, commit: contract.PushedCommit) -> contract.Committed:
        reply = self._owner.call(lambda timeout: self._commit_pushed(pushes.pushed_commit_frames(commit), timeout))
        return from_message(contract.Committed, reply)

    def recover(self, version: int | None = None) -> int:
        return int(self.send_reset(None, version, take_back=True).rows)

    def record(self) -> bytes | None:
        read, request = partial(self.connection.decoded, messages.record_from_frames), store_pb2.ReadRecordRequest()
        return self._owner.call(lambda timeout: read(self._record_frames(request, timeout=timeout)))

    def reset_version(self, version: int, record: bytes | None = None, force: bool = False) -> None:
        self.send_reset(record, version, force=force)

    def take_changes(self, mark: bytes, base: bytes) -> contract.TakenChanges:
        request = store_pb2.TakeChangesRequest(mark=mark, base=base)
        return from_message(contract.TakenChanges, self._owner.send(self._write_stub.TakeChanges, request))

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        return ShardPin(self, version, lease_s)

    def save_rows(self, save: contract.RowSave, pin: bytes = b"") -> contract.SavedRows:
        """Asks until it is done, by short calls; `pin`: token of the pin whose rows are saved, b"" for the store."""
        request, early = to_message(store_pb2.SaveRowsRequest, save, pin=pin, wait_ms=_SAVE_MS), 0
        try:
            while early < _MOST_EARLY:
                asked = time.monotonic()
                reply = self._owner.send(self._write_stub.SaveRows, request)
                if reply.done:
                    return from_message(contract.SavedRows, reply)
                early += time.monotonic() - asked < _SAVE_MS / 2000
            raise errors.StoreFailed(
                f"{self.address} answers SaveRows again and again, and does not wait as it is asked to"
            )
        except errors.CheckpointError as error:
            raise errors.CheckpointError(f"store server {self.address}: {error}") from error

    def _refuse_commit(self, *_: object, **__: object) -> NoReturn:
        raise errors.Unsupported(
            f"{self.address} is a store server, whose versions are made of what workers push there (commit_pushed); "
            "commits of whole gradients are for a parameter server (elastable serve, grpc://)"
        )

    commit = stage = update = _refuse_commit

    def close(self) -> None:
        self._pushes.close()
        super().close()


class ShardPin(RemotePin, contract.ServedRows):
    """A pin of a store server, whose owner has its rows saved; `client`, `version`, `lease_s`: as of `RemotePin`."""

    def __init__(self, client: ShardClient, version: int | None, lease_s: float) -> None:
        super().__init__(client, version, lease_s)
        self._client = client

    def save_rows(self, save: contract.RowSave) -> contract.SavedRows:
        self.require_open()
        return self._client.save_rows(save, self.token)
