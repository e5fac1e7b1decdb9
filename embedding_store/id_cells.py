"""The cells of the id index: how ids are hashed to lines of memory, and how lines move as it grows.

A line of 64 bytes is eight words. Words 0 to 4 hold the ids of up to five
cells, those in use first. Words 5, 6 and 7 hold the low 32 bits of their
positions, two in a word; the upper half of word 7 holds how many cells are in
use (3 bits) and the five high bits of each position. Zeroed memory is empty.

The hash range is cut into 2**bits segments of equal length, each with `lines`
lines of its own. An id goes into its home line, or where that is full into the
next line of the segment that has room, and after the last line into the first.

Segments lie in the order of their hashes, so growing moves every segment
upwards: from the last one to the first, each from its place under the old
(bits, lines) to its place under the new, without memory for a second table.
What the index needs to know of itself is in `state`, the words of which are
named below.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from embedding_store.kernel import kernel, prefetch_line
from embedding_store.store import Int64

__all__ = [
    "Cells",
    "all_lines",
    "claim",
    "find",
    "free_positions",
    "plan_growth",
    "refill",
    "remove",
    "rows_before_growth",
]

Cells = npt.NDArray[np.uint64]
"""uint64 `[lines, 8]`."""

Word = Any
"""One uint64 of them, which mypy would have become something else at every operator."""

Place = tuple[Word, Word, Word, Word, Word, Word]
"""The words of `state` that say where an id lies: OLD_BITS, OLD_LINES, NEW_BITS, NEW_LINES, UNMOVED, SEED."""

OLD_BITS, OLD_LINES, NEW_BITS, NEW_LINES = range(4)  # how segments lie before and after they have moved
UNMOVED = 4  # segments from this one on have moved
COUNT = 5  # ids that have a position
HIGH = 6  # positions ever given
FREE = 7  # 1 + the first free position below HIGH, at which stands the next; 0: none
SEED = 8  # of the hash
MOVED = 9  # cells moved by growth so far
STATE_WORDS = 10

FIRST_LINES = 256
MOST_LINES = 1024  # of a segment in a finished table; while it grows half as many more
LINE_CELLS = 5
LEAST_LOAD = 0.48  # of all cells at least, after every step of growth; before, and in segments that have yet to
# move, half as many more at most

_AHEAD = 12
_BLOCK = 32
_LOW = np.uint64(0xFFFFFFFF)
_FULL = np.uint64(LINE_CELLS)
_ONE = np.uint64(1)
_FIVE = np.uint64(5)
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
    old_bits, old_lines = np.uint64(state[OLD_BITS]), np.uint64(state[OLD_LINES])
    new_bits, new_lines = np.uint64(state[NEW_BITS]), np.uint64(state[NEW_LINES])
    return old_bits, old_lines, new_bits, new_lines, np.uint64(state[UNMOVED]), np.uint64(state[SEED])


@kernel
def _home(wanted: Word, place: Place) -> tuple[Word, Word, Word]:
    """First line of an id's segment, the segment's number of lines, and the id's home line within it."""
    bits, lines, new_bits, new_lines, unmoved, seed = place
    h = _hash(wanted, seed)
    # The shift by one keeps a shift by 64 out of it, where there is one segment.
    segment = (h >> _ONE) >> (np.uint64(63) - bits)
    if segment >= unmoved:
        lines, segment = new_lines, (h >> _ONE) >> (np.uint64(63) - new_bits)
    return segment * lines, lines, ((h & _LOW) * lines) >> np.uint64(32)


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
    """Into a line that has room."""
    _set(cells, line, _used(cells, line), wanted, position)
    cells[line, 7] += _ONE << _IN_USE


@kernel
def _drop(cells: Cells, line: Word, k: Word) -> None:
    """The last cell of the line takes the place of cell k."""
    last = _used(cells, line) - _ONE
    if k != last:
        _set(cells, line, k, np.int64(cells[line, last]), _position(cells, line, last))
    cells[line, 7] -= _ONE << _IN_USE


@kernel
def _seek(cells: Cells, first: Word, lines: Word, at: Word, wanted: Word) -> tuple[Word, Word]:
    """The line and cell of an id; of one that is not there the line with room for it, and 5.

    Where it is not there and its whole segment is full, the cell is 6.
    """
    for _ in range(lines):
        line = first + at
        used = _used(cells, line)
        for k in range(used):
            if cells[line, k] == np.uint64(wanted):
                return line, np.uint64(k)
        if used < _FULL:
            return line, _FULL
        at += _ONE
        if at == lines:
            at = np.uint64(0)
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
    crowded = np.empty(_BLOCK + 1, np.int64)
    missing = 0
    for start in range(-_BLOCK, len(ids), _BLOCK):
        _ask_for_homes(cells, place, ids, start + _BLOCK, homes)
        count = 0
        for i in range(max(0, start), min(start + _BLOCK, len(ids))):
            line, wanted = homes[i & (2 * _BLOCK - 1)], np.uint64(ids[i])
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
            count += 1 if overflows else 0
            prefetch_line(cells, line + np.uint64(overflows), 0)
        for j in range(count):
            i = crowded[j]
            first, lines, at = _home(ids[i], place)
            line, k = _seek(cells, first, lines, at, ids[i])
            if k < _FULL:
                positions[i] = _position(cells, line, k)
                missing -= 1
    return missing


@kernel
def _ask_for_homes(cells: Cells, place: Place, ids: Int64, start: int, homes: npt.NDArray[np.uint64]) -> None:
    """The home lines of a block of ids, which are asked for; `_home`, written so that it runs on vectors of ids."""
    old_bits, old_lines, new_bits, new_lines, unmoved, seed = place
    old_shift, new_shift = np.uint64(63) - old_bits, np.uint64(63) - new_bits
    at, count = start & _BLOCK, min(_BLOCK, len(ids) - start)
    for i in range(count):
        h = _hash(ids[start + i], seed)
        segment = (h >> _ONE) >> old_shift
        before = segment * old_lines + (((h & _LOW) * old_lines) >> np.uint64(32))
        after = ((h >> _ONE) >> new_shift) * new_lines + (((h & _LOW) * new_lines) >> np.uint64(32))
        homes[at + i] = after if segment >= unmoved else before
    for i in range(count):
        prefetch_line(cells, homes[at + i], 0)


@kernel
def _fits(there: int, place: Place) -> Any:
    """Whether every segment lies in the lines that there are."""
    old_bits, old_lines, new_bits, new_lines, unmoved, _ = place
    end = old_lines << old_bits
    if unmoved < _ONE << old_bits:
        end = max(end, new_lines << new_bits)
    small = (old_lines < np.uint64(1 << 24)) & (new_lines < np.uint64(1 << 24))
    return small & (old_bits < np.uint64(38)) & (new_bits < np.uint64(38)) & (end <= np.uint64(there))


@kernel
def _move_segment(cells: Cells, state: Int64, scratch: Cells) -> None:
    """Moves the last segment that has not moved; after the first one the growth is complete."""
    old_lines, new_bits, new_lines = state[OLD_LINES], state[NEW_BITS], state[NEW_LINES]
    segment = state[UNMOVED] - 1
    source = segment * old_lines
    for line in range(old_lines):
        for word in range(8):
            scratch[line, word] = cells[source + line, word]
    width = new_lines << (new_bits - state[OLD_BITS])
    cells[segment * width : (segment + 1) * width] = np.uint64(0)
    state[UNMOVED] = segment
    for line in range(old_lines):
        for k in range(_used(scratch, np.uint64(line))):
            wanted = np.int64(scratch[line, k])
            first, lines, at = _home(wanted, _now(state))
            place, _ = _seek(cells, first, lines, at, wanted)
            _append(cells, place, wanted, _position(scratch, np.uint64(line), np.uint64(k)))
            state[MOVED] += 1
    if segment == 0:
        plan_growth(state)


@kernel
def plan_growth(state: Int64) -> None:
    """The next size: by a half, then by a third, which doubles it. Segments too long are halved."""
    bits, lines = state[NEW_BITS], state[NEW_LINES]
    state[OLD_BITS], state[OLD_LINES], state[UNMOVED] = bits, lines, 1 << bits
    if lines & (lines - 1) == 0:
        state[NEW_LINES] = lines + lines // 2
    elif lines < MOST_LINES:
        state[NEW_LINES] = lines // 3 * 4
    else:
        state[NEW_BITS], state[NEW_LINES] = bits + 1, lines // 3 * 2


@kernel
def all_lines(state: Int64) -> Any:
    """Lines of all segments, moved or not."""
    return state[UNMOVED] * state[OLD_LINES] + ((1 << state[OLD_BITS]) - state[UNMOVED]) * (
        state[NEW_LINES] << (state[NEW_BITS] - state[OLD_BITS])
    )


@kernel
def rows_before_growth(state: Int64) -> Any:
    """Ids that there may be before another segment moves."""
    longer = (state[NEW_LINES] << (state[NEW_BITS] - state[OLD_BITS])) - state[OLD_LINES]
    return np.int64(LEAST_LOAD * LINE_CELLS * (all_lines(state) + longer))


@kernel
def claim(
    cells: Cells, row_ids: Int64, state: Int64, scratch: Cells, ids: Int64, positions: Int64, fresh: Int64, begin: int
) -> tuple[int, int]:
    """`RowDirectory.claim` of ids[begin:]; the index grows by a few segments as it fills.

    Returns:
        How many were fresh, and the end of `ids`; or the id that found its segment full.
    """
    count = 0
    for i in range(begin, len(ids)):
        first, _, at = _home(ids[min(i + _AHEAD, len(ids) - 1)], _now(state))
        prefetch_line(cells, first + at, 0)
        first, lines, at = _home(ids[i], _now(state))
        line, k = _seek(cells, first, lines, at, ids[i])
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
            _move_segment(cells, state, scratch)
    return count, len(ids)


@kernel
def _close_gap(cells: Cells, state: Int64, first: Word, lines: Word, hole: Word) -> None:
    """After a cell of a full line was dropped: later ids that passed by it move up, so that they are found."""
    at = hole
    while True:
        at = at + _ONE if at + _ONE < lines else np.uint64(0)
        if at == hole:
            return
        used = _used(cells, first + at)
        gap = (at + lines - hole) % lines
        moved = False
        for k in range(used):
            wanted = np.int64(cells[first + at, k])
            _, _, home = _home(wanted, _now(state))
            if (at + lines - home) % lines >= gap:
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
    count = 0
    for i in range(len(ids)):
        first, lines, at = _home(ids[i], _now(state))
        line, k = _seek(cells, first, lines, at, ids[i])
        if k >= _FULL:
            continue
        position = _position(cells, line, k)
        full = _used(cells, line) == _FULL
        _drop(cells, line, k)
        if full:
            _close_gap(cells, state, first, lines, line - first)
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
def refill(source: Cells, before: Int64, cells: Cells, state: Int64) -> bool:
    """Puts every id of an index into the empty cells of another of the same size; False where one is too full."""
    for segment in range(1 << before[OLD_BITS]):
        moved = segment >= before[UNMOVED]
        width = (before[NEW_LINES] << (before[NEW_BITS] - before[OLD_BITS])) if moved else before[OLD_LINES]
        for line in range(segment * width, (segment + 1) * width):
            for k in range(_used(source, np.uint64(line))):
                wanted = np.int64(source[line, k])
                first, lines, at = _home(wanted, _now(state))
                place, cell = _seek(cells, first, lines, at, wanted)
                if cell > _FULL:
                    return False
                _append(cells, place, wanted, _position(source, np.uint64(line), np.uint64(k)))
    return True
