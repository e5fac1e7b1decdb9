"""Exchange by remote buffers: every replica holds a part of the table in its own memory.

Token: row i is on replica `i mod n` at `i // n`. Forward: all-gather the ids, look up the local ones, zeros for all
others, reduce-scatter. Backward: all-gather the gradients, keep those of local rows.

Encoding: every replica holds `ceil(dim / n)` columns of all rows. Forward: all-gather the ids, look all of them up,
all-to-all, transpose, slice off the padding. Backward: the mirror image: pad, transpose, all-to-all.

After the host embeddings of TensorFlow for the IPU. Both strategies, and one replica with the joined batch, sum the
gradients of an id in the same order, by replica and then by position, so they give the same bits.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from elastable.embedding_store.composite import Partition, gather_rows, partition, split_ids
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.optimizers.fused.rowwise_adagrad import row_squares
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.grouping import GradientPart
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.exchange.gathered_ids import GatheredIds
from elastable.replicas.host_embeddings.exchange.row_exchange import RowExchange, rows_with_slots
from elastable.replicas.host_embeddings.exchange.row_layout import join_columns, lay_rows, own_ids, spread_columns

__all__ = ["EncodingBuffers", "RemoteBuffers", "TokenBuffers", "TokenSums"]


class RemoteBuffers(RowExchange):
    """What both strategies share: this replica's shard of the table, in a memory store."""

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
        return self._joined_blocks(
            [
                self._block_of(rank, weights[rank], slots[rank])
                for rank, shard in enumerate(self.partition.shards)
                if shard is not None
            ]
        )

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

    def _block_of(self, rank: int, weights: Float32, slots: Float32) -> RowBlock:
        """One shard's rows, from its flat values."""
        ids = self.kept_ids(rank)
        return RowBlock(ids, weights.reshape(len(ids), -1), slots.reshape(len(ids), -1))

    def _joined_blocks(self, blocks: Sequence[RowBlock]) -> RowBlock:
        raise NotImplementedError


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
            lay_rows(block, places[start : start + len(block)], out)
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
        return RowBlock(np.arange(len(order)), weights, np.concatenate([block.slots for block in blocks])[order])


class TokenSums(TokenBuffers):
    """The original exchange: every replica sends a row for every id, zeros where it has none, and they are summed."""

    def lookup(self, batch: GatheredIds) -> Float32:
        """Sends `4 longest dim (n - 1)` bytes."""
        group, dim = self.group, self.spec.dim
        local, mine = own_ids(batch.ids, group.size, group.rank)
        found = np.zeros((group.size, batch.longest, dim), np.float32)
        lay_rows(self._rows(local), batch.places()[mine], found.reshape(-1, dim))
        # Only one replica has a row: summed as integers, the zeros of others keep its bits, also those of -0.0.
        rows = group.reduce_scatter(found.view(np.uint32)).view(np.float32)
        return rows[: batch.counts[group.rank]]

    def parts(self, batch: GatheredIds, gradients: Float32, scales: Float32) -> Sequence[GradientPart]:
        """Sends `4 longest dim (n - 1)` bytes."""
        group = self.group
        padded = np.zeros((batch.longest, self.spec.dim), np.float32)
        padded[: len(gradients)] = gradients
        parts: list[GradientPart] = []
        for rank, theirs in enumerate(group.all_gather(padded)):
            local, places = own_ids(batch.ids_of(rank), group.size, group.rank)
            parts.append((local, gather_rows(theirs, places), float(scales[rank])))
        return parts


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
