"""`elastable store`: a store server, and what is done to a store and its `elastable log` while no job has it."""

import json
import os
import re
import signal
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import asdict, dataclass

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import Progress, SpinnerColumn, TextColumn
from rich.table import Table

from elastable.commands.command_line import AS_JSON, DEADLINE, takes
from elastable.commands.model_commands import CHECKPOINT, readable_size
from elastable.embedding_store.composite.moving import move_job
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import BadInput, ElastableError, TableNotFound
from elastable.embedding_store.log.inspection import LogReport, inspect_log
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.open_store import open_reader, open_store
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.tiers.redis.redis_log import inspect_redis_log, truncate_redis_log
from elastable.embedding_store.tiers.redis.url import SCHEMES, redacted
from elastable.embedding_store.wire.pushes.shard_client import ShardClient
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.jobs.options import StoreServerOptions, deadline
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.model.wrapping_optimizers import register_job_optimizers
from elastable.output.progress_bars import JobConsole
from elastable.process.child import when_parent_ends
from elastable.process.repeating import repeating
from elastable.process.stopping import OutputConsole


@dataclass(frozen=True, slots=True)
class _LookupOptions:
    table: str = required(Option("Name of the table.", metavar="TABLE", positional=True))
    ids: tuple[str, ...] = required(
        Option(
            "Ids; strings where the table's ids are strings. Write -- before negative ones.",
            metavar="IDS...", positional=True,
        )
    )  # fmt: skip
    master: str | None = setting(None, Option("Address of a running master.", metavar="HOST:PORT"))
    store: str | None = setting(
        None, Option("URL of a store: redis://host:port, grpc://host:port or file:///folder.", metavar="URL")
    )
    checkpoint: str | None = setting(None, CHECKPOINT)
    newest: bool = setting(
        False, Option("With --store in Redis: exactly the newest version, by the store's log, not the last flush.")
    )
    deadline_s: float = setting(5.0, DEADLINE)

    def __post_init__(self) -> None:
        if sum(source is not None for source in (self.master, self.store, self.checkpoint)) != 1:
            raise BadInput("lookup needs exactly one of --master, --store and --checkpoint")


@takes(_LookupOptions)
def lookup(options: _LookupOptions) -> None:
    """Print rows of a table as JSON, one line an id.

    Where a model called its layer on strings, the ids are strings here, too, numbers among them.
    """
    table, ids = options.table, options.ids
    with _source(options) as source:
        specs = source.specs()
        if table not in specs:
            known = ", ".join(map(repr, sorted(specs))) or "none"
            raise TableNotFound(f"no table {table!r}; tables here: {known}")
        hashed = specs[table].ids == "farmhash64"
        found = hash_ids(list(ids)) if hashed else _integers(table, ids)
        rows = source.lookup({table: found})[table]
    for given, row_id, row in zip(ids, found.tolist(), rows, strict=True):
        named = {"string": given, "id": row_id} if hashed else {"id": row_id}
        typer.echo(json.dumps({"table": table, **named, "row": [float(value) for value in row]}))


def _integers(table: str, ids: Sequence[str]) -> Int64:
    for text in ids:
        if not re.fullmatch(r"[+-]?[0-9]{1,40}", text) or not -(2**63) <= int(text) < 2**63:
            raise BadInput(f"{text[:80]!r} is no id of table {table!r}: its ids are integers from -2**63 to 2**63 - 1")
    return np.array([int(text) for text in ids], np.int64)


def _source(options: _LookupOptions) -> RowSource:
    if options.master is not None:
        return RemoteSource(options.master, deadline_s=options.deadline_s)
    if options.store is not None:
        if options.store.startswith(("file:", "memory?")):  # which no other process has, or it is refused
            return open_store(options.store, deadline_s=options.deadline_s)
        return open_reader(options.store, options.newest, options.deadline_s)
    memory = MemoryStore()
    restore_tables(open_checkpoint(options.checkpoint or "."), memory)
    return memory


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
