"""How a log entry is stored in a Redis Stream: one part, or several numbered ones, each a stream entry.

The part `k` of entry `s` has the stream id `s-k`, so Redis itself refuses an
entry that is repeated or out of order. Every part has the fields

    version   of the log entry, decimal
    begin     bytes of all log entries before this one since the log began, headers included, decimal
    payload   at most `PART_BYTES` of the payload; the parts' payloads joined are the entry's

and the last part has one more, by which it is known to be the last:

    header    48 bytes, as in a segment file (`elastable.embedding_store.log.framing`): sequence number, version,
              length and CRC-32 of the payload, and the checksum of the entry before

All parts are added in one transaction.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log.contract import Buffer, LogEntry
from elastable.embedding_store.log.framing import HEADER_BYTES, Header, crc32_of, frame_header, header_of, parse_header
from elastable.embedding_store.tiers.redis.connection import Deadline
from elastable.embedding_store.tiers.redis.reply_shapes import Command, Reply, packed_command
from elastable.embedding_store.tiers.redis.schema import log_key
from elastable.embedding_store.tiers.redis.topology import Topology

#: Measured with `benchmarks/storage/redis_log.py`: larger values leave the processor's cache between Redis' steps.
PART_BYTES = 1 << 19
#: Redis closes a connection whose queued transaction exceeds `client-query-buffer-limit`, 1 GiB unless configured.
MAX_ENTRY_BYTES = 1_000 << 20
_MAX_PART_BYTES = 1 << 24
_MAX_DIGITS = 20
_EXEC = packed_command(("EXEC",))
_MULTI = packed_command(("MULTI",))


@dataclass(frozen=True, slots=True)
class NewEntry:
    """An entry to be appended.

    Attributes:
        sequence, version: As of `LogEntry`.
        parts: Its payload, in pieces: bytes views.
        length: Bytes of the payload.
        begin: Bytes of all entries before it.
        previous: `Header.check` of the entry before it; 0 for the first.
    """

    sequence: int
    version: int
    parts: Sequence[memoryview]
    length: int
    begin: int
    previous: int

    @classmethod
    def of(cls, sequence: int, version: int, parts: Sequence[Buffer], begin: int, previous: int) -> "NewEntry":
        """The entry with this payload, which is not copied."""
        views = [memoryview(part).cast("B") for part in parts]
        return cls(sequence, version, views, sum(len(view) for view in views), begin, previous)

    @property
    def ids(self) -> list[bytes]:
        """Stream ids of its parts."""
        return [b"%d-%d" % (self.sequence, part) for part in range(max(1, -(-self.length // PART_BYTES)))]

    def header(self) -> Header | None:
        """Its header."""
        return parse_header(frame_header(self.sequence, self.version, self.parts, self.previous)[0])

    def requests(self, key: bytes) -> Iterator[tuple[list[Buffer], Header | None]]:
        """MULTI, one XADD a part, EXEC: the bytes to send, part by part, and with the last of them the header.

        The checksum of a part is computed when the part is asked for, so while the parts before it are on their way.
        """
        ids, crc32 = self.ids, 0
        yield [_MULTI], None
        for number, (part_id, pieces) in enumerate(zip(ids, self._cut(), strict=True), 1):
            for piece in pieces:
                crc32 = crc32_of(piece, crc32)
            length = sum(len(piece) for piece in pieces)
            if number < len(ids):
                yield [*self._add(key, part_id, length, 9), *pieces, b"\r\n"], None
            else:
                text = header_of(self.sequence, self.version, self.length, crc32, self.previous)
                sealed = b"\r\n$6\r\nheader\r\n$%d\r\n%b\r\n" % (len(text), text)
                yield [*self._add(key, part_id, length, 11), *pieces, sealed, _EXEC], parse_header(text)

    def _add(self, key: bytes, part_id: bytes, length: int, words: int) -> list[Buffer]:
        """An XADD up to where its payload begins."""
        texts = (b"XADD", key, part_id, b"version", b"%d" % self.version, b"begin", b"%d" % self.begin, b"payload")
        encoded = b"".join(b"$%d\r\n%b\r\n" % (len(text), text) for text in texts)
        return [b"*%d\r\n%b$%d\r\n" % (words, encoded, length)]

    def _cut(self) -> Iterator[list[memoryview]]:
        """The payload in parts of `PART_BYTES`, each in pieces; an empty payload is one empty part."""
        pieces, room = list[memoryview](), PART_BYTES
        for whole in self.parts:
            view = whole
            while len(view) > room:
                pieces.append(view[:room])
                yield pieces
                view, pieces, room = view[room:], [], PART_BYTES
            if len(view):
                pieces.append(view)
                room -= len(view)
        if pieces or not self.length:
            yield pieces


@dataclass(frozen=True, slots=True)
class StreamPart:
    """One stream entry: a part of a log entry.

    Attributes:
        sequence, number: Its stream id.
        version, begin: Those of its log entry.
        payload: Its bytes.
        header: Of the log entry, in its last part.
    """

    sequence: int
    number: int
    version: int
    begin: int
    payload: bytes
    header: Header | None

    @property
    def id(self) -> bytes:
        """Its stream id."""
        return b"%d-%d" % (self.sequence, self.number)

    @property
    def end(self) -> int:
        """Of a last part: bytes of all entries up to and including this one."""
        assert self.header is not None
        return self.begin + self.header.entry_bytes


def part_of(entry: object, place: str) -> StreamPart:
    """Reads a stream entry as Redis gives it: id and fields.

    Raises:
        StoreBroken: it is no part of a log entry; names its id.
    """
    match entry:
        case [bytes(name), [b"version", bytes(version), b"begin", bytes(begin), b"payload", bytes(payload), *rest]]:
            sequence, _, number = name.partition(b"-")
            header = _header_in(rest)
            fits = all(text.isdigit() and len(text) <= _MAX_DIGITS for text in (sequence, number, version, begin))
            if fits and (header or not rest) and len(payload) <= _MAX_PART_BYTES:
                return StreamPart(int(sequence), int(number), int(version), int(begin), payload, header)
        case [bytes(name), *_]:
            pass
        case _:
            name = b"?"
    raise _corrupt(place, name.decode(errors="replace")[:50], "it is no part of a log entry")


def _header_in(fields: Sequence[object]) -> Header | None:
    """The header among a stream entry's last fields; None: there is none, or it is not intact."""
    match fields:
        case [b"header", bytes(header)] if len(header) == HEADER_BYTES:
            return parse_header(header)
    return None


def joined_entries(parts: Iterator[StreamPart], sequence: int, place: str) -> Iterator[tuple[LogEntry, Header]]:
    """The log entries that are made of parts, from entry `sequence` on, each checked.

    Raises:
        StoreBroken: an entry is missing, incomplete or corrupt; names it.
    """
    pieces, length, version, begin = list[bytes](), 0, 0, 0
    previous = 0 if sequence == 1 else None
    for part in parts:
        if part.sequence != sequence or part.number != len(pieces):
            missing = f"{sequence}-{len(pieces)}"
            raise _corrupt(place, missing, f"it is missing, and {part.id.decode()} is the next one")
        if pieces and (part.version, part.begin) != (version, begin):
            raise _corrupt(place, part.id.decode(), "its version or its place is not that of the part before it")
        version, begin = part.version, part.begin
        pieces.append(part.payload)
        length += len(part.payload)
        if length > MAX_ENTRY_BYTES:
            raise _corrupt(place, part.id.decode(), f"the entry is longer than {MAX_ENTRY_BYTES:,} bytes")
        if part.header is None:
            continue
        payload = pieces[0] if len(pieces) == 1 else b"".join(pieces)
        _check(part, part.header, payload, place)
        if previous is not None and part.header.previous != previous:
            raise _corrupt(place, part.id.decode(), "it was appended to another entry than the one before it")
        yield LogEntry(sequence, version, memoryview(payload)), part.header
        sequence, pieces, length, previous = sequence + 1, [], 0, part.header.check
    if pieces:
        raise _corrupt(place, f"{sequence}-{len(pieces)}", "it is missing, and the log ends before it")


def _check(part: StreamPart, header: Header, payload: bytes, place: str) -> None:
    if (header.sequence, header.version, header.length) != (part.sequence, part.version, len(payload)):
        raise _corrupt(place, part.id.decode(), "its header is that of another entry")
    if header.crc32 != crc32_of(payload):
        raise _corrupt(place, part.id.decode(), "the checksum of the payload is another one")


def _corrupt(place: str, name: str, why: str) -> StoreBroken:
    return StoreBroken(f"{place} is corrupt at stream entry {name}: {why}")


# Where the log of a store in Redis begins and ends, as its server says


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
    def of(cls, part: StreamPart) -> "StreamEnd":
        """The end of a log whose newest entry ends with this part."""
        assert part.header is not None
        return cls(part.sequence, part.header.check, part.end, part.id)


def ends_questions(key: bytes) -> tuple[Command, Command]:
    """The commands whose answers `read_ends` reads."""
    return ("XRANGE", key, "-", "+", "COUNT", 1), ("XREVRANGE", key, "+", "-", "COUNT", 1)


def read_ends(answers: Sequence[Reply], name: str) -> tuple[int, int, StreamEnd]:
    """Both ends of a log, from the answers to `ends_questions`.

    Returns:
        The sequence number of its oldest entry (1 where there is none), the bytes of all before it, and its newest one.

    Raises:
        StoreBroken: the stream is not one of a log, or lacks the end of its newest entry.
    """
    oldest, newest = answers
    if not oldest or not newest:
        return 1, 0, StreamEnd()
    first, last = part_of(oldest[0], name), part_of(newest[0], name)
    if last.header is None:
        raise StoreBroken(f"{name} is corrupt at its end: no part of entry {last.sequence} is its last one")
    return first.sequence, first.begin, StreamEnd.of(last)


# Reads the log of a store in Redis, some stream entries at a time


#: The greatest number that a part can have.
LAST_PART = (1 << 64) - 1
_AT_ONCE = 16  # of half a MiB each they are 8 MiB


def stream_entries(topology: Topology, begin: bytes, end: bytes) -> Iterator[Reply]:
    """The stream entries from one id to another, as hiredis gives them; each round trip has its own deadline.

    Raises:
        StoreFailed, Unavailable, DeadlineExceeded: as `Topology.call`.
    """
    key = log_key(topology.url.namespace)
    while True:
        words = ("XRANGE", key, begin, end, "COUNT", _AT_ONCE)
        (found,) = topology.call([(key, words)], Deadline(topology.url.deadline))
        yield from found
        if len(found) < _AT_ONCE:
            return
        begin = b"(%b" % found[-1][0]


def first_part(topology: Topology, name: str, words: Command, deadline: Deadline) -> StreamPart | None:
    """The first part in the answer to XRANGE or XREVRANGE; None: there is none.

    Raises what `stream_entries` and `part_of` raise.
    """
    (found,) = topology.call([(log_key(topology.url.namespace), words)], deadline)
    return part_of(found[0], name) if found else None
