"""Requests for records in bulk: RESP2 as fixed-stride bytes, without an object per row.

A read, of `n` ids of a partition:

    HMGET <key> stamp (<id>) * n

A write of `n` records, after `m` ids are deleted; without these there is no MULTI and no EXEC, as one HSET is atomic:

    HSTRLEN <key> stamp   MULTI   HDEL <key> (<id>) * m   HSET <key> stamp <sequence> (<id> <record>) * n   EXEC

HSTRLEN tells whether the partition was still there. Where a node is asked out of turn (`-ASK`), an ASKING goes before
each of HMGET, HSTRLEN, MULTI and a HSET without MULTI.
"""

from dataclasses import dataclass
from typing import cast

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.native.intrinsics import copy_bytes, put_word
from elastable.embedding_store.native.kernel import kernel

Parts = npt.NDArray[np.void]

#: What a batch has to do with one partition. Offsets count from 0.
PART = np.dtype(
    [
        ("partition", np.int64),
        ("row_at", np.int64),  # where its ids begin in `ids` and `positions`
        ("rows", np.int64),  # how many ids are read or written
        ("gone_at", np.int64),  # where the ids to delete begin
        ("gone", np.int64),  # how many
    ]
)


@dataclass(frozen=True, slots=True)
class Keys:
    """Encoded keys side by side: key k is `text[at[k]:at[k + 1]]`, a whole `$<L>\\r\\n<key>\\r\\n`.

    Attributes:
        text: uint8.
        at: int64 `[keys + 1]`.
    """

    text: UInt8
    at: Int64

    @classmethod
    def of(cls, keys: list[bytes]) -> "Keys":
        """Encodes the keys, in order."""
        encoded = [b"$%d\r\n%s\r\n" % (len(key), key) for key in keys]
        at = np.zeros(len(keys) + 1, np.int64)
        np.cumsum([len(key) for key in encoded], out=at[1:])
        return cls(np.frombuffer(b"".join(encoded), np.uint8), at)


_ASKING = np.frombuffer(b"*1\r\n$6\r\nASKING\r\n", np.uint8)
_MULTI = np.frombuffer(b"*1\r\n$5\r\nMULTI\r\n", np.uint8)
_EXEC = np.frombuffer(b"*1\r\n$4\r\nEXEC\r\n", np.uint8)
_HMGET = np.frombuffer(b"$5\r\nHMGET\r\n", np.uint8)
_HSET = np.frombuffer(b"$4\r\nHSET\r\n", np.uint8)
_HDEL = np.frombuffer(b"$4\r\nHDEL\r\n", np.uint8)
_HSTRLEN = np.frombuffer(b"*3\r\n$7\r\nHSTRLEN\r\n", np.uint8)
_STAMP = np.frombuffer(b"$5\r\nstamp\r\n", np.uint8)

_ID_BYTES = 14  # $8\r\n<8>\r\n
_LARGEST_HEADER = 24  # *<n>\r\n or $<n>\r\n
_FRAME_BYTES = (
    320  # of one partition, without keys, ids and records: headers, names, stamp; words are put beyond the end
)
_MOST_KEYS = 3  # a write names its key so many times


def read_sizes(parts: Parts, keys: Keys) -> Int64:
    """Upper bound of the encoded bytes of each read: int64 `[parts]`."""
    return cast(Int64, _key_bytes(parts, keys) + parts["rows"] * _ID_BYTES + _FRAME_BYTES)


def reply_sizes(parts: Parts, width: int) -> Int64:
    """Upper bound of the bytes of the reply to each read of records of `width` bytes: int64 `[parts]`."""
    return cast(Int64, (width + _LARGEST_HEADER) * parts["rows"] + _FRAME_BYTES)


def write_sizes(parts: Parts, keys: Keys, width: int) -> Int64:
    """Upper bound of the encoded bytes of each write: int64 `[parts]`."""
    rows = parts["rows"] * (width + _ID_BYTES + _LARGEST_HEADER) + parts["gone"] * _ID_BYTES
    return cast(Int64, _MOST_KEYS * _key_bytes(parts, keys) + rows + _FRAME_BYTES)


def _key_bytes(parts: Parts, keys: Keys) -> Int64:
    return cast(Int64, keys.at[parts["partition"] + 1] - keys.at[parts["partition"]])


@kernel
def _header_word(width: int) -> tuple[int, int]:
    """`\\r\\n$<width>\\r\\n` as a word of at most 8 bytes and its size; size 0: it is longer."""
    header = np.empty(32, np.uint8)
    header[0], header[1] = 13, 10
    size = put_header(header, 2, 36, width)
    word = np.uint64(0)
    for i in range(min(size, 8)):
        word |= np.uint64(header[i]) << np.uint64(8 * i)
    return word, (size if size <= 8 else 0)  # type: ignore[return-value]  # uint64 inside the kernel


@kernel
def _put_records(part: np.void, ids: Int64, positions: Int64, rows: UInt8, width: int, out: UInt8, at: int) -> int:
    """`$8\\r\\n<id>\\r\\n$<W>\\r\\n<record>\\r\\n` for every record of the part."""
    word, size = _header_word(width)
    for row in range(part["row_at"], part["row_at"] + part["rows"]):
        put_word(out, at, INT64_HEADER)
        put_word(out, at + 4, ids[row])
        put_word(out, at + 12, word)
        at = at + 12 + size if size else put_header(out, at + 14, 36, width)
        copy_bytes(out, at, rows, positions[row] * width, width)
        out[at + width] = 13
        out[at + width + 1] = 10
        at += width + 2
    return at


@kernel
def encode_reads(parts: Parts, text: UInt8, key_at: Int64, ids: Int64, asking: bool, out: UInt8, at: int) -> int:
    """Puts the reads of some partitions into `out` from `at` on; returns the place behind them.

    Args:
        parts: `PART` `[p]`.
        text, key_at: `Keys` of the table's partitions.
        ids: int64; a part reads `ids[row_at:row_at + rows]`.
        asking: An ASKING goes before each.
        out: uint8, with room for `read_sizes`.
        at: Where to begin.
    """
    for c in range(len(parts)):
        part = parts[c]
        if asking:
            at = put_text(out, at, _ASKING)
        at = put_header(out, at, 42, 3 + part["rows"])
        at = put_text(out, at, _HMGET)
        at = put_text(out, at, text[key_at[part["partition"]] : key_at[part["partition"] + 1]])
        at = put_text(out, at, _STAMP)
        for row in range(part["row_at"], part["row_at"] + part["rows"]):
            at = put_int64(out, at, ids[row])
    return at


@kernel
def encode_writes(
    parts: Parts, text: UInt8, key_at: Int64, ids: Int64, positions: Int64, gone: Int64, rows: UInt8, width: int,
    sequence: int, asking: bool, out: UInt8, at: int,
) -> int:  # fmt: skip
    """Puts the writes of some partitions into `out` from `at` on; returns the place behind them.

    Args:
        parts: `PART` `[p]`.
        text, key_at: `Keys` of the table's partitions.
        ids: int64; a part writes `ids[row_at:row_at + rows]`.
        positions: int64: the record of `ids[i]` is `rows[positions[i] * width:]`.
        gone: int64; a part deletes `gone[gone_at:gone_at + gone]`.
        rows: uint8, records of `width` bytes.
        sequence: The partitions' new stamp.
        asking: An ASKING goes before what needs one.
        out: uint8, with room for `write_sizes`.
        at: Where to begin.
    """
    for c in range(len(parts)):
        part = parts[c]
        key = text[key_at[part["partition"]] : key_at[part["partition"] + 1]]
        if asking:
            at = put_text(out, at, _ASKING)
        at = put_text(out, at, _HSTRLEN)
        at = put_text(out, at, key)
        at = put_text(out, at, _STAMP)
        if asking:
            at = put_text(out, at, _ASKING)
        if part["gone"]:
            at = put_text(out, at, _MULTI)
            at = put_header(out, at, 42, 2 + part["gone"])
            at = put_text(out, at, _HDEL)
            at = put_text(out, at, key)
            for row in range(part["gone_at"], part["gone_at"] + part["gone"]):
                at = put_int64(out, at, gone[row])
        at = put_header(out, at, 42, 4 + 2 * part["rows"])
        at = put_text(out, at, _HSET)
        at = put_text(out, at, key)
        at = put_text(out, at, _STAMP)
        at = put_int64(out, at, sequence)
        at = _put_records(part, ids, positions, rows, width, out, at)
        if part["gone"]:
            at = put_text(out, at, _EXEC)
    return at


# Words of RESP2 in a buffer: texts, headers and numbers, for the kernels that encode requests


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
