"""`elastable evaluate`, `predict` and `export`: what to do with a checkpoint of a model."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import typer

from elastable.commands.command_line import takes
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, required, setting
from elastable.jobs.options import MODEL_FILE
from elastable.process.quiet import import_tensorflow

__all__ = ["CHECKPOINT", "evaluate", "export", "predict"]

CHECKPOINT = Option("A checkpoint, or a directory of checkpoints (the newest is taken).", metavar="DIR|URL")
_SPLIT = Option("Which split to use.", choices=("train", "validation"))
_records = partial(Option, "Records in one batch.", at_least=1)


@dataclass(frozen=True, slots=True)
class _CheckpointOptions:
    model_file: Path = required(MODEL_FILE)
    checkpoint: str = required(CHECKPOINT)


@dataclass(frozen=True, slots=True)
class _EvaluateOptions(_CheckpointOptions):
    split: str = setting("validation", _SPLIT)
    batch_size: int | None = setting(None, _records(unset="the job's micro-batch size"))


@takes(_EvaluateOptions)
def evaluate(options: _EvaluateOptions) -> None:
    """Print the loss and metrics of a checkpoint on a split, as JSON."""
    import_tensorflow()
    from elastable.models.trained import evaluated, open_trained

    trained = open_trained(options.model_file, options.checkpoint)
    metrics = evaluated(trained, options.split, options.batch_size)
    typer.echo(json.dumps({"version": trained.checkpoint.version, "split": options.split, **metrics}))


@dataclass(frozen=True, slots=True)
class _PredictOptions(_CheckpointOptions):
    output: Path = required(Option("File for the predictions.", metavar="FILE.npy"))
    split: str = setting("validation", _SPLIT)
    batch_size: int = setting(4096, _records())


@takes(_PredictOptions)
def predict(options: _PredictOptions) -> None:
    """Write the predictions of a checkpoint for a split as a .npy array."""
    import_tensorflow()
    from elastable.models.trained import batches, open_trained

    _require_suffix(options.output, ".npy", "predictions")
    trained = open_trained(options.model_file, options.checkpoint)
    reader = trained.reader(options.split)
    parts = [trained.model.predict_on_batch(batch[0]) for batch in batches(trained.model, reader, options.batch_size)]
    if not isinstance(parts[0], np.ndarray):
        raise BadInput(f"{trained.file.path}: the model has several outputs; predict writes models with one")
    predictions = np.concatenate(parts)
    np.save(options.output, predictions)
    typer.echo(json.dumps({"output": str(options.output), "shape": list(predictions.shape)}))


@dataclass(frozen=True, slots=True)
class _ExportOptions(_CheckpointOptions):
    output: Path = required(Option("File for the model.", metavar="FILE.keras"))


@takes(_ExportOptions)
def export(options: _ExportOptions) -> None:
    """Write a checkpoint as a plain .keras model that needs no Elastable."""
    import_tensorflow()
    from elastable.models.trained import open_trained
    from elastable.worker.models.export import export_keras

    _require_suffix(options.output, ".keras", "models")
    trained = open_trained(options.model_file, options.checkpoint)
    written = export_keras(trained.model, trained.store, options.output)
    typer.echo(json.dumps({"output": str(written), "version": trained.checkpoint.version}))


def _require_suffix(output: Path, suffix: str, what: str) -> None:
    if output.suffix != suffix:
        raise BadInput(f"--output {output}: {what} are written as {suffix}")
