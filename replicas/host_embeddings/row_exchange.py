"""The interface of both exchanges, and the ids of one lookup, known to every replica."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, IdOutOfRange
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables import GradientPart
from elastable.embedding_store.tables.checks import as_ids
from elastable.replicas.groups.group import ReplicaGroup

__all__ = ["GatheredIds", "RowExchange", "gather_ids", "id_dtype", "require_integers", "rows_with_slots"]


class RowExchange(ABC):
    """A table that the members of a group look up and update together, by the same calls in the same order.

    Attributes:
        group: The replicas.
        spec: The whole table.
        dim: Columns of the gradients that this member sums, in `parts` and `apply`.
    """

    def __init__(self, group: ReplicaGroup, spec: TableSpec) -> None:
        self.group = group
        self.spec = spec
        self.dim = spec.dim

    @abstractmethod
    def lookup(self, batch: GatheredIds) -> Float32:
        """float32 `[counts[rank], dim]`: the rows of this member's ids."""

    @abstractmethod
    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """The part of everyone's gradients that this member sums.

        Args:
            batch: The lookup's ids.
            gradients: float32 `[counts[rank], whole dim]`, this member's, C-contiguous.
            scales: float32 `[replicas]`, the factor of each replica's.

        Returns:
            A part for every replica, in rank order: the ids and columns that this
            member sums, in the order of their positions.
        """

    @abstractmethod
    def apply(self, update: TableUpdate, step: int, learning_rate: float) -> None:
        """One optimizer step with the sums of `parts`."""

    @abstractmethod
    def columns_of(self, rank: int) -> slice:
        """The whole table's columns that a member sums."""

    @abstractmethod
    def kept_ids(self, rank: int) -> Int64:
        """int64, ascending: the whole table's ids that a member sums; its local ids are positions in this array."""

    @abstractmethod
    def whole(self) -> RowBlock:
        """Every row with its slots, by id, on every member."""

    @abstractmethod
    def replace(self, block: RowBlock) -> None:
        """Writes every row with its slots; `block` holds all ids in order."""

    @abstractmethod
    def close(self) -> None:
        """Frees its own memory. Closing twice is harmless."""


def rows_with_slots(store: EmbeddingStore, spec: TableSpec) -> RowBlock:
    """Every row of a store's table with a fixed vocabulary; initial values for rows never updated."""
    size = int(spec.vocabulary_size or 0)
    optimizer = row_optimizer(spec.optimizer)
    ids = np.arange(size)
    weights = store.lookup({spec.name: ids})[spec.name]
    slots = np.tile(optimizer.initial_slots(spec.dim), (size, 1))
    held = store.read_rows(spec.name, ids)
    slots[held.ids] = held.slots
    return RowBlock(ids, weights, slots)


# The ids of one lookup by all replicas, known to every replica


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
