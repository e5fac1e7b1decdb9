"""Before-images: what was changed in a partition, as it was, in values that never change.

A value is `stamp, h, a, left` (int64 each), the ids of `h` rows that there were
and of `a` rows that there were not (int64 each), and the `h` rows as they lay in
the weights hash; a second value holds their slots. `left` is 1 where the change
wrote rows, 0 where it took them away. Rows are copied as they were read, packed,
in one pass: nothing here depends on what a number means. See
`elastable.embedding_store.tiers.redis.schema` for where they lie.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.native.copy import copy_bytes, put_word
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.tiers.redis.block import Block
from elastable.embedding_store.tiers.redis.more_commands import MoreCommands
from elastable.embedding_store.tiers.redis.resp_codec import Bytes, Commands

__all__ = ["FIELD_BYTES", "NO_PIN", "BeforeImage", "Flags", "Moment", "before_bytes", "decode_before", "encode_before"]

Flags = npt.NDArray[np.bool_]

_HEAD_WORDS = 4
_FRAMES_BYTES = 192  # of UNLINK and HSET, without keys and values

_UNLINK = np.frombuffer(b"*2\r\n$6\r\nUNLINK\r\n", np.uint8)
_HSET_ONE = np.frombuffer(b"*4\r\n$4\r\nHSET\r\n", np.uint8)
_HSET_TWO = np.frombuffer(b"*6\r\n$4\r\nHSET\r\n", np.uint8)
_WEIGHTS_FIELD = np.frombuffer(b"$16\r\n", np.uint8)
_SLOTS_FIELD = np.frombuffer(b"$17\r\n", np.uint8)


class Moment(NamedTuple):
    """A state of the store, and a change that made it: moments stand in the order in which they came.

    Attributes:
        version: That was current.
        serial: Of the change outside commits that was the last one (`Registry.serial`);
            0 in the name of a before-image that a commit left.
    """

    version: int
    serial: int = 0

    @property
    def weights_field(self) -> bytes:
        """Where in the hash of before-images the ids and weights lie that this change found."""
        return self.version.to_bytes(8, "little") + self.serial.to_bytes(8, "little")

    @property
    def slots_field(self) -> bytes:
        """Where their slots lie."""
        return self.weights_field + b"s"

    @classmethod
    def of_field(cls, field: bytes) -> Moment:
        """From a `weights_field`."""
        return cls(int.from_bytes(field[:8], "little"), int.from_bytes(field[8:16], "little"))


NO_PIN = Moment(np.iinfo(np.int64).max)
"""The oldest pinned moment, where none is."""

FIELD_BYTES = 16
"""Of a `Moment.weights_field`."""


@dataclass(frozen=True, slots=True)
class BeforeImage:
    """One partition's before-image.

    Attributes:
        stamp: Of the partition before the change.
        ids: int64 `[h + a]`: those of rows that there were first.
        held: How many rows there were, `h`.
        left: Whether there were rows of all these ids after the change, or of none.
        weights: uint8 `[h, weight_bytes]`.
        slots: uint8 `[h, slot_bytes]`; width 0 where they were not asked for.
    """

    stamp: int
    ids: Int64
    held: int
    left: bool
    weights: Bytes
    slots: Bytes


def decode_before(weights: bytes, weight_bytes: int, slots: bytes | None = None, slot_bytes: int = 0) -> BeforeImage:
    """Reads what `encode_before` wrote, without a copy.

    Args:
        weights: The value with ids and weights.
        weight_bytes: Of a row, packed.
        slots: The value with slots; None: without them.
        slot_bytes: Of a row.

    Raises:
        StoreFailed: it is something else.
    """
    words = np.frombuffer(weights, "<i8", min(_HEAD_WORDS, len(weights) // 8))
    if len(words) == _HEAD_WORDS:
        stamp, held, absent, left = (int(word) for word in words)
        rows_at = 8 * (_HEAD_WORDS + held + absent)
        slot_width = 0 if slots is None else slot_bytes
        whole = min(stamp, held, absent) >= 0 and len(weights) == rows_at + held * weight_bytes
        if whole and len(slots or b"") == held * slot_width:
            ids = np.frombuffer(weights, "<i8", held + absent, 8 * _HEAD_WORDS)
            rows = np.frombuffer(weights, np.uint8, offset=rows_at).reshape(held, weight_bytes)
            beside = np.frombuffer(slots or b"", np.uint8).reshape(held, slot_width)
            return BeforeImage(stamp, ids, held, bool(left), rows, beside)
    raise StoreFailed(f"a before-image of {len(weights)} bytes is none of rows of {weight_bytes} bytes")


def before_bytes(block: Block) -> tuple[int, int]:
    """(rows, bytes) of the before-images of a whole block."""
    rows, size = 0, 8 * _HEAD_WORDS * len(block.weights)
    for name, of in block.tables.items():
        held = of.unique - int(of.no_weights.sum())
        rows += of.unique
        size += 8 * of.unique + held * (block.catalog.tables[name].spec.weight_bytes + 4 * of.slots.shape[1])
    return rows, size


def encode_before(block: Block, stamps: Int64, name: Moment, drops: Flags, left: bool = True) -> MoreCommands:
    """The commands that leave a block's rows, as they were read, as before-images.

    Args:
        block: Whose rows have not changed since they were read.
        stamps: int64 `[commands]`, of each partition.
        name: Of the change.
        drops: bool `[commands]`: whether the partition's earlier before-images go.
        left: Whether the change writes rows; else it takes them away.

    Returns:
        For each of the block's partitions the commands of its transaction.
    """
    keys, weights, slots = block.catalog.keys, block.weights, block.slots
    key = weights["key"] + 2 * block.catalog.partitions
    sizes = 2 * (keys.at[key + 1] - keys.at[key]) + _FRAMES_BYTES + 8 * _HEAD_WORDS
    sizes = sizes + weights["rows"] * (8 + weights["width"] + slots["width"])
    out = np.empty(int(sizes.sum()), np.uint8)
    at = np.zeros(len(weights) + 1, np.int64)
    heads = np.empty((len(weights), _HEAD_WORDS), np.int64)
    heads[:, 0], heads[:, 3] = stamps, left
    _encode(weights, slots, key, keys.text, keys.at, block.ids, block.positions, block.rows, block.missing,
            heads, drops, name.version, name.serial, out, at)  # fmt: skip
    return MoreCommands(out, at, 1 + drops.astype(np.int64))


@kernel
def _put_text(out: Bytes, at: int, text: Bytes) -> int:
    for i in range(len(text)):
        out[at + i] = text[i]
    return at + len(text)


@kernel
def _put_length(out: Bytes, at: int, number: int) -> int:
    """`$<number>\\r\\n`."""
    out[at] = 36
    digits = 1
    power = 10
    while number >= power:
        digits += 1
        power *= 10
    rest = number
    for i in range(digits):
        out[at + digits - i] = 48 + rest % 10
        rest //= 10
    return _put_end(out, at + digits + 1)


@kernel
def _put_end(out: Bytes, at: int) -> int:
    out[at] = 13
    out[at + 1] = 10
    return at + 2


@kernel
def _put_rows(width: int, block_at: int, places: Int64, block: Bytes, out: Bytes, at: int) -> int:
    for i in range(len(places)):
        copy_bytes(out, at, block, block_at + places[i] * width, width)
        at += width
    return at


@kernel
def _sort_out(
    row_at: int, rows: int, flag_at: int, ids: Int64, positions: Int64, missing: Bytes, sorted_ids: Int64, held: Int64
) -> int:  # fmt: skip
    """Ids of rows that there were, with their positions, then the others; how many there were."""
    count = 0
    for row in range(row_at, row_at + rows):
        if not missing[flag_at + positions[row]]:
            sorted_ids[count] = ids[row]
            held[count] = positions[row]
            count += 1
    place = count
    for row in range(row_at, row_at + rows):
        if missing[flag_at + positions[row]]:
            sorted_ids[place] = ids[row]
            place += 1
    return count


@kernel
def _put_field(out: Bytes, at: int, version: int, serial: int) -> int:
    put_word(out, at, version)
    put_word(out, at + 8, serial)
    return at + 16


@kernel
def _encode(
    weights: Commands, slots: Commands, key: Int64, text: Bytes, key_at: Int64, ids: Int64, positions: Int64,
    block: Bytes, missing: Bytes, heads: Int64, drops: Flags, version: int, serial: int, out: Bytes, at: Int64,
) -> None:  # fmt: skip
    """Writes commands to `out`; those of partition c end at `at[c + 1]`."""
    most = 0
    for c in range(len(weights)):
        most = max(most, weights[c]["rows"])
    sorted_ids = np.empty(most, np.int64)
    places = np.empty(most, np.int64)
    end = 0
    for c in range(len(weights)):
        rows, width, slot_width = weights[c]["rows"], weights[c]["width"], slots[c]["width"]
        name = text[key_at[key[c]] : key_at[key[c] + 1]]
        held = _sort_out(weights[c]["row_at"], rows, weights[c]["flag_at"], ids, positions, missing, sorted_ids, places)
        if drops[c]:
            end = _put_text(out, end, _UNLINK)
            end = _put_text(out, end, name)
        end = _put_text(out, end, _HSET_TWO if slot_width else _HSET_ONE)
        end = _put_text(out, end, name)
        end = _put_end(out, _put_field(out, _put_text(out, end, _WEIGHTS_FIELD), version, serial))
        end = _put_length(out, end, 8 * (heads.shape[1] + rows) + held * width)
        heads[c, 1] = held
        heads[c, 2] = rows - held
        for i in range(heads.shape[1]):
            put_word(out, end, heads[c, i])
            end += 8
        for i in range(rows):
            put_word(out, end, sorted_ids[i])
            end += 8
        end = _put_end(out, _put_rows(width, weights[c]["block_at"], places[:held], block, out, end))
        if slot_width:
            end = _put_field(out, _put_text(out, end, _SLOTS_FIELD), version, serial)
            out[end] = 115  # s
            end = _put_length(out, _put_end(out, end + 1), held * slot_width)
            end = _put_end(out, _put_rows(slot_width, slots[c]["block_at"], places[:held], block, out, end))
        at[c + 1] = end
