"""`elastable status` and `elastable lookup`: what a running job or a store holds."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastable.commands.command_line import AS_JSON, takes
from elastable.commands.model import CHECKPOINT
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.ids.string_ids import hash_ids
from elastable.embedding_store.open_reader import open_reader
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.wire.client.remote_source import RemoteSource
from elastable.embedding_store.wire.client.remote_store import RemoteStore
from elastable.master.api import JobStatus
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.wire.client import MasterClient

__all__ = ["lookup", "status"]

_DEADLINE = Option(
    "Give up on an unreachable server after this time.", flags=("--deadline",), above=0, metavar="SECONDS"
)


@dataclass(frozen=True, slots=True)
class _StatusOptions:
    master: str = required(Option("Address of the master.", metavar="HOST:PORT"))
    as_json: bool = setting(False, AS_JSON)
    deadline_s: float = setting(5.0, _DEADLINE)


@takes(_StatusOptions)
def status(options: _StatusOptions) -> None:
    """Show how far a job is and who works on it."""
    reported = MasterClient(options.master, deadline_s=options.deadline_s).status()
    with RemoteStore(options.master, deadline_s=options.deadline_s) as store:
        pins = store.pins()
    if options.as_json:
        typer.echo(json.dumps({**_as_json(reported), "pins": [asdict(pin) for pin in pins]}, indent=2))
        return
    console = Console()
    console.print(_progress_table(reported))
    workers = Table("host", "pid", "leases", "micro-batches", title=f"{len(reported.workers)} workers")
    for worker in reported.workers:
        identity = worker.identity
        workers.add_row(escape(identity.host), str(identity.pid), str(worker.leases), f"{worker.micro_batches:,}")
    console.print(workers)
    if reported.flush is not None:
        console.print(_flush_table(reported.flush))
    if pins:
        pinned = Table("version", "seconds left", "rows kept", "bytes", title="pinned versions")
        for pin in pins:
            pinned.add_row(f"{pin.version:,}", f"{pin.lease_left_s:.0f}", f"{pin.rows:,}", f"{pin.bytes:,}")
        console.print(pinned)
    if reported.refusals:
        refused = Table("host", "pid", "how many", "why", title="failed workers")
        for refusal in reported.refusals:
            why = f"{refusal.error}: {refusal.message}"
            refused.add_row(escape(refusal.worker.host), str(refusal.worker.pid), str(refusal.count), escape(why))
        console.print(refused)


def _progress_table(reported: JobStatus) -> Table:
    """How far a job is; of a parameter server without a model, which has no end, at which version it is."""
    endless = not reported.versions_total
    title = "parameter server" if endless else f"job {escape(reported.job)}"
    table = Table(title=title, show_header=False, title_justify="left")
    if endless:
        table.add_row("version", f"{reported.version:,}")
        table.add_row("records pushed", f"{reported.records_trained:,}")
        return table
    table.add_row("state", escape(reported.state))
    table.add_row("mode", escape(reported.mode))
    table.add_row("store", escape(reported.store))
    table.add_row("version", f"{reported.version:,} of {reported.versions_total:,}")
    table.add_row("epoch", f"{min(reported.epoch + 1, reported.epochs)} of {reported.epochs}")
    table.add_row("records trained", f"{reported.records_trained:,}")
    for name, value in reported.metrics.items():
        table.add_row(escape(name), f"{value:.4f}")
    return table


def _flush_table(flush: FlushStatus) -> Table:
    """How far the tier of the store is behind."""
    table = Table(title="rows written behind", show_header=False, title_justify="left")
    table.add_row("written up to version", f"{flush.flushed_version:,} of {flush.version:,}")
    table.add_row("changed rows", f"{flush.changed_rows:,}")
    table.add_row("log", f"{flush.log_bytes:,} bytes")
    table.add_row("commits that waited", f"{flush.waits:,}, for {flush.waited_s:.1f} s")
    if flush.failure is not None:
        table.add_row("failure", escape(flush.failure))
    return table


def _as_json(reported: JobStatus) -> dict[str, object]:
    plain = {name: getattr(reported, name) for name in reported.__slots__ if name not in ("workers", "refusals")}
    plain["metrics"] = dict(reported.metrics)
    plain["flush"] = None if reported.flush is None else asdict(reported.flush)
    plain["workers"] = [
        {"host": w.identity.host, "pid": w.identity.pid, "leases": w.leases, "micro_batches": w.micro_batches}
        for w in reported.workers
    ]
    plain["refusals"] = [
        {"host": r.worker.host, "pid": r.worker.pid, "error": r.error, "message": r.message, "count": r.count}
        for r in reported.refusals
    ]
    return plain


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
    deadline_s: float = setting(5.0, _DEADLINE)

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
        hashed = table in specs and specs[table].ids == "farmhash64"
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
