"""The Store service of a store server: pushes of workers, versions of them, and what only its owner changes."""

from collections.abc import Iterator
from typing import Any

import grpc

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.measures import LookupCounts
from elastable.embedding_store.shards import Claim, Shard
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.store_messages import OWNER_KEY
from elastable.embedding_store.wire.pushes import push_messages as messages
from elastable.embedding_store.wire.server.grpc_server import NotReady, Service
from elastable.embedding_store.wire.server.handlers import (
    Handler,
    behaviour_of,
    control,
    stream,
    upload,
    with_behaviour,
)
from elastable.embedding_store.wire.service.pin_service import ServedPins
from elastable.embedding_store.wire.service.store_service import StoreServicer
from elastable.embedding_store.wire.service.write_service import write_handlers
from elastable.embedding_store.wire.shared.shared_channel import SharedChannels

_NOT_SERVED = ("Commit", "CommitStaged")  # versions are made of pushes


def shard_service(
    shard: Shard,
    channels: SharedChannels | None = None,
    lookups: LookupCounts | None = None,
    not_ready: NotReady = lambda: None,
) -> Service:
    """What a store server serves: its rows to be read by all, and its owner's calls.

    Args:
        shard: The rows, and the pushes.
        channels: Where the arrays of pushes may lie.
        lookups, not_ready: As of `store_service`.
    """
    rows = StoreServicer(shard.store, lookups)
    servicer = _ShardServicer(shard, channels, rows.pins)
    writes, refused = (
        write_handlers(shard.store, writable, rows.pins, rows.forget_specs) for writable in (True, False)
    )
    owned = {
        "Renew": control(servicer.renew, store_pb2.RenewRequest),
        "Measure": control(servicer.measure, store_pb2.MeasureRequest),
        "OfferRows": control(servicer.offer_rows, store_pb2.OfferRowsRequest),
        "CommitPushed": upload(servicer.commit_pushed, _secret),
        "TakeBack": control(servicer.take_back, store_pb2.TakeBackRequest, _secret),
        "ReadRecord": stream(servicer.read_record, store_pb2.ReadRecordRequest),
        "KeepRecord": upload(servicer.keep_record),
        "TakeChanges": control(servicer.take_changes, store_pb2.TakeChangesRequest),
        "SaveRows": control(servicer.save_rows, store_pb2.SaveRowsRequest),
        **{call: handler for call, handler in writes.items() if call not in _NOT_SERVED},
    }
    changing = {
        "GetOwner": control(servicer.get_owner, store_pb2.GetOwnerRequest, _secret),
        "GetShardStatus": control(servicer.get_shard_status, store_pb2.GetShardStatusRequest),
        "PushRows": upload(servicer.push_rows),
        "Claim": control(servicer.claim, store_pb2.ClaimRequest, _secret),
        **{call: _owned(handler, shard) for call, handler in owned.items()},
        **{call: refused[call] for call in _NOT_SERVED},
    }
    return rows.service(changing, not_ready)


class _ShardServicer:
    def __init__(self, shard: Shard, channels: SharedChannels | None, pins: ServedPins) -> None:
        self._shard = shard
        self._channels = channels
        self._pins = pins

    def get_owner(self, request: store_pb2.GetOwnerRequest, secret: bytes) -> store_pb2.GetOwnerReply:
        owner = self._shard.ownership.live_owner(but=secret)
        return store_pb2.GetOwnerReply(owner=owner, keeps_records=self._shard.store.keeps_records)

    def get_shard_status(self, request: store_pb2.GetShardStatusRequest) -> store_pb2.ShardStatus:
        return messages.shard_status_to_message(self._shard.status())

    def claim(self, request: store_pb2.ClaimRequest, secret: bytes) -> store_pb2.ClaimReply:
        claim = Claim(request.owner, request.job, request.may_overflow, request.number, request.servers)
        self._shard.claim(secret, claim, request.first)
        return store_pb2.ClaimReply()

    def renew(self, request: store_pb2.RenewRequest) -> store_pb2.RenewReply:
        return store_pb2.RenewReply()

    def push_rows(self, frames: Iterator[bytes]) -> store_pb2.RowPushReply:
        return messages.row_outcome_to_message(
            self._shard.push_rows(messages.row_push_from_frames(frames, self._channels))
        )

    def measure(self, request: store_pb2.MeasureRequest) -> store_pb2.MeasureReply:
        return messages.measured_to_message(self._shard.measure(messages.sums_from_message(request.sums)))

    def offer_rows(self, request: store_pb2.OfferRowsRequest) -> store_pb2.OfferRowsReply:
        return messages.offers_to_message(self._shard.offer_rows(*messages.offer_request_from_message(request)))

    def commit_pushed(self, frames: Iterator[bytes], secret: bytes) -> store_pb2.CommitPushedReply:
        made = self._shard.commit(messages.pushed_commit_from_frames(frames), secret)
        return store_pb2.CommitPushedReply(repeated=made.repeated, missing=made.missing, tables=made.tables)

    def take_back(self, request: store_pb2.TakeBackRequest, secret: bytes) -> store_pb2.TakeBackReply:
        version = request.version if request.HasField("version") else None
        return store_pb2.TakeBackReply(rows=self._shard.take_back(version, secret))

    def read_record(self, request: store_pb2.ReadRecordRequest) -> Iterator[bytes]:
        return messages.record_frames(self._shard.store.record())

    def keep_record(self, frames: Iterator[bytes]) -> store_pb2.KeepRecordReply:
        record, version = messages.record_from_frames(frames)
        self._pins.make_way(f"the version cannot be reset to {version}", force=False)
        self._shard.reset_version(version, record)
        return store_pb2.KeepRecordReply()

    def take_changes(self, request: store_pb2.TakeChangesRequest) -> store_pb2.TakeChangesReply:
        return messages.changes_to_message(self._shard.take_changes(request.mark, request.base))

    def save_rows(self, request: store_pb2.SaveRowsRequest) -> store_pb2.SaveRowsReply:
        save, wait_s = messages.save_from_message(request)
        return messages.saved_to_message(self._shard.save_rows(save, self._pins.source(request.pin), wait_s))


def _owned(handler: Handler, shard: Shard) -> Handler:
    """The handler of a call that only the owner may make; frames of one that has been replaced are not taken."""
    behaviour = behaviour_of(handler)

    def frames_of_owner(frames: Iterator[bytes], secret: bytes) -> Iterator[bytes]:
        for frame in frames:
            shard.ownership.require(secret)
            yield frame
        shard.ownership.require(secret)

    def answer(request: Any, context: grpc.ServicerContext) -> Any:
        secret = _secret(context)
        if not secret:
            raise BadInput(f"this call is for the owner of the store server: show the secret of a claim ({OWNER_KEY})")
        shard.ownership.require(secret)
        return behaviour(frames_of_owner(request, secret) if handler.request_streaming else request, context)

    return with_behaviour(handler, answer)


def _secret(context: grpc.ServicerContext) -> bytes:
    """What the caller shows; b"": nothing."""
    shown = [value for key, value in context.invocation_metadata() if key == OWNER_KEY and isinstance(value, bytes)]
    return shown[0] if len(shown) == 1 else b""
