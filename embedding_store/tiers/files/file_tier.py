"""The tier that keeps records in files of one folder, by position."""

import base64
import json
import os
import re
import struct
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.tier import MappedRecords, Records, Tier, TierTable
from elastable.embedding_store.errors import BadInput, SpecConflict, StoreBroken, StoreFailed, TableNotFound
from elastable.embedding_store.native.range_pool import shared_pool
from elastable.embedding_store.support.checked_files import (
    LOCK_NAME,
    FolderLock,
    OpenFile,
    open_regular,
    store_failures,
    sync_folder,
)
from elastable.embedding_store.tiers.files.mapped_file import opened_part
from elastable.embedding_store.tiers.files.table_files import NumberedTable, TableFiles

_MARK_NAME = "mark"
_FILES_OF_A_TABLE = re.compile(r"[0-9]{6,9}\.(rows|ids)")


class FileTier(Tier):
    """Tables in files of a folder that one process at a time has.

    ```
    lock            the process that has the folder
    tables          the manifest: tables, what `put_state` was given, and a CRC-32
    mark            the sequence of the last write that began
    000001.rows     records of a table by position, each with its check
    000001.ids      16 bytes a position: whose record is there
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
        with FolderLock(folder), store_failures(folder, "cannot be emptied"):
            for path in sorted(folder.iterdir()):
                if _FILES_OF_A_TABLE.fullmatch(path.name):
                    path.unlink()
            for name in (_MARK_NAME, f"{MANIFEST_NAME}.new", MANIFEST_NAME):
                (folder / name).unlink(missing_ok=True)
            sync_folder(folder)

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
        files = TableFiles(self._folder, saved, fresh=True, fsync=self._fsync)
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
            files.write(records)

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        self._require_open()
        files = self._table(table)
        width = files.table.record_bytes if width is None else width
        files.table.require_scan(block_rows, width)
        return files.scan(block_rows, width)

    def doubtful(self, table: str) -> Int64:
        return np.array([*self._table(table).doubtful.values()], np.int64)

    def state(self) -> bytes | None:
        self._require_open()
        return self._manifest.state

    def put_state(self, state: bytes) -> None:
        self._require_sound()
        try:
            tables = {name: files.save() for name, files in self._tables.items()}
        except StoreBroken:
            raise
        except StoreFailed as error:
            self._failure = error  # what the system did not write, it may forget
            raise
        self._replace(TierManifest(tables, self._manifest.save + 1, self.sequence, bytes(state)))

    def close(self) -> None:
        self._closed = True
        for files in self._tables.values():
            files.close()
        self._tables.clear()
        if self._mark is not None:
            self._mark.close()
        self._lock.close()

    def _open(self) -> None:
        manifest = read_tier_manifest(self._folder)
        self._mark = SequenceMark(self._folder / _MARK_NAME, manifest is None, self._fsync)
        if manifest is None:
            self._replace(TierManifest())
            return
        self._manifest = manifest
        clean = self._mark.save < manifest.save
        for name, saved in manifest.tables.items():
            self._tables[name] = TableFiles(self._folder, saved, clean=clean, fsync=self._fsync)
        self._remove_orphans()

    def _remove_orphans(self) -> None:
        """Files of tables whose creation or drop broke off."""
        numbers = {saved.number for saved in self._manifest.tables.values()}
        with store_failures(self._folder, "cannot be used"):
            for path in self._folder.iterdir():
                if _FILES_OF_A_TABLE.fullmatch(path.name) and path.stem not in numbers:
                    path.unlink()

    def _replace(self, manifest: "TierManifest") -> None:
        write_tier_manifest(self._folder, manifest, self._fsync)
        self._manifest = manifest

    def _files(self, records: Records, whole: bool = False) -> TableFiles:
        """The table's files. Raises `BadInput` where records are not what the contract says."""
        files = self._table(records.table)
        records.require_fit(files.table.record_bytes, whole)
        return files

    def _table(self, name: str) -> TableFiles:
        files = self._tables.get(name)
        if files is None:
            raise TableNotFound(f"{self._folder} holds no table {name!r}")
        return files

    def _require_sound(self) -> "SequenceMark":
        if self._failure is not None:
            raise StoreBroken(f"{self._folder} failed before: {self._failure}; restore a checkpoint") from self._failure
        return self._require_open()

    def _require_open(self) -> "SequenceMark":
        if self._closed or self._mark is None:
            raise StoreFailed(f"the file tier {self._folder} is closed")
        return self._mark


# How far writes to a file tier have got: a few bytes that are written before each of them, for who comes after


_SLOT = struct.Struct("<QQII")  # sequence, save, a CRC-32 of these, 0
_SLOT_BYTES = 4096  # each on separate blocks: a write that breaks off leaves the other one


class SequenceMark(OpenFile):
    """Two slots in turn; the one with the greater numbers counts. A slot that is torn had not been relied on yet.

    Attributes:
        sequence: Of the last write that began; 0: there was none.
        save: Number of the save after which it began; 0: there was none.
    """

    def __init__(self, path: Path, fresh: bool, fsync: bool) -> None:
        """Opens the file, or makes it.

        Args:
            path: Of the file. A symbolic link is refused.
            fresh: Whether to begin anew.
            fsync: Whether a mark is on the disk before the write that it announces begins.

        Raises:
            StoreBroken: it is missing or corrupt.
            StoreFailed: it cannot be made or opened.
        """
        self._path, self._fsync, self._slot = path, fsync, 0
        self.sequence = self.save = 0
        self.fd = opened_part(path, fresh)
        try:
            with store_failures(path, "cannot be used"):
                if fresh:
                    self._write(0, 0)
                    self._write(0, 0)
                    os.fsync(self.fd)
                else:
                    self._read()
        except BaseException:
            self.close()
            raise

    def put(self, sequence: int, save: int) -> None:
        """Says that a write of `sequence` is about to begin. Raises `StoreFailed`: it must not."""
        if (sequence, save) == (self.sequence, self.save):
            return
        with store_failures(self._path, "cannot be written"):
            self._write(sequence, save)
            if self._fsync:
                os.fdatasync(self.fd)
        self.sequence, self.save = sequence, save

    def _write(self, sequence: int, save: int) -> None:
        content = _SLOT.pack(sequence, save, _mark_check(sequence, save), 0)
        if os.pwrite(self.fd, content, self._slot * _SLOT_BYTES) != len(content):
            raise OSError(28, "No space left on device")
        self._slot = 1 - self._slot

    def _read(self) -> None:
        found = list[tuple[int, int, int]]()
        for slot in range(2):
            content = os.pread(self.fd, _SLOT.size, slot * _SLOT_BYTES)
            if len(content) == _SLOT.size:
                sequence, save, *check = _SLOT.unpack(content)
                if check == [_mark_check(sequence, save), 0]:
                    found.append((save, sequence, slot))
        if not found:
            raise StoreBroken(f"{self._path} is corrupt: restore a checkpoint into an empty folder")
        self.save, self.sequence, slot = max(found)
        self._slot = 1 - slot


def _mark_check(sequence: int, save: int) -> int:
    return zlib.crc32(struct.pack("<QQ", sequence, save))


# The manifest of a file tier: its tables, and what the engine keeps next to them. Replaced in one step


MANIFEST_NAME = "tables"
_DRAFT = f"{MANIFEST_NAME}.new"
_FORMAT = "elastable-file-tier-1"
_MOST_BYTES = 1 << 32
_MOST_SEQUENCE = 1 << 63


@dataclass(frozen=True, slots=True)
class TierManifest:
    """What a folder holds.

    Attributes:
        tables: By name.
        save: How often `put_state` was called, and once more.
        sequence: Of the last write before the last save.
        state: What `put_state` was last given.
    """

    tables: dict[str, NumberedTable] = field(default_factory=dict)
    save: int = 1
    sequence: int = 0
    state: bytes | None = field(default=None, repr=False)


def read_tier_manifest(folder: Path) -> TierManifest | None:
    """The manifest of a folder; None: the folder is empty.

    Raises:
        StoreFailed: the folder holds something else, or cannot be read.
        StoreBroken: the manifest is corrupt.
    """
    path = folder / MANIFEST_NAME
    with store_failures(path, "cannot be read"):
        try:
            with os.fdopen(open_regular(path), "rb") as file:
                content = file.read(_MOST_BYTES)
        except FileNotFoundError:
            _require_empty(folder)
            return None
    body, check = content[:-4], content[-4:]
    if len(content) < 4 or zlib.crc32(body).to_bytes(4, "little") != check:
        raise StoreBroken(f"{path} is corrupt: its check does not fit; restore a checkpoint into an empty folder")
    text, _, state = body.partition(b"\n")
    try:
        fields = json.loads(text)
        if fields["format"] != _FORMAT:
            raise StoreFailed(f"{path} is of format {fields['format']!r}; this version reads {_FORMAT!r}")
        return _manifest(fields, state)
    except MALFORMED as error:
        raise StoreBroken(f"{path} is not the manifest of a file tier: {error}") from error


def write_tier_manifest(folder: Path, manifest: TierManifest, fsync: bool) -> None:
    """Replaces the manifest in one step; it is on the disk on return, with `fsync`.

    Raises:
        StoreFailed: it cannot be written; the one before stays.
    """
    tables = [
        {
            "name": saved.table.name,
            "record_bytes": saved.table.record_bytes,
            "first_bytes": saved.table.first_bytes,
            "description": base64.b64encode(saved.table.description).decode(),
            "number": saved.number,
            "token": saved.token.hex(),
            "items": saved.items,
        }
        for saved in manifest.tables.values()
    ]
    fields = {
        "format": _FORMAT,
        "save": manifest.save,
        "sequence": manifest.sequence,
        "state": manifest.state is not None,
        "tables": tables,
    }
    path, draft = folder / MANIFEST_NAME, folder / _DRAFT
    body = json.dumps(fields).encode() + b"\n" + (manifest.state or b"")
    if len(body) + 4 > _MOST_BYTES:
        raise StoreFailed(f"{path} cannot be written: {len(body)} bytes, at most {_MOST_BYTES - 4} are allowed")
    try:
        flags = os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
        with os.fdopen(os.open(draft, flags, 0o666), "wb") as file:
            file.write(body)
            file.write(zlib.crc32(body).to_bytes(4, "little"))
            file.flush()
            if fsync:
                os.fsync(file.fileno())
        draft.replace(path)
        if fsync:
            sync_folder(folder)
    except OSError as error:
        with suppress(OSError):
            draft.unlink(missing_ok=True)
        raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error


def _manifest(fields: dict[str, object], state: bytes) -> TierManifest:
    """Raises `MALFORMED` and `BadInput`, which is one of them."""
    listed = fields["tables"]
    if not isinstance(listed, list):
        raise ValueError("its tables are no list")
    tables = [
        NumberedTable(
            TierTable(
                entry["name"],
                _integer(entry["record_bytes"]),
                base64.b64decode(entry["description"], validate=True),
                _integer(entry["first_bytes"]),
            ),
            entry["number"],
            bytes.fromhex(entry["token"]),
            _integer(entry["items"]),
        )
        for entry in listed
    ]
    by_name = {saved.table.name: saved for saved in tables}
    if len(by_name) < len(tables) or len({saved.number for saved in tables}) < len(tables):
        raise ValueError("two of its tables have one name or the same files")
    return TierManifest(
        by_name, _integer(fields["save"]), _integer(fields["sequence"]), state if fields["state"] else None
    )


def _integer(value: object) -> int:
    if type(value) is not int or not 0 <= value < _MOST_SEQUENCE:
        raise ValueError(f"{value!r} is not a number from 0 to {_MOST_SEQUENCE - 1}")
    return value


def _require_empty(folder: Path) -> None:
    with store_failures(folder, "cannot be read"):
        found = sorted(entry.name for entry in folder.iterdir() if entry.name not in (LOCK_NAME, _DRAFT, "mark"))
    if found:
        raise StoreFailed(
            f"{folder} is no file tier: it holds {', '.join(found[:3])} but no {MANIFEST_NAME}; name an empty folder"
        )
