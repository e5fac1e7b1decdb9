"""One table of a file tier: a file of records, and a file that says whose record is at each position."""

import re
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
from numba import types

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import MappedRecords, Records, TierTable
from elastable.embedding_store.errors import BadInput, StoreBroken
from elastable.embedding_store.native.intrinsics import copy_bytes, put_word, word_at
from elastable.embedding_store.native.kernel import inlined, kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.native.record_checks import (
    FACTOR,
    OTHER_FACTOR,
    check_of,
    part_stride,
    prefetch_bytes,
    record_key,
    record_stride,
)
from elastable.embedding_store.tiers.files.mapped_file import MappedFile

_NUMBER = re.compile(r"[0-9]{6,9}")  # names the files of a table; nothing else may, as it is a part of their paths
_MOST_RECORD_BYTES = 1 << 24
_MOST_POSITIONS = 1 << 40

_ROWS_A_THREAD = 1 << 8
_OWNER_BYTES = 16
_OWNERS_READ = 1 << 18  # at a time


@dataclass(frozen=True, slots=True)
class NumberedTable:
    """A table in a manifest.

    Attributes:
        table: The table.
        number: Name of its files, decimal digits.
        token: 16 bytes that its files hold.
        items: Positions that they had room for at the last save.
    """

    table: TierTable
    number: str
    token: bytes
    items: int = 0

    def __post_init__(self) -> None:
        if self.table.record_bytes > _MOST_RECORD_BYTES:
            raise BadInput(
                f"record_bytes of table {self.table.name!r} must be at most {_MOST_RECORD_BYTES}, "
                f"got {self.table.record_bytes}"
            )
        if not isinstance(self.number, str) or not _NUMBER.fullmatch(self.number):
            raise BadInput(f"{self.number!r} is no number of a table's files")
        if len(self.token) != 16 or not 0 <= self.items <= _MOST_POSITIONS:
            raise BadInput(f"files {self.number!r} of table {self.table.name!r} cannot be")


class TableFiles:
    """Records by position in `<number>.rows`, their owners in `<number>.ids`.

    An owner is 16 bytes: the id, and a stamp of id and position; a stamp of 0 says that there is no record. A record is
    written before its owner, and an owner erased before its record. Reads may run on many threads while one writes.

    Where the process or the machine died after the last save, records written since then may be torn, and after a
    loss of power an id may own two positions. Both are mended by whoever writes these records again; `doubtful` says
    which are still as the death left them.

    Attributes:
        table: The table.
        doubtful: Position -> id of records that a scan found torn, and that were not written or deleted since.
    """

    def __init__(
        self, folder: Path, saved: NumberedTable, *, fresh: bool = False, clean: bool = True, fsync: bool = True
    ) -> None:
        """Makes the table's files, or opens them.

        Args:
            folder: Theirs.
            saved: The table, and what its files must be.
            fresh: Whether they are made.
            clean: Whether nothing was written since the last save.
            fsync: Whether a save waits for the disk.

        Raises:
            StoreBroken: a file is missing, cut short, or another one.
            StoreFailed: a file cannot be made or opened.
        """
        self.table, self.doubtful, self._clean, self._fsync = saved.table, dict[int, int](), clean, fsync
        table, self._saved, begun = saved.table, saved, (saved.token, fresh, saved.items)
        self._first = table.first_bytes or table.record_bytes
        self._rest = table.record_bytes - self._first
        self._stride = record_stride(self._first, self._rest)
        self._writing = threading.Lock()
        self._rows = MappedFile(folder / f"{saved.number}.rows", b"rows", self._stride, *begun)
        try:
            self._owners = MappedFile(folder / f"{saved.number}.ids", b"ids", _OWNER_BYTES, *begun)
            if not clean:
                self._mend()
        except BaseException:
            self.close()
            raise

    def require_whole(self) -> None:
        """Raises `StoreBroken` if a file was deleted or cut short."""
        self._rows.require_whole()
        self._owners.require_whole()

    def allocate(self, positions: Int64) -> None:
        """Takes the room that records at `positions` int64 `[n]` need.

        Raises:
            BadInput: a position out of range.
            StoreFailed: there is none; no record has changed.
        """
        if not len(positions):
            return
        ascending = np.sort(positions)
        low, high = ascending[0], ascending[-1]
        if low < 0 or high >= _MOST_POSITIONS:
            raise BadInput(
                f"positions of table {self.table.name!r} must be from 0 to {_MOST_POSITIONS - 1}, got {low} to {high}"
            )
        self._rows.allocate(ascending)
        self._owners.allocate(ascending)

    def mapped(self) -> MappedRecords:
        """Where lookups find the records in memory."""
        return MappedRecords(self._rows.mapped(), self._rows.begin, self._rows.items, self._first, self._stride)

    def read(self, wanted: Records, pool: RangePool) -> Int64:
        """Reads records into `wanted.rows`; int64: the indices of ids that have none."""
        failed = np.zeros(len(wanted.ids), np.bool_)
        if not self._read(wanted, failed, pool):
            return np.empty(0, np.int64)
        missing = np.flatnonzero(failed)
        if wanted.positions[missing].min() < 0:
            raise BadInput(f"positions of table {self.table.name!r} must be at least 0, got {wanted.positions.min()}")
        if self._owned(wanted.ids[missing], wanted.positions[missing]).any():
            missing = self._read_again(wanted, missing)
        return missing

    def write(self, changed: Records) -> None:
        """Writes records, for which there must be room. Raises `StoreFailed`: some may have been written."""
        ids, positions = changed.ids, changed.positions
        if not len(ids):
            return
        order = np.argsort(positions) if (np.diff(positions) < 0).any() else np.arange(len(positions))
        with self._writing:
            self._put_records(changed, order)
            ids, positions = ids[order], positions[order]
            owners = np.stack((ids, owner_stamps(ids, positions)), axis=1)
            new = np.flatnonzero((self._owners_at(positions) != owners).any(axis=1))
            self._put_owners(positions[new], owners[new])
        self._resolve(positions)

    def delete(self, ids: Int64, positions: Int64) -> None:
        """Deletes those of the records that are there. Raises `StoreFailed`: some may have been deleted."""
        gone = np.sort(positions[self._owned(ids, positions)])
        with self._writing:
            self._put_owners(gone, np.zeros((len(gone), 2), np.int64))
            at = invalidate(self._rows.fd, self._rows.begin, self._stride, gone)
        if at >= 0:
            raise self._rows.write_failed(int(gone[at]))
        self._resolve(gone)

    def scan(self, block_rows: int, width: int) -> Iterator[Records]:
        """Every record by ascending position, in blocks of at most `block_rows`, their first `width` bytes."""
        self.require_whole()
        for positions, ids in self._owner_blocks(block_rows):
            records = Records(self.table.name, ids, positions, np.zeros((len(ids), width), np.uint8))
            if width:
                self._rows.expect(int(positions[0]), int(positions[-1]) + 1)
                failed = np.zeros(len(ids), np.bool_)
                if self._read(records, failed, SERIAL):
                    if self._clean:
                        raise self._rows.read_failed(int(positions[failed][0]))
                    self.doubtful.update(zip(positions[failed].tolist(), ids[failed].tolist(), strict=True))
            yield records

    def _resolve(self, positions: Int64) -> None:
        for position in positions.tolist() if self.doubtful else ():
            self.doubtful.pop(position, None)

    def save(self) -> NumberedTable:
        """Makes everything written as durable as `fsync` says; returns what a manifest says of the table from now on.

        Raises:
            StoreBroken: records that were torn when the process died have not been written again.
            StoreFailed: the disk refuses.
        """
        if self.doubtful:
            raise StoreBroken(
                f"{self._rows.path} is corrupt: {len(self.doubtful)} of its records, the first at position "
                f"{min(self.doubtful)}, failed their check and were not written again; restore a checkpoint"
            )
        for file in (self._rows, self._owners) if self._fsync else ():
            file.sync()
        self._clean = True
        return replace(self._saved, items=min(self._rows.items, self._owners.items))

    def close(self) -> None:
        """Closes both files. Closing twice is harmless."""
        self._rows.close()
        if hasattr(self, "_owners"):
            self._owners.close()

    def remove(self) -> None:
        """Closes both files and deletes them."""
        self.close()
        for file in (self._rows, self._owners):
            file.path.unlink(missing_ok=True)

    def _read(self, wanted: Records, failed: npt.NDArray[np.bool_], pool: RangePool) -> int:
        """Reads what is there; how many are not, or fail: those are set in `failed`."""
        file, counts = self._rows.mapped(), list[int]()
        place = self._rows.fd, self._rows.begin, self._rows.items, self._first, self._rest, wanted.ids, wanted.positions

        def some(start: int, stop: int) -> None:
            counts.append(load_checked(file, *place, wanted.rows, start, stop, failed))

        pool.run(some, len(wanted.ids), _ROWS_A_THREAD)
        return sum(counts)

    def _put_records(self, changed: Records, order: Int64) -> None:
        place = self._rows.mapped(), self._rows.fd, self._rows.begin, self._first
        at = store_checked(*place, changed.ids, changed.positions, changed.rows, order)
        if at >= 0:
            raise self._rows.write_failed(int(changed.positions[order[at]]))

    def _read_again(self, wanted: Records, indices: Int64) -> Int64:
        """Reads records that failed, now while nobody writes; indices of those that are not there.

        Raises:
            StoreBroken: one is there, and still fails.
        """
        with self._writing:
            owned = self._owned(wanted.ids[indices], wanted.positions[indices])
            there = indices[owned]
            ids, positions = wanted.ids[there], wanted.positions[there]
            rows = np.empty((len(there), wanted.rows.shape[1]), np.uint8)
            failed = np.zeros(len(there), np.bool_)
            if self._read(Records(wanted.table, ids, positions, rows), failed, SERIAL):
                raise self._rows.read_failed(int(positions[failed][0]))
        wanted.rows[there] = rows
        return indices[~owned]

    def _owned(self, ids: Int64, positions: Int64) -> npt.NDArray[np.bool_]:
        """Whether each position belongs to the id: bool `[n]`."""
        inside = (positions >= 0) & (positions < self._owners.items)
        owners = np.zeros((len(ids), 2), np.int64)
        owners[inside] = self._owners_at(positions[inside])
        return (owners[:, 0] == ids) & (owners[:, 1] == owner_stamps(ids, positions))  # type: ignore[no-any-return]

    def _owners_at(self, positions: Int64) -> Int64:
        """Owners of positions, int64 `[n, 2]`: id and stamp."""
        owners = np.empty((len(positions), 2), np.int64)
        file = self._owners
        at = read_items(file.mapped(), file.fd, file.begin, positions, owners.view(np.uint8))
        if at >= 0:
            raise file.read_failed(int(positions[at]))
        return owners

    def _put_owners(self, positions: Int64, owners: Int64) -> None:
        at = write_items(self._owners.fd, self._owners.begin, positions, np.ascontiguousarray(owners).view(np.uint8))
        if at >= 0:
            raise self._owners.write_failed(int(positions[at]))

    def _owner_blocks(self, block_rows: int) -> Iterator[tuple[Int64, Int64]]:
        """Positions that have a record, int64 `[n]`, ascending, and their ids, by at most `block_rows`."""
        for first, last in self._owners.data_ranges():
            for start in range(first, last, _OWNERS_READ):
                stop = min(start + _OWNERS_READ, last)
                self._owners.expect(start, stop)
                positions = np.arange(start, stop)
                owners = self._owners_at(positions)
                there = np.flatnonzero(owners[:, 1])
                positions, ids = positions[there], owners[there, 0]
                wrong = np.flatnonzero(owners[there, 1] != owner_stamps(ids, positions))
                if len(wrong):
                    raise self._owners.read_failed(int(positions[wrong[0]]))
                for part in range(0, len(ids), block_rows):
                    yield positions[part : part + block_rows].copy(), ids[part : part + block_rows].copy()

    def _mend(self) -> None:
        """After a death: the file of records may be shorter than that of owners, and an id may own two positions."""
        if self._rows.items < self._owners.items:
            self._rows.grow(self._owners.items)
        if not (blocks := list(self._owner_blocks(_OWNERS_READ))):
            return
        positions = np.concatenate([block[0] for block in blocks])
        first = np.unique(np.concatenate([block[1] for block in blocks]), return_index=True)[1]
        again = np.delete(positions, first)
        self._put_owners(again, np.zeros((len(again), 2), np.int64))


# Records with checks (`native/record_checks`), moved between memory and a file by machine code


_SIGNATURE = types.intp(types.int32, types.uintp, types.uintp, types.int64)
_pread = types.ExternalFunction("pread", _SIGNATURE)
_pwrite = types.ExternalFunction("pwrite", _SIGNATURE)

_RECORDS_AHEAD = 6
_RUN_BYTES = 1 << 18  # that one system call writes; written so, the system's cache has large pages and is read faster
_GAP_BYTES = 1 << 12  # up to here, to write what lies between two records takes less time than a second system call


@kernel
def load_checked(
    file: UInt8,
    fd: int,
    begin: int,
    items: int,
    first: int,
    rest: int,
    ids: Int64,
    positions: Int64,
    rows: UInt8,
    start: int,
    stop: int,
    failed: npt.NDArray[np.bool_],
) -> int:
    """Reads records and checks them.

    A record that another thread writes meanwhile is read as it was, as it will be, or it fails.

    Args:
        file: uint8: the file, mapped; what lies beyond it is read by system calls.
        fd: The open file.
        begin: Where in it record 0 lies, in bytes.
        items: How many records there may be.
        first, rest: Bytes of a record's parts.
        ids, positions: int64 `[n]`; a position out of range fails.
        rows: uint8 `[n, width]`: the first bytes of each record go here. A row whose record fails is left as it was.
        start, stop: The range of records that are read.
        failed: bool `[n]`: is set where a record is not there or fails its check.

    Returns:
        How many failed.
    """
    width, stride = rows.shape[1], record_stride(first, rest)
    second = part_stride(first)
    taken = second if width <= first else stride
    staged, flat, lines = np.empty(stride, np.uint8), rows.reshape(-1), file.reshape(-1, 1)
    count = 0
    for i in range(start, stop):
        prefetch_bytes(lines, begin + stride * positions[min(i + _RECORDS_AHEAD, stop - 1)], taken)
        at = begin + stride * positions[i]
        whole = 0 <= positions[i] < items
        if not whole:
            pass
        elif at + taken <= len(file):
            # Checked as it was copied, not on the way: the compiler reads twice then, and a writer may come between.
            copy_bytes(staged, 0, file, at, taken)
        else:
            whole = _pread(np.int32(fd), np.uintp(staged.ctypes.data), np.uintp(taken), np.int64(at)) == taken
        key = record_key(ids[i], positions[i])
        whole = whole and word_at(staged, 0) == check_of(staged, 8, first, key)
        if whole and taken > second:
            whole = word_at(staged, second) == check_of(staged, second + 8, rest, key)
        if not whole:
            failed[i] = True
            count += 1
            continue
        copy_bytes(flat, width * i, staged, 8, min(width, first))
        if taken > second:
            copy_bytes(flat, width * i + first, staged, second + 8, width - first)
    return count


@kernel
def store_checked(
    file: UInt8, fd: int, begin: int, first: int, ids: Int64, positions: Int64, rows: UInt8, order: Int64
) -> int:
    """Writes records with their checks, those that lie near one another by one system call: what lies between them is
    written again. Nobody else writes records meanwhile.

    Args:
        file: uint8: the file, mapped, with room for all the records; empty: it cannot be mapped.
        fd: The open file.
        begin: Where in it record 0 lies, in bytes.
        first: Bytes of a record's first part.
        ids, positions: int64 `[n]`.
        rows: uint8 `[n, record_bytes]`.
        order: int64 `[n]`: indices of the rows by ascending position.

    Returns:
        -1, or the index in `order` of a record that could not be written.
    """
    width, stop = rows.shape[1], len(order)
    stride, flat, lines = record_stride(first, width - first), rows.reshape(-1), file.reshape(-1, 1)
    most, gap = max(1, _RUN_BYTES // stride), 1
    if len(file):
        gap += _GAP_BYTES // stride
    staged = np.empty(most * stride, np.uint8)
    i = 0
    while i < stop:
        after = _run_end(positions, order, i, stop, most, gap)
        size = stride * (positions[order[after - 1]] - positions[order[i]] + 1)
        end = at = begin + stride * positions[order[i]]
        for k in range(i, after):
            if len(file):
                prefetch_bytes(lines, begin + stride * positions[order[min(k + _RECORDS_AHEAD, stop - 1)]], stride)
            place = begin + stride * positions[order[k]]
            if place > end:
                copy_bytes(staged, end - at, file, end, place - end)
            _put_record(staged, place - at, flat, order[k], width, first, ids, positions)
            end = place + stride
        if _pwrite(np.int32(fd), np.uintp(staged.ctypes.data), np.uintp(size), np.int64(at)) != size:
            return i
        i = after
    return -1


@kernel
def invalidate(fd: int, begin: int, stride: int, positions: Int64) -> int:
    """Makes records at `positions` fail; -1, or the index of one that could not be written."""
    zero = np.zeros(8, np.uint8)
    for i in range(len(positions)):
        if _pwrite(np.int32(fd), np.uintp(zero.ctypes.data), np.uintp(8), np.int64(begin + stride * positions[i])) != 8:
            return i
    return -1


@kernel
def read_items(file: UInt8, fd: int, begin: int, positions: Int64, items: UInt8) -> int:
    """Reads item `positions[i]` of a file into row i of `items` uint8 `[n, size]`; returns as `write_items`."""
    size, flat = items.shape[1], items.reshape(-1)
    for i in range(len(positions)):
        at = begin + size * positions[i]
        if at + size <= len(file):
            copy_bytes(flat, i * size, file, at, size)
        elif _pread(np.int32(fd), np.uintp(flat.ctypes.data + i * size), np.uintp(size), np.int64(at)) != size:
            return i
    return -1


@kernel
def write_items(fd: int, begin: int, positions: Int64, items: UInt8) -> int:
    """Writes row i of `items` uint8 `[n, size]` as item `positions[i]`; -1, or the index of one that cannot be."""
    size, flat = items.shape[1], items.reshape(-1)
    i = 0
    while i < len(positions):
        run = 1
        while i + run < len(positions) and positions[i + run] == positions[i] + run:
            run += 1
        at = np.int64(begin + size * positions[i])
        if _pwrite(np.int32(fd), np.uintp(flat.ctypes.data + i * size), np.uintp(size * run), at) != size * run:
            return i
        i += run
    return -1


def owner_stamps(ids: Int64, positions: Int64) -> Int64:
    """What says that an id owns a position, int64 `[n]`, never 0."""
    mixed = ids.view(np.uint64) * np.uint64(FACTOR) ^ (positions.view(np.uint64) + np.uint64(1)) * np.uint64(
        OTHER_FACTOR
    )
    stamps: Int64 = ((mixed ^ (mixed >> np.uint64(32))) | np.uint64(1)).view(np.int64)
    return stamps


@inlined
def _run_end(positions: Int64, order: Int64, start: int, stop: int, most: int, gap: int) -> int:
    """Where in `order` a run ends that begins at `start`: over `most` positions at most, from one to the next `gap`."""
    end = start + 1
    while (
        end < stop
        and positions[order[end]] - positions[order[end - 1]] <= gap
        and positions[order[end]] - positions[order[start]] < most
    ):
        end += 1
    return end


@inlined
def _put_record(
    target: UInt8, at: int, flat: UInt8, row: int, width: int, first: int, ids: Int64, positions: Int64
) -> None:
    key = record_key(ids[row], positions[row])
    _put_part(target, at, flat, row * width, first, key)
    if width > first:
        _put_part(target, at + part_stride(first), flat, row * width + first, width - first, key)


@inlined
def _put_part(staged: UInt8, at: int, flat: UInt8, source: int, size: int, key: np.uint64) -> None:
    put_word(staged, at + part_stride(size) - 8, 0)  # its last bytes may be padding
    copy_bytes(staged, at + 8, flat, source, size)
    put_word(staged, at, check_of(staged, at + 8, size, key))
