"""`elastable store`: a store server, and below it what is done to a store while no job has it."""

import os
import signal
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn

from elastable.commands.command_line import takes
from elastable.embedding_store.composite.moving import move_job
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.jobs.options import StoreServerOptions, deadline
from elastable.master.model.wrapping_optimizers import register_job_optimizers
from elastable.output.progress_bars import JobConsole
from elastable.process.child import when_parent_ends
from elastable.process.repeating import repeating

_RENEW_EVERY_S = 1.0


@dataclass(frozen=True, slots=True)
class _RescaleOptions:
    old: tuple[str, ...] = required(
        Option("Store servers that have the rows, as the job's --stores names them.", ("--from",), metavar="ADDRESSES")
    )
    new: tuple[str, ...] = required(
        Option("Store servers that get them, started and empty.", ("--to",), metavar="ADDRESSES")
    )
    take_over: bool = setting(False, Option("Take the servers from a job that is using them; it ends with an error."))
    deadline_s: float = setting(60.0, deadline("How long a call is repeated while a server cannot be reached."))


@takes(_RescaleOptions)
def rescale(options: _RescaleOptions) -> None:
    """Move the rows of a job that is not running to other store servers. If it is interrupted, run it again.

    The old servers hold the job until the new ones have everything. A server in both lists keeps its rows.
    """
    from elastable.jobs.store_watch import refuse_live_owner

    register_job_optimizers()
    console = Console(stderr=True)
    with ExitStack() as opened:
        clients = {
            address: opened.enter_context(ShardClient(address, options.deadline_s))
            for address in dict.fromkeys((*options.old, *options.new))
        }
        if not options.take_over:
            for client in clients.values():
                refuse_live_owner(client.other_writer)

        def renew() -> None:
            with suppress(ElastableError):  # moving the rows says it
                for client in clients.values():
                    client.require_owner()

        opened.enter_context(repeating(renew, _RENEW_EVERY_S, "elastable-rescale"))
        progress = opened.enter_context(
            Progress(SpinnerColumn(), TextColumn("{task.description}"), console=console, transient=True)
        )
        shown = progress.add_task("reading")

        def copied(table: str, done: int, rows: int) -> None:
            progress.update(shown, description=f"{table}: {done:,} of {rows:,} rows")

        old, new = ({address: clients[address] for address in side} for side in (options.old, options.new))
        moved = move_job(old, new, copied)
    typer.echo(
        f"{sum(moved.rows.values()):,} rows of {len(moved.rows)} tables copied; version {moved.version:,} is at the "
        f"new store servers: go on with --stores {','.join(options.new)} --resume. Servers in --from alone are done"
    )


store = typer.Typer(name="store", add_completion=False, invoke_without_command=True)
store.command()(rescale)


@store.callback()
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
