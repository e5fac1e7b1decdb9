"""`elastable store`: a store server, and what is done to a store and its `elastable log` while no job has it."""

import json
import os
import signal
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.commands.model_commands import readable_size
from elastable.embedding_store.composite.moving import move_job
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.log.inspection import LogReport, inspect_log
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.tiers.redis.redis_log import inspect_redis_log, truncate_redis_log
from elastable.embedding_store.tiers.redis.url import SCHEMES, redacted
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.jobs.options import StoreServerOptions, deadline
from elastable.master.model.wrapping_optimizers import register_job_optimizers
from elastable.output.progress_bars import JobConsole
from elastable.process.child import when_parent_ends
from elastable.process.repeating import repeating
from elastable.process.stopping import OutputConsole

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


# The write-ahead log of a store


log = typer.Typer(
    name="log", help="Show, check and cut the write-ahead log of a store.", no_args_is_help=True, add_completion=False
)


@dataclass(frozen=True, slots=True)
class _PlaceOption:
    place: str = required(
        Option(
            "Folder of the log, as in --store memory?log=FOLDER, or the redis:// or rediss:// URL of a store.",
            metavar="PLACE", positional=True,
        )
    )  # fmt: skip


@dataclass(frozen=True, slots=True)
class _LogOptions(_PlaceOption):
    as_json: bool = setting(False, AS_JSON)


@log.command()
@takes(_LogOptions)
def show(options: _LogOptions) -> None:
    """Show what a log holds: its base, its entries, the version it leads to."""
    found = _inspected(options.place)
    if options.as_json:
        typer.echo(json.dumps(asdict(found), indent=2))
        return
    about = Table(title=escape(redacted(options.place)), show_header=False, title_justify="left")
    about.add_row("version", f"{found.version:,}")
    base = f"version {found.base_version:,}, {readable_size(found.base_bytes)}" if found.base is not None else "none"
    if found.flushed:
        base = f"version {found.base_version:,}, entry {found.flushed:,}: rows are in the store up to there"
    about.add_row("base", base)
    about.add_row("entries", f"{found.first:,} to {found.last:,}, {readable_size(found.bytes)}")
    about.add_row("torn at the end", readable_size(found.torn_bytes) if found.torn_bytes else "nothing")
    about.add_row("rows in commits", f"{found.rows:,}")
    for kind, number in sorted(found.changes.items()):
        about.add_row(kind, f"{number:,}")
    OutputConsole().print(about)


@log.command()
@takes(_PlaceOption)
def verify(options: _PlaceOption) -> None:
    """Read every byte of a log and of its base; a corrupt one ends with an error that names file and position."""
    found = _inspected(options.place)
    torn = f"; {found.torn_bytes:,} bytes of a torn entry will be dropped" if found.torn_bytes else ""
    typer.echo(f"whole: entries {found.first} to {found.last}, version {found.version}{torn}")


@dataclass(frozen=True, slots=True)
class _TruncateOptions(_PlaceOption):
    version: int = required(Option("The version to go back to.", flags=("--version",), at_least=0))


@log.command()
@takes(_TruncateOptions)
def truncate(options: _TruncateOptions) -> None:
    """Take back every change after a version. No store may have the log open."""
    _inspected(options.place)  # a typing error must not make a log
    if _is_redis(options.place):
        rows = truncate_redis_log(options.place, options.version)
    else:
        with StoreHistory(options.place) as history:
            rows = history.take_back(options.version)
    found = _inspected(options.place)
    typer.echo(f"version {found.version}, entries {found.first} to {found.last}; {rows:,} written rows were taken back")


def _is_redis(place: str) -> bool:
    return place.partition("://")[0] in SCHEMES


def _inspected(place: str) -> LogReport:
    return inspect_redis_log(place) if _is_redis(place) else inspect_log(place)
