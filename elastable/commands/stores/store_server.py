"""`elastable store`: a store server, and below it what is done to a store while no job has it."""

from __future__ import annotations

import os
import signal

import typer

from elastable.commands.command_line import takes, without_subcommand
from elastable.commands.stores.rescaling import rescale
from elastable.jobs.options import StoreServerOptions
from elastable.output.progress_bars import JobConsole
from elastable.process.child import when_parent_ends

__all__ = ["store"]

store = typer.Typer(name="store", add_completion=False, invoke_without_command=True)
store.command()(rescale)


@store.callback()
@without_subcommand
@takes(StoreServerOptions)
def serve(options: StoreServerOptions) -> None:
    """Serve one shard of a job's tables, or look after a store while no job has it.

    Workers look rows up here and push their gradients; their job's master only says when these are committed
    (elastable master --stores). The server serves one job at a time, until a signal ends it.
    """
    # Started by `elastable train --stores N`: it writes what its store keeps, and makes room for the next one.
    when_parent_ends(lambda: os.kill(os.getpid(), signal.SIGTERM))
    from elastable.jobs.serving import run_store_server

    raise typer.Exit(run_store_server(options, JobConsole()))
