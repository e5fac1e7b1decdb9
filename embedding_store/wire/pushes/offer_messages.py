"""What store servers offer of tables that share a budget of rows, and what goes of it, as messages and back."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise

from elastable.embedding_store.contract.row_data import EvictionCut
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.row_pushes import PushedCommit, RowOffer, RowOffers
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.pushes.sums_messages import sums_from_message, sums_to_message

__all__ = [
    "cut_from_message",
    "cut_to_message",
    "offer_request_from_message",
    "offer_request_to_message",
    "offers_from_message",
    "offers_to_message",
]


def offer_request_to_message(
    commit: PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]
) -> store_pb2.OfferRowsRequest:
    """The arguments of `ShardServer.offer_rows`; of the commit, what matters there."""
    return store_pb2.OfferRowsRequest(
        sums=sums_to_message(commit.sums),
        dropped=commit.dropped,
        time=commit.time,
        most=most,
        ids={table: store_pb2.TiedRows(version=version, count=count) for table, (version, count) in ids.items()},
    )


def offer_request_from_message(
    request: store_pb2.OfferRowsRequest,
) -> tuple[PushedCommit, int, dict[str, tuple[int, int]]]:
    """The inverse of `offer_request_to_message`. Raises `BadInput` for numbers that cannot be."""
    ids = {table: (rows.version, rows.count) for table, rows in request.ids.items()}
    if request.most < 0 or any(count < 0 for _, count in ids.values()):
        raise BadInput("OfferRowsRequest: a negative number of versions or ids is asked for")
    time = request.time if request.HasField("time") else None
    commit = PushedCommit(sums_from_message(request.sums), 0, {}, dropped=request.dropped, time=time)
    return commit, request.most, ids


def offers_to_message(offers: RowOffers) -> store_pb2.OfferRowsReply:
    """The reply to an OfferRows."""
    reply = store_pb2.OfferRowsReply(missing=offers.missing)
    for table, offer in offers.tables.items():
        versions, counts = [version for version, _ in offer.touched], [count for _, count in offer.touched]
        reply.tables.add(table=table, rows=offer.rows, versions=versions, counts=counts, ids=offer.ids)
    return reply


def offers_from_message(reply: store_pb2.OfferRowsReply) -> RowOffers:
    """The inverse of `offers_to_message`. Raises `BadInput` for numbers that cannot be."""
    offers = {}
    for entry in reply.tables:
        if len(entry.versions) != len(entry.counts):
            raise BadInput(f"OfferRowsReply: versions and counts of table {entry.table!r} are of different lengths")
        ascend = all(one < other for one, other in pairwise(entry.versions))
        if not ascend or min(entry.counts, default=1) < 1 or sum(entry.counts) > entry.rows:
            raise BadInput(f"OfferRowsReply: versions or counts of rows of table {entry.table!r} that cannot be")
        touched = tuple(zip(entry.versions, entry.counts, strict=True))
        offers[entry.table] = RowOffer(entry.rows, touched, tuple(entry.ids))
    return RowOffers(offers, tuple(reply.missing))


def cut_to_message(cut: EvictionCut) -> store_pb2.EvictionCut:
    """What goes of a table."""
    return store_pb2.EvictionCut(version=cut.version, least_id=cut.least_id)


def cut_from_message(message: store_pb2.EvictionCut) -> EvictionCut:
    """The inverse of `cut_to_message`."""
    return EvictionCut(message.version, message.least_id if message.HasField("least_id") else None)
