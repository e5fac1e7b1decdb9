"""`elastable evaluate`, `predict` and `export`: what to do with a checkpoint."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import numpy as np
import typer

from elastable.commands.arguments import CheckpointPath, ModelPath, Split
from elastable.embedding_store.errors import BadInput
from elastable.process.quiet import import_tensorflow

__all__ = ["evaluate", "export", "predict"]

BatchSize = Annotated[int, typer.Option("--batch-size", min=1, help="Records at a time.")]


def evaluate(
    model_file: ModelPath,
    checkpoint: CheckpointPath,
    split: Split = "validation",
    batch_size: Annotated[
        int | None, typer.Option("--batch-size", min=1, help="Records at a time \\[default: the job's micro-batches].")
    ] = None,
) -> None:
    """Print the loss and metrics of a checkpoint on a split, as JSON."""
    import_tensorflow()
    from elastable.models.trained import evaluated, open_trained

    trained = open_trained(model_file, checkpoint)
    told = evaluated(trained, split, batch_size)
    typer.echo(json.dumps({"version": trained.checkpoint.version, "split": split, **told}))


def predict(
    model_file: ModelPath,
    checkpoint: CheckpointPath,
    output: Annotated[Path, typer.Option("--output", metavar="FILE.npy", help="Where predictions go.")],
    split: Split = "validation",
    batch_size: BatchSize = 4096,
) -> None:
    """Write the predictions of a checkpoint for a split as a .npy array."""
    import_tensorflow()
    from elastable.models.trained import batches, open_trained

    if output.suffix != ".npy":
        raise BadInput(f"--output {output}: predictions are written as .npy")
    trained = open_trained(model_file, checkpoint)
    parts = [trained.model.predict_on_batch(batch[0]) for batch in batches(trained.reader(split), batch_size)]
    if not isinstance(parts[0], np.ndarray):
        raise BadInput(f"{trained.file.path}: the model has several outputs; predict writes models with one")
    predictions = np.concatenate(parts)
    np.save(output, predictions)
    typer.echo(json.dumps({"output": str(output), "shape": list(predictions.shape)}))


def export(
    model_file: ModelPath,
    checkpoint: CheckpointPath,
    output: Annotated[Path, typer.Option("--output", metavar="FILE.keras", help="Where the model goes.")],
) -> None:
    """Write a checkpoint as a plain .keras model that needs no Elastable."""
    import_tensorflow()
    from elastable.models.trained import open_trained
    from elastable.worker.models.export import export_keras

    if output.suffix != ".keras":
        raise BadInput(f"--output {output}: models are written as .keras")
    trained = open_trained(model_file, checkpoint)
    written = export_keras(trained.model, trained.store, output)
    typer.echo(json.dumps({"output": str(written), "version": trained.checkpoint.version}))
