"""`elastable evaluate`, `predict`, `export` and `plan`: what to do with a model file, trained or before."""

import json
import os
import ssl
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import numpy as np
import typer
from rich.table import Table

from elastable.commands.command_line import AS_JSON, DEADLINE, takes, wide_console
from elastable.embedding_store.composite.locations import plan_tables
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.contract.spec import WEIGHT_DTYPES
from elastable.embedding_store.errors import BadInput, Unavailable
from elastable.embedding_store.option import Option, check_options, required, setting
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.jobs.options import EARLIER_VERSIONS, MODEL_FILE, MODEL_SOURCE, OFFLOAD_ABOVE, OWN_CLASSES
from elastable.process.quiet import import_backend

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
    import_backend()
    from elastable.models.trained import evaluated, open_trained

    trained = open_trained(options.model_file, options.checkpoint, options.split, labels=True)
    metrics = evaluated(trained, options.batch_size)
    typer.echo(json.dumps({**trained.origin(), "split": options.split, **metrics}))


@dataclass(frozen=True, slots=True, kw_only=True)
class _HoldOptions:
    server: str = required(Option("URL of `elastable serve-model`.", metavar="http://HOST:PORT", positional=True))
    version: int | None = setting(None, Option("The version to answer from.", at_least=0, unset="with --newest, none"))
    newest: bool = setting(False, Option("Free the held version, and go on to the newest.", flags=("--newest",)))
    deadline_s: float = setting(600.0, DEADLINE)

    def __post_init__(self) -> None:
        check_options(self)
        if (self.version is None) is not self.newest:
            raise BadInput("hold needs --version N, or --newest")


@takes(_HoldOptions)
def hold(options: _HoldOptions) -> None:
    """Have a server of predictions answer from one version, or from the newest one again."""
    credentials = Credentials.from_environment()
    headers = {"Content-Type": "application/json"}
    if credentials.sent_token is not None:
        headers["Authorization"] = f"Bearer {credentials.sent_token}"
    body = json.dumps({"version": options.version}).encode()
    request = Request(f"{options.server.rstrip('/')}/hold", body, headers)
    try:
        context = ssl.create_default_context(cafile=credentials.ca) if credentials.ca else None
        with urlopen(request, timeout=options.deadline_s, context=context) as answer:
            typer.echo(answer.read().decode())
    except HTTPError as error:
        raise BadInput(
            f"{options.server} refuses: {error.code} {error.read(4_000).decode(errors='replace')}"
        ) from error
    except OSError as error:
        raise Unavailable(f"{options.server} cannot be reached: {error}") from error


@dataclass(frozen=True, slots=True, kw_only=True)
class _PredictOptions(_ModelOptions):
    output: Path = required(Option("File for the predictions.", metavar="FILE.npy"))
    split: str = setting("validation", _SPLIT)
    batch_size: int = setting(4096, _records())


@takes(_PredictOptions)
def predict(options: _PredictOptions) -> None:
    """Write the predictions of a checkpoint, or of the model that model() loads, for a split as a .npy array."""
    import_backend()
    from elastable.models.trained import batches, open_trained

    if options.output.suffix != ".npy":
        raise BadInput(f"--output {options.output}: predictions are written as .npy")
    _require_folder(options.output)
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
class _ExportOptions:
    source: str = required(MODEL_SOURCE)
    output: Path = required(Option("Where to write; nothing is there yet.", metavar="FILE.keras|FOLDER"))
    format: str = required(
        Option(
            "A plain model (keras), one for TensorFlow Serving (savedmodel), or weights for `serve-model` (serving).",
            choices=("keras", "savedmodel", "serving"),
        )
    )  # fmt: skip
    version: int | None = setting(None, Option("The version.", at_least=0, unset="the newest one"))
    checkpoints: str | None = setting(None, EARLIER_VERSIONS)
    dtype: str | None = setting(None, Option("Type of the rows.", choices=WEIGHT_DTYPES, unset="unchanged"))
    model_file: Path | None = setting(None, OWN_CLASSES)
    deadline_s: float = setting(600.0, DEADLINE)

    def __post_init__(self) -> None:
        check_options(self)
        output, kind = self.output, self.format
        if (kind == "keras") is not (output.suffix == ".keras"):
            raise BadInput(f"--output {output}: --format keras writes a file .keras, and the other formats a folder")
        if kind == "keras" and self.dtype is not None:
            raise BadInput(
                f"--dtype {self.dtype} with --format keras: plain layers keep rows as float32; load the file, and have "
                "Keras do it (model.quantize('int8')), or write --format savedmodel or serving"
            )
        if os.path.lexists(output):
            raise BadInput(f"--output {output} is there already, and nothing is overwritten: name another")
        _require_folder(output)


@takes(_ExportOptions)
def export(options: _ExportOptions) -> None:
    """Write the model of a version, of a job that has ended or goes on."""
    import_backend()
    from elastable.models.saving import export_version

    it = options
    version = export_version(
        it.source, it.output, it.format, version=it.version, checkpoints=it.checkpoints, dtype=it.dtype,
        model_file=it.model_file, deadline_s=it.deadline_s,
    )  # fmt: skip
    typer.echo(json.dumps({"output": str(it.output), "source": redacted(it.source), "version": version}))


def _require_folder(output: Path) -> None:
    if not output.absolute().parent.is_dir():
        raise BadInput(f"--output {output}: there is no directory {output.parent}")


@dataclass(frozen=True, slots=True)
class _PlanOptions:
    model_file: Path = required(MODEL_FILE)
    locations: Path | None = setting(None, Option("Location settings.", metavar="FILE.toml", unset="all in --store"))
    store: str = setting("memory", Option("The store of tables that have no other location.", metavar="URL"))
    offload_above: int = setting(0, replace(OFFLOAD_ABOVE, group=None))
    as_json: bool = setting(False, AS_JSON)


@takes(_PlanOptions)
def plan(options: _PlanOptions) -> None:
    """Show where the tensors of a model would live, with sizes and reasons; nothing is created."""
    import_backend()
    from elastable.assembly import locations_of
    from elastable.jobs.prepare import tables_of

    model, tables = tables_of(options.model_file, options.offload_above)
    placements = plan_tables(tables, locations_of(options.locations, options.store).settings)
    dense = [
        {
            "variable": it.path,
            "shape": list(it.shape),
            "bytes": int(it.value.dtype.size * it.value.shape.num_elements()),
        }
        for it in variables_of(model.weights)
    ]
    if options.as_json:
        names = ("table", "kind", "rows", "row", "elements", "row_bytes", "bytes", "reason")
        tables_shown = [
            {**{name: getattr(line, name) for name in names}, "location": line.location.storage} for line in placements
        ]
        typer.echo(json.dumps({"tables": tables_shown, "dense": dense}, indent=2))
        return
    shown = Table(
        "table", "tensor", "shape", "elements", "size", "location", "reason", title=f"plan of {options.model_file.name}"
    )
    for line in placements:
        rows = "any id" if line.rows is None else f"{line.rows:,}"
        elements = "grows" if line.elements is None else f"{line.elements:,}"
        size = f"{line.row_bytes:,} B a row" if line.bytes is None else readable_size(line.bytes)
        shown.add_row(line.table, line.kind, f"{rows} x {line.row}", elements, size, line.location.storage, line.reason)
    console = wide_console()
    console.print(shown)
    total = sum(it["bytes"] for it in dense)
    console.print(
        f"{len(dense)} dense variables, {readable_size(total)}: on the master, with their optimizer state, and on "
        "every worker"
    )


def readable_size(count: int) -> str:
    """Bytes for people: 12.3 MiB."""
    value, units = float(count), ("B", "KiB", "MiB", "GiB", "TiB")
    for unit in units[:-1]:
        if value < 1024:
            return f"{value:,.0f} B" if unit == "B" else f"{value:,.1f} {unit}"
        value /= 1024
    return f"{value:,.1f} {units[-1]}"
