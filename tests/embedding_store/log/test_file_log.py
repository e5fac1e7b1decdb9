"""Entries of a log in files come back whole and in order, whatever ended the process that wrote them."""

import errno
import os
import sys
import threading
import time
import zlib
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput, StoreBroken, StoreFailed
from elastable.embedding_store.log import file_log as reserved_blocks
from elastable.embedding_store.log.changes import ClearTable, encode_change
from elastable.embedding_store.log.file_log import BackgroundSync, FileLog
from elastable.embedding_store.log.framing import HEADER_BYTES, MAGIC, crc32_of, header_of, next_intact
from elastable.embedding_store.log.inspection import inspect_log
from elastable.embedding_store.log.segment import segment_name, write_base
from tests.embedding_store.log.log_places import read
from tests.waiting import until

RANDOM = np.random.default_rng(0)
PAYLOADS = [RANDOM.bytes(length) for length in (0, 1, 47, 48, 49, 5_000, 70_000)]


def fill(log: FileLog) -> list[tuple[int, int, bytes]]:
    appended = []
    for sequence, payload in enumerate(PAYLOADS, log.last + 1):
        log.append(sequence, sequence // 2, [payload[:7], memoryview(payload)[7:]])
        appended.append((sequence, sequence // 2, payload))
    return appended


@pytest.mark.parametrize("segment_bytes", [6_000, 1 << 20])
def test_a_truncated_log_goes_on_where_it_was_cut(tmp_path: Path, segment_bytes: int) -> None:
    for after in range(len(PAYLOADS) + 1):
        with FileLog(tmp_path / str(after), segment_bytes=segment_bytes) as log:
            appended = fill(log)
            log.truncate(after)
            assert (log.last, read(log)) == (after, appended[:after])
            again = fill(log)
            assert read(log, after=after // 2) == (appended[:after] + again)[after // 2 :]
        with FileLog(tmp_path / str(after), segment_bytes=segment_bytes) as log:
            assert read(log) == appended[:after] + again


def test_one_process_at_a_time_has_a_log(tmp_path: Path) -> None:
    with FileLog(tmp_path), pytest.raises(StoreFailed, match=f"open already, in process {os.getpid()}"):
        FileLog(tmp_path)
    FileLog(tmp_path).close()


@pytest.mark.parametrize(
    "options",
    [{"fsync": "sometimes"}, {"fsync_interval_s": 0}, {"segment_bytes": 0}, {"fsync_interval_s": float("nan")}],
)
def test_bad_options_are_refused_by_value(tmp_path: Path, options: dict[str, object]) -> None:
    with pytest.raises(BadInput, match=r"choose one of always, interval, never|both are above 0"):
        FileLog(tmp_path, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("segment_bytes", [6_000, 1 << 20])
def test_a_torn_last_entry_is_dropped(tmp_path: Path, segment_bytes: int, caplog: pytest.LogCaptureFixture) -> None:
    with FileLog(tmp_path / "whole", segment_bytes=segment_bytes) as log:
        appended = fill(log)
    newest = sorted((tmp_path / "whole").glob("*.log"))[-1]
    content = newest.read_bytes()
    length = HEADER_BYTES + len(appended[-1][2])
    for cut in (1, 2, HEADER_BYTES, length // 2, length - HEADER_BYTES, length - HEADER_BYTES + 1, length - 1, length):
        newest.write_bytes(content[: len(content) - cut])
        with FileLog(tmp_path / "whole", segment_bytes=segment_bytes) as log:
            assert read(log) == appended[:-1]
            assert log.last == len(appended) - 1
            log.append(*appended[-1][:2], [appended[-1][2]])
            assert read(log) == appended
        assert cut == length or "not written whole" in caplog.text
        caplog.clear()


def segments_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.log"))


def test_a_missing_segment_is_refused(tmp_path: Path) -> None:
    with FileLog(tmp_path, segment_bytes=1) as log:
        fill(log)
    segments_of(tmp_path)[3].unlink()
    with pytest.raises(StoreBroken, match="entries are missing between 3, where one segment ends, and 5, where"):
        FileLog(tmp_path)


def test_links_in_a_log_are_not_read(tmp_path: Path) -> None:
    with FileLog(tmp_path / "log") as log:
        fill(log)
    (path,) = (tmp_path / "log").glob(segment_name(1))
    path.rename(tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(StoreFailed, match=f"{path} cannot be read"):
        FileLog(tmp_path / "log")


@pytest.mark.parametrize("name", [segment_name(1), f"{7:020d}.base"])
def test_pipes_in_a_log_are_not_waited_for(tmp_path: Path, name: str) -> None:
    os.mkfifo(tmp_path / name)
    messages: list[str] = []

    def look() -> None:
        with pytest.raises(StoreFailed) as caught:
            inspect_log(tmp_path)
        messages.append(str(caught.value))

    looking = threading.Thread(target=look, daemon=True)
    looking.start()
    looking.join(60)
    assert messages == [f"{tmp_path / name} cannot be read: it is no regular file"]


def test_nothing_is_written_through_links_in_a_log(tmp_path: Path) -> None:
    others, folder = tmp_path / "others", tmp_path / "log"
    others.write_bytes(b"another user's")
    folder.mkdir()
    (folder / "lock").symlink_to(others)
    with pytest.raises(StoreFailed, match="symbolic link"):
        FileLog(folder)
    (folder / "lock").unlink()
    with FileLog(folder) as log:
        (folder / segment_name(1)).symlink_to(others)
        with pytest.raises(StoreFailed, match=f"{segment_name(1)} cannot be made"):
            fill(log)
        (folder / segment_name(1)).unlink()
        fill(log)
    (folder / f"{7:020d}.base.new").symlink_to(others)
    with pytest.raises(StoreFailed, match="cannot be written"):
        write_base(folder, 7, 3, [])
    assert others.read_bytes() == b"another user's"


@pytest.mark.parametrize("signs", [MAGIC * (1 << 18), b"".join(header_of(i, 1, 8 << 20, 1, 0) for i in range(1 << 15))])
def test_signs_of_entries_that_are_none_are_looked_through_once(signs: bytes) -> None:
    content = memoryview(signs + bytes(8 << 20))
    begun = time.process_time()
    found = next_intact(content, 1)
    assert time.process_time() - begun < 3.0
    assert found is None or found[1].length == 8 << 20  # one of so many stands for all


def test_a_segment_that_no_memory_holds_is_refused(tmp_path: Path) -> None:
    with (tmp_path / segment_name(1)).open("wb") as file:
        file.truncate(1 << 42)
    with pytest.raises(StoreFailed, match="do not fit into memory"):
        FileLog(tmp_path)


def test_a_renamed_segment_is_refused(tmp_path: Path) -> None:
    with FileLog(tmp_path) as log:
        fill(log)
    segments_of(tmp_path)[0].rename(tmp_path / segment_name(2))
    with pytest.raises(StoreBroken, match="its first entry is 1"):
        FileLog(tmp_path)


@pytest.mark.parametrize("segment_bytes", [100, 1 << 20], ids=["an old segment", "the newest"])
def test_an_entry_of_another_log_is_refused_where_it_lies(tmp_path: Path, segment_bytes: int) -> None:
    """It is whole and has the right number: only the entry behind it, which names the one before, tells."""
    for name, second in (("ours", b"2"), ("theirs", b"!")):
        with FileLog(tmp_path / name, segment_bytes=segment_bytes) as log:
            for sequence, payload in enumerate([b"1", second, b"3", b"4"], 1):
                log.append(sequence, sequence, [payload])
    ours, theirs = (segments_of(tmp_path / name)[0] for name in ("ours", "theirs"))
    content, entry = ours.read_bytes(), HEADER_BYTES + 1
    assert len(content) >= 3 * entry
    ours.write_bytes(content[:entry] + theirs.read_bytes()[entry : 2 * entry] + content[2 * entry :])
    with pytest.raises(StoreBroken, match=rf"{ours.name} is corrupt: entry 3 comes after 2"):
        FileLog(tmp_path / "ours")


@settings(max_examples=150, deadline=None)
@given(place=st.integers(0, 1 << 30), bits=st.integers(1, 255))
def test_no_flipped_bit_is_read_as_an_entry(tmp_path_factory: pytest.TempPathFactory, place: int, bits: int) -> None:
    folder = tmp_path_factory.mktemp("flipped")
    with FileLog(folder) as log:
        appended = fill(log)
    path = segments_of(folder)[0]
    content = bytearray(path.read_bytes())
    content[place % len(content)] ^= bits
    path.write_bytes(content)
    try:
        with FileLog(folder) as log:
            assert read(log) == appended[:-1], "only the last entry can be taken for a torn one"
    except StoreBroken as error:
        assert f"{path.name} is corrupt at byte" in str(error)  # noqa: PT017 - either outcome is right, by the place


class _FullDisk:
    """`os.pwritev` on a disk that has room for so many bytes more."""

    def __init__(self, room: int) -> None:
        self.room, self.plain = room, os.pwritev

    def __call__(self, fd: int, pieces: list[memoryview], offset: int) -> int:
        if not self.room:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        written = self.plain(fd, [piece[: self.room] for piece in pieces[:1]], offset)
        self.room -= written
        return written


@pytest.mark.parametrize("room", [0, 5, HEADER_BYTES, HEADER_BYTES + 3])
@pytest.mark.parametrize("segment_bytes", [1, 1 << 20])
def test_a_failed_append_changes_nothing(
    tmp_path: Path, room: int, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with FileLog(tmp_path, segment_bytes=segment_bytes) as log:
        appended = fill(log)
        following = len(PAYLOADS) + 1
        with monkeypatch.context() as patch:
            patch.setattr(os, "pwritev", _FullDisk(room))
            with pytest.raises(StoreFailed, match=rf"entry {following} cannot be written: No space left on device"):
                log.append(following, 9, [b"payload"])
        assert read(log) == appended
        assert log.last == len(appended)
        log.append(following, 9, [b"payload"])
        assert read(log) == [*appended, (following, 9, b"payload")]


def test_after_an_fsync_that_failed_nothing_is_appended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(fd: int) -> None:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    with FileLog(tmp_path, fsync="always") as log:
        log.append(1, 1, [b"one"])
        with monkeypatch.context() as patch:
            patch.setattr(os, "fdatasync", fails)
            with pytest.raises(StoreBroken, match="fsync failed: Input/output error"):
                log.append(2, 2, [b"two"])
        # The system may have dropped the pages: a second fsync would succeed and mean nothing.
        with pytest.raises(StoreBroken, match="fsync failed: Input/output error"):
            log.append(3, 3, [b"three"])


def test_a_log_whose_only_file_was_truncated_away_has_nothing_to_bring_to_the_disk() -> None:
    asked, failures = threading.Event(), list[str]()

    def no_file() -> int:
        asked.set()
        return -1

    syncing = BackgroundSync(0.001, no_file, failures.append)
    syncing.appended(1)
    assert asked.wait(60)
    syncing.close()
    assert not failures


def test_a_log_is_inspected_as_it_lies(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match="holds no log"):
        inspect_log(tmp_path)
    with FileLog(tmp_path) as log:
        for entry in (1, 2):
            log.append(entry, entry * 7, encode_change(ClearTable("t")))
        report = inspect_log(tmp_path)
    assert (report.base, report.first, report.last, report.version) == (None, 1, 2, 14)
    assert report.changes == {"ClearTable": 2}


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="blocks are reserved on Linux")
def test_blocks_are_reserved_while_a_segment_is_written_and_freed_when_it_is_done(tmp_path: Path) -> None:
    def blocks(path: Path) -> int:
        return path.stat().st_blocks * 512

    with FileLog(tmp_path, segment_bytes=200_000) as log:
        log.append(1, 1, [bytes(100_000)])
        first = tmp_path / segment_name(1)
        length = first.stat().st_size
        assert length == HEADER_BYTES + 100_000, "the length is that of the entries"
        reserves = blocks(first) >= 1 << 20  # a file system may refuse to
        log.append(2, 2, [bytes(100_000)])
        log.append(3, 3, [bytes(100_000)])
        second = tmp_path / segment_name(3)
        assert blocks(first) < 300_000, "a full segment keeps what it needs"
        assert (blocks(second) >= 1 << 20) == reserves
    assert blocks(second) < 200_000
    with FileLog(tmp_path, segment_bytes=200_000) as log:
        assert [entry.sequence for entry in log.entries()] == [1, 2, 3]


def test_entries_are_appended_where_no_blocks_can_be_reserved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def refuses(fd: int, mode: int, offset: int, length: int) -> int:
        asked.append(length)
        return -1

    monkeypatch.setattr(reserved_blocks, "_system_call", lambda: refuses)
    with FileLog(tmp_path) as log:
        appended = fill(log)
        assert read(log) == appended
    assert len(asked) == 1, "a file system that cannot is asked once a segment"


def test_entries_are_appended_while_old_segments_are_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with FileLog(tmp_path, segment_bytes=1) as log:
        appended = fill(log)
        plain = Path.unlink

        def appending(path: Path, missing_ok: bool = False) -> None:
            log.append(log.last + 1, 0, [b"meanwhile"])  # would wait for ever if the log were held
            plain(path, missing_ok=missing_ok)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", appending)
            log.trim(4)
        meanwhile = [(sequence, 0, b"meanwhile") for sequence in range(len(PAYLOADS) + 1, len(PAYLOADS) + 4)]
        assert (log.first, read(log, after=3)) == (4, appended[3:] + meanwhile)
    with FileLog(tmp_path, segment_bytes=1) as log:
        assert read(log, after=3) == appended[3:] + meanwhile


def test_segments_that_cannot_be_removed_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(path: Path, missing_ok: bool = False) -> None:
        raise OSError(errno.EPERM, os.strerror(errno.EPERM))

    with FileLog(tmp_path, segment_bytes=1) as log:
        appended = fill(log)
        with monkeypatch.context() as patch:
            patch.setattr(Path, "unlink", fails)
            with pytest.raises(StoreFailed, match="cannot be removed: Operation not permitted"):
                log.trim(4)
        assert read(log) == appended
        log.trim(4)
        assert read(log, after=3) == appended[3:]


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="asks Linux what its page cache holds")
def test_a_log_that_is_on_the_disk_does_not_stay_in_the_page_cache(tmp_path: Path) -> None:
    # What the file system of `tmp_path` does with a file that is on the disk: one in memory keeps its pages.
    other = tmp_path / "other"
    with other.open("wb") as file:
        file.write(bytes(1 << 20))
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    forgets = not cached(other)
    with FileLog(tmp_path / "log", fsync="never", segment_bytes=3 << 20) as log:
        log.append(1, 1, [bytes(1 << 20)])
        [first] = segments_of(log.folder)
        assert cached(first), "what was just written is in memory"
        log.sync()
        assert cached(first) == (not forgets)
    with FileLog(tmp_path / "interval", fsync_interval_s=3_600) as log:
        for sequence in range(1, 7):
            log.append(sequence, sequence, [bytes(8 << 20)])
        [first] = segments_of(log.folder)
        until(lambda: not (forgets and cached(first)))  # what is not on the disk is bounded, whatever the interval


def cached(path: Path) -> bool:
    """Whether the first pages of a file can be read without asking the disk."""
    with path.open("rb") as file:
        try:
            return os.preadv(file.fileno(), [bytearray(4096)], 0, os.RWF_NOWAIT) > 0
        except BlockingIOError:
            return False
        except OSError:
            return True  # a file system that cannot say, such as one in memory


@given(st.lists(st.binary(max_size=5_000), max_size=5), st.integers(0, 7))
def test_checksums_are_those_of_zlib_piece_by_piece(pieces: list[bytes], offset: int) -> None:
    ours = theirs = 0
    for piece in pieces:
        view = memoryview(piece)[offset:]
        ours, theirs = crc32_of(view, ours), zlib.crc32(view, theirs)
        assert ours == theirs
