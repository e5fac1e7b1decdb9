"""Exchanges of a host embedding's rows: by remote buffers, or by callbacks to an embedding store."""

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.composite.partitions import (
    Partition,
    encoding_columns,
    gather_rows,
    partition,
    split_ids,
)
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadIds, FutureVersion, IdOutOfRange
from elastable.embedding_store.native.intrinsics import copy_row
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_gather import scatter_rows
from elastable.embedding_store.optimizers.fused import row_squares
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.checks import as_ids
from elastable.embedding_store.tables.grouping import GradientPart
from elastable.embedding_store.tables.table_update import IndexedSlices, TableSlices, update_tables
from elastable.replicas.groups.group import ReplicaGroup, fail_together


class RowExchange(ABC):
    """A table that the members of a group look up and update together, by the same calls in the same order.

    Attributes:
        spec: The whole table.
        dim: Columns of the gradients that this member sums, in `parts` and `apply`.
    """

    def __init__(self, group: ReplicaGroup, spec: TableSpec) -> None:
        self.group = group
        self.spec = spec
        self.dim = spec.dim

    @abstractmethod
    def lookup(self, batch: "GatheredIds") -> Float32:
        """float32 `[counts[rank], dim]`: the rows of this member's ids."""

    @abstractmethod
    def parts(self, batch: "GatheredIds", gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """The part of everyone's gradients that this member sums.

        Args:
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
    return RowBlock(ids, weights, slots, trained=True)


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
        spec: The whole table, with a fixed vocabulary.
        indices: This member's integers, of any shape.

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


class RemoteBuffers(RowExchange):
    """What both strategies share: this replica's shard of the table, in a memory store.

    Both, and one replica with the joined batch, sum the gradients of an id in the same order, by replica and then by
    position, so they give the same bits. After the host embeddings of TensorFlow for the IPU.
    """

    strategy: str

    def __init__(self, group: ReplicaGroup, spec: TableSpec, threads: int | None = None) -> None:
        """Creates this member's shard. Raises BadSpec or Unsupported for a table that cannot be split."""
        super().__init__(group, spec)
        self.partition: Partition = partition(spec, self.strategy, group.size)
        shard = self.partition.shards[group.rank]
        columns = self.partition.columns[group.rank]
        self.dim = columns.stop - columns.start
        self._shard = shard
        self._store = MemoryStore(threads)
        if shard is not None:
            self._store.create_table(shard)

    def apply(self, update: TableUpdate, step: int, learning_rate: float) -> None:
        squares = self._row_squares(update)
        if self._shard is None:
            return
        name = self.spec.name
        updates = {name: TableUpdate(update.ids, update.gradients, squares)}
        self._store.commit(Commit(self._store.version() + 1, updates, step, {name: learning_rate}))

    def whole(self) -> RowBlock:
        nothing = np.empty((0, 0), np.float32)
        mine = RowBlock(np.empty(0, np.int64), nothing, nothing)
        if self._shard is not None:
            mine = rows_with_slots(self._store, self._shard)
        weights = self.group.all_gather_uneven(mine.weights.reshape(-1))
        slots = self.group.all_gather_uneven(mine.slots.reshape(-1))
        blocks = []
        for rank, shard in enumerate(self.partition.shards):
            if shard is not None:
                ids = self.kept_ids(rank)
                parts = weights[rank].reshape(len(ids), -1), slots[rank].reshape(len(ids), -1)
                blocks.append(RowBlock(ids, *parts, trained=True))
        return self._joined_blocks(blocks)

    def replace(self, block: RowBlock) -> None:
        for part in self.partition.parts(block.ids):
            if part.shard == self.group.rank:
                self._store.put(self.spec.name, [self.partition.block(part, block)])

    def columns_of(self, rank: int) -> slice:
        return self.partition.columns[rank]

    def close(self) -> None:
        self._store.close()

    def _rows(self, ids: Int64) -> Float32:
        """float32 `[n, dim]`: the rows of local ids."""
        if self._shard is None:
            return np.empty((len(ids), self.dim), np.float32)
        return self._store.lookup({self.spec.name: ids})[self.spec.name]

    def _row_squares(self, update: TableUpdate) -> Float32 | None:
        return None

    @abstractmethod
    def _joined_blocks(self, blocks: Sequence[RowBlock]) -> RowBlock:
        """Whole rows of what all shards have of some ids."""


class TokenBuffers(RemoteBuffers):
    """Whole rows: row i on replica `i mod n` at `i // n`; each replica sends only the rows that it has."""

    strategy = "token"

    def lookup(self, batch: GatheredIds) -> Float32:
        group, dim = self.group, self.spec.dim
        asked = [own_ids(batch.ids_of(rank), group.size, group.rank)[0] for rank in range(group.size)]
        ends = np.cumsum([len(ids) for ids in asked])
        rows = self._rows(np.concatenate(asked))
        _, places, shard_ends = split_ids(batch.ids_of(group.rank), group.size)
        lengths = np.diff(shard_ends, prepend=0).tolist()
        out = np.empty((len(places), dim), np.float32)
        start = 0
        for block in group.all_to_all_uneven(np.split(rows, ends[:-1]), lengths):
            scatter_rows(block, places[start : start + len(block)], out)
            start += len(block)
        return out

    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        group = self.group
        _, places, ends = split_ids(batch.ids_of(group.rank), group.size)
        kept = [own_ids(batch.ids_of(rank), group.size, group.rank)[0] for rank in range(group.size)]
        blocks = np.split(gather_rows(gradients, places), ends[:-1])
        everyone = group.all_to_all_uneven(blocks, [len(ids) for ids in kept])
        return [(ids, block, float(scale)) for ids, block, scale in zip(kept, everyone, scales, strict=True)]

    def kept_ids(self, rank: int) -> Int64:
        return np.arange(rank, int(self.spec.vocabulary_size or 0), self.group.size)

    def _joined_blocks(self, blocks: Sequence[RowBlock]) -> RowBlock:
        order = np.argsort(np.concatenate([block.ids for block in blocks]), kind="stable")
        weights = np.concatenate([block.weights for block in blocks])[order]
        slots = np.concatenate([block.slots for block in blocks])[order]
        return RowBlock(np.arange(len(order)), weights, slots, trained=True)


class EncodingBuffers(RemoteBuffers):
    """Some columns of all rows: `ceil(dim / n)` on each replica, fewer or none on the last ones."""

    strategy = "encoding"

    def __init__(self, group: ReplicaGroup, spec: TableSpec, threads: int | None = None) -> None:
        super().__init__(group, spec, threads)
        self._width = -(-spec.dim // group.size)

    def lookup(self, batch: GatheredIds) -> Float32:
        """Sends `4 longest ceil(dim / n) (n - 1)` bytes."""
        size, count = self.group.size, int(batch.counts[self.group.rank])
        rows = self._rows(batch.ids)
        if rows.shape != (size * batch.longest, self._width):
            padded = np.zeros((size * batch.longest, self._width), np.float32)
            padded[batch.places(), : self.dim] = rows
            rows = padded
        found = self.group.all_to_all(rows.reshape(size, batch.longest, self._width))
        return join_columns(found, count, self.spec.dim)

    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """Sends `4 longest ceil(dim / n) (n - 1)` bytes."""
        everyone = self.group.all_to_all(spread_columns(gradients, self.group.size, batch.longest))
        return [
            (batch.ids_of(rank), np.ascontiguousarray(theirs[: batch.counts[rank], : self.dim]), float(scales[rank]))
            for rank, theirs in enumerate(everyone)
        ]

    def kept_ids(self, rank: int) -> Int64:
        return np.arange(int(self.spec.vocabulary_size or 0))

    def _row_squares(self, update: TableUpdate) -> Float32 | None:
        """For an optimizer that looks across columns: the squares of whole rows, gathered from all replicas."""
        if self.group.size == 1 or not row_optimizer(self.spec.optimizer).cross_column:
            return None
        everyone = self.group.all_gather_uneven(np.ascontiguousarray(update.gradients).reshape(-1))
        whole = np.empty((len(update.ids), self.spec.dim), np.float32)
        for columns, part in zip(self.partition.columns, everyone, strict=True):
            whole[:, columns] = part.reshape(len(update.ids), columns.stop - columns.start)
        return row_squares(whole)

    def _joined_blocks(self, blocks: Sequence[RowBlock]) -> RowBlock:
        return self.partition.joined(blocks)


_BELOW_32_BITS = 1 << 31


def own_ids(ids: Int64, shards: int, shard: int) -> tuple[Int64, Int64]:
    """The ids (int64 `[n]`, not negative) with `id mod shards = shard`, in order.

    Returns:
        int64 `[m]`: `id // shards`; int64 `[m]`: their positions in `ids`.
    """
    return _own(ids, shards, shards.bit_length() - 1 if shards & (shards - 1) == 0 else -1, shard)


def join_columns(pieces: Float32, count: int, dim: int) -> Float32:
    """float32 `[count, dim]`: rows from their columns, without the padding.

    Args:
        pieces: float32 `[n, rows, width]`, C-contiguous; `pieces[j]` are columns `j width` to `(j + 1) width`.
        count: Number of rows.
        dim: Number of columns, at most `n width`.
    """
    out = np.empty((count, dim), np.float32)
    for columns, piece in zip(encoding_columns(dim, len(pieces)), pieces, strict=True):
        _copy(piece[:count, : columns.stop - columns.start], out[:, columns])
    return out


def spread_columns(rows: Float32, shards: int, longest: int) -> Float32:
    """The inverse: float32 `[count, dim]` as `[shards, longest, ceil(dim / shards)]`, padded with zeros."""
    width = -(-rows.shape[1] // shards)
    full = rows.shape == (longest, shards * width)
    pieces: Float32 = (np.empty if full else np.zeros)((shards, longest, width), np.float32)
    for columns, piece in zip(encoding_columns(rows.shape[1], shards), pieces, strict=True):
        _copy(rows[:, columns], piece[: len(rows), : columns.stop - columns.start])
    return pieces


@kernel
def _own(ids: Int64, shards: int, bits: int, shard: int) -> tuple[Int64, Int64]:
    """Without a branch on the owner; `bits` is the logarithm of `shards` if that is a power of two, else -1."""
    local, places, count = np.empty_like(ids), np.empty_like(ids), 0
    for i in range(len(ids)):
        if bits >= 0:
            quotient = ids[i] >> bits
        elif ids[i] < _BELOW_32_BITS:
            quotient = np.int64(np.uint32(ids[i]) // np.uint32(shards))  # 32 bits: a third of the time
        else:
            quotient = ids[i] // shards
        local[count] = quotient
        places[count] = i
        count += 1 if ids[i] - quotient * shards == shard else 0
    return local[:count], places[:count]


@kernel
def _copy(rows: Float32, out: Float32) -> None:
    for i in range(len(rows)):
        copy_row(out, i, rows, i)


_COMMITS = 0  # the rank that changes the store
_SEEN_S = 60.0


class Callbacks(RowExchange):
    """A table of a store that all replicas reach, through one object or one each."""

    def __init__(self, group: ReplicaGroup, spec: TableSpec, store: EmbeddingStore) -> None:
        """Creates the table, unless the store has it already.

        Raises:
            SpecConflict: the store has another table of that name.
            StoreFailed: another replica could not create it; names the rank.
        """
        super().__init__(group, spec)
        self._store = store
        for turn in (True, False):  # rank 0 creates the table before others look for it
            with fail_together(group):
                if turn is (group.rank == _COMMITS):
                    self._store.create_table(spec)

    def lookup(self, batch: GatheredIds) -> Float32:
        with fail_together(self.group):
            return self._store.lookup({self.spec.name: batch.ids_of(self.group.rank)})[self.spec.name]

    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """All of them on rank 0, nothing on others."""
        nothing = np.empty((0, self.dim), np.float32)
        blocks = [gradients if rank == _COMMITS else nothing for rank in range(self.group.size)]
        everyone = self.group.all_to_all_uneven(blocks)
        if self.group.rank != _COMMITS:
            return [(np.empty(0, np.int64), nothing, 1.0)]
        return [(batch.ids_of(rank), theirs, float(scales[rank])) for rank, theirs in enumerate(everyone)]

    def apply(self, update: TableUpdate, step: int, learning_rate: float) -> None:
        """Returns once every replica's store has the new version.

        Raises:
            StoreFailed: rank 0's commit failed; no row has changed.
            FutureVersion: a replica's store does not see the commit.
        """
        version = 0
        with fail_together(self.group):
            if self.group.rank == _COMMITS:
                own = self.spec.optimizer
                values = dict(own.hyperparameters) | {"learning_rate": learning_rate}
                optimizer = OptimizerSpec.of(own.name, lazy=own.lazy, **values)
                slices = IndexedSlices(update.gradients, update.ids)
                version = update_tables(self._store, [TableSlices(self.spec, slices, optimizer)], step=step)
        version = int(self.group.broadcast(np.array(version, np.int64), _COMMITS))
        with fail_together(self.group):
            self._require_version(version)

    def columns_of(self, rank: int) -> slice:
        return slice(0, self.spec.dim)

    def kept_ids(self, rank: int) -> Int64:
        return np.arange(int(self.spec.vocabulary_size or 0) if rank == _COMMITS else 0)

    def whole(self) -> RowBlock:
        return rows_with_slots(self._store, self.spec)

    def replace(self, block: RowBlock) -> None:
        with fail_together(self.group):
            if self.group.rank == _COMMITS:
                self._store.put(self.spec.name, [block])

    def close(self) -> None:
        """The store is the caller's."""

    def _require_version(self, version: int) -> None:
        if not self._store.wait_for_version(version, _SEEN_S):
            raise FutureVersion(
                f"host embedding {self.spec.name!r}: the store of rank {self.group.ranks[self.group.rank]} is at "
                f"version {self._store.version()}, and rank {self.group.ranks[_COMMITS]} has committed {version}: "
                "replicas must be given the same store"
            )
