"""`elastable status` and `elastable lookup`: what a running job or a store holds."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from typing import Annotated, Any

import numpy as np
import typer
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from elastable.commands.arguments import Deadline
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.ids.string_ids import hash_ids
from elastable.embedding_store.open_store import open_source
from elastable.embedding_store.wire.client.remote_source import RemoteSource
from elastable.embedding_store.wire.client.remote_store import RemoteStore
from elastable.master.api import JobStatus
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.wire.client import MasterClient

__all__ = ["lookup", "status"]


def status(
    master: Annotated[str, typer.Option("--master", metavar="HOST:PORT", help="Address of the master.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
    deadline: Deadline = 5.0,
) -> None:
    """Show how far a job is and who works on it."""
    told = MasterClient(master, deadline_s=deadline).status()
    with RemoteStore(master, deadline_s=deadline) as store:
        pins = store.pins()
    if as_json:
        typer.echo(json.dumps({**_as_json(told), "pins": [asdict(pin) for pin in pins]}, indent=2))
        return
    console = Console()
    console.print(_progress_table(told))
    workers = Table("host", "pid", "leases", "micro-batches", title=f"{len(told.workers)} workers")
    for worker in told.workers:
        identity = worker.identity
        workers.add_row(escape(identity.host), str(identity.pid), str(worker.leases), f"{worker.micro_batches:,}")
    console.print(workers)
    if pins:
        pinned = Table("version", "seconds left", "rows kept", "bytes", title="pinned versions")
        for pin in pins:
            pinned.add_row(f"{pin.version:,}", f"{pin.lease_left_s:.0f}", f"{pin.rows:,}", f"{pin.bytes:,}")
        console.print(pinned)
    if told.refusals:
        refused = Table("host", "pid", "how many", "why", title="failed workers")
        for refusal in told.refusals:
            why = f"{refusal.error}: {refusal.message}"
            refused.add_row(escape(refusal.worker.host), str(refusal.worker.pid), str(refusal.count), escape(why))
        console.print(refused)


def _progress_table(told: JobStatus) -> Table:
    """How far a job is; of a parameter server without a model, which has no end, at which version it is."""
    endless = not told.versions_total
    title = "parameter server" if endless else f"job {escape(told.job)}"
    table = Table(title=title, show_header=False, title_justify="left")
    if endless:
        table.add_row("version", f"{told.version:,}")
        table.add_row("records pushed", f"{told.records_trained:,}")
        return table
    table.add_row("state", escape(told.state))
    table.add_row("mode", escape(told.mode))
    table.add_row("store", escape(told.store))
    table.add_row("version", f"{told.version:,} of {told.versions_total:,}")
    table.add_row("epoch", f"{min(told.epoch + 1, told.epochs)} of {told.epochs}")
    table.add_row("records trained", f"{told.records_trained:,}")
    for name, value in told.metrics.items():
        table.add_row(escape(name), f"{value:.4f}")
    return table


def _as_json(told: JobStatus) -> dict[str, Any]:
    plain = {name: getattr(told, name) for name in told.__slots__ if name not in ("workers", "refusals")}
    plain["metrics"] = dict(told.metrics)
    plain["workers"] = [
        {"host": w.identity.host, "pid": w.identity.pid, "leases": w.leases, "micro_batches": w.micro_batches}
        for w in told.workers
    ]
    plain["refusals"] = [
        {"host": r.worker.host, "pid": r.worker.pid, "error": r.error, "message": r.message, "count": r.count}
        for r in told.refusals
    ]
    return plain


def lookup(
    table: Annotated[str, typer.Argument(help="Name of the table.")],
    ids: Annotated[
        list[str],
        typer.Argument(help="Ids; strings where the table's ids are strings. Write -- before negative ones."),
    ],
    master: Annotated[
        str | None, typer.Option("--master", metavar="HOST:PORT", help="Address of a running master.")
    ] = None,
    store: Annotated[
        str | None,
        typer.Option("--store", metavar="URL", help="URL of a store: redis://host:port or grpc://host:port."),
    ] = None,
    checkpoint: Annotated[
        str | None,
        typer.Option("--checkpoint", metavar="DIR|URL", help="A checkpoint, or a directory of them (the newest)."),
    ] = None,
    deadline: Deadline = 5.0,
) -> None:
    """Print rows of a table as JSON, one line an id.

    Where a model called its layer on strings, the ids are strings here, too, numbers among them.
    """
    with _source(master, store, checkpoint, deadline) as source:
        specs = source.specs()
        hashed = table in specs and specs[table].ids == "farmhash64"
        found = hash_ids(ids) if hashed else _integers(table, ids)
        rows = source.lookup({table: found})[table]
    for given, row_id, row in zip(ids, found.tolist(), rows, strict=True):
        named = {"string": given, "id": row_id} if hashed else {"id": row_id}
        typer.echo(json.dumps({"table": table, **named, "row": [float(value) for value in row]}))


def _integers(table: str, ids: list[str]) -> Int64:
    for text in ids:
        if not re.fullmatch(r"[+-]?[0-9]{1,40}", text) or not -(2**63) <= int(text) < 2**63:
            raise BadInput(f"{text[:80]!r} is no id of table {table!r}: its ids are integers from -2**63 to 2**63 - 1")
    return np.array([int(text) for text in ids], np.int64)


def _source(master: str | None, store: str | None, checkpoint: str | None, deadline: float) -> RowSource:
    if sum(given is not None for given in (master, store, checkpoint)) != 1:
        raise BadInput("lookup needs exactly one of --master, --store and --checkpoint")
    if master is not None:
        return RemoteSource(master, deadline_s=deadline)
    if store is not None:
        return open_source(store, deadline)
    memory = MemoryStore()
    restore_tables(open_checkpoint(checkpoint or "."), memory)
    return memory
