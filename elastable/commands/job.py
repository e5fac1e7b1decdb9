"""`elastable train` and `elastable master`: a job, with its workers or waiting for them."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from elastable.commands.arguments import Insecure, ModelPath, Transport
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.jobs.options import JobOptions
from elastable.output.progress_bars import JobConsole
from elastable.process.quiet import import_tensorflow

__all__ = ["master", "train"]

_ANY_PORT, _MASTER_PORT = "127.0.0.1:0", "127.0.0.1:50051"
_JOB, _DATA, _PLACES, _WORKERS = "The job", "Data and model", "Where things go", "Workers, slow or late"


def _option(panel: str, kind: Any, default: Any, *names: str, **settings: Any) -> tuple[Any, Any]:
    return Annotated[kind, typer.Option(*names, rich_help_panel=panel, **settings)], default


# The options of a job by field of JobOptions: declared once, taken by both commands.
_OPTIONS: dict[str, tuple[Any, Any]] = {
    "store": _option(
        _JOB,
        str,
        "memory",
        "--store",
        help="memory, file:///folder, or redis://\\[user:pass@]host:port (rediss:// for TLS); docs/tiers.md says more.",
    ),
    "mode": _option(
        _JOB, str, "sync", "--mode", help="sync: the same numbers for any number of workers; async: no waiting."
    ),
    "epochs": _option(_JOB, int, 1, "--epochs", min=1, help="Passes over the training data."),
    "micro_batch_size": _option(
        _JOB,
        int,
        256,
        "--micro-batch-size",
        "--minibatch-size",
        min=1,
        help="Records in a micro-batch, the unit of work of a worker.",
    ),
    "grads_to_wait": _option(
        _JOB,
        int | None,
        None,
        "--grads-to-wait",
        min=1,
        help="Micro-batches of one update \\[default: --workers in sync mode, or 1].",
    ),
    "seed": _option(_JOB, int, 0, "--seed", help="Seed of record order, initial values and dropout."),
    "intra_op_threads": _option(
        _JOB,
        int,
        1,
        "--intra-op-threads",
        min=1,
        help="TensorFlow threads of every worker; part of the job, since it changes roundings.",
    ),
    "average": _option(
        _JOB, str, "mean", "--average", help="mean (as Keras divides the loss), records, batches or sum."
    ),
    "not_finite": _option(_JOB, str, "refuse", "--not-finite", help="refuse or skip gradients with NaN or Inf."),
    "shuffle": _option(_DATA, bool, True, "--shuffle/--no-shuffle", help="Shuffle records."),
    "lazy": _option(
        _DATA,
        bool,
        True,
        "--lazy/--no-lazy",
        help="A step moves only rows that its batch touches; --no-lazy: all, as plain Keras does (docs/lazy.md).",
    ),
    "offload_above": _option(
        _DATA,
        int,
        0,
        "--offload-embeddings-above",
        min=0,
        metavar="ELEMENTS",
        help="Move plain keras.layers.Embedding of more elements to the store; 0: none.",
    ),
    "locations": _option(
        _PLACES,
        Path | None,
        None,
        "--locations",
        metavar="FILE.toml",
        help="Which tables live where; elastable plan shows it \\[default: all in --store].",
    ),
    "run_dir": _option(_PLACES, Path, Path("runs"), "--run-dir", help="Directory for run directories."),
    "checkpoint_dir": _option(
        _PLACES,
        str | None,
        None,
        "--checkpoint-dir",
        metavar="DIR|URL",
        help="Where checkpoints are written, a path or a URL such as s3://... \\[default: in the run directory].",
    ),
    "checkpoint_every": _option(
        _PLACES,
        int,
        0,
        "--checkpoint-every",
        min=0,
        metavar="VERSIONS",
        help="Versions between checkpoints; 0: at the end only.",
    ),
    "keep": _option(_PLACES, int, 3, "--keep", min=0, help="How many checkpoints to keep; 0: all."),
    "full_every": _option(
        _PLACES,
        int,
        5,
        "--full-every",
        min=1,
        metavar="CHECKPOINTS",
        help="Write a full checkpoint every N; those between hold what changed; 1: all are full.",
    ),
    "warm_start": _option(
        _PLACES,
        str | None,
        None,
        "--warm-start",
        metavar="CKPT",
        help="Begin with the rows of another model's checkpoint, in the tables that both models have.",
    ),
    "warm_tables": _option(
        _PLACES,
        str | None,
        None,
        "--warm-tables",
        metavar="A,B",
        help="Take only these tables from --warm-start \\[default: all].",
    ),
    "evaluate_every": _option(
        _JOB,
        int,
        0,
        "--evaluate-every",
        min=0,
        metavar="VERSIONS",
        help="Versions between evaluations during training; 0: only at the end of epochs.",
    ),
    "resume": _option(
        _PLACES, bool, False, "--resume", help="Continue an earlier job: in Redis, or from the newest checkpoint."
    ),
    "rerun": _option(
        _PLACES, bool, False, "--rerun", help="With --resume: train anew where the earlier job is finished."
    ),
    "overwrite": _option(_PLACES, bool, False, "--overwrite", help="Drop tables of an earlier job from the store."),
    "take_over": _option(
        _PLACES, bool, False, "--take-over", help="Take the store from a job that still runs on it; that job fails."
    ),
    "export": _option(_PLACES, bool, True, "--export/--no-export", help="Write the trained model as plain .keras."),
    "insecure": (Insecure, False),
    "transport": (Transport, "auto"),
    "lease_s": _option(
        _WORKERS,
        float,
        60.0,
        "--lease",
        metavar="SECONDS",
        help="Seconds before an unfinished micro-batch is also given to another worker.",
    ),
    "backup_after_s": _option(
        _WORKERS,
        float | None,
        None,
        "--backup-after",
        metavar="SECONDS",
        help="Seconds before an idle worker also computes a slow worker's micro-batch; the first result counts "
        "\\[default: never].",
    ),
    "staleness_bound": _option(
        _WORKERS,
        int | None,
        None,
        "--staleness-bound",
        min=0,
        metavar="VERSIONS",
        help="With --mode async: gradients further behind than this are computed again \\[default: no bound].",
    ),
    "staleness_modulation": _option(
        _WORKERS,
        str,
        "none",
        "--staleness-modulation",
        help="With --mode async: none, or inverse: learning rate / (1 + versions behind).",
    ),
    "deadline_s": _option(
        _JOB, float, 60.0, "--deadline", metavar="SECONDS", help="How long a worker or the store may be unreachable."
    ),
}


def _with_job_options(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command that takes `**options` the options of a job, for typer to see."""
    own = list(inspect.signature(command, eval_str=True).parameters.values())[:-1]
    shared = [
        inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=annotation)
        for name, (annotation, default) in _OPTIONS.items()
    ]
    command.__signature__ = inspect.Signature([*own, *shared])  # type: ignore[attr-defined]
    command.__annotations__ = {parameter.name: parameter.annotation for parameter in (*own, *shared)}
    return command


#: Options that say where a job begins.
_BEGINNING = ("resume", "rerun", "overwrite", "take_over", "checkpoint_dir")


def _words(command: str, model_file: Path, own: Mapping[str, tuple[Any, Any]], options: Mapping[str, Any]) -> list[str]:
    """The words of a command with these options, but for those that say where a job begins.

    Args:
        command: Its name.
        model_file: Its argument.
        own: Name of each option that only this command has -> its value and its default.
        options: By field, as `_OPTIONS`; those left at their defaults are left out.
    """
    words = ["elastable", command, str(model_file)]
    for name, (value, default) in own.items():
        words += [name, str(value)] if value != default else []
    for field, (annotation, default) in _OPTIONS.items():
        if (value := options[field]) != default and field not in _BEGINNING:
            name = get_args(annotation)[1].default  # where typer keeps the first of an option's names
            if isinstance(value, bool):
                yes, _, no = name.partition("/")
                words.append(yes if value else no)
            else:
                words += [name, redacted(str(value)) if field == "store" else str(value)]
    return words


def _as_settings(options: dict[str, Any]) -> dict[str, Any]:
    """Options as `JobOptions` takes them."""
    tables = str(options["warm_tables"] or "").split(",")
    return {**options, "warm_tables": tuple(name.strip() for name in tables if name.strip())}


@_with_job_options
def train(
    model_file: ModelPath,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes here.")] = 2,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the master listens; port 0: a free one.")
    ] = _ANY_PORT,
    **options: Any,
) -> None:
    """Train a model with a master and worker processes on this machine."""
    words = _words("train", model_file, {"--workers": (workers, 2), "--listen": (listen, _ANY_PORT)}, options)
    default = workers if options["mode"] == "sync" else 1
    job = JobOptions(model_file=model_file, listen=listen, grads_to_wait_else=default, **_as_settings(options))
    import_tensorflow()
    from elastable.jobs.master_process import run_job

    raise typer.Exit(run_job(job, local_workers=workers, console=JobConsole(), command=words))


@_with_job_options
def master(
    model_file: ModelPath,
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where the master listens; port 0: a free one.")
    ] = _MASTER_PORT,
    **options: Any,
) -> None:
    """Run a job's master and wait for workers, wherever they are."""
    words = _words("master", model_file, {"--listen": (listen, _MASTER_PORT)}, options)
    job = JobOptions(model_file=model_file, listen=listen, **_as_settings(options))
    import_tensorflow()
    from elastable.jobs.master_process import run_job

    raise typer.Exit(run_job(job, local_workers=0, console=JobConsole(), command=words))
