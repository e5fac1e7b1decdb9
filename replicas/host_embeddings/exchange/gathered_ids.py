"""The ids of one lookup by all replicas, known to every replica."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadIds, IdOutOfRange
from elastable.embedding_store.rows.checks import as_ids
from elastable.replicas.groups.group import ReplicaGroup

__all__ = ["GatheredIds", "gather_ids", "id_dtype", "require_integers"]


@dataclass(frozen=True, slots=True, eq=False)
class GatheredIds:
    """The ids of all replicas, one replica after another, each in its own order.

    Attributes:
        ids: int64 `[total]`.
        counts: int64 `[replicas]`: number of ids of each replica.
        samples: int64 `[replicas]`: length of each one's first axis, its batch.
    """

    ids: Int64
    counts: Int64
    samples: Int64

    @property
    def longest(self) -> int:
        """The largest count; arrays that need one length are padded to it."""
        return int(self.counts.max())

    def places(self) -> Int64:
        """int64 `[total]`: positions of the ids in the flat `[replicas, longest]`."""
        replica = np.repeat(np.arange(len(self.counts)), self.counts)
        begins = np.cumsum(self.counts) - self.counts
        places: Int64 = replica * self.longest + np.arange(len(self.ids)) - begins[replica]
        return places

    def ids_of(self, rank: int) -> Int64:
        """int64 `[counts[rank]]`."""
        end = int(self.counts[: rank + 1].sum())
        return self.ids[end - int(self.counts[rank]) : end]

    def scales(self, reduction: str) -> Float32:
        """float32 `[replicas]`: factors of the replicas' gradients before they are summed.

        "sum": ones. "mean": each replica's share of all samples, so that mean losses
        of the parts become the mean loss of the whole batch.
        """
        total = int(self.samples.sum())
        if reduction == "sum" or not total:
            return np.ones(len(self.samples), np.float32)
        return (self.samples / total).astype(np.float32)


def id_dtype(rows: int) -> npt.DTypeLike:
    """The dtype in which ids of a table with this many rows are exchanged."""
    return np.int32 if rows <= 2**31 else np.int64


def gather_ids(
    group: ReplicaGroup, spec: TableSpec, indices: npt.ArrayLike, clip_indices: bool
) -> tuple[GatheredIds, tuple[int, ...]]:
    """All-gathers ids; every member calls it.

    Args:
        group: The replicas.
        spec: The whole table, with a fixed vocabulary.
        indices: This member's integers, of any shape.
        clip_indices: Whether to clip ids to the table.

    Returns:
        Everyone's ids, and the shape of this member's.

    Raises:
        BadIds: not integers; raised on this member before anything is exchanged.
        IdOutOfRange: an id is outside the table without clipping; raised on every member, with rank, position and id.
    """
    rows = int(spec.vocabulary_size or 0)
    if clip_indices and getattr(indices, "dtype", None) == np.uint64:
        indices = np.minimum(indices, np.uint64(rows - 1))  # int64 could not hold the largest
    given = as_ids(indices, spec.name)
    flat = np.ascontiguousarray(given.reshape(-1))
    outside = np.flatnonzero((flat < 0) | (flat >= rows))[:1]
    if clip_indices:
        flat, outside = np.clip(flat, 0, rows - 1), outside[:0]
    position = int(outside[0]) if len(outside) else -1
    header = np.array([len(flat), given.shape[0] if given.ndim else 1, position, flat[position] if len(outside) else 0])
    headers = group.all_gather(header.astype(np.int64))
    _refuse_outside(group, spec, headers)
    counts = np.ascontiguousarray(headers[:, 0])
    padded = np.zeros(int(counts.max()), id_dtype(rows))
    padded[: len(flat)] = flat
    everyone = group.all_gather(padded).astype(np.int64)
    if (counts == counts[0]).all():
        ids = everyone.reshape(-1)
    else:
        ids = np.concatenate([row[:count] for row, count in zip(everyone, counts, strict=True)])
    return GatheredIds(ids, counts, np.ascontiguousarray(headers[:, 1])), given.shape


def require_integers(name: str, dtype: object, integers: bool) -> None:
    """Raises BadIds for a dtype that is not an integer one; for tensors without values."""
    if not integers:
        raise BadIds(f"host embedding {name!r}: indices must be integers, got {dtype}")


def _refuse_outside(group: ReplicaGroup, spec: TableSpec, headers: Int64) -> None:
    for rank, (_, _, position, given) in enumerate(headers.tolist()):
        if position >= 0:
            raise IdOutOfRange(
                f"host embedding {spec.name!r}: index {given} at position {position} of rank {group.ranks[rank]} is "
                f"outside 0 <= index < {spec.vocabulary_size}, and clip_indices=False"
            )
