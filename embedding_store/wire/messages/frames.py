"""Bulk messages as one frame, or as frames of about 1 MiB, encoded with one copy.

A bulk message of the protos is `{ Header header = 1; bytes body = 2; }` on a
stream. The header stands in the first frame only; the bodies of all frames,
joined, are raw little-endian buffers in header order. Frames are written
by hand here, and read by hand in `frame_reader`, byte for byte what the generated serializers make and take:
those copy every buffer several times, and hold the GIL while they do.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput

__all__ = [
    "BODY_TAG",
    "FRAME_BYTES",
    "HEADER_TAG",
    "MAX_ENTRIES",
    "MAX_FRAME_BYTES",
    "MAX_HEADER_BYTES",
    "ONE_FRAME_BYTES",
    "SMALL_BYTES",
    "encode",
    "frame_prefix",
]


FRAME_BYTES = 1 << 20
"""Body bytes in a frame of a message that takes several; loopback gRPC is fastest about there."""

MAX_FRAME_BYTES = 4 << 20
"""The longest frame that is sent or taken."""

MAX_ENTRIES = 1 << 14
"""Fields of a header, entries of its lists included."""

MAX_HEADER_BYTES = MAX_FRAME_BYTES - FRAME_BYTES - 64
"""The longest header; it must fit into one frame."""

ONE_FRAME_BYTES = 3584 << 10
"""A body up to this travels in one frame: a call of one frame each way costs half of a stream's threads."""

HEADER_TAG = 0x0A  # field 1, length-delimited
_FIELD_BYTES = 8  # the tag and the length of a body
_LONGEST_PREFIX = 16  # without the header itself
SMALL_BYTES = 4 << 10  # below this a second copy costs less than a view
BODY_TAG = 0x12  # field 2, length-delimited
_HEADER_TAG_BYTE = bytes((HEADER_TAG,))
_BODY_TAG_BYTE = bytes((BODY_TAG,))


def encode(header: bytes, arrays: Iterable[Array]) -> Iterator[bytes]:
    """The frames of one message.

    Args:
        header: The serialized header message.
        arrays: C-contiguous arrays of any shape and of plain dtypes, in header order; they must not change until the
            last frame is made.

    Yields:
        One frame or more; each is one copy of the bytes it carries.

    Raises:
        BadInput: the header does not fit into a frame.
    """
    if len(header) > MAX_HEADER_BYTES:
        raise BadInput(f"a header of {len(header)} bytes does not fit into a frame; at most {MAX_HEADER_BYTES} do")
    prefix = b"".join((_HEADER_TAG_BYTE, _varint(len(header)), header))
    buffers = [_raw(array) for array in arrays if array.size]
    size = sum(map(len, buffers))
    room = max(FRAME_BYTES - len(prefix), 0)
    if size <= room or (size <= ONE_FRAME_BYTES and len(prefix) + size <= MAX_FRAME_BYTES - _FIELD_BYTES):
        yield _frame(prefix, buffers, size)
        return
    for pieces, held in _pieces(buffers, room):
        yield _frame(prefix, pieces, held)
        prefix = b""


def frame_prefix(header: bytes | None, size: int) -> bytes:
    """What a frame begins with, before a body of `size` bytes: a multiple of 4 bytes, so that float32 may follow.

    Args:
        header: The serialized header; None but in the first frame.
        size: Of the body, at most `MAX_FRAME_BYTES`; without a header below 2 MiB.

    Raises:
        BadInput: the header does not fit into a frame.
    """
    if header is not None and len(header) + size > MAX_FRAME_BYTES - _LONGEST_PREFIX:
        raise BadInput(f"a header of {len(header)} bytes does not fit into a frame beside {size} bytes of rows")
    body = _varint(size)
    # Lengths may be written longer than need be, up to five bytes.
    if header is None:
        return _BODY_TAG_BYTE + _varint(size, -(1 + len(body)) % 4)
    missing = -(2 + len(_varint(len(header))) + len(header) + len(body)) % 4
    in_header = min(missing, 5 - len(_varint(len(header))))
    lengths = _varint(len(header), in_header), _varint(size, missing - in_header)
    return b"".join((_HEADER_TAG_BYTE, lengths[0], header, _BODY_TAG_BYTE, lengths[1]))


def _pieces(buffers: Iterable[memoryview | bytes], room: int) -> Iterator[tuple[list[memoryview | bytes], int]]:
    """Runs of bytes, with their lengths: `room` of them first, then `FRAME_BYTES` at a time."""
    pieces: list[memoryview | bytes] = []
    held = 0
    for buffer in buffers:
        start = 0
        while start < len(buffer):
            if held == room:
                yield pieces, held
                pieces, held, room = [], 0, FRAME_BYTES
            taken = min(room - held, len(buffer) - start)
            pieces.append(buffer[start : start + taken])
            start += taken
            held += taken
    yield pieces, held


def _frame(prefix: bytes, pieces: Sequence[memoryview | bytes], size: int) -> bytes:
    if not size:
        return prefix
    return b"".join((prefix, _BODY_TAG_BYTE, _varint(size), *pieces))


def _raw(array: Array) -> memoryview | bytes:
    """The bytes of a contiguous array, little-endian."""
    if array.dtype.str[0] == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    if array.nbytes <= SMALL_BYTES:
        return array.tobytes()
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _varint(value: int, longer: int = 0) -> bytes:
    """The value in base 128, by so many bytes longer than it need be."""
    parts = bytearray()
    while value > 0x7F or longer:
        longer -= value <= 0x7F
        parts.append(0x80 | value & 0x7F)
        value >>= 7
    parts.append(value)
    return bytes(parts)
