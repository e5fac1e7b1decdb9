"""`elastable evaluate`, `predict` and `export`: what to do with a trained model."""

import json
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import typer

from elastable.commands.command_line import takes
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.option import Option, required, setting
from elastable.jobs.options import MODEL_FILE
from elastable.process.quiet import import_tensorflow

CHECKPOINT = Option("A checkpoint, or a directory of checkpoints (the newest is taken).", metavar="DIR|URL")
_SPLIT = Option("Which split to use.", choices=("train", "validation"))
_records = partial(Option, "Records in one batch.", at_least=1)


_WITHOUT = "the rows and weights that model() loads"


@dataclass(frozen=True, slots=True)
class _ModelOptions:
    model_file: Path = required(MODEL_FILE)
    checkpoint: str | None = setting(None, replace(CHECKPOINT, unset=_WITHOUT))


@dataclass(frozen=True, slots=True)
class _EvaluateOptions(_ModelOptions):
    split: str = setting("validation", _SPLIT)
    batch_size: int | None = setting(None, _records(unset="the job's micro-batch size"))


@takes(_EvaluateOptions)
def evaluate(options: _EvaluateOptions) -> None:
    """Print the loss and metrics of a checkpoint, or of the model that model() loads, on a split, as JSON."""
    import_tensorflow()
    from elastable.models.trained import evaluated, open_trained

    trained = open_trained(options.model_file, options.checkpoint, options.split, labels=True)
    metrics = evaluated(trained, options.batch_size)
    typer.echo(json.dumps({**trained.origin(), "split": options.split, **metrics}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _PredictOptions(_ModelOptions):
    output: Path = required(Option("File for the predictions.", metavar="FILE.npy"))
    split: str = setting("validation", _SPLIT)
    batch_size: int = setting(4096, _records())


@takes(_PredictOptions)
def predict(options: _PredictOptions) -> None:
    """Write the predictions of a checkpoint, or of the model that model() loads, for a split as a .npy array."""
    import_tensorflow()
    from elastable.models.trained import batches, open_trained

    _require_output(options.output, ".npy", "predictions")
    trained = open_trained(options.model_file, options.checkpoint, options.split)
    parts = [
        trained.model.predict_on_batch(batch[0])
        for batch in batches(trained.model, trained.records(), options.batch_size)
    ]
    if not isinstance(parts[0], np.ndarray):
        raise BadInput(f"{trained.file.path}: the model has several outputs; predict writes models with one")
    predictions = np.concatenate(parts)
    np.save(options.output, predictions)
    typer.echo(json.dumps({"output": str(options.output), "shape": list(predictions.shape), **trained.origin()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _ExportOptions(_ModelOptions):
    output: Path = required(Option("File for the model.", metavar="FILE.keras"))


@takes(_ExportOptions)
def export(options: _ExportOptions) -> None:
    """Write a checkpoint, or the model that model() loads, as a plain .keras model that needs no Elastable."""
    import_tensorflow()
    from elastable.models.trained import open_trained
    from elastable.worker.user_model.export import export_keras

    _require_output(options.output, ".keras", "models")
    trained = open_trained(options.model_file, options.checkpoint)
    written = export_keras(trained.model, trained.store, options.output)
    typer.echo(json.dumps({"output": str(written), **trained.origin()}))


def _require_output(output: Path, suffix: str, what: str) -> None:
    if output.suffix != suffix:
        raise BadInput(f"--output {output}: {what} are written as {suffix}")
    if not output.parent.is_dir():
        raise BadInput(f"--output {output}: there is no directory {output.parent}")
