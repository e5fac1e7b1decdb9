"""The lines of the id index: how ids are hashed to lines of memory, and what a line holds.

A line of 64 bytes is eight words. Words 0 to 4 hold the ids of up to five
cells, those in use first. Words 5, 6 and 7 hold the low 32 bits of their
positions, two in a word; the upper half of word 7 holds how many cells are in
use (3 bits) and the five high bits of each position. Zeroed memory is empty.

Lines come in segments of 512. An id goes into its home line, or where that is
full into the next line of the segment that has room, after the last line into
the first.

With M = 2**bits, segments j, M + j, 2M + j, ... are group j, to which the low
bits of the hash lead. A group has two segments, then three, then four, and
growing gives one more segment to one group after the other (linear hashing
with partial expansions: Larson, VLDB 1980), at the end of the memory in use.
M groups of four are 2M groups of two. So the share of cells in use hardly
changes, and a step of growth is short, whatever the size of the index.

What the index knows of itself is in `state`, whose words are named below.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.numbers.number_bits import mixed_bits

__all__ = [
    "Cells",
    "Place",
    "append_cell",
    "cells_used",
    "drop_cell",
    "home_of",
    "place_of",
    "position_in",
    "put_cell",
    "seek_cell",
    "set_cell",
]

Cells = npt.NDArray[np.uint64]
"""uint64 `[lines, 8]`."""

Word = np.uint64
"""One of the words of a line."""

Integer = int | np.integer
"""An id or a position, signed or not: kernels reinterpret its 64 bits."""

Place = tuple[Word, Word, Word, Word]
"""The words of `state` that say where an id lies: BITS, WAYS, GROWN, SEED."""

BITS = 0  # 2**bits groups
WAYS = 1  # segments of a group, 2 or 3
GROWN = 2  # groups that have one more already: those below this one
SEED = 3  # of the hash
COUNT = 4  # ids that have a position
HIGH = 5  # positions ever given
FREE = 6  # 1 + the first free position below HIGH, at which stands the next; 0: none
MOVED = 7  # cells moved by growth so far
STATE_WORDS = 8

LINE_CELLS = 5
SEGMENT_LINES = 512
GROUP_LINES = 3 * SEGMENT_LINES  # that move at a time, at most

_LOW = np.uint64(0xFFFFFFFF)
FULL = np.uint64(LINE_CELLS)
ONE = np.uint64(1)
_FIVE = np.uint64(5)
LINES = np.uint64(SEGMENT_LINES)
_LINE_BITS = np.uint64(41)  # of the hash: from here nine for the line; groups take those below
_THIRD_BITS = np.uint64(50)  # fourteen, which say whether an id is of the third that moves
_THIRD = np.uint64((1 << 14) // 3)
_IN_USE = np.uint64(32)  # where in word 7 the number of cells in use stands
_HIGH_BITS = np.uint64(35)  # where in word 7 the high bits of positions begin


@kernel
def place_of(state: Int64) -> Place:
    """Where ids lie at present."""
    return np.uint64(state[BITS]), np.uint64(state[WAYS]), np.uint64(state[GROWN]), np.uint64(state[SEED])


@kernel
def home_of(wanted: Integer, place: Place) -> tuple[Word, Word]:
    """First line of an id's segment, and its home line within it."""
    bits, ways, grown, seed = place
    h = mixed_bits(np.uint64(wanted) ^ seed)
    group = h & ((ONE << bits) - ONE)
    ways += ONE if group < grown else np.uint64(0)
    half, quarter = (h >> bits) & ONE, (h >> (bits + ONE)) & ONE
    # Of three segments the third one takes a third of either half.
    third = np.uint64(2) - half if (h >> _THIRD_BITS) < _THIRD else np.uint64(0)
    way = half + (third if ways == np.uint64(3) else np.uint64(0))
    way += quarter + quarter if ways == np.uint64(4) else np.uint64(0)
    return ((way << bits) + group) * LINES, (h >> _LINE_BITS) & (LINES - ONE)


@kernel
def cells_used(cells: Cells, line: Word) -> Word:
    return np.uint64((cells[line, 7] >> _IN_USE) & np.uint64(7))


@kernel
def position_in(cells: Cells, line: Word, k: Word) -> np.int64:
    low = (cells[line, _FIVE + (k >> ONE)] >> (np.uint64(32) * (k & ONE))) & _LOW
    high = (cells[line, 7] >> (_HIGH_BITS + _FIVE * k)) & np.uint64(31)
    return np.int64(low | (high << np.uint64(32)))


@kernel
def set_cell(cells: Cells, line: Word, k: Word, wanted: Integer, position: Integer) -> None:
    cells[line, k] = np.uint64(wanted)
    word, shift = _FIVE + (k >> ONE), np.uint64(32) * (k & ONE)
    cells[line, word] = (cells[line, word] & ~(_LOW << shift)) | ((np.uint64(position) & _LOW) << shift)
    shift = _HIGH_BITS + _FIVE * k
    high = np.uint64(position) >> np.uint64(32)
    cells[line, 7] = (cells[line, 7] & ~(np.uint64(31) << shift)) | (high << shift)


@kernel
def append_cell(cells: Cells, line: Word, wanted: Integer, position: Integer) -> None:
    """Into a line that has room; what words 5 to 7 hold of a cell not in use is 0."""
    k = cells_used(cells, line)
    cells[line, k] = np.uint64(wanted)
    cells[line, _FIVE + (k >> ONE)] |= (np.uint64(position) & _LOW) << (np.uint64(32) * (k & ONE))
    cells[line, 7] += (ONE << _IN_USE) + ((np.uint64(position) >> np.uint64(32)) << (_HIGH_BITS + _FIVE * k))


@kernel
def put_cell(cells: Cells, first: Word, at: Word, wanted: Integer, position: Integer) -> bool:
    """An id that is not there yet, into the first line from its home that has room; False where none has."""
    for _ in range(SEGMENT_LINES):
        if cells_used(cells, first + at) < FULL:
            append_cell(cells, first + at, wanted, position)
            return True
        at = (at + ONE) & (LINES - ONE)
    return False


@kernel
def drop_cell(cells: Cells, line: Word, k: Word) -> None:
    """The last cell of the line takes the place of cell k."""
    last = cells_used(cells, line) - ONE
    set_cell(cells, line, k, np.int64(cells[line, last]), position_in(cells, line, last))
    set_cell(cells, line, last, 0, 0)
    cells[line, 7] -= ONE << _IN_USE


@kernel
def seek_cell(cells: Cells, first: Word, at: Word, wanted: Integer) -> tuple[Word, Word]:
    """The line and cell of an id; of one that is not there the line with room for it, and 5.

    Where it is not there and its whole segment is full, the cell is 6.
    """
    for _ in range(SEGMENT_LINES):
        line = first + at
        used = cells_used(cells, line)
        for k in range(used):
            if cells[line, k] == np.uint64(wanted):
                return line, np.uint64(k)
        if used < FULL:
            return line, FULL
        at = (at + ONE) & (LINES - ONE)
    return first, np.uint64(6)
