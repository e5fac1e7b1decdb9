"""The calls about dense variables at store servers as messages and frames, and back."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import replace

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.row_pushes import DenseLayout, DenseSlice, Measured
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages.frames import BodyPlan, FrameReader, encode
from elastable.embedding_store.wire.pushes.dense_arrays import (
    DenseEntries,
    declare_dense,
    dtype_of,
    plan_dense,
    taken_dense,
)
from elastable.embedding_store.wire.pushes.push_messages import measured_from_message, measured_to_message

__all__ = [
    "dense_sums_frames",
    "dense_sums_from_frames",
    "dense_values_frames",
    "dense_values_from_frames",
    "layout_from_message",
    "layout_to_message",
]

_MOST_VARIABLES = 100_000
_LONGEST_NAME = 4096
_SUMS, _VALUES = "DenseSums", "DenseValues"


def layout_to_message(entries: DenseEntries, layout: DenseLayout) -> None:
    """Says in a claim what the server holds, in place of what was said before."""
    del entries[:]
    for place, each in layout.items():
        entries.add(place=place, dtype=each.dtype.name, size=each.size, name=each.name)


def layout_from_message(entries: DenseEntries) -> dict[int, DenseSlice]:
    """The inverse of `layout_to_message`. Raises `BadInput` for what cannot be."""
    if len(entries) > _MOST_VARIABLES or len({entry.place for entry in entries}) < len(entries):
        raise BadInput(f"Claim: {len(entries)} dense variables; at most {_MOST_VARIABLES}, and each once")
    for entry in entries:
        if entry.place < 0 or len(entry.name) > _LONGEST_NAME:
            raise BadInput(f"Claim: dense variable {entry.place} with a name of {len(entry.name)} characters")
    plan_dense(BodyPlan("Claim"), "Claim", entries)  # sizes that no body could have
    return {entry.place: DenseSlice(dtype_of("Claim", entry), entry.size, entry.name) for entry in entries}


def dense_sums_frames(measured: Measured) -> Iterator[bytes]:
    """The frames that answer one SumDense."""
    header = store_pb2.DenseSumsHeader(measured=measured_to_message(measured))
    arrays = declare_dense(header.slices, measured.dense)
    return encode(header.SerializeToString(), arrays)


def dense_sums_from_frames(frames: Iterable[bytes], layout: DenseLayout) -> Measured:
    """The inverse of `dense_sums_frames`. Raises `BadInput`: malformed frames, or slices other than asked for."""
    reader = FrameReader(frames, _SUMS)
    header = reader.header(store_pb2.DenseSumsHeader)
    measured = measured_from_message(header.measured)
    slices = _slices(reader, _SUMS, header.slices, {} if measured.missing else layout)
    return replace(measured, dense=slices)


def dense_values_frames(version: int, values: Mapping[int, Array]) -> Iterator[bytes]:
    """The frames of one KeepDense, or of the answer to one ReadDense."""
    header = store_pb2.DenseValuesHeader(version=version)
    arrays = declare_dense(header.slices, values)
    return encode(header.SerializeToString(), arrays)


def dense_values_from_frames(
    frames: Iterable[bytes], layout: DenseLayout | None = None
) -> tuple[int, dict[int, Array]]:
    """The version and its slices. Raises `BadInput`: malformed frames, or slices other than those of `layout`."""
    reader = FrameReader(frames, _VALUES)
    header = reader.header(store_pb2.DenseValuesHeader)
    return header.version, _slices(reader, _VALUES, header.slices, layout)


def _slices(reader: FrameReader, message: str, entries: DenseEntries, layout: DenseLayout | None) -> dict[int, Array]:
    # Before anything is allocated: the other side may declare what it likes.
    if layout is not None:
        found = {entry.place: (entry.dtype, entry.size) for entry in entries}
        wanted = {place: (each.dtype.name, each.size) for place, each in layout.items()}
        if found != wanted:
            raise BadInput(f"{message}: slices of dense variables {found}; want {wanted}")
    plan = BodyPlan(message)
    plan_dense(plan, message, entries)
    return taken_dense(entries, iter(reader.read(plan)))
