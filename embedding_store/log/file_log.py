"""A write-ahead log in a folder: segments that rotate, and a stated fsync policy."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, NoReturn, get_args

from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed
from elastable.embedding_store.log.contract import Buffer, Log, LogEntry, require_kept, require_next
from elastable.embedding_store.log.framing import frame_header
from elastable.embedding_store.log.segment import (
    Segment,
    SegmentReader,
    base_paths,
    open_segments,
    segment_name,
    segment_names,
    write_all,
)
from elastable.embedding_store.support.checked_files import FolderLock, reason_of, store_failures, sync_folder

# Disk blocks that a growing file has before it is written to


_KEEP_SIZE = 1  # FALLOC_FL_KEEP_SIZE
_LEAST_BYTES, _MOST_RESERVED_BYTES = 1 << 20, 16 << 20


class ReservedBlocks:
    """Reserves blocks ahead of the end of a file, whose length stays as it is.

    Linux writes to reserved blocks with less work, as the file system need not find room for every page. Where the
    system cannot reserve blocks, or none are free, nothing is reserved, and writing says what is wrong.
    """

    def __init__(self) -> None:
        self._fallocate = _system_call()
        self._end = 0
        self._works = True

    def begin(self, end: int) -> None:
        """Another file is written from now on, from byte `end`."""
        self._end, self._works = end, self._fallocate is not None

    def reserve(self, fd: int, begin: int, parts: Sequence[Buffer]) -> None:
        """Makes sure that there are blocks for `parts`, which are written from byte `begin` on; reserves some more."""
        end = begin + sum(memoryview(part).nbytes for part in parts)
        if self._works and self._fallocate is not None and end > self._end:
            more = end - self._end + min(max(end, _LEAST_BYTES), _MOST_RESERVED_BYTES)
            self._works = not self._fallocate(fd, _KEEP_SIZE, self._end, more)
            self._end += more

    def give_back(self, fd: int, end: int) -> None:
        """Frees the blocks behind byte `end`, where the file ends. Raises `OSError`."""
        if end < self._end:
            os.ftruncate(fd, end)  # which frees them, although the length stays
            self._end = end


def _system_call() -> ctypes._NamedFuncPointer | None:
    """`fallocate` of the C library; None: this system has none."""
    if not sys.platform.startswith("linux"):
        return None
    function = ctypes.CDLL(None).fallocate
    function.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_int64, ctypes.c_int64]
    return function


FsyncPolicy = Literal["always", "interval", "never"]
"""When appended entries reach the disk: before `append` returns, at most an interval later, or when the system likes.

Each of them keeps every entry when the process is killed; they differ in what a loss of power takes.
"""


class FileLog(Log):
    """Entries in segment files of one folder, one process at a time.

    A torn entry at the very end, which a process leaves that dies while it appends, is dropped when the log is opened,
    with a warning. A corrupt entry with intact ones behind it is an error: it was acknowledged once.
    """

    def __init__(
        self,
        folder: str | Path,
        *,
        fsync: str = "interval",
        fsync_interval_s: float = 1.0,
        segment_bytes: int = 64 << 20,
    ) -> None:
        """Opens the log, and makes it where there is none.

        Args:
            folder: Holds the segments and nothing else.
            fsync: An `FsyncPolicy`.
            fsync_interval_s: Seconds between two fsyncs with `interval`.
            segment_bytes: A segment that has reached this size is followed by a new one.

        Raises:
            BadInput: an unknown policy, or a number that is not above 0.
            StoreFailed: another process has the log open, or the folder cannot be used.
            StoreBroken: the log is corrupt in its middle.
        """
        if fsync not in get_args(FsyncPolicy):
            raise BadInput(f"fsync={fsync!r}: choose one of {', '.join(get_args(FsyncPolicy))}")
        if not (fsync_interval_s > 0 and segment_bytes > 0):
            raise BadInput(f"fsync_interval_s={fsync_interval_s!r}, segment_bytes={segment_bytes!r}: both are above 0")
        self.folder = Path(folder)
        self._policy, self._segment_bytes = fsync, segment_bytes
        self._guard = threading.Lock()  # of the list of segments and of the file that is written
        self._failure: str | None = None
        self._fd, self._reserved = -1, ReservedBlocks()
        self._syncing: BackgroundSync | None = None
        self._lock = FolderLock(self.folder)
        try:
            self._segments = open_segments(self.folder)
            if self._segments:
                self._open_newest()
        except BaseException:
            self._lock.close()
            raise
        if fsync == "interval":
            self._syncing = BackgroundSync(fsync_interval_s, self._duplicate, self._sync_failed)

    @classmethod
    def delete_all(cls, folder: Path) -> None:
        """Deletes a log and its base, which are not opened: they may be missing in part, or corrupt.

        Raises:
            StoreFailed: the folder is in use, or a file cannot be deleted. The oldest go first: a log without its
                beginning is refused.
        """
        with FolderLock(folder), store_failures(folder, "cannot be emptied"):
            for path in [*(folder / name for name in segment_names(folder)), *base_paths(folder)]:
                path.unlink()
            sync_folder(folder)

    @property
    def first(self) -> int:
        with self._guard:
            return self._segments[0].first if self._segments else 1

    @property
    def last(self) -> int:
        with self._guard:
            return self._segments[-1].last if self._segments else 0

    def check_at(self, sequence: int) -> int | None:
        with self._guard:
            segment = next((each for each in reversed(self._segments) if each.first <= sequence <= each.last), None)
            if segment is None or sequence == segment.last:
                return None if segment is None else segment.check
            path = segment.path
        with SegmentReader(path) as reader:
            return next((header.check for header in reader.headers() if header.sequence == sequence), None)

    @property
    def bytes(self) -> int:
        with self._guard:
            return sum(segment.bytes for segment in self._segments)

    def append(self, sequence: int, version: int, parts: Sequence[Buffer]) -> None:
        with self._guard:
            self._require_usable()
            newest = self._segments[-1] if self._segments else None
            last, previous = (0, 0) if newest is None else (newest.last, newest.check)
            require_next(sequence, last, self.folder)
            header, check = frame_header(sequence, version, parts, previous)
            if newest is None or newest.bytes >= self._segment_bytes:
                self._begin_segment(sequence, previous)
            segment = self._segments[-1]
            begin = segment.bytes
            self._reserved.reserve(self._fd, segment.bytes, [header, *parts])
            try:
                segment.bytes += write_all(self._fd, [header, *parts], segment.bytes)
            except OSError as error:
                self._undo_append(segment, sequence, error)
            segment.last, segment.check = sequence, check
            if self._policy == "always":
                self._sync()
        if self._syncing is not None:
            self._syncing.appended(segment.bytes - begin)

    def entries(self, after: int = 0) -> Iterator[LogEntry]:
        with self._guard:
            segments = [replace(segment) for segment in self._segments]
        if segments and segments[0].first > after + 1:
            raise BadInput(f"{self.folder} begins with entry {segments[0].first}: those after {after} were trimmed")
        for segment in segments:
            if segment.last > after:
                yield from (entry for entry in segment.entries() if entry.sequence > after)

    def sync(self) -> None:
        """Returns once every entry is on the disk, whatever the policy. Raises `StoreBroken` where that fails."""
        with self._guard:
            self._require_usable()
            if self._fd >= 0:
                self._sync()

    def trim(self, through: int) -> None:
        """Removes whole segments; the newest one stays, and so does entry `through`: it knows where the next begins."""
        with self._guard:
            self._require_usable()
            paths = [segment.path for segment in self._segments[:-1] if segment.last < through]
        for path in paths:
            with store_failures(path, "cannot be removed"):
                path.unlink(missing_ok=True)  # not under the guard: it takes as long as several appends
            with self._guard:
                del self._segments[0]

    def truncate(self, after: int) -> None:
        """Removes and cuts segments; entry `after` has to be in the log, unless nothing was trimmed and it is 0."""
        with self._guard:
            self._require_usable()
            require_kept(after, self._segments[0].first if self._segments else 1, self.folder)
            try:
                while self._segments and self._segments[-1].first > after:
                    self._drop_newest()
                if self._segments and self._segments[-1].last > after:
                    self._cut_newest(after)
                sync_folder(self.folder)
            except OSError as error:
                self._failure = f"it was not truncated after entry {after}: {error.strerror}"
                raise StoreBroken(f"{self.folder}: {self._failure}") from error

    def close(self) -> None:
        if self._syncing is not None:
            self._syncing.close()
        with self._guard:
            fd, self._fd = self._fd, -1
            if fd >= 0:
                try:
                    if self._failure is None:
                        self._reserved.give_back(fd, self._segments[-1].bytes)
                        if self._policy != "never":
                            os.fdatasync(fd)
                finally:
                    os.close(fd)
            self._failure = self._failure or "it is closed"
            self._lock.close()

    def _begin_segment(self, first: int, previous: int) -> None:
        path = self.folder / segment_name(first)
        with store_failures(path, "cannot be made"):
            if self._fd >= 0:
                self._reserved.give_back(self._fd, self._segments[-1].bytes)
                if self._policy != "never":
                    os.fdatasync(self._fd)
                    forget_pages(self._fd)
            fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
            sync_folder(self.folder)
        if self._fd >= 0:
            os.close(self._fd)
        self._fd = fd
        self._reserved.begin(0)
        self._segments.append(Segment(path, first, first - 1, 0, previous, previous))

    def _undo_append(self, segment: Segment, sequence: int, error: OSError) -> NoReturn:
        """Cuts off what was written of an entry."""
        try:
            os.ftruncate(self._fd, segment.bytes)
            if not segment.bytes:
                self._drop_newest()
        except OSError as second:
            self._failure = (
                f"entry {sequence} was written in part ({error.strerror}) and cannot be cut off ({second.strerror})"
            )
            raise StoreBroken(f"{self.folder}: {self._failure}") from error
        raise StoreFailed(f"{segment.path}: entry {sequence} cannot be written: {reason_of(error)}") from error

    def _drop_newest(self) -> None:
        segment = self._segments.pop()
        os.close(self._fd)
        self._fd = -1
        segment.path.unlink(missing_ok=True)
        if self._segments:
            self._open_newest()

    def _open_newest(self) -> None:
        self._fd = os.open(self._segments[-1].path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
        self._reserved.begin(self._segments[-1].bytes)

    def _cut_newest(self, after: int) -> None:
        segment = self._segments[-1]
        with SegmentReader(segment.path) as reader:
            for header in reader.headers():
                if header.sequence == after:
                    break
            os.ftruncate(self._fd, reader.offset)
            os.fdatasync(self._fd)
            assert reader.last is not None
            segment.last, segment.check, segment.bytes = after, reader.last.check, reader.offset

    def _sync(self) -> None:
        try:
            os.fdatasync(self._fd)
            forget_pages(self._fd)
        except OSError as error:
            # What the system could not write may be gone from its cache: a second fsync would report success.
            self._failure = f"fsync failed: {error.strerror}"
            raise StoreBroken(f"{self.folder}: {self._failure}") from error

    def _duplicate(self) -> int:
        with self._guard:
            return os.dup(self._fd) if self._fd >= 0 else -1

    def _sync_failed(self, why: str) -> None:
        with self._guard:
            self._failure = f"fsync failed: {why}"

    def _require_usable(self) -> None:
        if self._failure is not None:
            raise StoreBroken(f"the log in {self.folder} cannot be used: {self._failure}")


# Brings a log to the disk every now and then, while entries are appended


_MOST_BYTES = 8 << 20  # what a new segment has to wait for, and what the page cache holds


class BackgroundSync:
    """A thread that brings a file to the disk: at most an interval after an append, or after 8 MiB of them."""

    def __init__(self, interval_s: float, file: Callable[[], int], failed: Callable[[str], None]) -> None:
        """Begins.

        Args:
            interval_s: Seconds.
            file: Gives a duplicate of the file's descriptor, which is closed here; -1: there is no file.
            failed: Called with the reason where the system could not write.
        """
        self._interval_s, self._file, self._failed = interval_s, file, failed
        self._bytes = 0
        self._appended, self._many = threading.Event(), threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="log-fsync", daemon=True)
        self._thread.start()

    def appended(self, count: int) -> None:
        """So many bytes more are in the file."""
        self._bytes += count
        if self._bytes > _MOST_BYTES:
            self._many.set()
        self._appended.set()

    def close(self) -> None:
        """Ends the thread. Closing twice is harmless."""
        self._closing = True
        self._many.set()
        self._appended.set()
        self._thread.join()

    def _run(self) -> None:
        while True:
            self._appended.wait()
            self._many.wait(self._interval_s)
            if self._closing:
                return
            # Before the file is synced: what is appended from now on is announced again.
            self._appended.clear()
            self._many.clear()
            self._bytes = 0
            self._sync()

    def _sync(self) -> None:
        fd = self._file()
        if fd < 0:
            return
        try:
            os.fdatasync(fd)  # not under the log's guard: commits continue meanwhile
            forget_pages(fd)
        except OSError as error:
            self._failed(str(error.strerror))
        finally:
            os.close(fd)


# Pages of files that are written and not read again, given back to the system


def forget_pages(fd: int) -> None:
    """Takes what is on the disk of a file out of the page cache; what is not stays. Raises `OSError`.

    A log is read only when a store is opened again. Left in the page cache, it displaces what others read, and each
    entry is written to pages that nobody has used for long: in a virtual machine whose host takes free pages back,
    such pages take several times as long to write to as those that were in use a moment ago.
    """
    if sys.platform.startswith("linux"):
        os.posix_fadvise(fd, 0, 0, os.POSIX_FADV_DONTNEED)
