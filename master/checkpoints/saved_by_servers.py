"""What a master does for checkpoints whose rows store servers write: which rows, where, and whether all is there."""

import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.errors import CheckpointError
from elastable.embedding_store.shards.server_contract import (
    ChangedTable,
    RowSave,
    SavedRows,
    ServedRows,
    ShardStore,
    TableSave,
)
from elastable.master.checkpoints.storage.checkpoint_files import CheckpointFiles
from elastable.master.checkpoints.storage.checkpoint_locations import checkpoint_name
from elastable.master.checkpoints.storage.tensor_file import FileWriter

_SEEN_WITHIN_S = 60.0  # shared file systems show files of other hosts late
_LOOK_EVERY_S = 0.5
_PROBE = "probe.safetensors"


@dataclass(frozen=True, slots=True)
class ServerChanges:
    """What changed on store servers up to a version, since the checkpoint of mark `base`."""

    version: int
    mark: bytes
    base: bytes
    tables: Mapping[str, ChangedTable]


class ServersDirtyRows:
    """Which rows changed since the last checkpoint, as `DirtyRows`; the servers keep them.

    Args:
        store: The servers; as it is now, it is equal to the checkpoint that the first increment builds upon.
    """

    def __init__(self, store: ShardStore) -> None:
        self._store = store
        self._base = b""
        self.take(store.version())

    def add(self, updates: Mapping[str, TableUpdate]) -> None:
        """The servers have seen the commit themselves."""

    def take(self, version: int) -> ServerChanges:
        """What changed up to `version`, the current one.

        Raises:
            CheckpointError: the servers are at another one.
        """
        mark = uuid.uuid4().bytes
        taken = self._store.take_changes(mark, self._base)
        if taken.version != version:
            raise CheckpointError(f"the store servers are at version {taken.version}, and not at {version}")
        changes = ServerChanges(version, mark, self._base, taken.tables)
        self._base = mark
        return changes

    def give_back(self, changes: ServerChanges) -> None:
        """The checkpoint of these changes failed: the servers hear of it with the next one."""
        if self._base == changes.mark:
            self._base = changes.base


def stop_saving(source: ServedRows) -> None:
    """Returns once no server writes into a draft any more."""
    source.save_rows(RowSave(uuid.uuid4().bytes))


def require_reached(files: CheckpointFiles, source: ServedRows, version: int) -> None:
    """Raises `CheckpointError` where a store server cannot write to the folder of checkpoints, naming both."""
    stop_saving(source)
    draft = None
    try:
        draft = files.begin(checkpoint_name(version, files.names()))
        with FileWriter(files, draft, {}) as out:
            out.put(_PROBE, {"probe": [np.zeros(1, np.uint8)]})
            size = out.entries()[_PROBE].bytes
        saved = source.save_rows(RowSave(uuid.uuid4().bytes, files.place, draft, _PROBE, size, probe="probe"))
        _require_seen(files, draft, saved)
    except OSError as error:
        raise CheckpointError(f"checkpoints cannot be written to {files.address}: {error}") from error
    finally:
        if draft is not None:
            files.discard(draft)


def save_tables(
    out: FileWriter,
    files: CheckpointFiles,
    draft: str,
    source: ServedRows,
    known: str,
    saves: Sequence[TableSave],
    mark: bytes,
) -> SavedRows:
    """Has every server write its rows.

    Args:
        out: Writes files of the master's own; the file `known` has been handed to it.
        known: A file of the draft, by which the servers know it.
        saves: What is saved.
        mark: Of the changes (`ServerChanges`), where a table is not saved whole.
    """
    size = out.entries()[known].bytes
    save = RowSave(uuid.uuid4().bytes, files.place, draft, known, size, tuple(saves), mark, out.note)
    saved = source.save_rows(save)
    _require_seen(files, draft, saved)
    return saved


def _require_seen(files: CheckpointFiles, draft: str, saved: SavedRows) -> None:
    """Waits until the files of the servers are here as they wrote them.

    Raises:
        CheckpointError: they are not: the servers write somewhere else.
    """
    give_up = time.monotonic() + _SEEN_WITHIN_S
    while True:
        sizes = files.sizes(draft)
        missing = [name for name, file in saved.files.items() if sizes.get(name) != file.bytes]
        if not missing:
            return
        if time.monotonic() > give_up:
            raise CheckpointError(
                f"{files.at(f'{draft}/{missing[0]}')} was written by a store server and is not there, or not whole: "
                "give --checkpoint-dir a folder that all servers share, or a URL such as s3://bucket/job"
            )
        time.sleep(_LOOK_EVERY_S)
