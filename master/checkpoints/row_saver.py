"""How a store server writes its rows into a checkpoint of its job, as the job's master asks."""

import re
import threading
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, wait
from contextlib import contextmanager

import numpy as np

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, CheckpointError, ElastableError
from elastable.embedding_store.shards.server_contract import RowSave, RowSaver, SavedRows, TakenChanges
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.checkpoints.dirty_rows import Changes, DirtyRows
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.storage.checkpoint_locations import files_at, version_named
from elastable.master.checkpoints.storage.tensor_file import FileWriter
from elastable.master.checkpoints.writing import write_blocks

_NAME_BYTES = 16
_LONGEST_PLACE = 4_096
_MOST_NOTES = 16
_LOCAL_DRAFT = re.compile(r"\.writing-[0-9a-f]{32}")
_PREFIX = re.compile(r"[a-z]+(-\d{4,6})?-s\d{3,5}")
_KNOWN = re.compile(r"[a-z]+\.safetensors")


class CheckpointRowSaver(RowSaver):
    """Writes files as the master of a job without store servers does. One attempt at a time."""

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._lock = threading.Lock()
        self._beginning = threading.Lock()  # one call that begins or gives up an attempt at a time
        self._dirty: DirtyRows | None = None  # until the first `take`: jobs without increments need none
        self._taken: tuple[bytes, TakenChanges, Changes] | None = None
        self._attempt: _Attempt | None = None

    def rows_changed(self, updates: Mapping[str, TableUpdate]) -> None:
        if self._dirty is not None:
            self._dirty.add(updates)

    def take(self, mark: bytes, base: bytes) -> TakenChanges:
        if len(mark) != _NAME_BYTES or len(base) not in (0, _NAME_BYTES):
            raise BadInput(f"the mark of a checkpoint has {_NAME_BYTES} bytes")
        self.abandon()
        with self._lock:
            if self._taken is None or self._taken[0] != mark:
                if self._dirty is None:
                    self._dirty = DirtyRows(self._store)
                changes = self._dirty.take(mark, base)
                tables = {name: changes.described(name, self._store.row_count(name)) for name in self._store.specs()}
                self._taken = mark, TakenChanges(self._store.version(), tables), changes
            return self._taken[1]

    def save(self, save: RowSave, source: Snapshot, wait_s: float) -> SavedRows | None:
        if len(save.save) != _NAME_BYTES:
            raise BadInput(f"an attempt to save rows is named by {_NAME_BYTES} bytes")
        with self._beginning:
            attempt = self._attempt
            if attempt is None or attempt.save.save != save.save:
                self._stop()
                if not save.tables and not save.probe:
                    return SavedRows()
                attempt = self._attempt = self._begun(save, source)
        return attempt.result(wait_s)

    def abandon(self) -> None:
        with self._beginning:
            self._stop()

    def _stop(self) -> None:
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            attempt.stop()

    def _begun(self, save: RowSave, source: Snapshot) -> "_Attempt":
        specs = source.specs()
        for of in save.tables:
            if of.table not in specs:
                raise BadInput(f"table {of.table!r} is to be saved, and is not here")
        with self._lock:
            changes = self._taken[2] if self._taken is not None and self._taken[0] == save.mark else None
        if changes is None and not all(of.whole for of in save.tables):
            raise CheckpointError("it was started again since, and does not know which rows have changed")
        return _Attempt(_files(save), save, source, changes)


class _Attempt:
    """Rows that a thread writes into a draft; `changes` say which, of tables that are not saved whole."""

    def __init__(self, files: CheckpointFiles, save: RowSave, source: Snapshot, changes: Changes | None) -> None:
        self.save = save
        self._files, self._source, self._changes = files, source, changes
        self._stopped, self._ended = threading.Event(), Future[SavedRows]()
        threading.Thread(target=self._run, name="elastable-checkpoint", daemon=True).start()

    def result(self, wait_s: float) -> SavedRows | None:
        """What was saved; None: it has not ended. Raises what ended it."""
        return self._ended.result() if wait((self._ended,), wait_s).done else None

    def stop(self) -> None:
        """Ends it before its next file; returns once nothing is written any more."""
        self._stopped.set()
        wait((self._ended,))

    def _run(self) -> None:
        try:
            with _named(self._files):
                self._ended.set_result(self._write())
        except BaseException as error:  # noqa: BLE001 - raised to whoever asks
            self._ended.set_exception(error)

    def _write(self) -> SavedRows:
        save = self.save
        if self._files.sizes(save.draft).get(save.known) != save.known_bytes:
            raise FileNotFoundError("it is not the folder that the master writes to")
        tables = {}
        with FileWriter(self._files, save.draft, save.note, self._source.pinned, self._stopped.is_set) as out:
            if save.probe:
                out.put(f"{save.probe}.safetensors", {"probe": [np.zeros(1, np.uint8)]})
            for of in save.tables:
                tables[of.table] = write_blocks(out, of, self._source, self._source.specs()[of.table], self._changes)
            return SavedRows(tables, out.entries())


def _files(save: RowSave) -> CheckpointFiles:
    """The folder of checkpoints, once nothing of what is named can lie outside of the draft."""
    place = save.place
    if not 0 < len(place) <= _LONGEST_PLACE or not place.isprintable() or "::" in place:
        raise BadInput("the place of a checkpoint is a path from the root, or one URL of at most 4,096 characters")
    if not place.startswith("/") and "://" not in place:
        raise BadInput(f"the place of a checkpoint is a path from the root or a URL, got {redacted(place)}")
    if not (_LOCAL_DRAFT.fullmatch(save.draft) or version_named(save.draft)):
        raise BadInput(f"{save.draft!r} is no draft of a checkpoint")
    names = [of.prefix for of in save.tables] + ([save.probe] if save.probe else [])
    if not all(_PREFIX.fullmatch(name) for name in names) or len(set(names)) < len(names):
        raise BadInput("files of a checkpoint are named table-0000-s000 and the like, each of its own name")
    if not _KNOWN.fullmatch(save.known) or len(save.note) > _MOST_NOTES:
        raise BadInput("SaveRows: the known file or the note is not that of a checkpoint")
    return files_at(place)


@contextmanager
def _named(files: CheckpointFiles) -> Iterator[None]:
    """Errors of the file system say where, and what to do."""
    try:
        yield
    except (OSError, TypeError) as error:
        if isinstance(error, ElastableError):
            raise
        raise CheckpointError(
            f"it cannot write to {files.address}: {error}. The master and all store servers write a checkpoint "
            "together: give --checkpoint-dir a folder that all of them share, or a URL such as s3://bucket/job"
        ) from error
