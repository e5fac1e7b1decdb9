"""`elastable train`, `master`, `worker`, `serve` and `replicas`: processes that train, or serve those that do."""

import logging
import os
from dataclasses import dataclass

import typer

from elastable.commands.command_line import takes
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.support.extras import needs
from elastable.jobs.options import JobOptions, ModelServerOptions, ServerOptions, TrainOptions, WorkerOptions
from elastable.output.progress_bars import JobConsole
from elastable.process.child import when_parent_ends
from elastable.process.exit_codes import ExitCode
from elastable.process.quiet import import_backend


@takes(TrainOptions)
def train(options: TrainOptions) -> None:
    """Train a model with a master and worker processes, on this machine or on a cluster."""
    if options.on is None:
        _run(options)
    from elastable.jobs.engines.job_on_engine import run_on

    raise typer.Exit(run_on(options, JobConsole()))


@takes(JobOptions)
def master(options: JobOptions) -> None:
    """Run a job's master and wait for workers, wherever they are."""
    when_parent_ends(_leave_at_once)
    _run(options)


def _run(options: JobOptions) -> None:
    import_backend()
    from elastable.jobs.master_process import run_job

    raise typer.Exit(run_job(options, JobConsole()))


@takes(ServerOptions)
def serve(options: ServerOptions) -> None:
    """Serve the tables of a store to any gRPC client, without a model: clients create tables, look up and push."""
    from elastable.jobs.serving import run_parameter_server

    raise typer.Exit(run_parameter_server(options, JobConsole()))


@takes(ModelServerOptions)
def serve_model(options: ModelServerOptions) -> None:
    """Answer predictions of a trained model: Open Inference Protocol over HTTP and gRPC, TensorFlow Serving's REST."""
    import_backend()
    with needs("elastable serve-model", "monitoring"):
        from elastable.serving.process import run_model_server

    raise typer.Exit(run_model_server(options, JobConsole()))


@takes(WorkerOptions)
def worker(options: WorkerOptions) -> None:
    """Join a job and compute micro-batches until it ends."""
    when_parent_ends(_leave_at_once)
    import_backend()
    from elastable.jobs.worker_process import run_worker

    raise typer.Exit(run_worker(options))


def _leave_at_once() -> None:
    """Whoever started this master or worker starts the next one: there is nobody to tell."""
    logging.getLogger("elastable").warning("the process that started this one has ended")
    os._exit(ExitCode.JOB_FAILED)


REPLICAS_SETTINGS = {"ignore_unknown_options": True, "allow_interspersed_args": False}
"""Of click: what follows the program is the program's."""


@dataclass(frozen=True, slots=True)
class _ReplicaOptions:
    words: tuple[str, ...] = required(
        Option(
            "A Python file, -m MODULE, or elastable COMMAND; with its arguments.",
            metavar="PROGRAM [ARGS]...", positional=True,
        )
    )  # fmt: skip
    count: int = required(Option("Number of processes.", flags=("-n",), at_least=1))
    deadline_s: float = setting(
        60.0,
        Option(
            "Seconds before a process that others wait for counts as failed.",
            flags=("--deadline",), above=0, metavar="SECONDS",
        ),
    )  # fmt: skip
    hosts: str | None = setting(None, Option("Hosts to run on, by ssh.", metavar="HOST[:COUNT],...", unset="this one"))
    grace_s: float = setting(
        5.0,
        Option(
            "Seconds for the others to end after one has failed.", flags=("--grace",), at_least=0, metavar="SECONDS"
        ),
    )


@takes(_ReplicaOptions)
def replicas(options: _ReplicaOptions) -> None:
    """Run a program in several processes; et.replica_group() joins them. All end when one fails."""
    from elastable.launch.launch import Launch
    from elastable.launch.program import program_of

    Launch(options.count, program_of(options.words), options.deadline_s, options.hosts, options.grace_s).run()
