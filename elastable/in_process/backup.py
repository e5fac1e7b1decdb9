"""`keras.callbacks.BackupAndRestore` in `et.fit`: where a fit that was interrupted goes on."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import keras

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.worker.keras.seeds import layers_of
from elastable.worker.models.offload import OffloadedEmbedding

__all__ = ["backed_up_epoch", "refuse_backup_of_slots"]


def backed_up_epoch(callbacks: Sequence[keras.callbacks.Callback], initial_epoch: int) -> int:
    """The epoch that Keras' `fit` would begin at: that of a backup, where there is one.

    Raises:
        BadInput: a backup that cannot be read.
    """
    for callback in callbacks:
        if isinstance(callback, keras.callbacks.BackupAndRestore):
            file = Path(callback._training_metadata_path)
            if not file.exists():
                continue
            try:
                epoch = json.loads(file.read_text())["epoch"]
                if type(epoch) is not int or epoch < 0:
                    raise ValueError(f"epoch {epoch!r}")
            except (OSError, ValueError, KeyError, TypeError) as error:
                raise BadInput(
                    f"callback BackupAndRestore: {file} is no backup ({error}); delete its folder to begin anew"
                ) from error
            initial_epoch = epoch or initial_epoch
    return initial_epoch


def refuse_backup_of_slots(
    callbacks: Sequence[keras.callbacks.Callback], model: keras.Model, tables: dict[str, TableSpec]
) -> None:
    """Raises `Unsupported` where a backup would lack the slots of a table: the file holds a plain Keras embedding."""
    if not any(isinstance(callback, keras.callbacks.BackupAndRestore) for callback in callbacks):
        return
    for layer in layers_of(model):
        spec = tables.get(layer.name) if isinstance(layer, OffloadedEmbedding) else None
        if spec is not None and row_optimizer(spec.optimizer).slots:
            raise Unsupported(
                f"callback BackupAndRestore: embedding layer {layer.name!r} is offloaded, and Keras' file has no place "
                "for the slots of its optimizer; use et.Embedding, or a job with --checkpoint-dir and --resume"
            )
