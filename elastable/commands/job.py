"""`elastable train`, `master`, `worker` and `serve`: the processes of a job, and a parameter server without one."""

import logging
import os

import typer

from elastable.commands.command_line import takes
from elastable.jobs.options import JobOptions, ServerOptions, TrainOptions, WorkerOptions
from elastable.output.progress_bars import JobConsole
from elastable.process.child import when_parent_ends
from elastable.process.exit_codes import ExitCode
from elastable.process.quiet import import_tensorflow


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


@takes(ServerOptions)
def serve(options: ServerOptions) -> None:
    """Serve the tables of a store to any gRPC client, without a model: clients create tables, look up and push."""
    from elastable.jobs.serving import run_parameter_server

    raise typer.Exit(run_parameter_server(options, JobConsole()))


@takes(WorkerOptions)
def worker(options: WorkerOptions) -> None:
    """Join a job and compute micro-batches until it ends."""
    when_parent_ends(_leave_at_once)
    import_tensorflow()
    from elastable.jobs.worker_process import run_worker

    counted = run_worker(options)
    logging.getLogger("elastable").info("%d micro-batches counted; the job is over", counted)


def _leave_at_once() -> None:
    """A local worker's master is gone, and the next one starts its own workers: there is nobody to tell."""
    logging.getLogger("elastable").warning("the master that started this worker has ended")
    os._exit(ExitCode.JOB_FAILED)
