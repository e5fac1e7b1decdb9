"""`elastable lookup`: rows of a running job, a store or a checkpoint."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import typer

from elastable.commands.command_line import DEADLINE, takes
from elastable.commands.model_commands import CHECKPOINT
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, TableNotFound
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.open_store import open_reader, open_store
from elastable.embedding_store.option import Option, required, setting
from elastable.embedding_store.wire.remote_source import RemoteSource
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables


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
