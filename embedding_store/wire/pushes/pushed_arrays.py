"""The arrays of a push, to a master or to a store server: gradients of tables, in frames or in shared memory."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadGradient, BadInput
from elastable.embedding_store.shards.row_pushes import Slices
from elastable.embedding_store.wire.messages.frames import BodyPlan, FrameReader
from elastable.embedding_store.wire.shared.shared_channel import SharedChannel, SharedChannels, SharedMessage

__all__ = ["body_of", "declare_slices", "plan_slices", "read_body"]

_INT64, _FLOAT32 = np.dtype(np.int64), np.dtype(np.float32)
_WORTH_SHARING = 128 << 10  # bytes; fewer are sent as quickly


class _SlicesEntry(Protocol):
    table: str
    count: int
    dim: int


def declare_slices(entries: Any, every: Mapping[str, Slices]) -> list[Array]:
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
        raise BadInput(f"{message}: a table stands in it twice; join its slices")
    for entry in every:
        plan.add(f"indices of table {entry.table!r}", (entry.count,), _INT64)
        plan.add(f"values of table {entry.table!r}", (entry.count, entry.dim), _FLOAT32)


def body_of(header: Any, arrays: Sequence[Array], channel: SharedChannel | None) -> Sequence[Array]:
    """Lays arrays down in a channel, if there is one and that is worth it; what is left for the frames.

    Args:
        header: Of the message; its field `shared` says where they lie.
        arrays: All of the message.
        channel: Memory that the server reads, too.
    """
    if channel is None or sum(array.nbytes for array in arrays) < _WORTH_SHARING:
        return arrays
    message = channel.put(arrays)
    header.shared.channel, header.shared.stamp = message.channel, message.stamp
    return ()


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
    lies = SharedMessage(header.shared.channel, header.shared.stamp)
    return iter((SharedChannels() if channels is None else channels).read(lies, plan))
