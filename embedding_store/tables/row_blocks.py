"""Blocks of rows: made, chosen from and joined."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.optimizers.registry import row_optimizer


def chosen_rows(block: RowBlock, choice: npt.NDArray[np.bool_] | Int64) -> RowBlock:
    """The rows that `choice` picks: bool `[n]`, or int64 places in the block."""
    touches = None if block.touches is None else block.touches[choice]
    return RowBlock(block.ids[choice], block.weights[choice], block.slots[choice], touches, block.trained)


def joined_rows(spec: TableSpec, blocks: Sequence[RowBlock]) -> RowBlock:
    """All rows of blocks of one table, one after the other; none of no blocks."""
    if not blocks:
        width = row_optimizer(spec.optimizer).slot_width(spec.dim)
        return RowBlock(np.empty(0, np.int64), np.empty((0, spec.dim), np.float32), np.empty((0, width), np.float32))
    touches = [block.touches for block in blocks if block.touches is not None]
    return RowBlock(
        np.concatenate([block.ids for block in blocks]),
        np.concatenate([block.weights for block in blocks]),
        np.concatenate([block.slots for block in blocks]),
        np.concatenate(touches) if len(touches) == len(blocks) else None,
        all(block.trained for block in blocks),
    )


def rows_in_order(ids: Int64, block: RowBlock) -> RowBlock:
    """The block's rows in the order of `ids` int64 `[n]`, each once, with all ids of the block among them."""
    order = np.argsort(ids, kind="stable")
    places = order[np.searchsorted(ids, block.ids, sorter=order)]
    return chosen_rows(block, np.argsort(places, kind="stable"))


# Rows whose weights are given and whose slots stay


def put_weights(store: EmbeddingStore, table: str, ids: Int64, weights: Float32) -> None:
    """Gives rows other weights; their slots stay, and new rows get those that a first update would find.

    Args:
        store: Nobody commits to it meanwhile.
        table: In the store.
        ids: int64 `[n]`, each once.
        weights: float32 `[n, dim]`.

    Raises:
        TableNotFound, IdOutOfRange, StoreFailed, Unavailable: as of `EmbeddingStore.put`.
    """
    order = np.argsort(ids)
    block = fresh_rows(store.specs()[table], ids[order], weights[order])
    there = store.read_rows(table, block.ids)  # those that have a row
    block.slots[np.searchsorted(block.ids, there.ids)] = there.slots
    store.put(table, [block])


# Rows that come from somewhere else: their values are given, their slots begin anew


def fresh_rows(spec: TableSpec, ids: Int64, weights: Float32) -> RowBlock:
    """A block of rows with the slots that a first update would find.

    Args:
        spec: The table.
        ids: int64 `[n]`, each once.
        weights: float32 `[n, dim]`.
    """
    slots = row_optimizer(spec.optimizer).initial_slots(spec.dim)
    return RowBlock(ids, weights, np.repeat(slots[np.newaxis], len(ids), axis=0))
