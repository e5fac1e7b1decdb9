"""Where the log of a store in Redis begins and ends, as its server says."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.streams.stream_records import StreamPart, part_of

__all__ = ["StreamEnd", "StreamEnds", "ends_questions", "read_ends"]


@dataclass(frozen=True, slots=True)
class StreamEnd:
    """The newest entry of a log.

    Attributes:
        last: Its sequence number; 0: nothing was ever appended.
        check: `Header.check` of it; 0 where there is none.
        total: Bytes of all entries that were ever appended.
        id: Stream id of its last part; b"0-0" where there is none.
    """

    last: int = 0
    check: int = 0
    total: int = 0
    id: bytes = b"0-0"

    @classmethod
    def of(cls, part: StreamPart) -> StreamEnd:
        """The end of a log whose newest entry ends with this part."""
        assert part.header is not None
        return cls(part.sequence, part.header.check, part.end, part.id)


@dataclass(frozen=True, slots=True)
class StreamEnds:
    """Both ends of a log.

    Attributes:
        first: Sequence number of the oldest entry; `end.last` + 1 where there is none.
        begin: Bytes of all entries before that one.
        end: The newest entry.
    """

    first: int = 1
    begin: int = 0
    end: StreamEnd = StreamEnd()


def ends_questions(key: bytes) -> tuple[Command, Command]:
    """The commands whose answers `read_ends` reads."""
    return ("XRANGE", key, "-", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1)


def read_ends(answers: Sequence[Reply], name: str) -> StreamEnds:
    """Both ends of a log, from the answers to `ends_questions`.

    Raises:
        StoreBroken: the stream is not one of a log, or lacks the end of its newest entry.
    """
    oldest, newest = answers
    if not oldest or not newest:
        return StreamEnds()
    first, last = part_of(oldest[0], name), part_of(newest[0], name)
    if last.header is None:
        raise StoreBroken(f"{name} is corrupt at its end: no part of entry {last.sequence} is its last one")
    return StreamEnds(first.sequence, first.begin, StreamEnd.of(last))
