"""`elastable train` and `elastable master`: a job, with its workers or waiting for them."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from elastable.commands.arguments import Average, ModelPath
from elastable.options import JobOptions

__all__ = ["master", "train"]

_JOB, _DATA, _PLACES = "The job", "Data and model", "Where things go"

Store = Annotated[
    str,
    typer.Option("--store", help="memory, or redis://[user:pass@]host:port (rediss:// for TLS).", rich_help_panel=_JOB),
]
Mode = Annotated[
    str, typer.Option("--mode", help="sync: the same numbers for any workers; async: no waiting.", rich_help_panel=_JOB)
]
Epochs = Annotated[int, typer.Option("--epochs", min=1, help="Passes over the training data.", rich_help_panel=_JOB)]
MicroBatch = Annotated[
    int,
    typer.Option(
        "--micro-batch-size", "--minibatch-size", min=1, help="Records of one gradient.", rich_help_panel=_JOB
    ),
]
GradsToWait = Annotated[
    int | None,
    typer.Option(
        "--grads-to-wait",
        min=1,
        rich_help_panel=_JOB,
        help="Micro-batches averaged into one update [default: the number of workers, or 1].",
    ),
]
Seed = Annotated[int, typer.Option("--seed", help="Of record order, initial values and dropout.", rich_help_panel=_JOB)]
Threads = Annotated[
    int,
    typer.Option(
        "--intra-op-threads",
        min=1,
        rich_help_panel=_JOB,
        help="TensorFlow threads of every worker; part of the job, since it changes roundings.",
    ),
]
NotFinite = Annotated[
    str, typer.Option("--not-finite", help="refuse or skip gradients with NaN or Inf.", rich_help_panel=_JOB)
]
Shuffle = Annotated[bool, typer.Option("--shuffle/--no-shuffle", help="Shuffle records.", rich_help_panel=_DATA)]
Offload = Annotated[
    int,
    typer.Option(
        "--offload-embeddings-above",
        min=0,
        metavar="ELEMENTS",
        rich_help_panel=_DATA,
        help="Move plain keras.layers.Embedding of more elements to the store; 0: none.",
    ),
]
RunDir = Annotated[Path, typer.Option("--run-dir", help="Home of run directories.", rich_help_panel=_PLACES)]
CheckpointDir = Annotated[
    Path | None,
    typer.Option("--checkpoint-dir", help="Checkpoints [default: in the run directory].", rich_help_panel=_PLACES),
]
CheckpointEvery = Annotated[
    int,
    typer.Option(
        "--checkpoint-every",
        min=0,
        metavar="VERSIONS",
        rich_help_panel=_PLACES,
        help="Versions between checkpoints; 0: at the end only.",
    ),
]
Keep = Annotated[int, typer.Option("--keep", min=0, help="Checkpoints that stay; 0: all.", rich_help_panel=_PLACES)]
Resume = Annotated[bool, typer.Option("--resume", help="Go on from the newest checkpoint.", rich_help_panel=_PLACES)]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Drop tables of an earlier job from the store.", rich_help_panel=_PLACES)
]
Export = Annotated[
    bool, typer.Option("--export/--no-export", help="Write the trained model as plain .keras.", rich_help_panel=_PLACES)
]
Listen = Annotated[
    str, typer.Option("--listen", metavar="HOST:PORT", help="Where the master listens; port 0: a free one.")
]
Deadline = Annotated[
    float, typer.Option("--deadline", metavar="SECONDS", help="How long a worker or the store may stay away.")
]


def train(
    model_file: ModelPath,
    workers: Annotated[int, typer.Option("--workers", min=1, help="Worker processes here.")] = 2,
    store: Store = "memory",
    mode: Mode = "sync",
    epochs: Epochs = 1,
    micro_batch_size: MicroBatch = 256,
    grads_to_wait: GradsToWait = None,
    seed: Seed = 0,
    intra_op_threads: Threads = 1,
    average: Average = "mean",
    not_finite: NotFinite = "refuse",
    shuffle: Shuffle = True,
    offload_above: Offload = 0,
    run_dir: RunDir = Path("runs"),
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = 0,
    keep: Keep = 3,
    resume: Resume = False,
    overwrite: Overwrite = False,
    export: Export = True,
    listen: Listen = "127.0.0.1:0",
    deadline: Deadline = 60.0,
) -> None:
    """Train a model with a master and worker processes on this machine."""
    options = JobOptions(
        model_file=model_file, store=store, mode=mode, epochs=epochs, micro_batch_size=micro_batch_size,
        grads_to_wait=grads_to_wait or (workers if mode == "sync" else 1), seed=seed,
        intra_op_threads=intra_op_threads, average=average, not_finite=not_finite, shuffle=shuffle,
        offload_above=offload_above, run_dir=run_dir, checkpoint_dir=checkpoint_dir,
        checkpoint_every=checkpoint_every, keep=keep, resume=resume, overwrite=overwrite,
        export=export, listen=listen,
        deadline_s=deadline,
    )  # fmt: skip
    from elastable.master_process import run_job

    raise typer.Exit(run_job(options, local_workers=workers, console=Console()))


def master(
    model_file: Annotated[
        Path | None,
        typer.Argument(metavar="[MODEL.py]", help="Model file; without one: a bare parameter server for any client."),
    ] = None,
    store: Store = "memory",
    mode: Mode = "sync",
    epochs: Epochs = 1,
    micro_batch_size: MicroBatch = 256,
    grads_to_wait: GradsToWait = None,
    seed: Seed = 0,
    intra_op_threads: Threads = 1,
    average: Average = "mean",
    not_finite: NotFinite = "refuse",
    shuffle: Shuffle = True,
    offload_above: Offload = 0,
    run_dir: RunDir = Path("runs"),
    checkpoint_dir: CheckpointDir = None,
    checkpoint_every: CheckpointEvery = 0,
    keep: Keep = 3,
    resume: Resume = False,
    overwrite: Overwrite = False,
    export: Export = True,
    listen: Listen = "127.0.0.1:50051",
    deadline: Deadline = 60.0,
) -> None:
    """Run a job's master and wait for workers, wherever they are."""
    from elastable.master_process import run_bare_server, run_job

    console = Console()
    if model_file is None:
        raise typer.Exit(run_bare_server(store, listen, console))
    options = JobOptions(
        model_file=model_file, store=store, mode=mode, epochs=epochs, micro_batch_size=micro_batch_size,
        grads_to_wait=grads_to_wait or 1, seed=seed, intra_op_threads=intra_op_threads, average=average,
        not_finite=not_finite, shuffle=shuffle, offload_above=offload_above, run_dir=run_dir,
        checkpoint_dir=checkpoint_dir, checkpoint_every=checkpoint_every, keep=keep, resume=resume, overwrite=overwrite,
        export=export,
        listen=listen, deadline_s=deadline,
    )  # fmt: skip
    raise typer.Exit(run_job(options, local_workers=0, console=console))
