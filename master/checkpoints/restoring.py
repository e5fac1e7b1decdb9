"""Restores checkpoints: to any store, other shards, another dtype, all tables or some."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.rows.conversion import spec_in_dtype
from elastable.embedding_store.rows.row_blocks import fresh_rows
from elastable.master.checkpoints.checkpoint import Checkpoint

__all__ = ["refuse_other_model", "require_tables", "restore_tables"]


def restore_tables(
    checkpoint: Checkpoint, store: EmbeddingStore, *, tables: Iterable[str] | None = None, dtype: str | None = None
) -> dict[str, int]:
    """Makes the tables of a checkpoint in the store, as they were, and declares the checkpoint's version.

    Rows that the store holds of a table by the same name are forgotten; that
    happens only after all files were read and are whole. An empty store is
    filled while files are read, and emptied where one of them is damaged: tables
    that were made are dropped again.

    Args:
        checkpoint: What to restore.
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
    made: list[str] = []
    begun: list[str] = []
    restored: dict[str, int] = {}
    try:
        for name, spec in specs.items():
            if store.create_table(spec):
                made.append(name)
        for name, spec in specs.items():
            begun.append(name)
            if name not in made:
                store.clear(name)
            restored[name] = _restore(checkpoint, store, spec)
    except BaseException:
        for name in made:
            store.drop_table(name)
        for name in sorted(set(begun) - set(made)):
            store.clear(name)
        raise
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
    bare = spec.optimizer != checkpoint.manifest.tables[spec.name].spec.optimizer
    rows = 0
    for block in checkpoint.rows(spec.name):
        store.put(spec.name, [fresh_rows(spec, block.ids, block.weights) if bare else block])
        rows += len(block.ids)
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
