"""The tier that keeps records in files of one folder, by position."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import MappedRecords, Records, Tier, TierTable
from elastable.embedding_store.errors import BadInput, SpecConflict, StoreBroken, StoreFailed, TableNotFound
from elastable.embedding_store.log.folder_lock import FolderLock, sync_folder
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.tiers.files.sequence_mark import SequenceMark
from elastable.embedding_store.tiers.files.table_files import TableFiles
from elastable.embedding_store.tiers.files.tier_manifest import (
    MANIFEST_NAME,
    NumberedTable,
    TierManifest,
    read_tier_manifest,
    write_tier_manifest,
)

__all__ = ["FileTier"]

_MARK_NAME = "mark"
_FILES_OF_A_TABLE = re.compile(r"[0-9]{6,9}\.(rows|ids)")


class FileTier(Tier):
    """Tables in files of a folder that one process at a time has.

    ```
    lock            the process that has the folder
    tables          the manifest: tables, what `put_state` was given, and a CRC-32
    mark            the sequence of the last write that began
    000001.rows     records of a table by position, each with its check
    000001.ids      16 bytes a position: whose record lies there
    ```

    A disk that is full is met before anything of a write has changed. A disk that fails to keep what it was given
    (`fsync` fails) makes the tier useless: everything that changes it then raises `StoreBroken`.
    """

    keeps_positions = True
    far = False

    def __init__(self, folder: str | Path, *, fsync: bool = True) -> None:
        """Opens the tier in a folder, or begins one in an empty or missing folder.

        Args:
            folder: Its place; nothing else may lie there.
            fsync: Whether what was saved survives a loss of power. Without, it survives the death of the process.

        Raises:
            StoreFailed: the folder is in use, holds something else, or cannot be used.
            StoreBroken: part of the tier is missing or corrupt; names the file.
        """
        self._folder, self._fsync = Path(folder), fsync
        self._tables: dict[str, TableFiles] = {}
        self._mark: SequenceMark | None = None
        self._failure: StoreFailed | None = None
        self._closed = False
        self._lock = FolderLock(self._folder)
        try:
            self._open()
        except BaseException:
            self.close()
            raise

    @classmethod
    def delete_all(cls, folder: Path) -> None:
        """Deletes the files of a tier, which is not opened: they may be missing or corrupt. Other files stay.

        Raises:
            StoreFailed: the folder is in use, or a file cannot be deleted. The manifest goes last, and is refused
                without the others.
        """
        lock = FolderLock(folder)
        try:
            for path in sorted(folder.iterdir()):
                if _FILES_OF_A_TABLE.fullmatch(path.name):
                    path.unlink()
            for name in (_MARK_NAME, f"{MANIFEST_NAME}.new", MANIFEST_NAME):
                (folder / name).unlink(missing_ok=True)
            sync_folder(folder)
        except OSError as error:
            raise StoreFailed(f"{folder} cannot be emptied: {error.strerror}") from error
        finally:
            lock.release()

    @property
    def place(self) -> str:
        return str(self._folder)

    @property
    def sequence(self) -> int:
        return max(self._manifest.sequence, self._require_open().sequence)

    def tables(self) -> dict[str, TierTable]:
        self._require_open()
        for files in self._tables.values():
            files.require_whole()
        return {name: files.table for name, files in self._tables.items()}

    def create(self, table: TierTable) -> None:
        self._require_sound()
        if table.name in self._tables:
            raise SpecConflict(f"{self._folder} holds a table {table.name!r} already")
        numbers = [int(saved.number) for saved in self._manifest.tables.values()]
        saved = NumberedTable(table, f"{max(numbers, default=0) + 1:06d}", os.urandom(16))
        files = TableFiles(self._folder, saved.number, saved.token, table, fsync=self._fsync)
        try:
            self._replace(replace(self._manifest, tables={**self._manifest.tables, table.name: saved}))
        except BaseException:
            files.remove()
            raise
        self._tables[table.name] = files

    def drop(self, table: str) -> None:
        self._require_sound()
        if table in self._tables:
            others = {name: saved for name, saved in self._manifest.tables.items() if name != table}
            self._replace(replace(self._manifest, tables=others))
            self._tables.pop(table).remove()

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self._require_open()
        return [self._files(records).read(records, shared_pool()) for records in wanted]

    def mapped(self, table: str) -> MappedRecords | None:
        self._require_open()
        return self._table(table).mapped()

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        mark = self._require_sound()
        if sequence < self.sequence:
            raise BadInput(f"writes to {self._folder} have reached sequence {self.sequence}, got {sequence}")
        writes = [(self._files(records, whole=True), records) for records in changed]
        for files, records in writes:
            files.allocate(records.positions)
        mark.put(sequence, self._manifest.save)
        for table, (ids, positions) in deleted.items():
            self._table(table).delete(ids, positions)
        for files, records in writes:
            files.write(records, shared_pool())

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        self._require_open()
        files = self._table(table)
        width = files.table.record_bytes if width is None else width
        if block_rows < 1 or not 0 <= width <= files.table.record_bytes:
            raise BadInput(f"blocks of {block_rows} rows of {width} bytes of table {table!r} cannot be")
        return files.scan(block_rows, width)

    def state(self) -> bytes | None:
        self._require_open()
        return self._manifest.state

    def put_state(self, state: bytes) -> None:
        self._require_sound()
        tables = dict(self._manifest.tables)
        for name, files in self._tables.items():
            try:
                files.save()
            except StoreBroken:
                raise
            except StoreFailed as error:
                self._failure = error  # what the system did not write, it may forget
                raise
            tables[name] = replace(tables[name], items=files.items)
        self._replace(TierManifest(tables, self._manifest.save + 1, self.sequence, bytes(state)))

    def close(self) -> None:
        self._closed = True
        for files in self._tables.values():
            files.close()
        self._tables.clear()
        if self._mark is not None:
            self._mark.close()
        self._lock.release()

    def _open(self) -> None:
        manifest = read_tier_manifest(self._folder)
        self._mark = SequenceMark(self._folder / _MARK_NAME, manifest is None, self._fsync)
        if manifest is None:
            self._replace(TierManifest())
            return
        self._manifest = manifest
        clean = self._mark.save < manifest.save
        for name, saved in manifest.tables.items():
            self._tables[name] = TableFiles(
                self._folder, saved.number, saved.token, saved.table, saved.items, clean, self._fsync
            )
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        """Files of tables whose creation or drop broke off."""
        numbers = {saved.number for saved in self._manifest.tables.values()}
        try:
            for path in self._folder.iterdir():
                if _FILES_OF_A_TABLE.fullmatch(path.name) and path.stem not in numbers:
                    path.unlink()
        except OSError as error:
            raise StoreFailed(f"{self._folder} cannot be used: {error.strerror}") from error

    def _replace(self, manifest: TierManifest) -> None:
        write_tier_manifest(self._folder, manifest, self._fsync)
        self._manifest = manifest

    def _files(self, records: Records, whole: bool = False) -> TableFiles:
        """The table's files. Raises `BadInput` where records are not what the contract says."""
        files, rows, ids, positions = self._table(records.table), records.rows, records.ids, records.positions
        most = files.table.record_bytes
        shaped = rows.ndim == 2 and ids.shape == positions.shape == (len(rows),)
        if not shaped or rows.shape[1] > most or (whole and rows.shape[1] < most):
            raise BadInput(
                f"records of table {records.table!r} have {most} bytes; got ids {list(ids.shape)}, positions "
                f"{list(positions.shape)} and rows {list(rows.shape)}"
            )
        typed = rows.dtype == np.uint8 and ids.dtype == positions.dtype == np.int64
        if not (typed and rows.flags.c_contiguous):
            raise BadInput(f"records of table {records.table!r} must be int64 ids and positions and C-contiguous uint8")
        return files

    def _table(self, name: str) -> TableFiles:
        files = self._tables.get(name)
        if files is None:
            raise TableNotFound(f"{self._folder} holds no table {name!r}")
        return files

    def _require_sound(self) -> SequenceMark:
        if self._failure is not None:
            raise StoreBroken(f"{self._folder} failed before: {self._failure}; restore a checkpoint") from self._failure
        return self._require_open()

    def _require_open(self) -> SequenceMark:
        if self._closed or self._mark is None:
            raise StoreFailed(f"the file tier {self._folder} is closed")
        return self._mark
