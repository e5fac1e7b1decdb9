"""The layout of an entry in a file: a header that checks itself, then a payload that the header checks.

```
offset  size  field
0       8     b"ELSTLOG1"
8       8     sequence number, uint64
16      8     version, uint64
24      8     payload bytes, uint64
32      4     CRC-32 of the payload
36      4     the next field of the entry before; 0 for the first entry that was ever appended
40      4     0
44      4     CRC-32 of the 44 bytes before
48      ...   payload
```

All integers are little-endian. Entries follow each other without gaps, and each names the one before it, so
that a missing file is noticed.
"""

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from isal import isal_zlib

from elastable.embedding_store.log.contract import Buffer

MAGIC = b"ELSTLOG1"
MAX_PAYLOAD_BYTES = 1 << 36
crc32_of = isal_zlib.crc32
"""As `zlib.crc32`, with its values, at some five times its pace."""

_FIELDS = struct.Struct("<8sQQQIII")
_CHECK = struct.Struct("<I")
HEADER_BYTES = _FIELDS.size + _CHECK.size
_SEARCHED = 1 << 20  # bytes looked through at a time
_TIMES_READ = 16  # that a file is read while an intact entry is looked for


@dataclass(frozen=True, slots=True)
class Header:
    """An entry's header.

    Attributes:
        sequence, version: As of `LogEntry`.
        length, crc32: Bytes and CRC-32 of the payload.
        previous: `check` of the entry before.
        check: CRC-32 of the header.
    """

    sequence: int
    version: int
    length: int
    crc32: int
    previous: int
    check: int

    @property
    def entry_bytes(self) -> int:
        """Bytes of the whole entry."""
        return HEADER_BYTES + self.length


def frame_header(sequence: int, version: int, parts: Sequence[Buffer], previous: int) -> tuple[bytes, int]:
    """The header of an entry whose payload is `parts`, one after the other, and its `check`."""
    length = crc32 = 0
    for part in parts:
        view = memoryview(part).cast("B")
        length, crc32 = length + len(view), crc32_of(view, crc32)
    header = header_of(sequence, version, length, crc32, previous)
    return header, int.from_bytes(header[_FIELDS.size :], "little")


def header_of(sequence: int, version: int, length: int, crc32: int, previous: int) -> bytes:
    """The header of an entry, by its values."""
    fields = _FIELDS.pack(MAGIC, sequence, version, length, crc32, previous, 0)
    return fields + _CHECK.pack(crc32_of(fields))


def parse_header(content: Buffer, offset: int = 0) -> Header | None:
    """The header that lies at `offset`; None: there is no whole and valid one."""
    if len(content) - offset < HEADER_BYTES:
        return None
    fields = bytes(content[offset : offset + _FIELDS.size])
    magic, sequence, version, length, crc32, previous, zero = _FIELDS.unpack(fields)
    (check,) = _CHECK.unpack_from(content, offset + _FIELDS.size)
    if magic != MAGIC or check != crc32_of(fields) or zero or length > MAX_PAYLOAD_BYTES:
        return None
    return Header(sequence, version, length, crc32, previous, check)


def other_format(content: Buffer) -> str | None:
    """What an intact header begins with that another release wrote; None: there is none at the beginning."""
    if len(content) < HEADER_BYTES or bytes(content[:7]) != MAGIC[:7] or bytes(content[:8]) == MAGIC:
        return None
    (check,) = _CHECK.unpack_from(content, _FIELDS.size)
    return repr(bytes(content[:8])) if check == crc32_of(bytes(content[: _FIELDS.size])) else None


def next_intact(content: memoryview, offset: int) -> tuple[int, Header] | None:
    """The first intact entry that begins at `offset` or behind it, wherever it lies; None: there is none.

    No crash leaves valid headers one within the other. Where somebody has written so many that reading all of their
    payloads would take for ever, one of them counts as intact.
    """
    most = _TIMES_READ * len(content)
    for start in range(offset, len(content), _SEARCHED):
        window = bytes(content[start : start + _SEARCHED + len(MAGIC) - 1])
        place = window.find(MAGIC)
        while place >= 0:
            header = parse_header(content, start + place)
            if header is not None and start + place + header.entry_bytes <= len(content):
                most -= header.length
                if most < 0 or is_intact(content, start + place, header):
                    return start + place, header
            place = window.find(MAGIC, place + 1)
    return None


def is_intact(content: memoryview, offset: int, header: Header) -> bool:
    """Whether the whole payload follows the header at `offset`, and is the one that was written."""
    payload = content[offset + HEADER_BYTES : offset + header.entry_bytes]
    return len(payload) == header.length and crc32_of(payload) == header.crc32
