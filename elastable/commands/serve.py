"""`elastable serve`: a parameter server without a model."""

from __future__ import annotations

from typing import Annotated

import typer

from elastable.commands.arguments import Insecure
from elastable.output.progress_bars import JobConsole

__all__ = ["serve"]


def serve(
    store: Annotated[
        str,
        typer.Option("--store", metavar="URL", help="memory, file:///folder, or redis://\\[user:pass@]host:port."),
    ] = "memory",
    listen: Annotated[
        str, typer.Option("--listen", metavar="HOST:PORT", help="Where it listens; port 0: a free one.")
    ] = "127.0.0.1:50051",
    insecure: Insecure = False,
    not_finite: Annotated[
        str, typer.Option("--not-finite", help="refuse or skip gradients with NaN or Inf.")
    ] = "refuse",
    deadline: Annotated[
        float,
        typer.Option("--deadline", metavar="SECONDS", help="How long a commit is repeated while the store fails."),
    ] = 60.0,
    transport: Annotated[
        str,
        typer.Option(
            "--transport", help="How clients on this host read rows: auto (shared memory, or gRPC), grpc, or shared."
        ),
    ] = "auto",
) -> None:
    """Serve the tables of a store to any gRPC client, without a model: clients create tables, look up and push."""
    from elastable.jobs.parameter_server import ServerOptions, run_parameter_server

    options = ServerOptions(store, listen, not_finite, deadline, transport, insecure)
    raise typer.Exit(run_parameter_server(options, JobConsole()))
