"""One table in files: a directory of its ids in memory, kept as a list beside the files of rows."""

from __future__ import annotations

import os
import shutil
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.log.folder_lock import sync_folder
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.support.row_budget import RowBudget
from elastable.embedding_store.tables.earlier_state import state_from_bytes
from elastable.embedding_store.tiers.files.file_rows import FileRows

__all__ = ["FileTable", "SavedIds"]

_IDS, _COUNTS, _STEPS = "ids.int64", "sightings.uint8", "steps.float64"
_BLOCK = 1 << 18  # ids that are written at a time


@dataclass(frozen=True, slots=True)
class SavedIds:
    """What a manifest says of a table's list of ids.

    It is a file of rows of int64, little-endian: id, position, and in tables
    with eviction `RowBlock.touches`.

    Attributes:
        count: Rows that hold a value of their own.
        columns: Of the file, 2 or 4.
        crc32: Of the file.
        direct: Whether row i lies at position i.
        sightings: Checksum of the file with the admission counts; None: there are none. Earlier releases wrote the
            decay into it, as its last 8 bytes.
        steps: Checksum of the file with the steps of a table whose rows follow them; None: they do not.
        untouched_decay: Of its `TableState`; None also where an earlier release wrote it.
    """

    count: int
    columns: int
    crc32: int
    direct: bool
    sightings: int | None = None
    steps: int | None = None
    untouched_decay: float | None = None


class FileTable(MemoryTable):
    """As `MemoryTable`, whose rows lie in files of a folder of its own.

    Where writing a file fails in the middle of a change, the table is of no
    use any more: everything raises `StoreFailed`.
    """

    file_rows: FileRows
    failure: BaseException | None
    """What broke in the middle of a change, if anything did."""

    def __init__(
        self,
        spec: TableSpec,
        direct_bytes: int,
        folder: Path,
        budget: RowBudget,
        before_change: Callable[[], None],
        saved: SavedIds | None = None,
    ) -> None:
        """Makes the table's folder, or opens what was saved in it.

        Args:
            spec: The table.
            direct_bytes: As for `MemoryTable`; what was saved keeps its layout.
            folder: Of the table alone.
            budget: Shares memory out among tables.
            before_change: Is called before rows are put or forgotten.
            saved: What the manifest says; None: the table is new.

        Raises:
            BadSpec: an optimizer that is not known here.
            StoreFailed: files cannot be made, or are not what was saved.
        """
        self._folder, self._budget, self._before_change = folder, budget, before_change
        self.failure = None
        self._fresh = saved is None
        if saved is not None:
            direct_bytes = 1 << 62 if saved.direct else 0
        super().__init__(spec, direct_bytes, make_rows=self._open_rows)
        self._fresh = True  # rows are forgotten by beginning with empty files
        if saved is not None:
            self._adopt(saved)

    def read_together(self, ids: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        """As in `TableReader.read_together`: where every id has a row, at its own position."""
        if not (self.direct and self.count == self.spec.vocabulary_size and self._rows is self.file_rows):
            return False
        return self.file_rows.read_together(require_ids(self.spec, ids), out, stream, pool)

    def put(self, block: RowBlock) -> None:
        """As in `MemoryTable.put`; raises `StoreFailed` for a full disk before anything is changed."""
        self._before_change()
        self._reserve(block.ids)
        with self._all_or_broken():
            super().put(block)

    def delete(self, ids: Int64) -> int:
        self._before_change()
        return super().delete(ids)

    def clear(self) -> None:
        """As in `MemoryTable.clear`; the disk is given back."""
        self._before_change()
        with self._all_or_broken():
            super().clear()

    def save(self) -> SavedIds:
        """Returns once rows and ids are on the disk. Raises `StoreFailed`."""
        self.file_rows.flush()
        self.file_rows.sync()
        crc32 = count = 0
        columns = 2 if self.spec.eviction is None else 4
        with self._file(_IDS) as file:
            for rows in self._rows_of_ids():
                content = rows.astype("<i8").tobytes()
                crc32, count = zlib.crc32(content, crc32), count + len(rows)
                file.write(content)
        state = self.state()
        counts = None if state.admission_counts is None else self._save_file(_COUNTS, state.admission_counts.tobytes())
        steps = None if self.replay is None else self._save_file(_STEPS, self.replay.steps.save())
        return SavedIds(count, columns, crc32, self.direct, counts, steps, state.untouched_decay)

    def remove_files(self) -> None:
        """Closes the table and deletes its folder."""
        self.close()
        shutil.rmtree(self._folder, ignore_errors=True)

    @contextmanager
    def _all_or_broken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.failure = error
            raise

    def _open_rows(self, spec: TableSpec, optimizer: RowOptimizer, rows: int) -> FileRows:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise StoreFailed(f"{self._folder} cannot be made: {error.strerror}") from error
        self.file_rows = FileRows(spec, optimizer, rows, self._folder, self._budget, self._fresh)
        return self.file_rows

    @contextmanager
    def _file(self, name: str) -> Iterator[BinaryIO]:
        """A new file in the table's folder, on the disk afterwards. Raises `StoreFailed`."""
        path = self._folder / name
        try:
            with path.open("wb") as file:
                yield file
                file.flush()
                os.fsync(file.fileno())
            sync_folder(self._folder)
        except OSError as error:
            raise StoreFailed(f"{path} cannot be written: {error.strerror}") from error

    def _save_file(self, name: str, content: bytes) -> int:
        """Writes a whole file; its checksum."""
        with self._file(name) as file:
            file.write(content)
        return zlib.crc32(content)

    def _saved_file(self, name: str, length: int | None, crc32: int) -> bytes:
        path = self._folder / name
        try:
            content = path.read_bytes()
        except OSError as error:
            raise StoreFailed(f"{path} cannot be read: {error.strerror}") from error
        if length not in (None, len(content)) or zlib.crc32(content) != crc32:
            raise StoreFailed(f"{path} is corrupt or cut short: it does not hold what was saved")
        return content

    def _rows_of_ids(self) -> Iterator[Int64]:
        """Rows of the list of ids, int64 `[n, columns]`, block by block."""
        cursor = 0
        while True:
            ids, positions, cursor = self._directory.scan(cursor, _BLOCK)
            if not len(ids):
                return
            touches = self._members.touches(positions)
            pairs = np.stack((ids, positions), axis=1)
            yield pairs if touches is None else np.concatenate((pairs, touches), axis=1)

    def _adopt(self, saved: SavedIds) -> None:
        """Gives every saved id the position that it had."""
        content = self._saved_file(_IDS, 8 * saved.columns * saved.count, saved.crc32)
        rows = np.frombuffer(content, "<i8").reshape(-1, saved.columns).astype(np.int64)
        ids, positions = rows[:, 0].copy(), rows[:, 1].copy()
        everywhere, gaps = (ids, ids[:0]) if saved.direct else _filled(ids, positions)
        self._directory.reserve(len(everywhere))
        self._rows.grow(self._directory.capacity)
        self._members.grow(self._directory.capacity)
        given = np.empty(len(everywhere), np.int64)
        self._directory.claim(everywhere, given)
        self._directory.remove(gaps)
        self._directory.find(ids, given[: len(ids)])
        if not np.array_equal(given[: len(ids)], positions):
            raise StoreFailed(f"{self._folder / _IDS} is corrupt: its ids cannot have the positions that they had")
        self.file_rows.adopt(positions)
        if saved.columns == 4:
            self._members.put(positions, rows[:, 2:].copy())
        self.put_state(self._saved_state(saved))
        if saved.steps is not None and self.replay is not None:
            self.replay.steps.restore(self._saved_file(_STEPS, None, saved.steps))

    def _saved_state(self, saved: SavedIds) -> TableState:
        if saved.sightings is None:
            return TableState(None, saved.untouched_decay)
        counts = np.frombuffer(self._saved_file(_COUNTS, None, saved.sightings), np.uint8).copy()
        if saved.untouched_decay is None:
            return state_from_bytes(self.spec, counts)
        return TableState(counts, saved.untouched_decay)


def _filled(ids: Int64, positions: Int64) -> tuple[Int64, Int64]:
    """Ids by position, without gaps: positions of deleted rows get ids that no row has.

    Returns:
        everywhere: int64 `[highest position + 1]`.
        gaps: int64, those of them that are no one's.
    """
    size = int(positions.max(initial=-1)) + 1
    free = np.ones(size, np.bool_)
    free[positions] = False
    # Among twice as many numbers as there are ids at least half are no one's.
    unused = np.setdiff1d(np.arange(len(ids) + np.count_nonzero(free)), ids)[: np.count_nonzero(free)]
    everywhere = np.empty(size, np.int64)
    everywhere[positions] = ids
    everywhere[free] = unused
    return everywhere, unused
