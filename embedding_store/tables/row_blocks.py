"""Blocks of rows: made, chosen from and joined; and a table's rows in another dtype."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Protocol

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import SpecConflict, TableNotFound, Unsupported
from elastable.embedding_store.optimizers.registry import decays_untouched_rows, follows_steps, row_optimizer


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


class Scanned(Protocol):
    """A store, or what else tells all rows of its tables."""

    def specs(self) -> dict[str, TableSpec]: ...
    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]: ...
    def table_state(self, table: str) -> TableState: ...


def convert_table(
    source: Scanned,
    table: str,
    target: EmbeddingStore,
    dtype: str,
    block_rows: int = 65_536,
    *,
    trained: bool = True,
) -> int:
    """Makes `table` in `target`, with the rows that it has in `source`, rounded to `dtype`.

    Slots go along, and what is counted for admission and eviction; not so into a table that is not trained: it gets an
    optimizer without slots, and no admission or eviction. Nothing may be committed to `source` meanwhile.
    The version of `target` is the caller's to set (`reset_version`).

    Args:
        source: Where the table is.
        table: Its name, here and there: initial values depend on it.
        target: Another store.
        dtype: One of `WEIGHT_DTYPES`.
        block_rows: Rows that are converted at a time.
        trained: Whether the table may be trained there; one of int8 never is.

    Returns:
        Rows converted; those that were never updated read their initial values there, too.

    Raises:
        TableNotFound: `source` has no such table.
        SpecConflict: `target` has a table of that name.
        BadInput: a weight that the dtype cannot hold; no table has been made.
    """
    spec = source.specs().get(table)
    if spec is None:
        raise TableNotFound(f"no table {table!r}; tables there: {', '.join(sorted(source.specs())) or 'none'}")
    there = spec_in_dtype(spec, dtype, trained)
    if table in target.specs() or not target.create_table(there):
        raise SpecConflict(f"the target has a table {table!r} already; drop it, or convert into an empty store")
    rows = 0
    try:
        for block in source.scan(table, block_rows):
            kept = block if there.optimizer == spec.optimizer else fresh_rows(there, block.ids, block.weights)
            target.put(table, [kept])
            rows += len(block.ids)
        state = source.table_state(table)
        if there.admission is not None or there.timed or follows_steps(there.optimizer):
            target.put_table_state(table, state)
    except BaseException:
        target.drop_table(table)
        raise
    return rows


def spec_in_dtype(spec: TableSpec, dtype: str, trained: bool = True) -> TableSpec:
    """The table in another dtype; one of int8 is not trained: it has no slots, no admission and no eviction.

    Where decay reaches rows that were never updated, a table that is not trained keeps its optimizer for them.

    Raises:
        Unsupported: the table's rows follow decay that the dtype has no place for.
    """
    there = replace(spec, dtype=dtype)
    if dtype == "int8" or not trained:
        decays = dtype != "int8" and decays_untouched_rows(spec.optimizer)
        optimizer = spec.optimizer if decays else OptimizerSpec()
        there = replace(there, optimizer=optimizer, admission=None, eviction=None)
    if decays_untouched_rows(spec.optimizer) and not follows_steps(there.optimizer):
        raise Unsupported(
            f"table {spec.name!r}: with lazy=False its weight_decay reaches rows that were never updated, and a table "
            f"of {there.dtype} has no place for that; keep it in float32"
        )
    return there
