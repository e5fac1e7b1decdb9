"""Reads a folder that an earlier release's file store wrote, for `elastable store upgrade`. Nothing here writes.

    manifest.json        JSON, a line feed, and the CRC-32 of the JSON in hexadecimal: whether the store was closed
                         cleanly, its version, and of each table its spec, its folder and what its files hold
    <folder>/ids.int64   of each row id and position, and of tables with eviction `RowBlock.touches`, int64
    <folder>/weights.rows, slots.rows
                         a header of 4096 bytes, then records: a check of 8 bytes, and the row in whole words
    <folder>/sightings.uint8, steps.float64
                         admission counts; the steps of a table with `lazy=False`

Numbers are little-endian.
"""

from __future__ import annotations

import json
import os
import zlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8, UInt64
from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.spec_json import spec_from_json
from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.support.regular_file import open_regular
from elastable.embedding_store.tables.earlier_state import state_from_bytes

__all__ = ["EarlierFileTable", "EarlierFiles", "is_earlier_folder"]

_MANIFEST, _FORMAT, _MAGIC = "manifest.json", "elastable-file-store-1", "elastable-rows-1"
_PARTS = ("weights", "slots")
_HEADER_BYTES, _LANES, _FACTOR = 4096, 4, np.uint64(0x9E3779B97F4A7C15)


def is_earlier_folder(folder: Path) -> bool:
    """Whether the manifest in a folder is one of an earlier release. Raises `StoreFailed` where it cannot be read."""
    try:
        content = _content(folder / _MANIFEST)
    except FileNotFoundError:
        return False
    except OSError as error:
        raise StoreFailed(f"{folder / _MANIFEST} cannot be read: {error.strerror}") from error
    return f'"{_FORMAT}"'.encode() in content


@dataclass(frozen=True, slots=True)
class EarlierFileTable:
    """A table of the manifest.

    Attributes:
        spec: The table.
        folder: Of its files.
        count: Rows.
        columns: Of the list of ids: 2, or 4 with touches.
        crc32: Of the list of ids.
        direct: Whether row i lies at position i.
        sightings, steps: CRC-32 of the file; None: there is none.
        untouched_decay: Of `TableState`; None also where it is in `sightings`.
    """

    spec: TableSpec
    folder: Path
    count: int
    columns: int
    crc32: int
    direct: bool
    sightings: int | None = None
    steps: int | None = None
    untouched_decay: float | None = None

    @classmethod
    def of(cls, folder: Path, entry: DocumentFields) -> EarlierFileTable:
        """From an entry of the manifest. Raises one of `MALFORMED`."""
        name, ids = str(entry["folder"]), dict(entry["ids"])
        count, columns = int(ids.pop("count")), int(ids.pop("columns"))
        if Path(name).name != name or name in (".", "..") or columns not in (2, 4) or count < 0:
            raise ValueError(f"folder {name!r}, {count} rows, {columns} columns")
        return cls(spec_from_json(json.dumps(entry["spec"])), folder / name, count, columns, **ids)

    def state(self) -> TableState:
        """What the table kept besides rows. Raises `StoreBroken`."""
        if self.sightings is None:
            return TableState(None, self.untouched_decay)
        counts = np.frombuffer(_checked(self.folder / "sightings.uint8", self.sightings), np.uint8).copy()
        if self.untouched_decay is None:
            return state_from_bytes(self.spec, counts)
        return TableState(counts, self.untouched_decay)

    def saved_steps(self) -> bytes | None:
        """The steps of a table with `lazy=False`; None: it has none. Raises `StoreBroken`."""
        return None if self.steps is None else _checked(self.folder / "steps.float64", self.steps)

    def rows(self, block_rows: int = 65_536) -> Iterator[tuple[Int64, Int64, UInt8]]:
        """Every row, in the order of the list of ids.

        Yields:
            ids int64 `[n]`, positions int64 `[n]`, and uint8 `[n, bytes]`: weights, slots, touches.

        Raises:
            StoreBroken: a file is corrupt, cut short, or another one.
        """
        path = self.folder / "ids.int64"
        content = _checked(path, self.crc32)
        if len(content) != 8 * self.columns * self.count:
            raise StoreBroken(f"{path} is cut short: it does not hold {self.count} rows")
        listed = np.frombuffer(content, "<i8").reshape(-1, self.columns).astype(np.int64)
        if (listed[:, 1] < 0).any():
            raise StoreBroken(f"{path} is corrupt: it has negative positions")
        files = [_RowFile(self.folder, part, self.spec.name) for part in _PARTS if self._has(part)]
        for start in range(0, len(listed), block_rows):
            some = listed[start : start + block_rows]
            parts = [file.read(some[:, 1]) for file in files]
            parts += [np.ascontiguousarray(some[:, 2:], "<i8").view(np.uint8)] if self.columns == 4 else []
            yield some[:, 0].copy(), some[:, 1].copy(), np.concatenate(parts, axis=1)

    def _has(self, part: str) -> bool:
        return part == "weights" or (self.folder / f"{part}.rows").exists()


class EarlierFiles:
    """The file store of an earlier release, as it was closed. Whoever reads it holds the folder's lock."""

    def __init__(self, folder: Path) -> None:
        """Reads the manifest.

        Raises:
            StoreBroken: it is corrupt, or the store was not closed cleanly.
            StoreFailed: it cannot be read.
        """
        path = folder / _MANIFEST
        try:
            content = _content(path)
        except OSError as error:
            raise StoreFailed(f"{path} cannot be read: {error.strerror}") from error
        text, _, check = content.rpartition(b"\n")
        if check != f"{zlib.crc32(text):08x}".encode():
            raise StoreBroken(f"{path} is corrupt: restore a checkpoint into an empty folder")
        try:
            fields = json.loads(text)
            clean, self.version = bool(fields["clean"]), int(fields["version"])
            tables = [EarlierFileTable.of(folder, entry) for entry in fields["tables"]]
        except MALFORMED as error:
            raise StoreBroken(f"{path} is not the manifest of a file store: {error}") from error
        if not clean:
            raise StoreBroken(
                f"{folder} was not closed cleanly, so its rows may be of different versions: restore a checkpoint into "
                "an empty folder"
            )
        self.tables: Mapping[str, EarlierFileTable] = {table.spec.name: table for table in tables}


class _RowFile:
    """Records of one part of a table's rows, checked as they are read."""

    def __init__(self, folder: Path, part: str, table: str) -> None:
        self._path = folder / f"{part}.rows"
        try:
            with os.fdopen(open_regular(self._path), "rb") as file:
                header = file.read(_HEADER_BYTES).rstrip(b"\0")
            text, _, check = header.partition(b"\n")
            told = json.loads(text)
            if check.strip() != f"{zlib.crc32(text):08x}".encode() or told["magic"] != _MAGIC:
                raise ValueError("another magic or check")
            self._row_bytes = int(told["row_bytes"])
            if (told["table"], told["part"]) != (table, part) or not 1 <= self._row_bytes <= 1 << 30:
                raise ValueError(f"it holds {told}")
        except OSError as error:
            raise StoreFailed(f"{self._path} cannot be read: {error.strerror}") from error
        except MALFORMED as error:
            raise StoreBroken(f"{self._path} is not the file of {part} of table {table!r}: {error}") from error
        self._words = 1 + (self._row_bytes + 7) // 8
        records = (self._path.stat().st_size - _HEADER_BYTES) // (8 * self._words)
        self._file: UInt64 = np.memmap(self._path, "<u8", "r", _HEADER_BYTES, (max(0, records), self._words))

    def read(self, positions: Int64) -> UInt8:
        """The rows at positions int64 `[n]`: uint8 `[n, row_bytes]`."""
        if positions.max(initial=-1) >= len(self._file):
            raise StoreBroken(f"{self._path} is cut short: it has no record at position {positions.max()}")
        records = np.asarray(self._file[positions])
        wrong = np.flatnonzero(records[:, 0] != _checks(records[:, 1:], positions))
        if len(wrong):
            position = int(positions[wrong[0]])
            at = _HEADER_BYTES + 8 * position * self._words
            raise StoreBroken(f"{self._path} is corrupt: the row at position {position} (byte {at}) fails its check")
        rows: UInt8 = np.ascontiguousarray(records[:, 1:]).view(np.uint8)[:, : self._row_bytes]
        return rows


def _checks(words: UInt64, positions: Int64) -> UInt64:
    """The check of each record, uint64 `[n]`: four lanes that are stirred together at the end."""
    first = positions.astype(np.uint64) + _FACTOR
    lanes = [first, first ^ np.uint64(1), first ^ np.uint64(2), first ^ np.uint64(3)]
    whole = words.shape[1] // _LANES * _LANES
    for column in range(words.shape[1]):
        lane = column % _LANES if column < whole else 0
        lanes[lane] = _stir(lanes[lane], words[:, column])
    return _stir(_stir(_stir(lanes[0], lanes[1]), lanes[2]), lanes[3])


def _stir(lane: UInt64, word: UInt64) -> UInt64:
    mixed: UInt64 = (lane ^ word) * _FACTOR
    return mixed ^ (mixed >> np.uint64(29))


def _checked(path: Path, crc32: int) -> bytes:
    try:
        content = _content(path)
    except OSError as error:
        raise StoreFailed(f"{path} cannot be read: {error.strerror}") from error
    if zlib.crc32(content) != crc32:
        raise StoreBroken(f"{path} is corrupt or cut short: it does not hold what was saved")
    return content


def _content(path: Path) -> bytes:
    with os.fdopen(open_regular(path), "rb") as file:
        return file.read()
