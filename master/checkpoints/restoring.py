"""Restores checkpoints: to any store, other shards or dtype, all tables or some, weights alone, or into a new job."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import replace

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.tables.row_blocks import fresh_rows, put_weights, spec_in_dtype
from elastable.master.checkpoints.checkpoint import Checkpoint


def restore_tables(
    checkpoint: Checkpoint, store: EmbeddingStore, *, tables: Iterable[str] | None = None, dtype: str | None = None
) -> dict[str, int]:
    """Makes the tables of a checkpoint in the store, as they were, and declares the checkpoint's version.

    Rows that the store holds of a table by the same name are forgotten; that happens only after all files were read and
    are whole. An empty store is filled while files are read, and emptied where one of them is damaged: tables that were
    made are dropped again.

    Args:
        store: Of any backend, with any number of shards.
        tables: Which; None: all.
        dtype: Keep weights so, one of `WEIGHT_DTYPES`; None: each as it was. An
            int8 table serves: it gets no slots, no admission and no eviction.

    Returns:
        Table -> how many rows were restored.

    Raises:
        CheckpointError: a file is damaged, or the checkpoint lacks a table that was asked for.
        SpecConflict: a table by the same name has another spec.
        BadInput: a weight that the dtype cannot hold.
        Unsupported: the table cannot be kept so.
    """
    names = require_tables(checkpoint, tables)
    specs = {name: _wanted(checkpoint.manifest.tables[name].spec, dtype) for name in names}
    there = store.specs()
    if any(name in there and store.row_count(name) for name in names):
        checkpoint.verify()
    restored: dict[str, int] = {}
    with ExitStack() as undo:
        made = set()
        for name, spec in specs.items():
            if store.create_table(spec):
                undo.callback(store.drop_table, name)
                made.add(name)
        for name, spec in specs.items():
            if name not in made:
                undo.callback(store.clear, name)
                store.clear(name)
            restored[name] = _restore(checkpoint, store, spec)
        undo.pop_all()
    store.reset_version(checkpoint.version)
    return restored


def refuse_other_model(checkpoint: Checkpoint, tables: Mapping[str, TableSpec]) -> None:
    """Raises `CheckpointError` where the tables of a checkpoint are not those of a model, by name."""
    for name in sorted({*tables, *checkpoint.manifest.tables}):
        ours, saved = tables.get(name), checkpoint.manifest.tables.get(name)
        difference = None
        if saved is None:
            difference = f"the model has a table {name!r}, and the checkpoint has none of that name"
        elif ours is None:
            difference = f"the checkpoint has a table {name!r}, and the model has none of that name"
        elif differences := saved.spec.differences(ours):
            pairs = (f"{part} {there!r} and {here!r}" for part, (there, here) in differences.items())
            difference = f"table {name!r} has in the checkpoint and in the model: {'; '.join(pairs)}"
        if difference is not None:
            raise CheckpointError(f"{checkpoint.address} is of another model: {difference}")


def require_tables(checkpoint: Checkpoint, tables: Iterable[str] | None) -> list[str]:
    """The names in `tables`, sorted; of all tables where it is None. Raises `CheckpointError` for an unknown one."""
    held = checkpoint.manifest.tables
    names = sorted(held) if tables is None else sorted(set(tables))
    for name in names:
        if name not in held:
            raise CheckpointError(
                f"{checkpoint.address} has no table {name!r}; its tables are {', '.join(sorted(held)) or 'none'}"
            )
    return names


def _wanted(spec: TableSpec, dtype: str | None) -> TableSpec:
    return spec if dtype is None or dtype == spec.dtype else spec_in_dtype(spec, dtype)


def _restore(checkpoint: Checkpoint, store: EmbeddingStore, spec: TableSpec) -> int:
    rows = _put(checkpoint, store, spec, timed=True)
    expected = checkpoint.manifest.tables[spec.name].rows
    if rows != expected:
        raise CheckpointError(
            f"{checkpoint.address}: table {spec.name!r} has {rows} rows in its files, and had {expected} when it was "
            "written"
        )
    state = checkpoint.table_state(spec.name)
    if state and (spec.admission is not None or spec.timed or follows_steps(spec.optimizer)):
        store.put_table_state(spec.name, state)
    return rows


def restore_weights(checkpoint: Checkpoint, store: EmbeddingStore, changed: Callable[[str, Int64], None]) -> None:
    """Every row reads what it read at the version of the checkpoint; slots and the store's version stay.

    Args:
        checkpoint: Of the same job.
        store: Holds its tables; nothing is committed to it meanwhile.
        changed: Called with a table and the ids of rows that were written.

    Raises:
        CheckpointError: a file is damaged; some rows may have been written then.
    """
    checkpoint.verify()
    for name, spec in store.specs().items():
        saved = [np.zeros(0, np.int64)]
        for block in checkpoint.rows(name):
            put_weights(store, name, block.ids, block.weights)
            changed(name, block.ids)
            saved.append(block.ids)
        known = np.concatenate(saved)
        for block in store.scan(name):
            since = np.setdiff1d(block.ids, known)
            if len(since):
                put_weights(store, name, since, _untouched(checkpoint, spec, since))
                changed(name, since)
        _restore_decay(checkpoint, store, name)


def _untouched(checkpoint: Checkpoint, spec: TableSpec, ids: Int64) -> Float32:
    """What ids without a row read at the version of the checkpoint."""
    with MemoryStore(threads=1) as empty:
        empty.create_table(spec)
        _restore_decay(checkpoint, empty, spec.name)
        return empty.lookup({spec.name: ids})[spec.name]


def _restore_decay(checkpoint: Checkpoint, store: EmbeddingStore, table: str) -> None:
    """Rows that were never updated have decayed as far as at the version of the checkpoint."""
    state = checkpoint.table_state(table)
    if state.untouched_decay is not None:
        store.put_table_state(table, state)


def warm_start(
    checkpoint: Checkpoint, store: EmbeddingStore, tables: Mapping[str, TableSpec], names: Sequence[str] = ()
) -> dict[str, int]:
    """Puts the rows of a checkpoint's tables into the tables of a new job, at its version 0.

    Weights are taken; slots only where both tables have the same optimizer, with the same settings, else they are
    reset, as are counts for admission and eviction. Dtypes and initial values may differ.

    Args:
        checkpoint: Of any model.
        store: Holds the job's tables, empty.
        names: Of which tables; none: of all that both have.

    Returns:
        Table -> how many rows were put.

    Raises:
        CheckpointError: a table is missing on either side, there is none that both
            have, or rows do not fit; nothing has been put. Or a file is damaged.
        BadInput: a weight that the table's dtype cannot hold.
    """
    saved = checkpoint.manifest.tables
    chosen = sorted(set(names)) if names else sorted(set(tables) & set(saved))
    if not chosen:
        raise CheckpointError(
            f"{checkpoint.address} has no table of this model: its tables are {_listed(saved)}, the model's "
            f"{_listed(tables)}"
        )
    for name in chosen:
        for whose, held in (("the checkpoint", saved), ("the model", tables)):
            if name not in held:
                raise CheckpointError(f"warm start of table {name!r}: {whose} has {_listed(held)}")
        _refuse_misfit(name, saved[name].spec, tables[name])
    return {name: _put(checkpoint, store, tables[name], timed=False) for name in chosen}


def _listed(tables: Mapping[str, object]) -> str:
    return ", ".join(sorted(tables)) or "no tables"


def _refuse_misfit(name: str, saved: TableSpec, ours: TableSpec) -> None:
    if saved.dim != ours.dim:
        raise CheckpointError(
            f"warm start of table {name!r}: its rows have {saved.dim} values in the checkpoint and {ours.dim} in the "
            "model"
        )
    size = ours.vocabulary_size
    if size is not None and (saved.vocabulary_size is None or saved.vocabulary_size > size):
        raise CheckpointError(
            f"warm start of table {name!r}: its vocabulary is "
            f"{'any id' if saved.vocabulary_size is None else saved.vocabulary_size} in the checkpoint and only {size} "
            "in the model"
        )


def _put(checkpoint: Checkpoint, store: EmbeddingStore, spec: TableSpec, timed: bool) -> int:
    """Puts all rows of a table; how many. Not `timed`: as if no version had touched them."""
    same = checkpoint.manifest.tables[spec.name].spec.optimizer == spec.optimizer
    rows = 0
    for block in checkpoint.rows(spec.name):
        kept = block if timed else replace(block, touches=None)
        store.put(spec.name, [kept if same else fresh_rows(spec, block.ids, block.weights)])
        rows += len(block.ids)
    return rows
