"""The cells of the id index: how ids are hashed to lines of memory, and how their number grows.

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

from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.kernel import kernel, prefetch_line

__all__ = [
    "Cells",
    "all_lines",
    "claim",
    "find",
    "free_positions",
    "next_size",
    "refill",
    "remove",
    "rows_before_growth",
]

Cells = npt.NDArray[np.uint64]
"""uint64 `[lines, 8]`."""

Word = Any  # one uint64 of them, which mypy would have become something else at every operator

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
LEAST_LOAD = 0.52  # of all cells, after every step of growth; a group that is next has half as much more

_AHEAD = 12
_BLOCK = 32
_RING = np.uint64(2 * _BLOCK - 1)  # homes of two blocks
_LOW = np.uint64(0xFFFFFFFF)
_FULL = np.uint64(LINE_CELLS)
_ONE = np.uint64(1)
_FIVE = np.uint64(5)
_LINES = np.uint64(SEGMENT_LINES)
_LINE_BITS = np.uint64(41)  # of the hash: from here nine for the line; groups take those below
_THIRD_BITS = np.uint64(50)  # fourteen, which say whether an id is of the third that moves
_THIRD = np.uint64((1 << 14) // 3)
_IN_USE = np.uint64(32)  # where in word 7 the number of cells in use stands
_HIGH_BITS = np.uint64(35)  # where in word 7 the high bits of positions begin


@kernel
def _hash(wanted: Word, seed: Word) -> Word:
    """The finalizer of splitmix64 (Steele, Lea, Flood: OOPSLA 2014)."""
    h = np.uint64(wanted) ^ seed
    h = (h ^ (h >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    h = (h ^ (h >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return h ^ (h >> np.uint64(31))


@kernel
def _now(state: Int64) -> Place:
    """Where ids lie at present."""
    return np.uint64(state[BITS]), np.uint64(state[WAYS]), np.uint64(state[GROWN]), np.uint64(state[SEED])


@kernel
def _home(wanted: Word, place: Place) -> tuple[Word, Word]:
    """First line of an id's segment, and its home line within it."""
    bits, ways, grown, seed = place
    h = _hash(wanted, seed)
    group = h & ((_ONE << bits) - _ONE)
    ways += _ONE if group < grown else np.uint64(0)
    half, quarter = (h >> bits) & _ONE, (h >> (bits + _ONE)) & _ONE
    # Of three segments the third one takes a third of either half.
    third = np.uint64(2) - half if (h >> _THIRD_BITS) < _THIRD else np.uint64(0)
    way = half + (third if ways == np.uint64(3) else np.uint64(0))
    way += quarter + quarter if ways == np.uint64(4) else np.uint64(0)
    return ((way << bits) + group) * _LINES, (h >> _LINE_BITS) & (_LINES - _ONE)


@kernel
def _used(cells: Cells, line: Word) -> Word:
    return (cells[line, 7] >> _IN_USE) & np.uint64(7)


@kernel
def _position(cells: Cells, line: Word, k: Word) -> Word:
    low = (cells[line, _FIVE + (k >> _ONE)] >> (np.uint64(32) * (k & _ONE))) & _LOW
    high = (cells[line, 7] >> (_HIGH_BITS + _FIVE * k)) & np.uint64(31)
    return np.int64(low | (high << np.uint64(32)))


@kernel
def _set(cells: Cells, line: Word, k: Word, wanted: Word, position: Word) -> None:
    cells[line, k] = np.uint64(wanted)
    word, shift = _FIVE + (k >> _ONE), np.uint64(32) * (k & _ONE)
    cells[line, word] = (cells[line, word] & ~(_LOW << shift)) | ((np.uint64(position) & _LOW) << shift)
    shift = _HIGH_BITS + _FIVE * k
    high = np.uint64(position) >> np.uint64(32)
    cells[line, 7] = (cells[line, 7] & ~(np.uint64(31) << shift)) | (high << shift)


@kernel
def _append(cells: Cells, line: Word, wanted: Word, position: Word) -> None:
    """Into a line that has room; what words 5 to 7 hold of a cell not in use is 0."""
    k = _used(cells, line)
    cells[line, k] = np.uint64(wanted)
    cells[line, _FIVE + (k >> _ONE)] |= (np.uint64(position) & _LOW) << (np.uint64(32) * (k & _ONE))
    cells[line, 7] += (_ONE << _IN_USE) + ((np.uint64(position) >> np.uint64(32)) << (_HIGH_BITS + _FIVE * k))


@kernel
def _put(cells: Cells, first: Word, at: Word, wanted: Word, position: Word) -> bool:
    """An id that is not there yet, into the first line from its home that has room; False where none has."""
    for _ in range(SEGMENT_LINES):
        if _used(cells, first + at) < _FULL:
            _append(cells, first + at, wanted, position)
            return True
        at = (at + _ONE) & (_LINES - _ONE)
    return False


@kernel
def _drop(cells: Cells, line: Word, k: Word) -> None:
    """The last cell of the line takes the place of cell k."""
    last = _used(cells, line) - _ONE
    _set(cells, line, k, np.int64(cells[line, last]), _position(cells, line, last))
    _set(cells, line, last, 0, 0)
    cells[line, 7] -= _ONE << _IN_USE


@kernel
def _seek(cells: Cells, first: Word, at: Word, wanted: Word) -> tuple[Word, Word]:
    """The line and cell of an id; of one that is not there the line with room for it, and 5.

    Where it is not there and its whole segment is full, the cell is 6.
    """
    for _ in range(SEGMENT_LINES):
        line = first + at
        used = _used(cells, line)
        for k in range(used):
            if cells[line, k] == np.uint64(wanted):
                return line, np.uint64(k)
        if used < _FULL:
            return line, _FULL
        at = (at + _ONE) & (_LINES - _ONE)
    return first, np.uint64(6)


@kernel
def find(cells: Cells, state: Int64, ids: Int64, positions: Int64) -> int:
    """`RowDirectory.find`; writes nothing but `positions`.

    In blocks, so that the lines of one arrive while those of the block before
    it are looked at, and without a branch where an id lies in its home line:
    no processor foresees a branch on what memory holds.
    """
    place = _now(state)
    if not _fits(len(cells), place):
        positions[:] = -1  # read by another process in the midst of a change, which it finds out
        return len(ids)
    homes = np.empty(2 * _BLOCK, np.uint64)
    crowded = np.empty(_BLOCK + 1, np.uint64)
    missing = 0
    _ask_for_homes(cells, place, ids, 0, homes)
    for start in range(0, len(ids), _BLOCK):
        _ask_for_homes(cells, place, ids, start + _BLOCK, homes)
        begin, count = np.uint64(start), np.uint64(0)
        for j in range(min(_BLOCK, len(ids) - start)):
            # Unsigned, as numba asks of signed ones whether they count from the end.
            i = begin + np.uint64(j)
            line, wanted = homes[i & _RING], np.uint64(ids[i])
            # The lowest one counts: cells not in use may hold anything.
            k = _FULL
            k = np.uint64(4) if cells[line, 4] == wanted else k
            k = np.uint64(3) if cells[line, 3] == wanted else k
            k = np.uint64(2) if cells[line, 2] == wanted else k
            k = np.uint64(1) if cells[line, 1] == wanted else k
            k = np.uint64(0) if cells[line, 0] == wanted else k
            used = _used(cells, line)
            position = _position(cells, line, k)
            positions[i] = position if k < used else -1
            missing += 0 if k < used else 1
            overflows = (k >= used) & (used == _FULL)
            crowded[count] = i
            count += _ONE if overflows else np.uint64(0)
            prefetch_line(cells, line + np.uint64(overflows), 0)
        for j in range(count):
            i = crowded[np.uint64(j)]
            first, at = _home(ids[i], place)
            line, k = _seek(cells, first, at, ids[i])
            if k < _FULL:
                positions[i] = _position(cells, line, k)
                missing -= 1
    return missing


@kernel
def _ask_for_homes(cells: Cells, place: Place, ids: Int64, start: int, homes: npt.NDArray[np.uint64]) -> None:
    """The home lines of a block of ids, which are asked for. Two loops: the first one runs on vectors of ids."""
    begin, count = np.uint64(start), min(_BLOCK, len(ids) - start)
    for j in range(count):
        i = begin + np.uint64(j)
        first, line = _home(ids[i], place)
        homes[i & _RING] = first + line
    for j in range(count):
        prefetch_line(cells, homes[(begin + np.uint64(j)) & _RING], 0)


@kernel
def _fits(there: int, place: Place) -> Any:
    """Whether every segment lies in the lines that there are."""
    bits, ways, grown, _ = place
    if bits > np.uint64(36) or ways < np.uint64(2) or ways > np.uint64(3) or grown > _ONE << bits:
        return False
    return ((ways << bits) + grown) * _LINES <= np.uint64(there)


@kernel
def _grow(cells: Cells, state: Int64, scratch: Cells) -> None:
    """One more segment for the next group, over which its ids are spread anew."""
    group, groups, ways = state[GROWN], 1 << state[BITS], state[WAYS]
    for way in range(ways):
        first = (way * groups + group) * SEGMENT_LINES
        scratch[way * SEGMENT_LINES : (way + 1) * SEGMENT_LINES] = cells[first : first + SEGMENT_LINES]
        cells[first : first + SEGMENT_LINES] = np.uint64(0)
    state[GROWN] += 1
    place = _now(state)
    for line in range(ways * SEGMENT_LINES):
        used = _used(scratch, np.uint64(line))
        state[MOVED] += np.int64(used)
        for k in range(used):
            wanted = np.int64(scratch[line, k])
            home, at = _home(wanted, place)
            _put(cells, home, at, wanted, _position(scratch, np.uint64(line), np.uint64(k)))
    if state[GROWN] == groups:
        next_size(state)


@kernel
def next_size(state: Int64) -> None:
    """What all groups have grown to is what they grow from."""
    state[BITS], state[WAYS] = state[BITS] + (state[WAYS] == 3), 5 - state[WAYS]
    state[GROWN] = 0


@kernel
def all_lines(state: Int64) -> Any:
    """Lines of all segments."""
    return SEGMENT_LINES * ((state[WAYS] << state[BITS]) + state[GROWN])


@kernel
def rows_before_growth(state: Int64) -> Any:
    """Ids that there may be before there is another segment."""
    return np.int64(LEAST_LOAD * LINE_CELLS * (all_lines(state) + SEGMENT_LINES))


@kernel
def claim(
    cells: Cells, row_ids: Int64, state: Int64, scratch: Cells, ids: Int64, positions: Int64, fresh: Int64, begin: int
) -> tuple[int, int]:
    """`RowDirectory.claim` of ids[begin:]; the index grows by a segment at a time as it fills.

    Returns:
        How many were fresh, and the end of `ids`; or the id that found its segment full.
    """
    count = 0
    for i in range(begin, len(ids)):
        first, at = _home(ids[min(i + _AHEAD, len(ids) - 1)], _now(state))
        prefetch_line(cells, first + at, 0)
        first, at = _home(ids[i], _now(state))
        line, k = _seek(cells, first, at, ids[i])
        if k < _FULL:
            positions[i] = _position(cells, line, k)
            continue
        if k > _FULL:
            return count, i
        position = state[FREE] - 1
        if position >= 0:
            state[FREE] = row_ids[position]
        else:
            position = state[HIGH]
            state[HIGH] += 1
        row_ids[position] = ids[i]
        _append(cells, line, ids[i], position)
        positions[i] = position
        fresh[count] = i
        count += 1
        state[COUNT] += 1
        while state[COUNT] > rows_before_growth(state):
            _grow(cells, state, scratch)
    return count, len(ids)


@kernel
def _close_gap(cells: Cells, place: Place, hole: Word) -> None:
    """After a cell of a full line was dropped: later ids that passed by it move up, so that they are found."""
    last = _LINES - _ONE
    first, hole = hole & ~last, hole & last
    at = hole
    while True:
        at = (at + _ONE) & last
        if at == hole:
            return
        used = _used(cells, first + at)
        moved = False
        for k in range(used):
            wanted = np.int64(cells[first + at, k])
            _, home = _home(wanted, place)
            if ((at - home) & last) >= ((at - hole) & last):
                _append(cells, first + hole, wanted, _position(cells, first + at, np.uint64(k)))
                _drop(cells, first + at, np.uint64(k))
                moved = True
                break
        if used < _FULL:
            return
        if moved:
            hole = at


@kernel
def remove(cells: Cells, row_ids: Int64, state: Int64, ids: Int64) -> int:
    """`RowDirectory.remove`; free positions are chained through `row_ids`, the last one first."""
    place = _now(state)
    count = 0
    for i in range(len(ids)):
        first, at = _home(ids[min(i + _AHEAD, len(ids) - 1)], place)
        prefetch_line(cells, first + at, 0)
        first, at = _home(ids[i], place)
        line, k = _seek(cells, first, at, ids[i])
        if k >= _FULL:
            continue
        position = _position(cells, line, k)
        full = _used(cells, line) == _FULL
        _drop(cells, line, k)
        if full:
            _close_gap(cells, place, line)
        row_ids[position] = state[FREE]
        state[FREE] = position + 1
        state[COUNT] -= 1
        count += 1
    return count


@kernel
def free_positions(row_ids: Int64, state: Int64, positions: Int64) -> None:
    """Writes the positions that come next into `positions`: free ones, then new ones."""
    following, high = state[FREE], state[HIGH]
    for i in range(len(positions)):
        if following > 0:
            positions[i] = following - 1
            following = row_ids[following - 1]
        else:
            positions[i] = high
            high += 1


@kernel
def refill(source: Cells, cells: Cells, state: Int64) -> bool:
    """Puts every id of an index into the empty cells of another of the same size; False where one is too full."""
    place = _now(state)
    for line in range(all_lines(state)):
        for k in range(_used(source, np.uint64(line))):
            wanted = np.int64(source[line, k])
            first, at = _home(wanted, place)
            if not _put(cells, first, at, wanted, _position(source, np.uint64(line), np.uint64(k))):
                return False
    return True
