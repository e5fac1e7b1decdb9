"""The calls about rows that store servers save, as messages and back."""

from __future__ import annotations

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.shards.shard_store import (
    ChangedTable,
    RowSave,
    SavedFile,
    SavedRows,
    SavedTable,
    TableSave,
    TakenChanges,
)
from elastable.embedding_store.v1 import store_pb2

__all__ = [
    "changes_from_message",
    "changes_to_message",
    "save_from_message",
    "save_to_message",
    "saved_from_message",
    "saved_to_message",
]

_WAIT_MS = 5_000
_LONGEST_WAIT_MS = 20_000


def changes_to_message(changes: TakenChanges) -> store_pb2.TakeChangesReply:
    """The reply to a TakeChanges."""
    reply = store_pb2.TakeChangesReply(version=changes.version)
    for table, of in changes.tables.items():
        reply.tables.add(table=table, rows=of.rows, changed=of.changed, shrunk=of.shrunk)
    return reply


def changes_from_message(reply: store_pb2.TakeChangesReply) -> TakenChanges:
    """The inverse of `changes_to_message`."""
    tables = {
        of.table: ChangedTable(of.rows, of.changed if of.HasField("changed") else None, of.shrunk)
        for of in reply.tables
    }
    return TakenChanges(reply.version, tables)


def save_to_message(save: RowSave, pin: bytes) -> store_pb2.SaveRowsRequest:
    """What is to be saved; `pin`: token of the pin to read, b"" for the store."""
    request = store_pb2.SaveRowsRequest(
        save=save.save,
        mark=save.mark,
        pin=pin,
        place=save.place,
        draft=save.draft,
        known=save.known,
        known_bytes=save.known_bytes,
        note=save.note,
        probe=save.probe,
        wait_ms=_WAIT_MS,
    )
    for of in save.tables:
        request.tables.add(table=of.table, prefix=of.prefix, whole=of.whole, live=of.live)
    return request


def save_from_message(request: store_pb2.SaveRowsRequest) -> tuple[RowSave, float]:
    """The inverse of `save_to_message`, and the seconds to wait. Raises `BadInput` for a wait that is too long."""
    if not 0 <= request.wait_ms <= _LONGEST_WAIT_MS:
        raise BadInput(f"SaveRows: wait_ms {request.wait_ms}: at most {_LONGEST_WAIT_MS}, and ask again")
    tables = tuple(TableSave(of.table, of.prefix, of.whole, of.live) for of in request.tables)
    save = RowSave(
        request.save,
        request.place,
        request.draft,
        request.known,
        request.known_bytes,
        tables,
        request.mark,
        dict(request.note),
        request.probe,
    )
    return save, request.wait_ms / 1000


def saved_to_message(saved: SavedRows | None) -> store_pb2.SaveRowsReply:
    """The reply to a SaveRows; None: it is not done yet."""
    if saved is None:
        return store_pb2.SaveRowsReply()
    reply = store_pb2.SaveRowsReply(done=True)
    for table, of in saved.tables.items():
        reply.tables.add(table=table, rows=of.rows, written=of.written, files=of.files, live=of.live)
    for name, file in saved.files.items():
        reply.files.add(name=name, sha256=file.sha256, bytes=file.bytes)
    return reply


def saved_from_message(reply: store_pb2.SaveRowsReply) -> SavedRows:
    """The inverse of `saved_to_message`."""
    tables = {of.table: SavedTable(of.rows, of.written, tuple(of.files), tuple(of.live)) for of in reply.tables}
    return SavedRows(tables, {file.name: SavedFile(file.sha256, file.bytes) for file in reply.files})
