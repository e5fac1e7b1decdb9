"""`elastable log show | verify | truncate`: the write-ahead log of a store."""

import json
from dataclasses import asdict, dataclass

import typer
from rich.markup import escape
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.commands.plan import readable_size
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.log.inspection import LogReport, inspect_log
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.tiers.redis.redis_log import inspect_redis_log, truncate_redis_log
from elastable.embedding_store.tiers.redis.url import SCHEMES, redacted
from elastable.process.stopping import OutputConsole

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
