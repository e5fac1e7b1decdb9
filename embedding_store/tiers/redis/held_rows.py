"""Rows that the one process that writes remembers from its own commits, so that the next ones need not read them.

A commit reads the rows it changes, and a Redis server spends as long on that
as on writing them. Who wrote a row last knows it: while nobody else writes,
which ownership sees to, hot rows and their slots stay here, byte for byte as
they lie in the server. Every commit still asks each partition for its stamp,
and the store for its version, its owner and the serial of changes outside
commits: what is held counts only if all of them are as the last commit left
them. Otherwise everything is forgotten, and read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.copy import copy_bytes
from elastable.embedding_store.native.ids.hot_set import BYTES_A_FRAME, HotSet
from elastable.embedding_store.native.ids.hot_set_kernels import WAYS
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.support.row_budget import even_shares
from elastable.embedding_store.tiers.redis.before_images import Flags
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.catalog import Catalog
from elastable.embedding_store.tiers.redis.registry import Registry
from elastable.embedding_store.tiers.redis.resp_codec import NO_STAMP, Bytes

__all__ = ["HeldRows"]

_FIRST_BYTES = 4 << 20
_GROWTH = 4


@dataclass(slots=True)
class _HeldTable:
    """The hot rows of one table.

    Attributes:
        spec: The table; another of its name may have another.
        hot: Which ids have a frame.
        rows: uint8 `[frames, weight_bytes + slot_bytes]`.
        stamps: int64 `[partitions]`, as this process left or found them; `NO_STAMP` where it never looked.
        missed: Rows that were to be kept and had no frame.
    """

    spec: TableSpec
    hot: HotSet
    rows: Slab
    stamps: Int64
    missed: int = 0


class HeldRows:
    """Packed weights and slots of hot rows, within a budget. For one thread at a time.

    Memory is taken as it is needed, four times as much whenever a table meets
    half as many rows that have no frame as it has frames: what a small table
    does not fill stays free, and a large one has the whole budget soon.
    """

    def __init__(self, total_bytes: int) -> None:
        """`total_bytes`: of memory, for all tables together at most; 0 holds nothing."""
        self._total = total_bytes
        self._room = min(total_bytes, _FIRST_BYTES)
        self._tables: dict[str, _HeldTable] = {}
        self._left: tuple[int, int] | None = None  # version and serial that the last commit left

    @property
    def count(self) -> int:
        """Rows that are held now."""
        return sum(table.hot.count() for table in self._tables.values())

    def forget(self) -> None:
        """Holds nothing: what lies in the server may have changed."""
        self._left = None
        for table in self._tables.values():
            table.hot.clear()
            table.stamps[:] = NO_STAMP

    def close(self) -> None:
        """Gives the memory back. Closing twice is harmless."""
        self._total, self._left, self._tables = 0, None, {}

    def place(self, block: Block) -> Block:
        """Copies the rows that are held into a block.

        Args:
            block: With slots, of ids that stand once each; nothing was read yet.

        Returns:
            What is left to be read of it, in the same memory: the other rows, and the stamp of every partition.
        """
        if self._left is None or not block.tables or not self._covers(block.catalog, block):
            return block
        block.missing[:] = 0
        there = np.concatenate([self._placed(name, block) for name in block.tables])
        return _without(block, there)

    def stands(self, block: Block, stamps: Int64, registry: Registry) -> bool:
        """Whether what was placed in a block is what lies in the server.

        Args:
            block: Of `place`.
            stamps: int64 `[commands]`, of its partitions, as they were read.
            registry: As it was read with them.
        """
        if self._left is None:
            return True  # nothing was placed
        if self._left != (registry.version, registry.serial):
            return False
        known = (self._tables[name].stamps[_partitions(block, name)] for name in block.tables if name in self._tables)
        found = (stamps[rows.commands] for name, rows in block.tables.items() if name in self._tables)
        return all(np.all((before == NO_STAMP) | (before == now)) for before, now in zip(known, found, strict=True))

    def keep(self, block: Block, version: int, serial: int) -> None:
        """Remembers rows as a commit left them.

        Args:
            block: As it was written, weights packed.
            version: Of the commit.
            serial: Of changes outside commits that were over then.
        """
        if not self._total:
            return
        grows = self._room < self._total and self._is_crowded()
        if grows:
            self._room = min(self._total, _GROWTH * self._room)
        if grows or not self._covers(block.catalog, block):
            try:
                self._share_out(block.catalog)
            except MemoryError:  # the commit stands all the same
                self._tables, self._left = {}, None
                return
        self._left = version, serial
        for name in block.tables:
            self._kept(name, block, version)

    def _covers(self, catalog: Catalog, block: Block) -> bool:
        """Whether every table of a block has its place here, as it is now."""
        return all(
            held is not None and held.spec == now.spec and len(held.stamps) == now.partitions
            for held, now in ((self._tables.get(name), catalog.tables[name]) for name in block.tables)
        )

    def _is_crowded(self) -> bool:
        return any(table.missed > table.hot.frames // 2 for table in self._tables.values())

    def _share_out(self, catalog: Catalog) -> None:
        """A new table takes of what the others have, and more room is other memory: all of them begin anew."""
        sizes = {name: _row_bytes(table.spec) for name, table in catalog.tables.items()}
        needs = [
            min(self._room, (table.spec.vocabulary_size or self._room) * (sizes[name] + BYTES_A_FRAME))
            for name, table in catalog.tables.items()
        ]
        self._tables = {}
        for (name, table), share in zip(catalog.tables.items(), even_shares(needs, self._room), strict=True):
            hot = HotSet(max(WAYS, share // (sizes[name] + BYTES_A_FRAME)), dense=False)
            rows = Slab(hot.frames, sizes[name], np.uint8)
            stamps = np.full(table.partitions, NO_STAMP, np.int64)
            self._tables[name] = _HeldTable(table.spec, hot, rows, stamps)

    def _placed(self, name: str, block: Block) -> Flags:
        """bool, of the table's ids in `block.ids`: whether the row was held."""
        table, (start, stop) = self._tables[name], _span(block, name)
        ids, frames, cold = block.ids[start:stop], np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        table.hot.find(ids, frames, cold)
        for command, at in _parts(block, name):
            _out_of(table.rows.array, at, frames, block.positions[start:stop], block.rows,
                    int(command["block_at"]), int(command["width"]))  # fmt: skip
        return frames >= 0

    def _kept(self, name: str, block: Block, version: int) -> None:
        table, (start, stop) = self._tables[name], _span(block, name)
        ids, frames, cold = block.ids[start:stop], np.empty(stop - start, np.int64), np.empty(stop - start, np.int64)
        cold = cold[: table.hot.find(ids, frames, cold, counted=False)]
        table.missed += len(cold)
        admitted, gone, lost = (np.empty(len(cold), np.int64) for _ in range(3))
        table.hot.admit(ids[cold], admitted, gone, lost)
        # A row that was held may just have lost its frame to one that is hotter.
        table.hot.find(ids, frames, np.empty(len(ids), np.int64), counted=False)
        for command, at in _parts(block, name):
            _into(table.rows.array, at, frames, block.positions[start:stop], block.rows,
                  int(command["block_at"]), int(command["width"]))  # fmt: skip
        table.stamps[_partitions(block, name)] = version


def _row_bytes(spec: TableSpec) -> int:
    return spec.weight_bytes + 4 * row_optimizer(spec.optimizer).slot_width(spec.dim)


def _span(block: Block, name: str) -> tuple[int, int]:
    """Where in `block.ids` a table's ids lie."""
    commands = block.weights[block.tables[name].commands]
    if not len(commands):
        return 0, 0
    return int(commands["row_at"][0]), int(commands["row_at"][-1] + commands["rows"][-1])


def _partitions(block: Block, name: str) -> Int64:
    """int64: the partitions of a table that a block's commands are of."""
    rows = block.tables[name]
    partitions: Int64 = block.weights["key"][rows.commands] - rows.table.first
    return partitions


def _parts(block: Block, name: str) -> Iterator[tuple[np.void, int]]:
    """A command that says where a part of a table's rows lies in the block, and where the part lies in a frame."""
    commands = block.tables[name].commands
    at = 0
    for kind in (block.weights[commands], block.slots[commands]):
        if len(kind) and kind["width"][0]:
            yield kind[0], at
            at += int(kind["width"][0])


def _without(block: Block, there: Flags) -> Block:
    """A block without the rows that are there already; of every partition it still asks for the stamp."""
    before = np.concatenate(([0], np.cumsum(~there)))
    weights, slots = block.weights.copy(), block.slots.copy()
    for commands in (weights, slots):
        ends = before[commands["row_at"] + commands["rows"]]
        commands["row_at"] = before[commands["row_at"]]
        commands["rows"] = ends - commands["row_at"]
    slots["width"][slots["rows"] == 0] = 0
    return replace(block, ids=block.ids[~there], positions=block.positions[~there], weights=weights, slots=slots)


@kernel
def _out_of(held: Bytes, at: int, frames: Int64, positions: Int64, rows: Bytes, block_at: int, width: int) -> None:
    """Rows of the frames into the block."""
    flat = held.reshape(-1)
    for i in range(len(frames)):
        if frames[i] >= 0:
            copy_bytes(rows, block_at + positions[i] * width, flat, frames[i] * held.shape[1] + at, width)


@kernel
def _into(held: Bytes, at: int, frames: Int64, positions: Int64, rows: Bytes, block_at: int, width: int) -> None:
    """Rows of the block into frames."""
    flat = held.reshape(-1)
    for i in range(len(frames)):
        if frames[i] >= 0:
            copy_bytes(flat, frames[i] * held.shape[1] + at, rows, block_at + positions[i] * width, width)
