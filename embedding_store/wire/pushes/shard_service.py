"""The Store service of a store server: pushes of workers, versions of them, and what only its owner changes."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Any

import grpc

from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.errors import BadInput, TableNotFound, Unsupported
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.optimizers.registry import runs_keras
from elastable.embedding_store.shards.ownership import Claim
from elastable.embedding_store.shards.server_contract import RowSave
from elastable.embedding_store.shards.shard import Shard
from elastable.embedding_store.support.memory_mapping import mappings_are_scarce
from elastable.embedding_store.tables.checks import require_not_ahead
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.access.credentials import Proof, Proofs, secret_of
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.messages.store_messages import (
    blocks_from_frames,
    ids_from_frames,
    record_frames,
    reset_from_frames,
    spec_from_message,
    wait_seconds,
)
from elastable.embedding_store.wire.pushes import push_messages as messages
from elastable.embedding_store.wire.server.grpc_server import NotReady, Service
from elastable.embedding_store.wire.server.handlers import Handler, behaviour_of, with_behaviour
from elastable.embedding_store.wire.service.store_service import StoreServicer
from elastable.embedding_store.wire.shared.shared_channel import SharedChannels

MOST_TABLES = 10_000
"""Tables that clients may have made."""

LONGEST_SAVE_S = 20.0
"""That a call may wait for the end of a save."""


def shard_service(
    shard: Shard,
    channels: SharedChannels | None = None,
    lookups: LookupCounts | None = None,
    not_ready: NotReady = lambda: None,
) -> Service:
    """What a store server serves: its rows to be read by all, pushes of its job's workers, and its owner's calls.

    A parameter server has neither job nor owner.

    Args:
        shard: The rows, and the pushes.
        channels: Where the arrays of pushes may lie.
        lookups, not_ready: As of `store_service`.
    """
    if shard.clients is not None:
        served = _ShardServicer(shard, channels, lookups).service(not_ready, {})
        return replace(served, of_known={"CreateTable": _imports_keras})
    proofs: Proofs = {Proof.SESSION: shard.ownership.require_session, Proof.OWNER: shard.ownership.require}
    served = _OwnedServicer(shard, channels, lookups).service(not_ready, proofs)
    owned = {call: _owned(served.handlers[call], shard) for call in ("Put", "Delete", "ResetVersion", "CommitPushed")}
    return replace(served, handlers={**served.handlers, **owned})


def _imports_keras(request: store_pb2.CreateTableRequest) -> str:
    """A framework takes half a gigabyte of the server, whoever asked for it."""
    spec = spec_from_message(request.spec)
    if not runs_keras(spec.optimizer):
        return ""
    return f"table {spec.name!r}: its optimizer has no kernel here, so the server would import Keras for it"


class _ShardServicer(StoreServicer):
    def __init__(self, shard: Shard, channels: SharedChannels | None, lookups: LookupCounts | None) -> None:
        super().__init__(shard.store, lookups)
        self._shard, self._channels = shard, channels

    def status_of_shard(self, request: store_pb2.StoreStatusRequest, owner: bytes) -> store_pb2.StoreStatus:
        status = store_pb2.StoreStatus()
        if self._shard.clients is not None and (request.owned or request.owner):
            raise Unsupported(
                "GetStoreStatus: this is a parameter server (elastable serve), which nobody owns; store servers of "
                "a job are started with elastable store"
            )
        if request.owned:
            self._shard.ownership.require(owner)
        if request.owner:
            status.owner = self._shard.ownership.live_owner(but=owner)
            status.keeps_records = self._shard.store.keeps_records
        if request.shard:
            status.shard.CopyFrom(to_message(store_pb2.ShardStatus, self._shard.status()))
        return status

    def create_table(self, request: store_pb2.CreateTableRequest) -> store_pb2.CreateTableReply:
        spec, known = spec_from_message(request.spec), self._store.specs()
        if spec.name not in known and len(known) >= MOST_TABLES:
            raise BadInput(f"table {spec.name!r}: {MOST_TABLES} tables are here, as many as there may be")
        if spec.name not in known and mappings_are_scarce():
            raise BadInput(
                f"table {spec.name!r}: {len(known)} tables are here, as many as the system maps memory for "
                "(sysctl vm.max_map_count): drop some, or raise it and start the server again"
            )
        return store_pb2.CreateTableReply(created=self._store.create_table(spec))

    def drop_table(self, request: store_pb2.DropTableRequest) -> store_pb2.DropTableReply:
        if request.table not in (specs := self._store.specs()):  # before pins are given up for it
            raise TableNotFound(f"no table {request.table!r}; there are {', '.join(map(repr, specs)) or 'none'}")
        what = "cleared" if request.keep else "dropped"
        self.pins.make_way(f"table {request.table!r} cannot be {what}", request.force)
        if request.keep:
            self._store.clear(request.table)
        else:
            self._store.drop_table(request.table)
            self.forget_specs()
        return store_pb2.DropTableReply()

    def put(self, frames: Iterator[bytes]) -> store_pb2.PutReply:
        found = list(islice(blocks_from_frames(frames), 2))
        if len(found) != 1:
            raise BadInput("Put: one block, or state, is put by a call, whole or not at all")
        ((table, put),) = found
        if isinstance(put, TableState):
            if put.touch_times is not None:
                require_not_ahead(int(put.touch_times.max(initial=0)) / 1000, f"Put: touch times of table {table!r}")
            self._store.put_table_state(table, put)
        else:
            # That training made a row infinite is believed of a job's owner, and not of any client.
            self._store.put(table, [put if self._shard.clients is None else replace(put, trained=False)])
        return store_pb2.PutReply()

    def delete(self, frames: Iterator[bytes]) -> store_pb2.DeleteReply:
        header, ids = ids_from_frames(frames)
        return store_pb2.DeleteReply(rows=self._store.delete(header.table, ids))

    def push_rows(self, frames: Iterator[bytes], session: bytes) -> store_pb2.RowPushReply:
        push = messages.row_push_from_frames(frames, self._channels)
        return to_message(store_pb2.RowPushReply, self._shard.push_rows(push, session))

    def reset_version(self, frames: Iterator[bytes], owner: bytes) -> store_pb2.ResetVersionReply:
        header, record = reset_from_frames(frames)
        if self._shard.clients is not None and (header.take_back or record is not None):
            raise Unsupported("ResetVersion: only store servers keep records of versions, and take versions back")
        if header.take_back:
            version = header.version if header.HasField("version") else None
            return store_pb2.ResetVersionReply(rows=self._shard.take_back(version, owner))
        self.pins.make_way(f"the version cannot be reset to {header.version}", header.force)
        clients = self._shard.clients
        self._shard.reset_version(header.version, record if clients is None else clients.record)
        return store_pb2.ResetVersionReply()


class _OwnedServicer(_ShardServicer):
    """What a store server does for its owner, too."""

    def claim(self, request: store_pb2.ClaimRequest, owner: bytes) -> store_pb2.ClaimReply:
        self._shard.claim(owner, from_message(Claim, request), request.first)
        return store_pb2.ClaimReply()

    def prepare(self, request: store_pb2.PrepareRequest) -> store_pb2.PrepareReply:
        if request.HasField("offer"):
            return messages.offers_to_message(self._shard.offer_rows(*messages.offer_request_from_message(request)))
        return messages.measured_to_message(self._shard.measure(messages.sums_from_message(request.sums)))

    def commit_pushed(self, frames: Iterator[bytes], owner: bytes) -> store_pb2.CommitPushedReply:
        made = self._shard.commit(messages.pushed_commit_from_frames(frames), owner)
        return to_message(store_pb2.CommitPushedReply, made)

    def read_record(self, request: store_pb2.ReadRecordRequest) -> Iterator[bytes]:
        return record_frames(self._shard.store.record())

    def take_changes(self, request: store_pb2.TakeChangesRequest) -> store_pb2.TakeChangesReply:
        return to_message(store_pb2.TakeChangesReply, self._shard.take_changes(request.mark, request.base))

    def save_rows(self, request: store_pb2.SaveRowsRequest) -> store_pb2.SaveRowsReply:
        wait_s = wait_seconds("SaveRowsRequest", request.wait_ms, LONGEST_SAVE_S)
        saved = self._shard.save_rows(from_message(RowSave, request), self.pins.source(request.pin), wait_s)
        return store_pb2.SaveRowsReply() if saved is None else to_message(store_pb2.SaveRowsReply, saved, done=True)


def _owned(handler: Handler, shard: Shard) -> Handler:
    """The handler of a call of the owner's, which takes no frames of one that has been replaced meanwhile."""
    behaviour = behaviour_of(handler)

    def frames_of_owner(frames: Iterator[bytes], owner: bytes) -> Iterator[bytes]:
        for frame in frames:
            shard.ownership.require(owner)
            yield frame
        shard.ownership.require(owner)

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        return behaviour(frames_of_owner(request, secret_of(context, Proof.OWNER)), context)

    return with_behaviour(handler, answer)
