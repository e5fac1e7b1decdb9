"""The segments of a log's folder, checked as it is opened."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log.segment import Segment, SegmentReader, segment_first

__all__ = ["open_segments"]

_log = logging.getLogger(__name__)


def open_segments(folder: Path) -> list[Segment]:
    """The segments of a folder, oldest first. What a process left that died while it appended is cut off.

    Raises:
        StoreBroken: a segment is missing, or corrupt before its end.
    """
    names = sorted(entry.name for entry in folder.iterdir() if segment_first(entry.name) is not None)
    segments: list[Segment] = []
    for name in names:
        segment = _open_segment(folder / name, newest=name == names[-1])
        if segment is None:
            continue
        if segments and (segment.previous != segments[-1].check or segment.first != segments[-1].last + 1):
            raise StoreBroken(
                f"{folder} is corrupt: entries are missing between {segments[-1].last}, where one segment ends, "
                f"and {segment.first}, where the next one begins"
            )
        segments.append(segment)
    return segments


def _open_segment(path: Path, newest: bool) -> Segment | None:
    """The segment, without a torn entry at its end; None: it holds no entry, and is removed."""
    with SegmentReader(path) as reader:
        # Only the newest segment can be torn: the others were complete before the next one was begun.
        for _ in reader.entries() if newest else reader.headers():
            pass
        if reader.offset < reader.size:
            _cut(reader, newest)
        first, last = reader.first, reader.last
        if first is None or last is None:
            path.unlink()
            return None
        return Segment(path, first.sequence, last.sequence, reader.offset, first.previous, last.check)


def _cut(reader: SegmentReader, newest: bool) -> None:
    reader.refuse_corruption()
    behind = "the beginning" if reader.last is None else f"entry {reader.last.sequence}"
    if not newest:
        raise StoreBroken(f"{reader.path} is corrupt at byte {reader.offset:,}, behind {behind}; later segments follow")
    torn = reader.size - reader.offset
    _log.warning("%s: dropped %d bytes of an entry that was not written whole, behind %s", reader.path, torn, behind)
    fd = os.open(reader.path, os.O_RDWR | os.O_CLOEXEC)
    try:
        os.ftruncate(fd, reader.offset)
        os.fdatasync(fd)
    finally:
        os.close(fd)
