"""A store server, as its owner and as workers call it."""

import os
import secrets
import socket
import threading
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import NoReturn, TypeVar

from google.protobuf.message import Message

from elastable.embedding_store import errors
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.shards import server_contract as shards
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Credentials, Proof
from elastable.embedding_store.wire.channels.server_connection import MetadataChannel, ServerConnection
from elastable.embedding_store.wire.channels.status_codes import raising
from elastable.embedding_store.wire.messages.frames import Upload
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE, record_from_frames
from elastable.embedding_store.wire.pushes import push_messages as messages
from elastable.embedding_store.wire.pushes.push_messages import SharedUpload
from elastable.embedding_store.wire.pushes.remote_store import RemoteStore
from elastable.embedding_store.wire.remote_source import RemotePin

Answer = TypeVar("Answer")

_SAVE_MS = 5_000  # that one call of a save waits for its end
_MOST_EARLY = 20  # answers that a save is not done, before half the time to wait has passed
_STATUS_S = 2.0  # for its status, which the next look asks for again


class ShardClient(RemoteStore, shards.ShardServer):
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
        self._own = isinstance(target, str)
        if isinstance(target, str):
            target = ServerConnection(target, deadline_s, credentials, moves=True)
        self._owner = OwnerCalls(target)
        super().__init__(target, writes=self._owner)
        self._server = self._owner.stub
        self._keeps_records: bool | None = None
        channel, path = self._owner.channel, f"/{STORE_SERVICE}"
        self._session = MetadataChannel(target.channel, PROOF_KEYS[Proof.SESSION], b"")
        push = Upload(self._session, f"{path}/PushRows", store_pb2.RowPushReply.FromString)
        self._pushes = SharedUpload(target, push, messages.row_push_frames, self.attach)
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
            self._owner.send(self._server.GetStoreStatus, store_pb2.StoreStatusRequest(owned=True))

    def other_writer(self) -> str | None:
        return self.status(owner=True).owner or None

    @property
    def keeps_records(self) -> bool:
        if self._keeps_records is None:
            self._keeps_records = bool(self.status(owner=True).keeps_records)
        return self._keeps_records

    def push_rows(self, push: shards.RowPush) -> shards.RowPushOutcome:
        return self.connection.decoded(partial(from_message, shards.RowPushReply), self._pushes.send(push)).outcome

    def shard_status(self) -> shards.ShardStatus:
        request = store_pb2.StoreStatusRequest(shard=True)
        try:
            with raising(self.address, _STATUS_S):
                return messages.shard_status_from_message(self._server.GetStoreStatus(request, timeout=_STATUS_S).shard)
        except (errors.Unavailable, errors.DeadlineExceeded):
            self.connection.look_elsewhere()
            raise

    def follow(self, find: Callable[[], str | None]) -> None:
        self.connection.follow(find)

    def share_memory(self) -> None:
        """Lets a server on this host take gradients from memory; see `SharedUpload.share_memory`."""
        self._pushes.share_memory()

    def measure(self, sums: shards.RowSums) -> shards.Measured:
        reply = self._owner.send(self._server.Prepare, store_pb2.PrepareRequest(sums=messages.sums_to_message(sums)))
        return self.connection.decoded(messages.measured_from_message, reply)

    def offer_rows(
        self, commit: shards.PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]
    ) -> shards.RowOffers:
        request = messages.offer_request_to_message(commit, most, ids)
        reply = self._owner.send(self._server.Prepare, request)
        return self.connection.decoded(messages.offers_from_message, reply)

    def commit_pushed(self, commit: shards.PushedCommit) -> shards.Committed:
        reply = self._owner.call(lambda timeout: self._commit_pushed(messages.pushed_commit_frames(commit), timeout))
        return from_message(shards.Committed, reply)

    def recover(self, version: int | None = None) -> int:
        return int(self.send_reset(None, version, take_back=True).rows)

    def record(self) -> bytes | None:
        request = store_pb2.ReadRecordRequest()

        def attempt(timeout: float) -> bytes | None:
            return self.connection.decoded(record_from_frames, self._record_frames(request, timeout=timeout))

        return self._owner.call(attempt)

    def reset_version(self, version: int, record: bytes | None = None, force: bool = False) -> None:
        self.send_reset(record, version, force=force)

    def take_changes(self, mark: bytes, base: bytes) -> shards.TakenChanges:
        request = store_pb2.TakeChangesRequest(mark=mark, base=base)
        return from_message(shards.TakenChanges, self._owner.send(self._server.TakeChanges, request))

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        return ShardPin(self, version, lease_s)

    def save_rows(self, save: shards.RowSave, pin: bytes = b"") -> shards.SavedRows:
        """Asks until it is done, by short calls; `pin`: token of the pin whose rows are saved, b"" for the store."""
        request, early = to_message(store_pb2.SaveRowsRequest, save, pin=pin, wait_ms=_SAVE_MS), 0
        try:
            while early < _MOST_EARLY:
                asked = time.monotonic()
                reply = self._owner.send(self._server.SaveRows, request)
                if reply.done:
                    return from_message(shards.SavedRows, reply)
                early += time.monotonic() - asked < _SAVE_MS / 2000
            raise errors.StoreFailed(
                f"{self.address} answers SaveRows again and again, and does not wait as it is asked to"
            )
        except errors.CheckpointError as error:
            raise errors.CheckpointError(f"store server {self.address}: {error}") from error

    def commit(self, commit: Commit) -> None:
        self._refuse_commit()

    def stage(self, commit: Commit) -> Callable[[], None]:
        self._refuse_commit()

    def update(
        self, updates: Mapping[str, TableUpdate], learning_rates: Mapping[str, float], step: int | None = None
    ) -> int:
        self._refuse_commit()

    def _refuse_commit(self) -> NoReturn:
        raise errors.Unsupported(
            f"{self.address} is a store server, whose versions are made of what workers push there (commit_pushed); "
            "commits of whole gradients are for a parameter server (elastable serve, grpc://)"
        )

    def close(self) -> None:
        self._pushes.close()
        if self._own:
            self.connection.close()


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
        return self.call(lambda timeout: method(request, timeout=timeout))

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


class ShardPin(RemotePin, shards.ServedRows):
    """A pin of a store server, whose owner has its rows saved; `client`, `version`, `lease_s`: as of `RemotePin`."""

    def __init__(self, client: ShardClient, version: int | None, lease_s: float) -> None:
        super().__init__(client, version, lease_s)
        self._client = client

    def save_rows(self, save: shards.RowSave) -> shards.SavedRows:
        self.require_open()
        return self._client.save_rows(save, self.token)
