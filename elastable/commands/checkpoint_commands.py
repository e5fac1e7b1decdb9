"""`elastable checkpoint list | show | verify | restore | diff`: what is saved, and what to do with it."""

import json
from dataclasses import asdict, dataclass, replace

import typer
from rich.markup import escape
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes, wide_console
from elastable.commands.model_commands import CHECKPOINT, readable_size
from elastable.embedding_store.contract.spec import WEIGHT_DTYPES
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.checkpoint import Checkpoint, ListedCheckpoint, list_checkpoints, open_checkpoint
from elastable.master.checkpoints.comparing import TableDifference, TensorDifference, compare_dense, compare_tables
from elastable.master.checkpoints.restoring import require_tables, restore_tables

checkpoint = typer.Typer(
    name="checkpoint", help="List, check, restore and compare checkpoints.", no_args_is_help=True, add_completion=False
)

_ONE = replace(CHECKPOINT, metavar="CKPT", positional=True)


@dataclass(frozen=True, slots=True)
class _ListOptions:
    directory: str = required(Option("Directory of checkpoints, a path or a URL.", metavar="DIR", positional=True))
    verify: bool = setting(False, Option("Read every file and compare its checksum."))
    as_json: bool = setting(False, AS_JSON)


@checkpoint.command("list")
@takes(_ListOptions)
def list_all(options: _ListOptions) -> None:
    """Show the checkpoints of a directory: version, job, time, kind, size, rows, whole or damaged."""
    found = list_checkpoints(options.directory, options.verify)
    if options.as_json:
        typer.echo(json.dumps([_as_json(listed) for listed in found], indent=2))
        return
    shown = Table(
        "checkpoint", "version", "job", "written", "kind", "size", "rows", "state", title=escape(options.directory)
    )
    for listed in found:
        name = escape(listed.address.rpartition("/")[2])
        if listed.checkpoint is None:
            shown.add_row(name, *[""] * 6, f"[red]damaged[/red]: {escape(listed.damage)}")
            continue
        it = listed.checkpoint.manifest
        about = f"{it.version:,}", escape(str(it.job.get("job", ""))), it.written or "unknown", it.kind
        shown.add_row(name, *about, readable_size(it.size), f"{it.rows:,}", "whole")
    wide_console().print(shown)


@dataclass(frozen=True, slots=True)
class _OneCheckpoint:
    checkpoint: str = required(_ONE)
    as_json: bool = setting(False, AS_JSON)


@checkpoint.command()
@takes(_OneCheckpoint)
def show(options: _OneCheckpoint) -> None:
    """Show what a checkpoint holds: its job, its tables, what it builds upon."""
    found = open_checkpoint(options.checkpoint)
    if options.as_json:
        typer.echo(json.dumps({**_as_json(ListedCheckpoint(found.address, found)), **_details(found)}, indent=2))
        return
    console, manifest, progress = wide_console(), found.manifest, found.progress()
    about = Table(title=escape(found.address), show_header=False, title_justify="left")
    about.add_row("version", f"{found.version:,}")
    about.add_row("written", manifest.written or "unknown")
    about.add_row("kind", manifest.kind)
    about.add_row("builds upon", ", ".join(base.name for base in found.chain()[1:]) or "nothing")
    about.add_row("size", readable_size(manifest.size))
    about.add_row("job", str(found.job.get("job", "")))
    about.add_row("records trained", f"{progress.records:,}")
    console.print(about)
    tables = Table("table", "rows", "in it", "dim", "dtype", "optimizer", title=f"{len(manifest.tables)} tables")
    for name, entry in manifest.tables.items():
        held = "all" if entry.whole else f"{entry.written:,} changed"
        spec = entry.spec
        tables.add_row(escape(name), f"{entry.rows:,}", held, str(spec.dim), spec.dtype, spec.optimizer.name)
    console.print(tables)


@checkpoint.command()
@takes(_OneCheckpoint)
def verify(options: _OneCheckpoint) -> None:
    """Read every file of a checkpoint, and of what it builds upon; damage is named, with exit code 8."""
    found = open_checkpoint(options.checkpoint)
    found.verify()
    files = sum(len(one.manifest.files) for one in found.chain())
    verified = {"checkpoint": found.address, "version": found.version, "files": files, "whole": True}
    typer.echo(json.dumps(verified) if options.as_json else f"{found.address}: {files} files, whole")


@dataclass(frozen=True, slots=True)
class _RestoreOptions:
    checkpoint: str = required(_ONE)
    store: str = required(Option("The store to create the tables in.", metavar="URL"))
    tables: tuple[str, ...] = setting((), Option("Only these tables.", metavar="A,B", unset="all"))
    dtype: str | None = setting(None, Option("Type of the restored rows.", choices=WEIGHT_DTYPES, unset="unchanged"))
    overwrite: bool = setting(False, Option("Drop the tables that the store holds."))

    def __post_init__(self) -> None:
        if self.store == "memory":
            raise BadInput("--store memory: its rows would be lost when this command ends; name a store that lasts")


@checkpoint.command()
@takes(_RestoreOptions)
def restore(options: _RestoreOptions) -> None:
    """Restore the tables of a checkpoint to a store, also of another kind, with other shards, in another dtype."""
    found = open_checkpoint(options.checkpoint)
    names = require_tables(found, options.tables or None)
    with open_store(options.store) as target:
        _claim(target, options.store, found, options.overwrite)
        restored = restore_tables(found, target, tables=names, dtype=options.dtype)
    typer.echo(json.dumps({"store": redacted(options.store), "version": found.version, "rows": restored}))


def _claim(target: EmbeddingStore, url: str, found: Checkpoint, overwrite: bool) -> None:
    """Makes sure that nothing is lost that is not to be; a checkpoint that replaces something is whole."""
    writer = target.other_writer()
    if writer is not None:
        raise BadInput(
            f"{redacted(url)} is in use: {writer} (host:process) is connected to write to it. Stop that job first, or "
            "restore to another ?namespace="
        )
    held = sorted(target.specs())
    if not held and target.version() == 0:
        return
    if not overwrite:
        raise BadInput(
            f"{redacted(url)} holds {len(held)} tables at version {target.version()} ({', '.join(held[:5])}), maybe of "
            "a job that runs: stop it and give --overwrite to drop them, or name another store"
        )
    found.verify()
    for name in held:
        target.drop_table(name)
    target.reset_version(0)


@dataclass(frozen=True, slots=True)
class _DiffOptions:
    first: str = required(replace(_ONE, metavar="A"))
    second: str = required(replace(_ONE, metavar="B"))
    as_json: bool = setting(False, AS_JSON)


@checkpoint.command()
@takes(_DiffOptions)
def diff(options: _DiffOptions) -> None:
    """Show which tables, rows and dense tensors of two checkpoints differ, and by how much; exit code 1 if any do."""
    ours, theirs = open_checkpoint(options.first), open_checkpoint(options.second)
    tables, dense = compare_tables(ours, theirs), compare_dense(ours, theirs)
    same = not dense and all(table.same for table in tables)
    if options.as_json:
        typer.echo(json.dumps(_difference(ours, theirs, tables, dense, same), indent=2))
    else:
        _show_difference(ours, theirs, tables, dense)
    raise typer.Exit(0 if same else 1)


def _show_difference(
    ours: Checkpoint, theirs: Checkpoint, tables: list[TableDifference], dense: list[TensorDifference]
) -> None:
    console = wide_console()
    console.print(f"A: {ours.address} (version {ours.version})", markup=False, highlight=False, soft_wrap=True)
    console.print(f"B: {theirs.address} (version {theirs.version})", markup=False, highlight=False, soft_wrap=True)
    shown = Table("table", "only in A", "only in B", "weights differ", "largest", "slots differ", "largest", "spec")
    for table in tables:
        weights, slots = f"{table.weights:,} rows", f"{table.slots:,} rows"
        spec = "; ".join(f"{name}: {one} and {other}" for name, (one, other) in table.spec.items()) or "same"
        missing = (f"{table.only_first:,}", f"{table.only_second:,}")
        moved = (weights, f"{table.largest_weight:.3g}", slots, f"{table.largest_slot:.3g}")
        shown.add_row(escape(table.table), *missing, *moved, escape(spec))
    console.print(shown)
    if not dense:
        console.print("dense: the same")
        return
    tensors = Table("dense tensor", "differs", "values", "largest")
    for tensor in dense:
        largest = "" if tensor.largest is None else f"{tensor.largest:.3g}"
        tensors.add_row(tensor.key, escape(tensor.difference), f"{tensor.values:,}", largest)
    console.print(tensors)


def _difference(
    ours: Checkpoint, theirs: Checkpoint, tables: list[TableDifference], dense: list[TensorDifference], same: bool
) -> dict[str, object]:
    return {
        "first": {"checkpoint": ours.address, "version": ours.version},
        "second": {"checkpoint": theirs.address, "version": theirs.version},
        "same": same,
        "tables": [
            {
                **asdict(table),
                "spec": {name: list(map(str, both)) for name, both in table.spec.items()},
                "same": table.same,
            }
            for table in tables
        ],
        "dense": [asdict(tensor) for tensor in dense],
    }


def _as_json(listed: ListedCheckpoint) -> dict[str, object]:
    if listed.checkpoint is None:
        return {"checkpoint": listed.address, "whole": False, "damage": listed.damage}
    manifest = listed.checkpoint.manifest
    return {
        "checkpoint": listed.address,
        "whole": True,
        "version": manifest.version,
        "job": manifest.job.get("job", ""),
        "written": manifest.written,
        "kind": manifest.kind,
        "base": None if manifest.base is None else manifest.base.name,
        "bytes": manifest.size,
        "rows": manifest.rows,
    }


def _details(found: Checkpoint) -> dict[str, object]:
    progress = found.progress()
    return {
        "job": dict(found.job),
        "records": progress.records,
        "epoch": progress.epoch,
        "tables": {
            name: {
                "rows": entry.rows,
                "written": entry.written,
                "whole": entry.whole,
                "dim": entry.spec.dim,
                "vocabulary_size": entry.spec.vocabulary_size,
                "dtype": entry.spec.dtype,
                "optimizer": entry.spec.optimizer.name,
            }
            for name, entry in found.manifest.tables.items()
        },
    }
