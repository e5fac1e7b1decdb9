"""`elastable train` and `elastable master`: a job, with its workers or waiting for them."""

from __future__ import annotations

import typer

from elastable.commands.command_line import takes
from elastable.jobs.options import JobOptions, TrainOptions
from elastable.output.progress_bars import JobConsole
from elastable.process.quiet import import_tensorflow

__all__ = ["master", "train"]


@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a model with a master and worker processes on this machine."""
    _run(options)


@takes(JobOptions)
def master(options: JobOptions) -> None:
    """Run a job's master and wait for workers, wherever they are."""
    _run(options)


def _run(options: JobOptions) -> None:
    import_tensorflow()
    from elastable.jobs.master_process import run_job

    raise typer.Exit(run_job(options, JobConsole()))
