"""A new job that begins with rows of another model's checkpoint."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.rows.row_blocks import fresh_rows
from elastable.master.checkpoints.checkpoint import Checkpoint

__all__ = ["warm_start"]


def warm_start(
    checkpoint: Checkpoint, store: EmbeddingStore, tables: Mapping[str, TableSpec], names: Sequence[str] = ()
) -> dict[str, int]:
    """Puts the rows of a checkpoint's tables into the tables of a new job, at its version 0.

    Weights are taken; slots only where both tables have the same optimizer, with
    the same settings, else they are reset, as are counts for admission and eviction.
    Dtypes and initial values may differ.

    Args:
        checkpoint: Of any model.
        store: Holds the job's tables, empty.
        tables: The job's tables.
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
    return {name: _put(checkpoint, store, tables[name]) for name in chosen}


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


def _put(checkpoint: Checkpoint, store: EmbeddingStore, spec: TableSpec) -> int:
    same = checkpoint.manifest.tables[spec.name].spec.optimizer == spec.optimizer
    rows = 0

    def blocks() -> Iterator[RowBlock]:
        nonlocal rows
        for block in checkpoint.rows(spec.name):
            rows += len(block.ids)
            yield (
                RowBlock(block.ids, block.weights, block.slots) if same else fresh_rows(spec, block.ids, block.weights)
            )

    store.put(spec.name, blocks())
    return rows
