"""Rows of many tables side by side in memory, and the commands that move them. Pure planning.

A block holds one stretch of rows for each table, in the order of the caller's
ids, so that decoded replies land where they are wanted and kernels run on them
in place. Commands are grouped by partition.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.rows.initial_values import write_initial_rows
from elastable.embedding_store.rows.row_dtypes import pack_rows, unpack_rows
from elastable.embedding_store.tiers.redis.catalog import Catalog, TableKeys
from elastable.embedding_store.tiers.redis.redis_kernels import copy_duplicates, group_by_partition
from elastable.embedding_store.tiers.redis.resp_codec import COMMAND, Bytes, Commands

__all__ = ["Block", "RedisRows"]


@dataclass(frozen=True, slots=True)
class RedisRows:
    """The rows of one table in a block.

    Attributes:
        table: The table.
        ids: int64 `[n]`, as the caller gave them.
        leaders: int64 `[n]`: where in `ids` each id is first seen. Rows of
            other positions are not read; `spread` fills them.
        unique: Ids among them.
        commands: The block's commands that are this table's.
        weights: float32 `[n, dim]`, a view into the block; of another dtype
            than float32 beside it.
        slots: float32 `[n, slot_width]`, a view into the block.
        no_weights: uint8 `[n]`, a view: 1 where the store holds no weights.
        no_slots: uint8 `[n]`, a view: 1 where the store holds no slots.
        packed: uint8 `[n, weight_bytes]`, a view into the block: the weights
            of a table of another dtype; None: `weights` is that view.
    """

    table: TableKeys
    ids: Int64
    leaders: Int64
    unique: int
    commands: slice
    weights: Float32
    slots: Float32
    no_weights: Bytes
    no_slots: Bytes
    packed: Bytes | None

    def unpack(self) -> None:
        """Takes over weights that were read into the block."""
        if self.packed is not None:
            unpack_rows(self.table.spec, self.packed, self.weights)

    def pack(self) -> None:
        """Puts weights into the block, to be written."""
        if self.packed is not None:
            pack_rows(self.table.spec, self.weights, self.packed)

    def missing(self) -> Int64:
        """int64: positions of the ids, first seen there, that the store holds no row of."""
        return np.flatnonzero(self.no_weights)

    def fill_missing(self) -> Int64:
        """Writes the initial values of the missing rows; returns their positions."""
        missing = self.missing()
        if len(missing):
            write_initial_rows(self.table.spec, self.ids[missing], missing, self.weights)
        return missing

    def spread(self) -> None:
        """Gives every duplicate the weights of its id."""
        if self.unique < len(self.ids):
            copy_duplicates(self.weights, self.leaders)


@dataclass(frozen=True, slots=True)
class Block:
    """Rows of many tables, and the commands that read or write them.

    Attributes:
        catalog: That the commands' keys count in.
        tables: By name.
        ids: int64: unique ids of all tables, by table and partition.
        positions: int64: the row of `ids[i]` within its table.
        weights: `COMMAND`, one for each partition that has ids.
        slots: `COMMAND`, the same for slots; width 0 where there are none.
        rows: uint8, everything that `TableRows.weights` and `.slots` view.
        missing: uint8, everything that `.no_weights` and `.no_slots` view.
    """

    catalog: Catalog
    tables: Mapping[str, RedisRows]
    ids: Int64
    positions: Int64
    weights: Commands
    slots: Commands
    rows: Bytes
    missing: Bytes

    @classmethod
    def of(
        cls,
        catalog: Catalog,
        ids: Mapping[str, Int64],
        slot_widths: Mapping[str, int] | None = None,
        rows: Bytes | None = None,
    ) -> Self:
        """An empty block for some ids.

        Args:
            catalog: All tables.
            ids: Table name -> int64 `[n]`, checked.
            slot_widths: Table name -> float32 slots of a row; None: weights alone.
            rows: uint8 `[n * weight_bytes]` to use, of a block of one table without slots; None: new memory.
        """
        widths = {name: (slot_widths or {}).get(name, 0) for name in ids}
        if rows is None:
            row_bytes = ((len(ids[n]), catalog.tables[n].spec.weight_bytes, 4 * widths[n]) for n in ids)
            rows = np.empty(sum(_padded(count * w) + _padded(count * s) for count, w, s in row_bytes), np.uint8)
        missing = np.zeros(2 * sum(len(some) for some in ids.values()), np.uint8)
        layout = _Layout(catalog, rows, missing)
        tables = {name: layout.add(catalog.tables[name], some, widths[name]) for name, some in ids.items()}
        return cls(catalog, tables, *layout.joined(), rows, missing)

    def hash_slots(self) -> Int64:
        """int64, of each command."""
        return cast(Int64, self.catalog.hash_slots[self.weights["key"]])

    def put(self, name: str, weights: Float32, slots: Float32) -> None:
        """Takes over rows to write, float32 `[n, dim]` and `[n, slot_width]`."""
        self.tables[name].weights[:] = weights
        self.tables[name].slots[:] = slots


class _Layout:
    """Lays tables into a block, one after another."""

    def __init__(self, catalog: Catalog, rows: Bytes, missing: Bytes) -> None:
        self._catalog, self._rows, self._missing = catalog, rows, missing
        self._row_at = self._block_at = self._flag_at = self._commands = 0
        self._parts: list[tuple[Int64, Int64, Commands, Commands]] = []

    def add(self, table: TableKeys, ids: Int64, slot_width: int) -> RedisRows:
        grouped, positions, counts, leaders = group_by_partition(ids, table.partitions)
        held = np.flatnonzero(counts)
        weights = np.zeros(len(held), COMMAND)
        weights["rows"] = counts[held]
        weights["row_at"] = self._row_at + np.cumsum(counts[held]) - counts[held]
        slots = weights.copy()
        weights["key"] = table.first + held
        weights["stamped"] = 1
        slots["key"] = weights["key"] + self._catalog.partitions
        weight_bytes, no_weights = self._take(weights, len(ids), table.spec.weight_bytes)
        slot_bytes, no_slots = self._take(slots, len(ids), 4 * slot_width)
        self._parts.append((grouped, positions, weights, slots))
        self._row_at += len(grouped)
        commands = slice(self._commands, self._commands + len(held))
        self._commands = commands.stop
        packed = None if table.spec.dtype == "float32" else weight_bytes
        numbers = weight_bytes.view(np.float32) if packed is None else np.empty((len(ids), table.spec.dim), np.float32)
        return RedisRows(
            table,
            ids,
            leaders,
            len(grouped),
            commands,
            numbers,
            slot_bytes.view(np.float32),
            no_weights,
            no_slots,
            packed,
        )

    def _take(self, commands: Commands, rows: int, width: int) -> tuple[Bytes, Bytes]:
        """The next uint8 `[rows, width]` of the block, and their flags."""
        commands["width"] = width
        commands["block_at"], commands["flag_at"] = self._block_at, self._flag_at
        block_at, flag_at = self._block_at, self._flag_at
        self._block_at += _padded(rows * width)
        self._flag_at += rows
        taken = self._rows[block_at : block_at + rows * width].reshape(rows, width)
        return taken, self._missing[flag_at : self._flag_at]

    def joined(self) -> tuple[Int64, Int64, Commands, Commands]:
        if not self._parts:
            return np.empty(0, np.int64), np.empty(0, np.int64), np.empty(0, COMMAND), np.empty(0, COMMAND)
        ids, positions, weights, slots = (np.concatenate(parts) for parts in zip(*self._parts, strict=True))
        return ids, positions, weights, slots


def _padded(size: int) -> int:
    """Bytes up to where the next part of a block may begin: numbers of every size lie at multiples of it."""
    return -(-size // 8) * 8
