"""Which pushes are summed, as a message and back."""

from __future__ import annotations

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.row_pushes import RowSums, SumTerm
from elastable.embedding_store.v1 import store_pb2

__all__ = ["sums_from_message", "sums_to_message"]


def sums_to_message(sums: RowSums) -> store_pb2.RowSums:
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


def sums_from_message(message: store_pb2.RowSums) -> RowSums:
    """The inverse of `sums_to_message`. Raises `BadInput` where its lists are not of one length."""
    if not len(message.micro_batches) == len(message.parts) == len(message.shares):
        raise BadInput("RowSums: micro_batches, parts and shares are of different lengths")
    terms = zip(message.micro_batches, message.parts, message.shares, strict=True)
    return RowSums(
        message.version,
        tuple(SumTerm(*term) for term in terms),
        tuple(message.rows_once),
        tuple(message.frozen),
        message.sender,
    )
