"""The segments of a log's folder, checked as it is opened."""

from __future__ import annotations

import logging
import os
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from elastable.embedding_store.errors import StoreBroken, StoreFailed
from elastable.embedding_store.log.files.segment import Segment, SegmentReader, segment_first

__all__ = ["check_segments", "open_segments", "segment_names"]

_log = logging.getLogger(__name__)


def open_segments(folder: Path) -> list[Segment]:
    """The segments of a folder, oldest first. What a process left that died while it appended is cut off.

    Raises:
        StoreBroken: a segment is missing, or corrupt before its end.
    """
    segments: list[Segment] = []
    names = segment_names(folder)
    for name in names:
        segment, torn = _open_segment(folder / name, newest=name == names[-1])
        if torn:
            _cut(folder / name, segment, torn)
        if segment is None:
            (folder / name).unlink()
        else:
            segments.append(segment)
    _require_whole(folder, segments)
    return segments


def check_segments(folder: Path) -> tuple[list[Segment], int]:
    """The segments of a folder, oldest first, and the bytes of a torn entry at its end; changes nothing.

    Raises:
        StoreBroken: as `open_segments`.
        StoreFailed: the folder cannot be read.
    """
    try:
        names = segment_names(folder)
    except OSError as error:
        raise StoreFailed(f"{folder} cannot be read: {error.strerror}") from error
    found = [_open_segment(folder / name, newest=name == names[-1]) for name in names]
    segments = [segment for segment, _ in found if segment is not None]
    _require_whole(folder, segments)
    return segments, sum(torn for _, torn in found)


def segment_names(folder: Path) -> list[str]:
    """Names of the segments of a folder, oldest first. Raises `OSError`."""
    return sorted(entry.name for entry in folder.iterdir() if segment_first(entry.name) is not None)


def _require_whole(folder: Path, segments: Sequence[Segment]) -> None:
    for before, segment in pairwise(segments):
        if segment.previous != before.check or segment.first != before.last + 1:
            raise StoreBroken(
                f"{folder} is corrupt: entries are missing between {before.last}, where one segment ends, "
                f"and {segment.first}, where the next one begins"
            )


def _open_segment(path: Path, newest: bool) -> tuple[Segment | None, int]:
    """The segment without a torn entry at its end, and that entry's bytes; None: it holds no whole entry."""
    with SegmentReader(path) as reader:
        # Only the newest segment can be torn: the others were complete before the next one was begun.
        for _ in reader.entries() if newest else reader.headers():
            pass
        torn = reader.size - reader.offset
        if torn:
            reader.refuse_corruption()
        first, last = reader.first, reader.last
        if torn and not newest:
            behind = "the beginning" if last is None else f"entry {last.sequence}"
            raise StoreBroken(f"{path} is corrupt at byte {reader.offset:,}, behind {behind}; later segments follow")
        if first is None or last is None:
            return None, torn
        return Segment(path, first.sequence, last.sequence, reader.offset, first.previous, last.check), torn


def _cut(path: Path, segment: Segment | None, torn: int) -> None:
    behind = "the beginning" if segment is None else f"entry {segment.last}"
    _log.warning("%s: dropped %d bytes of an entry that was not written whole, behind %s", path, torn, behind)
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        os.ftruncate(fd, 0 if segment is None else segment.bytes)
        os.fdatasync(fd)
    finally:
        os.close(fd)
