"""RESP2 in bulk: requests and replies of rows as fixed-stride bytes, without an object per row.

A request for rows, and its reply (`W` bytes a row, nil for a row that is not there):

    *<3+n> $5 HMGET $<L> <key> $7 version ($8 <id>) * n
    *<1+n> $8 <stamp> ($<W> <row> | $-1) * n

A change of a partition, and its replies:

    MULTI   HSET <weights> version <stamp> (<id> <row>) * n   HSET <slots> (<id> <slots>) * n   more     EXEC
    +OK     +QUEUED                                           +QUEUED                           +QUEUED  *3 :k :k :k

Where a node is asked out of turn (`-ASK`), an `ASKING` goes first and an `+OK` comes back first.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.copy import copy_bytes, put_word
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.tiers.redis.record_requests import Keys

__all__ = [
    "COMMAND",
    "NO_STAMP",
    "Bytes",
    "Commands",
    "block_encode_reads",
    "block_encode_writes",
    "block_read_sizes",
    "block_reply_sizes",
    "block_write_sizes",
]

Bytes = npt.NDArray[np.uint8]
Commands = npt.NDArray[np.void]

#: One row command: the rows of one key. Offsets count from 0; units are in the names.
COMMAND = np.dtype(
    [
        ("key", np.int64),  # which of the keys
        ("row_at", np.int64),  # where its ids begin in `ids` and `positions`
        ("rows", np.int64),  # how many ids
        ("width", np.int64),  # bytes of a row; 0: this key is left alone
        ("block_at", np.int64),  # byte of the block where the row of position 0 lies
        ("flag_at", np.int64),  # place of position 0 in the flags of missing rows
        ("stamped", np.int64),  # 1: the key carries the stamp of its partition
    ]
)

NO_STAMP = -1


_ASKING = np.frombuffer(b"*1\r\n$6\r\nASKING\r\n", np.uint8)
_MULTI = np.frombuffer(b"*1\r\n$5\r\nMULTI\r\n", np.uint8)
_EXEC = np.frombuffer(b"*1\r\n$4\r\nEXEC\r\n", np.uint8)
_HMGET = np.frombuffer(b"$5\r\nHMGET\r\n", np.uint8)
_HSET = np.frombuffer(b"$4\r\nHSET\r\n", np.uint8)
_STAMP = np.frombuffer(b"$7\r\nversion\r\n", np.uint8)

# As they lie in little-endian words.
_INT64_HEADER = int.from_bytes(b"$8\r\n", "little")
_CRLF = int.from_bytes(b"\r\n", "little")

_ID_BYTES = 14  # $8\r\n<8>\r\n
_FRAME_BYTES = 128  # of one command, without its key and rows: headers, ASKING, MULTI, EXEC, stamp
_LARGEST_HEADER = 24  # *<n>\r\n or $<n>\r\n


def block_read_sizes(commands: Commands, keys: Keys) -> Int64:
    """Upper bound of the encoded bytes of each read: int64 `[commands]`."""
    key_bytes = keys.at[commands["key"] + 1] - keys.at[commands["key"]]
    return cast(Int64, key_bytes + commands["rows"] * _ID_BYTES + _FRAME_BYTES)


def block_reply_sizes(commands: Commands) -> Int64:
    """Upper bound of the bytes of the reply to each read: int64 `[commands]`."""
    return cast(Int64, (commands["width"] + _LARGEST_HEADER) * commands["rows"] + _FRAME_BYTES)


def block_write_sizes(weights: Commands, slots: Commands, keys: Keys) -> Int64:
    """Upper bound of the encoded bytes of each change: int64 `[changes]`."""
    row_bytes = (weights["width"] + slots["width"] + 2 * (_ID_BYTES + _LARGEST_HEADER)) * weights["rows"]
    key_bytes = sum(keys.at[commands["key"] + 1] - keys.at[commands["key"]] for commands in (weights, slots))
    return cast(Int64, key_bytes + row_bytes + 2 * _FRAME_BYTES)


@kernel
def _put_text(out: Bytes, at: int, text: Bytes) -> int:
    for i in range(len(text)):
        out[at + i] = text[i]
    return at + len(text)


@kernel
def _put_header(out: Bytes, at: int, kind: int, number: int) -> int:
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
def _put_int64(out: Bytes, at: int, value: int) -> int:
    """`$8\\r\\n<value, little-endian>\\r\\n`, and rubbish in the 6 bytes behind it."""
    put_word(out, at, _INT64_HEADER)
    put_word(out, at + 4, value)
    put_word(out, at + 12, _CRLF)
    return at + 14


@kernel
def _header_word(width: int) -> tuple[int, int]:
    """`\\r\\n$<width>\\r\\n` as a word of at most 8 bytes and its size; size 0: it is longer."""
    header = np.empty(32, np.uint8)
    header[0], header[1] = 13, 10
    size = _put_header(header, 2, 36, width)
    word = np.uint64(0)
    for i in range(min(size, 8)):
        word |= np.uint64(header[i]) << np.uint64(8 * i)
    return word, (size if size <= 8 else 0)  # type: ignore[return-value]  # uint64 inside the kernel


@kernel
def _put_rows(command: np.void, ids: Int64, positions: Int64, block: Bytes, out: Bytes, at: int) -> int:
    """`$8\\r\\n<id>\\r\\n$<W>\\r\\n<row>\\r\\n` for every row of the command."""
    width, block_at = command["width"], command["block_at"]
    word, size = _header_word(width)
    for row in range(command["row_at"], command["row_at"] + command["rows"]):
        put_word(out, at, _INT64_HEADER)
        put_word(out, at + 4, ids[row])
        put_word(out, at + 12, word)
        at = at + 12 + size if size else _put_header(out, at + 14, 36, width)
        copy_bytes(out, at, block, block_at + positions[row] * width, width)
        out[at + width] = 13
        out[at + width + 1] = 10
        at += width + 2
    return at


@kernel
def _encode_reads(commands: Commands, text: Bytes, key_at: Int64, ids: Int64, asking: bool, out: Bytes) -> int:
    at = 0
    for c in range(len(commands)):
        command = commands[c]
        if asking:
            at = _put_text(out, at, _ASKING)
        at = _put_header(out, at, 42, 2 + command["stamped"] + command["rows"])
        at = _put_text(out, at, _HMGET)
        at = _put_text(out, at, text[key_at[command["key"]] : key_at[command["key"] + 1]])
        if command["stamped"]:
            at = _put_text(out, at, _STAMP)
        for row in range(command["row_at"], command["row_at"] + command["rows"]):
            at = _put_int64(out, at, ids[row])
    return at


@kernel
def _put_change(
    command: np.void, text: Bytes, key_at: Int64, ids: Int64, positions: Int64, block: Bytes, stamp: int,
    out: Bytes, at: int,
) -> int:  # fmt: skip
    stamped = command["stamped"] and stamp >= 0
    at = _put_header(out, at, 42, 2 + 2 * command["rows"] + (2 if stamped else 0))
    at = _put_text(out, at, _HSET)
    at = _put_text(out, at, text[key_at[command["key"]] : key_at[command["key"] + 1]])
    if stamped:
        at = _put_text(out, at, _STAMP)
        at = _put_int64(out, at, stamp)
    return _put_rows(command, ids, positions, block, out, at)


@kernel
def _encode_writes(
    weights: Commands, slots: Commands, text: Bytes, key_at: Int64, ids: Int64, positions: Int64, block: Bytes,
    stamps: Int64, asking: bool, more: Bytes, more_at: Int64, out: Bytes,
) -> int:  # fmt: skip
    at = 0
    for c in range(len(weights)):
        if asking:
            at = _put_text(out, at, _ASKING)
        at = _put_text(out, at, _MULTI)
        at = _put_change(weights[c], text, key_at, ids, positions, block, stamps[c], out, at)
        if slots[c]["width"]:
            at = _put_change(slots[c], text, key_at, ids, positions, block, stamps[c], out, at)
        size = more_at[c + 1] - more_at[c]
        copy_bytes(out, at, more, more_at[c], size)
        at += size
        at = _put_text(out, at, _EXEC)
    return at


def block_encode_reads(commands: Commands, keys: Keys, ids: Int64, asking: bool = False) -> Bytes:
    """The HMGETs of `commands`, one after another.

    Args:
        commands: `COMMAND` `[c]`.
        keys: That `command["key"]` counts in.
        ids: int64; a command asks for `ids[row_at:row_at + rows]`.
        asking: An ASKING goes before each.
    """
    out = np.empty(int(block_read_sizes(commands, keys).sum()), np.uint8)
    return out[: _encode_reads(commands, keys.text, keys.at, ids, asking, out)]


def block_encode_writes(
    weights: Commands,
    slots: Commands,
    keys: Keys,
    ids: Int64,
    positions: Int64,
    block: Bytes,
    stamp: int | Int64 = NO_STAMP,
    asking: bool = False,
    more: tuple[Bytes, Int64] | None = None,
) -> Bytes:
    """One MULTI ... EXEC for each pair of commands, one after another.

    Args:
        weights: `COMMAND` `[c]`: what goes into the weights hashes.
        slots: `COMMAND` `[c]`: what goes into the slots hashes; width 0 where there are none.
        keys: That `command["key"]` counts in.
        ids: int64; a command writes `ids[row_at:row_at + rows]`.
        positions: int64; the row of `ids[i]` lies in the block at
            `block_at + positions[i] * width`.
        block: uint8, all rows.
        stamp: Written beside the weights, unless it is `NO_STAMP`; int64 `[c]` where they differ.
        asking: An ASKING goes before each MULTI.
        more: Further commands of each transaction, as `MoreCommands.of` gives them.
    """
    stamps = np.full(len(weights), stamp, np.int64)
    text, at = (np.empty(0, np.uint8), np.zeros(len(weights) + 1, np.int64)) if more is None else more
    out = np.empty(int(block_write_sizes(weights, slots, keys).sum() + at[-1] - at[0]), np.uint8)
    used = _encode_writes(weights, slots, keys.text, keys.at, ids, positions, block, stamps, asking, text, at, out)
    return out[:used]
