"""The calls of store servers as messages and back: pushes, in frames or shared memory, versions, saved rows, status."""

import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import fields, replace
from itertools import pairwise
from typing import Any, Generic, Protocol, TypeVar

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadGradient, BadInput, Unavailable, Unsupported
from elastable.embedding_store.measures import BOUNDS_S, Histogram
from elastable.embedding_store.shards import server_contract as shards
from elastable.embedding_store.support.array_body import BodyPlan
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.tables.checks import array_kind
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.messages.frames import FrameReader, Upload, encode
from elastable.embedding_store.wire.messages.plain_data import from_message, to_message
from elastable.embedding_store.wire.messages.store_messages import and_record, with_record
from elastable.embedding_store.wire.shared.attachment import Attached
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels, SharedMessage

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_WORTH_SHARING = 128 << 10  # bytes; fewer are sent as quickly


def frames_of(header: Any, arrays: Sequence[Array], channel: SharedChannel | None) -> Iterator[bytes]:
    """The frames of a message; its arrays lie in a channel, if there is one and that is worth it.

    Args:
        header: Of the message; its field `shared` says where they lie.
        arrays: All of the message.
        channel: Memory that the server reads, too.
    """
    if channel is not None and sum(array.nbytes for array in arrays) >= _WORTH_SHARING:
        message = channel.put(arrays)
        header.shared.channel, header.shared.stamp = message.channel, message.stamp
        arrays = ()
    return encode(header.SerializeToString(), arrays)


def read_body(
    reader: FrameReader, header: Any, message: str, plan: BodyPlan, channels: SharedChannels | None
) -> Iterator[Array]:
    """The arrays of a message, from its frames or from the channel where its header says that they lie.

    Raises:
        BadInput: malformed frames.
        Unsupported: a channel that is not known here.
    """
    if not header.HasField("shared"):
        return iter(reader.read(plan))
    reader.read(BodyPlan(message))
    message_at = SharedMessage(header.shared.channel, header.shared.stamp)
    return iter((channels or SharedChannels()).read(message_at, plan))


Message = TypeVar("Message")
Reply = TypeVar("Reply")


class SharedUpload(Generic[Message, Reply]):
    """Makes calls that hand gradients to a server. Safe to use from many threads.

    Args:
        connection: To the server.
        upload: The call.
        frames: (message, channel) -> its frames; with a channel arrays may lie there instead.
        attach: Asks the server for its memory: the name of a socket, and what to say there.
    """

    def __init__(
        self,
        connection: ServerConnection,
        upload: Upload[Reply],
        frames: Callable[[Message, SharedChannel | None], Iterator[bytes]],
        attach: Callable[[], tuple[str, bytes]],
    ) -> None:
        self._connection, self._upload, self._frames = connection, upload, frames
        near, far = "gradients are laid down in memory for %s", "gradients go to %s over gRPC: %s"
        self._attached = Attached(connection, lambda: SharedChannel(*attach()), near, far)
        self._sharing = False
        self._sending = threading.Lock()

    def share_memory(self) -> None:
        """From now on arrays are laid down in memory where the server can map it: with it a socket's copies are saved.

        A server on another host, in another network namespace or whose store shares no memory gets frames, as before.
        """
        self._sharing = True

    def send(self, message: Message) -> Reply:
        """Makes the call, again until the deadline while the server is not reached; raises what the server answers."""
        if self._sharing and self._sending.acquire(blocking=False):  # one message at a time; others go in frames
            try:
                if (channel := self._attached.find()) is not None:
                    return self._connection.call(lambda timeout: self._upload(self._frames(message, channel), timeout))
            except Unavailable:  # an OSError, too; frames would not get there either
                raise
            except (Unsupported, OSError) as error:
                self._attached.leave(self._attached.memory, error)
            finally:
                self._sending.release()
        return self._connection.call(lambda timeout: self._upload(self._frames(message, None), timeout))

    def close(self) -> None:
        """Takes the memory back. Closing twice is harmless."""
        self._attached.close()


_MOST_SQUARES_BYTES = 128


class _SlicesEntry(Protocol):
    table: str
    count: int
    dim: int


def declare_slices(entries: Any, every: Mapping[str, shards.Slices]) -> list[Array]:
    """Adds an entry for each table; its arrays.

    Args:
        entries: A repeated field of `SlicesEntry`.
        every: Table name -> gradient.

    Raises:
        BadGradient: an array that the wire has no place for; names its table.
    """
    arrays: list[Array] = []
    for table, slices in every.items():
        indices, values = slices.indices, slices.values
        if indices.dtype != _INT64 or indices.ndim != 1:
            raise BadGradient(
                f"gradient of table {table!r}: indices must be int64 of one dimension, "
                f"got {indices.dtype} {list(indices.shape)}"
            )
        if values.dtype != _FLOAT32 or values.ndim != 2 or len(values) != len(indices):
            raise BadGradient(
                f"gradient of table {table!r}: values must be float32 [{len(indices)}, dim], "
                f"got {values.dtype} {list(values.shape)}"
            )
        entries.add(table=table, count=len(indices), dim=values.shape[1])
        arrays += [indices, values]
    return arrays


def plan_slices(plan: BodyPlan, message: str, every: Sequence[_SlicesEntry]) -> None:
    """Plans the arrays of `declare_slices`. Raises `BadInput` for a table named twice, or a size that cannot be."""
    if len({entry.table for entry in every}) < len(every):
        raise BadInput(f"{message}: a table is in it twice; join its slices")
    for entry in every:
        plan.add(f"indices of table {entry.table!r}", (entry.count,), _INT64)
        plan.add(f"values of table {entry.table!r}", (entry.count, entry.dim), _FLOAT32)


def row_push_frames(push: shards.RowPush, channel: SharedChannel | None = None) -> Iterator[bytes]:
    """The frames of one PushRows.

    Args:
        push: What is pushed.
        channel: Where to lay its arrays down, if that is worth it; None: they travel in the frames.

    Raises:
        BadGradient: an array that the wire has no place for; names its table.
    """
    terms = None if push.job else to_message(store_pb2.PushTerms, push.terms)
    header = to_message(store_pb2.RowPushHeader, push, parts=None, terms=terms)
    arrays: list[Array] = []
    for part in push.parts:
        entries = header.parts.add().slices
        arrays += declare_slices(entries, part)
        for entry, slices in zip(entries, part.values(), strict=True):
            if (squares := slices.row_squares) is not None:
                if squares.dtype != np.float32 or squares.shape != (entry.count,):
                    raise BadGradient(
                        f"table {entry.table!r}: row_squares must be float32 [{entry.count}], got {array_kind(squares)}"
                    )
                entry.row_squares = True
                arrays.append(squares)
    if channel is None:
        return encode(header.SerializeToString(), arrays)
    return frames_of(header, arrays, channel)


def row_push_from_frames(frames: Iterable[bytes], channels: SharedChannels | None = None) -> shards.RowPush:
    """The push in the frames of one PushRows.

    Args:
        frames: As they came.
        channels: Where its arrays may lie; None: nowhere else.

    Raises:
        BadInput: malformed frames, a table named twice in a part, or a size that cannot be.
        Unsupported: its arrays lie in a channel that is not known here.
    """
    reader = FrameReader(frames, "RowPush")
    header = reader.header(store_pb2.RowPushHeader)
    plan = BodyPlan("RowPush")
    for part in header.parts:
        plan_slices(plan, "RowPush", part.slices)
        for entry in part.slices:
            if entry.row_squares:
                plan.add(f"row_squares of table {entry.table!r}", (entry.count,), _FLOAT32)
    arrays = read_body(reader, header, "RowPush", plan, channels)
    parts = tuple(_part(part.slices, arrays) for part in header.parts)
    return from_message(shards.RowPush, header, parts=parts)


def _part(entries: Sequence[store_pb2.SlicesEntry], arrays: Iterator[Array]) -> dict[str, shards.Slices]:
    found = {entry.table: shards.Slices(next(arrays), next(arrays)) for entry in entries}
    for entry in entries:
        if entry.row_squares:
            found[entry.table] = replace(found[entry.table], row_squares=next(arrays))
    return found


def measured_to_message(measured: shards.Measured) -> store_pb2.PrepareReply:
    """The reply to a Prepare."""
    reply = store_pb2.PrepareReply(not_finite=measured.not_finite, missing=measured.missing)
    for table, squares in measured.squares.items():
        reply.tables.add(table=table, squares=squares.to_bytes((squares.bit_length() + 7) // 8, "little"))
    return reply


def measured_from_message(reply: store_pb2.PrepareReply) -> shards.Measured:
    """The inverse of `measured_to_message`. Raises `BadInput` for a number longer than any sum is."""
    squares = {}
    for entry in reply.tables:
        if len(entry.squares) > _MOST_SQUARES_BYTES:
            raise BadInput(f"PrepareReply: squares of {len(entry.squares)} bytes for table {entry.table!r}")
        squares[entry.table] = int.from_bytes(entry.squares, "little")
    return shards.Measured(squares, tuple(reply.not_finite), tuple(reply.missing))


def pushed_commit_frames(commit: shards.PushedCommit) -> Iterator[bytes]:
    """The frames of one CommitPushed."""
    header = to_message(store_pb2.CommitPushedHeader, commit, sums=sums_to_message(commit.sums))
    return with_record(header, commit.record)


def pushed_commit_from_frames(frames: Iterable[bytes]) -> shards.PushedCommit:
    """The commit in the frames of one CommitPushed. Raises `BadInput`: malformed frames."""
    header, record = and_record(frames, "CommitPushed", store_pb2.CommitPushedHeader)
    return from_message(shards.PushedCommit, header, sums=sums_from_message(header.sums), record=record)


# Which pushes are summed, as a message and back


def sums_to_message(sums: shards.RowSums) -> store_pb2.RowSums:
    """Which pushes are summed."""
    return to_message(
        store_pb2.RowSums,
        sums,
        micro_batches=[term.micro_batch for term in sums.terms],
        parts=[term.part for term in sums.terms],
        shares=[term.share for term in sums.terms],
    )


def sums_from_message(message: store_pb2.RowSums) -> shards.RowSums:
    """The inverse of `sums_to_message`. Raises `BadInput` where its lists are not of one length."""
    if not len(message.micro_batches) == len(message.parts) == len(message.shares):
        raise BadInput("RowSums: micro_batches, parts and shares are of different lengths")
    terms = zip(message.micro_batches, message.parts, message.shares, strict=True)
    return from_message(shards.RowSums, message, terms=tuple(shards.SumTerm(*term) for term in terms))


# What store servers offer of tables that share a budget of rows, and what goes of it, as messages and back


def offer_request_to_message(
    commit: shards.PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]
) -> store_pb2.PrepareRequest:
    """The arguments of `ShardServer.offer_rows`; of the commit, what matters there."""
    offer = to_message(
        store_pb2.OfferRequest,
        commit,
        most=most,
        ids={table: store_pb2.TiedRows(version=version, count=count) for table, (version, count) in ids.items()},
    )
    return store_pb2.PrepareRequest(sums=sums_to_message(commit.sums), offer=offer)


def offer_request_from_message(
    request: store_pb2.PrepareRequest,
) -> tuple[shards.PushedCommit, int, dict[str, tuple[int, int]]]:
    """The inverse of `offer_request_to_message`. Raises `BadInput` for numbers that cannot be."""
    offer = request.offer
    ids = {table: (rows.version, rows.count) for table, rows in offer.ids.items()}
    if offer.most < 0 or any(count < 0 for _, count in ids.values()):
        raise BadInput("PrepareRequest: a negative number of versions or ids is asked for")
    sums = sums_from_message(request.sums)
    commit = from_message(shards.PushedCommit, offer, sums=sums, step=0, learning_rates={})
    return commit, offer.most, ids


def offers_to_message(offers: shards.RowOffers) -> store_pb2.PrepareReply:
    """The reply to a Prepare that asks for offers."""
    reply = store_pb2.PrepareReply(missing=offers.missing)
    for table, offer in offers.tables.items():
        versions, counts = [version for version, _ in offer.touched], [count for _, count in offer.touched]
        reply.offers.add(table=table, rows=offer.rows, versions=versions, counts=counts, ids=offer.ids)
    return reply


def offers_from_message(reply: store_pb2.PrepareReply) -> shards.RowOffers:
    """The inverse of `offers_to_message`. Raises `BadInput` for numbers that cannot be."""
    offers = {}
    for entry in reply.offers:
        if len(entry.versions) != len(entry.counts):
            raise BadInput(f"PrepareReply: versions and counts of table {entry.table!r} are of different lengths")
        ascend = all(one < other for one, other in pairwise(entry.versions))
        if not ascend or min(entry.counts, default=1) < 1 or sum(entry.counts) > entry.rows:
            raise BadInput(f"PrepareReply: versions or counts of rows of table {entry.table!r} that cannot be")
        touched = tuple(zip(entry.versions, entry.counts, strict=True))
        offers[entry.table] = shards.RowOffer(entry.rows, touched, tuple(entry.ids))
    return shards.RowOffers(offers, tuple(reply.missing))


# The status of a shard as a message


_PHASES = ("prepare", "apply", "append")


def shard_status_from_message(message: store_pb2.ShardStatus) -> shards.ShardStatus:
    """What a server says of its shard; its text is fit for a terminal, and no number is below 0."""
    said = from_message(shards.ShardStatus, message, lambda text: printable(text, 1024, lines=False), commits={})
    return replace(
        said,
        **{of.name: max(0, getattr(said, of.name)) for of in fields(said) if of.type is int},
        failure=printable(message.failure, 1024),
        commits=_commits(message.commits),
    )


def _commits(phases: Iterable[store_pb2.CommitPhase]) -> dict[str, Histogram]:
    """Phases that there are, with as many buckets as there are here; others are left out."""
    found = {}
    for each in phases:
        known = each.phase in _PHASES and len(each.counts) == len(BOUNDS_S) + 1
        if known and min(each.counts) >= 0 and math.isfinite(each.seconds) and each.seconds >= 0:
            found[each.phase] = from_message(Histogram, each)
    return found
