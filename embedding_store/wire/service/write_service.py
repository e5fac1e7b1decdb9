"""The calls of the Store service that change the store, where the server allows it."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from google.protobuf.message import Message

from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, DeadlineExceeded, TableNotFound, Unsupported, VersionError
from elastable.embedding_store.tables.checks import require_from_outside
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.messages import store_messages as messages
from elastable.embedding_store.wire.server.handlers import Handler, control, upload
from elastable.embedding_store.wire.service.pin_service import ServedPins

MOST_TABLES = 10_000
"""Tables that clients may have made."""

_COMMIT_WAIT_S = 600.0  # of a commit for the one before it; the store gives up sooner


def write_handlers(
    store: EmbeddingStore, writable: bool, pins: ServedPins, dropped: Callable[[], None]
) -> dict[str, Handler]:
    """Method name -> handler, of all calls that change `store`.

    Args:
        store: What is changed.
        writable: Whether clients may change it; else every call refuses by its name.
        pins: Of clients; some changes are refused while there are pins.
        dropped: Called after a table was dropped.
    """
    servicer = _WriteServicer(store, pins, dropped)

    def method(call: str, does: Callable[..., Message]) -> Callable[..., Message]:
        return does if writable else _refusing(call)

    controls = {call: control(method(call, does), request) for call, (does, request) in servicer.controls.items()}
    return {**controls, **{call: upload(method(call, does)) for call, does in servicer.uploads.items()}}


def _refusing(call: str) -> Callable[[object], Message]:
    def refuse(request: object) -> Message:
        raise Unsupported(f"{call}: the store behind this port belongs to its master's job and is only read from")

    return refuse


class _WriteServicer:
    def __init__(self, store: EmbeddingStore, pins: ServedPins, dropped: Callable[[], None]) -> None:
        self._store = store
        self._pins = pins
        self._dropped = dropped
        self._committing = threading.Lock()
        self._applied: tuple[int, bytes] | None = None  # version and token of the last commit
        self._staged: tuple[bytes, Callable[[], None]] | None = None
        self.controls: dict[str, tuple[Callable[..., Message], type[Message]]] = {
            "CreateTable": (self.create_table, store_pb2.CreateTableRequest),
            "DropTable": (self.drop_table, store_pb2.DropTableRequest),
        }
        self.uploads: dict[str, Callable[[Iterator[bytes]], Message]] = {
            "Commit": self.commit,
            "Put": self.put,
            "Delete": self.delete,
            "ResetVersion": self.reset_version,
        }

    def create_table(self, request: store_pb2.CreateTableRequest) -> store_pb2.CreateTableReply:
        spec, known = messages.spec_from_message(request.spec), self._store.specs()
        if spec.name not in known and len(known) >= MOST_TABLES:
            raise BadInput(f"table {spec.name!r}: {MOST_TABLES} tables are here, as many as there may be")
        return store_pb2.CreateTableReply(created=self._store.create_table(spec))

    def commit(self, frames: Iterator[bytes]) -> store_pb2.CommitReply:
        commit, token, stage = messages.commit_from_frames(frames)
        if commit is None:
            return self._commit_staged(token)
        require_from_outside(commit)
        with self._one_at_a_time():
            repeated = self._is_applied(token) and commit.version == self._store.version()
            if stage and not repeated:
                self._staged = (token, self._store.stage(commit))
            elif not repeated:
                self._store.commit(commit)
                self._applied = (commit.version, token)
        return store_pb2.CommitReply(repeated=repeated)

    def _commit_staged(self, token: bytes) -> store_pb2.CommitReply:
        with self._one_at_a_time():
            repeated = self._is_applied(token)
            if not repeated:
                if self._staged is None or self._staged[0] != token:
                    raise VersionError("Commit: none of that token is staged here; stage it again")
                apply, self._staged = self._staged[1], None
                apply()
                self._applied = (self._store.version(), token)
        return store_pb2.CommitReply(repeated=repeated)

    @contextmanager
    def _one_at_a_time(self) -> Iterator[None]:
        """A commit whose client lost the answer may come again while it is still being applied."""
        if not self._committing.acquire(timeout=_COMMIT_WAIT_S):
            raise DeadlineExceeded(f"waited {_COMMIT_WAIT_S:g} s for the commit before this one")
        try:
            yield
        finally:
            self._committing.release()

    def _is_applied(self, token: bytes) -> bool:
        return bool(token) and self._applied == (self._store.version(), token)

    def put(self, frames: Iterator[bytes]) -> store_pb2.PutReply:
        for table, put in messages.blocks_from_frames(frames):
            if isinstance(put, TableState):
                self._store.put_table_state(table, put)
            else:
                self._store.put(table, [put])
        return store_pb2.PutReply()

    def delete(self, frames: Iterator[bytes]) -> store_pb2.DeleteReply:
        header, ids = messages.ids_from_frames(frames)
        return store_pb2.DeleteReply(rows=self._store.delete(header.table, ids))

    def drop_table(self, request: store_pb2.DropTableRequest) -> store_pb2.DropTableReply:
        self._require_table(request.table)
        what = "cleared" if request.keep else "dropped"
        self._pins.make_way(f"table {request.table!r} cannot be {what}", request.force)
        if request.keep:
            self._store.clear(request.table)
        else:
            self._store.drop_table(request.table)
            self._dropped()
        return store_pb2.DropTableReply()

    def reset_version(self, frames: Iterator[bytes]) -> store_pb2.ResetVersionReply:
        header, record = messages.reset_from_frames(frames)
        if header.take_back or record is not None:
            raise Unsupported("ResetVersion: only store servers keep records of versions, and take versions back")
        self._pins.make_way(f"the version cannot be reset to {header.version}", header.force)
        self._store.reset_version(header.version)
        return store_pb2.ResetVersionReply()

    def _require_table(self, table: str) -> None:
        """Before pins are given up for it."""
        if table not in (specs := self._store.specs()):
            raise TableNotFound(f"no table {table!r}; there are {', '.join(map(repr, specs)) or 'none'}")
