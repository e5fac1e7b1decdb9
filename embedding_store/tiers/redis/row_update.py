"""Blocks of rows that are to be changed: laid out, and moved one optimizer step on. No I/O."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.errors import BadIds, StoreFailed
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.rows.row_dtypes import round_update
from elastable.embedding_store.tiers.redis.block import Block, RedisRows
from elastable.embedding_store.tiers.redis.catalog import Catalog

__all__ = ["apply_update", "block_with_slots", "refuse_torn_rows", "stamps_alone"]


def block_with_slots(catalog: Catalog, ids: Mapping[str, Int64]) -> Block:
    """A block with slots, of ids that stand once each.

    Raises:
        BadIds: an id stands twice; names both positions.
    """
    specs = {name: catalog.tables[name].spec for name in ids}
    widths = {name: row_optimizer(spec.optimizer).slot_width(spec.dim) for name, spec in specs.items()}
    block = Block.of(catalog, ids, widths)
    for name, rows in block.tables.items():
        if rows.unique < len(rows.ids):
            position = int(np.argmax(rows.leaders != np.arange(len(rows.ids))))
            raise BadIds(f"table {name!r}: id {rows.ids[position]} stands at positions {rows.leaders[position]} "
                         f"and {position}; each id may stand once")  # fmt: skip
    return block


def stamps_alone(block: Block) -> Block:
    """The block's partitions without its rows: writing it leaves rows alone."""
    weights, slots = block.weights.copy(), block.slots.copy()
    weights["rows"], slots["width"] = 0, 0
    return replace(block, weights=weights, slots=slots)


def apply_update(rows: RedisRows, update: TableUpdate, step: int, learning_rate: float | None) -> None:
    """One optimizer step on rows that were read, in place; those that there were not begin with initial values.

    Raises:
        StoreFailed: the store holds weights without slots, or slots without weights.
    """
    spec = rows.table.spec
    optimizer = row_optimizer(spec.optimizer)
    rate = optimizer.default_learning_rate if learning_rate is None else learning_rate
    rows.slots[rows.fill_missing()] = optimizer.initial_slots(spec.dim)
    order = np.arange(len(rows.ids))
    optimizer.apply(
        rows.weights, rows.slots, UpdateBatch(rows.ids, order, update.gradients, step, rate, update.row_squares)
    )
    round_update(spec, rows.ids, step, rows.weights)


def refuse_torn_rows(rows: RedisRows) -> None:
    """Raises `StoreFailed` where the store holds weights without slots, or slots without weights."""
    if rows.slots.shape[1] == 0:
        return
    torn = np.flatnonzero(rows.no_weights != rows.no_slots)
    if len(torn):
        what = "slots" if rows.no_slots[torn[0]] else "weights"
        raise StoreFailed(f"table {rows.table.spec.name!r}: the row of id {rows.ids[torn[0]]} has lost its {what}")
