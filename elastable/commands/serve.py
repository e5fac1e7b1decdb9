"""`elastable serve`: a parameter server without a model."""

from __future__ import annotations

import typer

from elastable.commands.command_line import takes
from elastable.jobs.options import ServerOptions
from elastable.output.progress_bars import JobConsole

__all__ = ["serve"]


@takes(ServerOptions)
def serve(options: ServerOptions) -> None:
    """Serve the tables of a store to any gRPC client, without a model: clients create tables, look up and push."""
    from elastable.jobs.serving import run_parameter_server

    raise typer.Exit(run_parameter_server(options, JobConsole()))
