"""The calls of store servers as messages and frames, and back: pushes, versions of them, saved rows, status."""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import pairwise

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import EvictionCut
from elastable.embedding_store.errors import BadGradient, BadInput
from elastable.embedding_store.measures import BOUNDS_S, Histogram
from elastable.embedding_store.shards import server_contract as shards
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.tables.checks import array_kind
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import BodyPlan, FrameReader, encode
from elastable.embedding_store.wire.messages.store_messages import (
    and_record,
    optional,
    plain_fields,
    plain_values,
    with_record,
)
from elastable.embedding_store.wire.pushes.uploads import body_of, declare_slices, plan_slices, read_body
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels

_PLAIN_OF_PUSH = plain_fields(shards.RowPush, store_pb2.RowPushHeader)
_PLAIN_OF_TERMS = plain_fields(shards.PushTerms, store_pb2.PushTerms)
_MOST_SQUARES_BYTES = 128
_FLOAT32 = np.dtype(np.float32)


def row_push_frames(push: shards.RowPush, channel: SharedChannel | None = None) -> Iterator[bytes]:
    """The frames of one PushRows.

    Args:
        push: What is pushed.
        channel: Where to lay its arrays down, if that is worth it; None: they travel in the frames.

    Raises:
        BadGradient: an array that the wire has no place for; names its table.
    """
    header = store_pb2.RowPushHeader(**{name: getattr(push, name) for name in _PLAIN_OF_PUSH})
    if not push.job:
        terms = push.terms
        plain = {name: getattr(terms, name) for name in _PLAIN_OF_TERMS}
        header.terms.CopyFrom(store_pb2.PushTerms(learning_rates=terms.learning_rates, **plain))
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
    body = arrays if channel is None else body_of(header, arrays, channel)  # first: it sets the header's `shared`
    return encode(header.SerializeToString(), body)


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
    rates = dict(header.terms.learning_rates)
    terms = shards.PushTerms(learning_rates=rates, **plain_values(header.terms, _PLAIN_OF_TERMS))
    return shards.RowPush(parts=parts, terms=terms, **plain_values(header, _PLAIN_OF_PUSH))


def _part(entries: Sequence[store_pb2.SlicesEntry], arrays: Iterator[Array]) -> dict[str, shards.Slices]:
    found = {entry.table: shards.Slices(next(arrays), next(arrays)) for entry in entries}
    for entry in entries:
        if entry.row_squares:
            found[entry.table] = replace(found[entry.table], row_squares=next(arrays))
    return found


def row_reply_to_message(reply: shards.RowPushReply) -> store_pb2.RowPushReply:
    """The reply to a PushRows."""
    outcome = store_pb2.RowPushReply.Outcome.Value(f"OUTCOME_{reply.outcome.name}")
    return store_pb2.RowPushReply(outcome=outcome, version=reply.version, reason=reply.reason)


def row_reply_from_message(reply: store_pb2.RowPushReply) -> shards.RowPushReply:
    """The inverse of `row_reply_to_message`. Raises `BadInput` for an outcome that is not known here."""
    try:
        name = store_pb2.RowPushReply.Outcome.Name(reply.outcome).removeprefix("OUTCOME_")
        return shards.RowPushReply(shards.RowPushOutcome[name], reply.version, printable(reply.reason, 1024))
    except (KeyError, ValueError) as error:
        raise BadInput(
            f"RowPushReply: outcome {reply.outcome} is unknown; start all processes from one release"
        ) from error


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
    header = store_pb2.CommitPushedHeader(
        sums=sums_to_message(commit.sums),
        step=commit.step,
        learning_rates=commit.learning_rates,
        ends_replay_epoch=commit.ends_replay_epoch,
        clips={table: store_pb2.TableClip(scale=clip.scale, bound=clip.bound) for table, clip in commit.clips.items()},
        dropped=commit.dropped,
        time=commit.time,
        cuts={
            table: store_pb2.EvictionCut(version=cut.version, least_id=cut.least_id)
            for table, cut in commit.cuts.items()
        },
    )
    return with_record(header, commit.record)


def pushed_commit_from_frames(frames: Iterable[bytes]) -> shards.PushedCommit:
    """The commit in the frames of one CommitPushed. Raises `BadInput`: malformed frames."""
    header, record = and_record(frames, "CommitPushed", store_pb2.CommitPushedHeader)
    return shards.PushedCommit(
        sums_from_message(header.sums),
        header.step,
        dict(header.learning_rates),
        {table: shards.TableClip(clip.scale, optional(clip, "bound")) for table, clip in header.clips.items()},
        record,
        header.ends_replay_epoch,
        header.dropped,
        optional(header, "time"),
        {table: EvictionCut(cut.version, optional(cut, "least_id")) for table, cut in header.cuts.items()},
    )


# Which pushes are summed, as a message and back


def sums_to_message(sums: shards.RowSums) -> store_pb2.RowSums:
    """Which pushes are summed."""
    return store_pb2.RowSums(
        version=sums.version,
        micro_batches=[term.micro_batch for term in sums.terms],
        parts=[term.part for term in sums.terms],
        shares=[term.share for term in sums.terms],
        rows_once=sums.rows_once,
        frozen=sums.frozen,
        sender=sums.sender,
    )


def sums_from_message(message: store_pb2.RowSums) -> shards.RowSums:
    """The inverse of `sums_to_message`. Raises `BadInput` where its lists are not of one length."""
    if not len(message.micro_batches) == len(message.parts) == len(message.shares):
        raise BadInput("RowSums: micro_batches, parts and shares are of different lengths")
    terms = zip(message.micro_batches, message.parts, message.shares, strict=True)
    return shards.RowSums(
        message.version,
        tuple(shards.SumTerm(*term) for term in terms),
        tuple(message.rows_once),
        tuple(message.frozen),
        message.sender,
    )


# What store servers offer of tables that share a budget of rows, and what goes of it, as messages and back


def offer_request_to_message(
    commit: shards.PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]
) -> store_pb2.PrepareRequest:
    """The arguments of `ShardServer.offer_rows`; of the commit, what matters there."""
    offer = store_pb2.OfferRequest(
        dropped=commit.dropped,
        time=commit.time,
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
    commit = shards.PushedCommit(
        sums_from_message(request.sums), 0, {}, dropped=offer.dropped, time=optional(offer, "time")
    )
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


# The calls about rows that store servers save, as messages and back


_WAIT_MS = 5_000
_LONGEST_WAIT_MS = 20_000
_OF_A_SAVE = ("save", "mark", "place", "draft", "known", "known_bytes", "probe")


def changes_to_message(changes: shards.TakenChanges) -> store_pb2.TakeChangesReply:
    """The reply to a TakeChanges."""
    reply = store_pb2.TakeChangesReply(version=changes.version)
    for table, of in changes.tables.items():
        reply.tables.add(table=table, rows=of.rows, changed=of.changed, shrunk=of.shrunk)
    return reply


def changes_from_message(reply: store_pb2.TakeChangesReply) -> shards.TakenChanges:
    """The inverse of `changes_to_message`."""
    tables = {of.table: shards.ChangedTable(of.rows, optional(of, "changed"), of.shrunk) for of in reply.tables}
    return shards.TakenChanges(reply.version, tables)


def save_to_message(save: shards.RowSave, pin: bytes) -> store_pb2.SaveRowsRequest:
    """What is to be saved; `pin`: token of the pin to read, b"" for the store."""
    same = {name: getattr(save, name) for name in (*_OF_A_SAVE, "note")}
    request = store_pb2.SaveRowsRequest(**same, pin=pin, wait_ms=_WAIT_MS)
    for of in save.tables:
        request.tables.add(table=of.table, prefix=of.prefix, whole=of.whole, live=of.live)
    return request


def save_from_message(request: store_pb2.SaveRowsRequest) -> tuple[shards.RowSave, float]:
    """The inverse of `save_to_message`, and the seconds to wait. Raises `BadInput` for a wait that is too long."""
    if not 0 <= request.wait_ms <= _LONGEST_WAIT_MS:
        raise BadInput(f"SaveRows: wait_ms {request.wait_ms}: at most {_LONGEST_WAIT_MS}, and ask again")
    tables = tuple(shards.TableSave(of.table, of.prefix, of.whole, of.live) for of in request.tables)
    same = {name: getattr(request, name) for name in _OF_A_SAVE}
    return shards.RowSave(**same, tables=tables, note=dict(request.note)), request.wait_ms / 1000


def saved_to_message(saved: shards.SavedRows | None) -> store_pb2.SaveRowsReply:
    """The reply to a SaveRows; None: it is not done yet."""
    if saved is None:
        return store_pb2.SaveRowsReply()
    reply = store_pb2.SaveRowsReply(done=True)
    for table, of in saved.tables.items():
        reply.tables.add(table=table, rows=of.rows, written=of.written, files=of.files, live=of.live)
    for name, file in saved.files.items():
        reply.files.add(name=name, sha256=file.sha256, bytes=file.bytes)
    return reply


def saved_from_message(reply: store_pb2.SaveRowsReply) -> shards.SavedRows:
    """The inverse of `saved_to_message`."""
    tables = {of.table: shards.SavedTable(of.rows, of.written, tuple(of.files), tuple(of.live)) for of in reply.tables}
    return shards.SavedRows(tables, {file.name: shards.SavedFile(file.sha256, file.bytes) for file in reply.files})


# The status of a shard as a message


_NUMBERS = ("version", "rows", "bytes", "wanted_rows", "read_rows", "flush_lag", "log_bytes", "pushed_bytes")
_PHASES = ("prepare", "apply", "append")


def shard_status_to_message(status: shards.ShardStatus) -> store_pb2.ShardStatus:
    """What a server says of its shard."""
    return store_pb2.ShardStatus(
        **{name: getattr(status, name) for name in _NUMBERS},
        failure=status.failure,
        store=status.store,
        commits=[
            store_pb2.CommitPhase(phase=phase, counts=took.counts, seconds=took.seconds)
            for phase, took in status.commits.items()
        ],
    )


def shard_status_from_message(message: store_pb2.ShardStatus) -> shards.ShardStatus:
    """What a server says of its shard; its text is fit for a terminal, and no number is below 0."""
    return shards.ShardStatus(
        **{name: max(0, getattr(message, name)) for name in _NUMBERS},
        failure=printable(message.failure, 1024),
        store=printable(message.store, 1024, lines=False),
        commits=_commits(message.commits),
    )


def _commits(phases: Iterable[store_pb2.CommitPhase]) -> dict[str, Histogram]:
    """Phases that there are, with as many buckets as there are here; others are left out."""
    found = {}
    for each in phases:
        known = each.phase in _PHASES and len(each.counts) == len(BOUNDS_S) + 1
        if known and min(each.counts) >= 0 and math.isfinite(each.seconds) and each.seconds >= 0:
            found[each.phase] = Histogram(tuple(each.counts), each.seconds)
    return found
