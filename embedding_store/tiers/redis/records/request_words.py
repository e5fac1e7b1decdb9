"""Words of RESP2 in a buffer: texts, headers and numbers, for the kernels that encode requests."""

from __future__ import annotations

from elastable.embedding_store.contract.arrays import UInt8
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_moves import put_word

__all__ = ["INT64_HEADER", "put_header", "put_int64", "put_text"]

# As they lie in little-endian words.
INT64_HEADER = int.from_bytes(b"$8\r\n", "little")
_CRLF = int.from_bytes(b"\r\n", "little")


@kernel
def put_text(out: UInt8, at: int, text: UInt8) -> int:
    for i in range(len(text)):
        out[at + i] = text[i]
    return at + len(text)


@kernel
def put_header(out: UInt8, at: int, kind: int, number: int) -> int:
    """`<kind><number>\\r\\n`."""
    out[at] = kind
    digits = 1
    power = 10
    while number >= power:
        digits += 1
        power *= 10
    rest = number
    for i in range(digits):
        out[at + digits - i] = 48 + rest % 10
        rest //= 10
    out[at + digits + 1] = 13
    out[at + digits + 2] = 10
    return at + digits + 3


@kernel
def put_int64(out: UInt8, at: int, value: int) -> int:
    """`$8\\r\\n<value, little-endian>\\r\\n`, and rubbish in the 6 bytes behind it."""
    put_word(out, at, INT64_HEADER)
    put_word(out, at + 4, value)
    put_word(out, at + 12, _CRLF)
    return at + 14
