"""A hash index from any int64 id to the position of its row."""

from __future__ import annotations

import os

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.intrinsics import prefetch_line
from elastable.embedding_store.native.kernel import inlined, kernel
from elastable.embedding_store.native.number_formats import mixed_bits
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.native.slab import Scratch, Slab, SlabMaker, anonymous_slab

_FIRST_ROWS = 512
_MOST_ROWS = 1 << 37  # positions have so many bits
# Of the hash at first. Partitions and shards are chosen by the same hash with seed 0: under that seed all ids of one of
# them would fall together, and rows do come by partition where a tier is read.
_SEED = int.from_bytes(b"elastabl", "little")


class IdIndex(RowDirectory):
    """Rows in first-come order, found by open addressing over cache lines.

    At least half of the cells are in use. With the ids by position a row takes
    33 bytes at most, also while the index grows: it grows by one segment, for
    which some thousand cells move, for every 1,300 new ids, whatever its size.
    Positions of removed ids are given to the next new ones.
    """

    _cells: Slab
    _scratch: Cells
    _ids: Slab
    """The id at each position; at a free one, 1 + the next free one."""

    def __init__(self, new_slab: SlabMaker = anonymous_slab) -> None:
        self._new_slab = new_slab
        self._free, self._fresh = Scratch(np.int64), Scratch(np.int64)
        self.clear()

    @property
    def _state(self) -> Int64:
        state: Int64 = self._state_slab.array[:, 0]
        return state

    @property
    def count(self) -> int:  # type: ignore[override]
        return int(self._state[COUNT])

    @property
    def capacity(self) -> int:
        """Positions that there is room for now."""
        return len(self._ids.array)

    @property
    def positions_given(self) -> int:
        """Rows beyond were never written to."""
        return int(self._state[HIGH])

    @property
    def row_ids(self) -> Int64:
        """int64 `[positions_given]`, the id at each position; at a free one it means nothing. A view, to read."""
        row_ids: Int64 = self._ids.array[: self.positions_given, 0]
        return row_ids

    @property
    def cells_moved(self) -> int:
        """Cells that growth has moved so far."""
        return int(self._state[MOVED])

    @property
    def bytes(self) -> int:
        """Lines of all segments, and ids by position."""
        in_cells: int = 64 * int(_all_lines(self._state))
        return in_cells + 8 * self.positions_given

    def find(self, ids: Int64, positions: Int64) -> int:
        return int(_find(self._cells.array, self._state, ids, positions))

    @property
    def sound(self) -> bool:
        bits, ways, grown = (int(self._state[word]) for word in (BITS, WAYS, GROWN))
        if not (0 <= bits <= 36 and 2 <= ways <= 3 and 0 <= grown <= 1 << bits):
            return False
        return SEGMENT_LINES * ((ways << bits) + grown) <= len(self._cells.array)

    def slabs(self) -> tuple[Slab, ...]:
        return self._state_slab, self._cells, self._ids

    def reserve(self, more: int) -> None:
        """Address space, which takes memory only once it is used."""
        needed = max(self.positions_given, self.count + more)
        if needed > _MOST_ROWS:
            raise MemoryError(f"{needed} rows in one table: the index counts up to {_MOST_ROWS}")
        lines = self._lines_for(self.count + more)
        if not len(self._scratch) and lines > len(self._cells.array):
            self._scratch = np.empty((GROUP_LINES, 8), np.uint64)
        self._cells.grow(lines)
        if needed > self.capacity:
            self._ids.grow(max(needed, self.capacity * 5 // 4))

    def places(self, ids: Int64) -> Int64:
        """Free positions, the last one first, and then new ones."""
        positions = self._free.take(len(ids))
        _free_positions(self._ids.array[:, 0], self._state, positions)
        return positions

    def claim(self, ids: Int64, positions: Int64) -> Int64:
        fresh = self._fresh.take(len(ids))
        count = done = 0
        while True:
            row_ids, state = self._ids.array[:, 0], self._state
            found, done = _claim(self._cells.array, row_ids, state, self._scratch, ids, positions, fresh[count:], done)
            count += found
            if done == len(ids) and not _must_grow(state):
                return fresh[:count]
            self._hash_anew()

    def remove(self, ids: Int64) -> int:
        return int(_remove(self._cells.array, self._ids.array[:, 0], self._state, ids))

    def scan(self, cursor: int, limit: int) -> tuple[Int64, Int64, int]:
        """By position; the cursor is the next position.

        Rows that are claimed while the scan goes on are seen or not, all others once.
        """
        high = self.positions_given
        while cursor < high:
            stop = min(high, cursor + limit)
            ids, positions = self._ids.array[cursor:stop, 0].copy(), np.arange(cursor, stop)
            cursor = stop
            if self.count < high:
                found = np.empty_like(positions)
                self.find(ids, found)
                # A free position may hold an id, but that id is elsewhere.
                live = found == positions
                ids, positions = ids[live], positions[live]
            if len(ids):
                return ids, positions, cursor
        return np.empty(0, np.int64), np.empty(0, np.int64), cursor

    def clear(self) -> None:
        """The memory is given back."""
        self._state_slab = self._new_slab("index", STATE_WORDS, 1, np.int64)
        if self._state[WAYS] == 0:  # memory of nobody else
            self._state[WAYS] = 2
            self._state[SEED] = _SEED
        self._scratch = np.empty((0, 8), np.uint64)
        self._cells = self._new_slab("cells", 2 * SEGMENT_LINES, 8, np.uint64)
        self._ids = self._new_slab("ids", _FIRST_ROWS, 1, np.int64)

    def _lines_for(self, rows: int) -> int:
        """Lines that there must be to grow to so many rows."""
        state = self._state.copy()
        while rows > _rows_before_growth(state):
            state[GROWN] = (1 << state[BITS]) - 1
            if rows <= _rows_before_growth(state):
                break
            _next_size(state)
        return int(_all_lines(state)) + SEGMENT_LINES

    def _hash_anew(self) -> None:
        """Somebody has found ids that fall together: under a seed that nobody knows they are strewn again."""
        while True:
            state = self._state.copy()
            state[SEED] = int.from_bytes(os.urandom(8), "little", signed=True)
            cells = self._new_slab("cells", len(self._cells.array), 8, np.uint64)
            if _refill(self._cells.array, cells.array, state):
                self._cells = cells
                self._state[:] = state
                return


# The cells of the id index: finding, claiming and removing ids


_AHEAD = 12
_BLOCK = 32
_RING = np.uint64(2 * _BLOCK - 1)  # homes of two blocks


@kernel
def _find(cells: Cells, state: Int64, ids: Int64, positions: Int64) -> int:
    """`RowDirectory.find`; writes nothing but `positions`.

    In blocks, so that the lines of one arrive while those of the block before it are looked at, and without a branch
    where an id lies in its home line: no processor foresees a branch on what memory holds.
    """
    place = _place_of(state)
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
            k = FULL
            k = np.uint64(4) if cells[line, 4] == wanted else k
            k = np.uint64(3) if cells[line, 3] == wanted else k
            k = np.uint64(2) if cells[line, 2] == wanted else k
            k = np.uint64(1) if cells[line, 1] == wanted else k
            k = np.uint64(0) if cells[line, 0] == wanted else k
            used = _cells_used(cells, line)
            position = _position_in(cells, line, k)
            positions[i] = position if k < used else -1
            missing += 0 if k < used else 1
            overflows = (k >= used) & (used == FULL)
            crowded[count] = i
            count += ONE if overflows else np.uint64(0)
            prefetch_line(cells, line + np.uint64(overflows), 0)
        for j in range(count):
            i = crowded[np.uint64(j)]
            first, at = _home_of(ids[i], place)
            line, k = _seek_cell(cells, first, at, ids[i])
            if k < FULL:
                positions[i] = _position_in(cells, line, k)
                missing -= 1
    return missing


@kernel
def _ask_for_homes(cells: Cells, place: Place, ids: Int64, start: int, homes: npt.NDArray[np.uint64]) -> None:
    """The home lines of a block of ids, which are asked for. Two loops: the first one runs on vectors of ids."""
    begin, count = np.uint64(start), min(_BLOCK, len(ids) - start)
    for j in range(count):
        i = begin + np.uint64(j)
        first, line = _home_of(ids[i], place)
        homes[i & _RING] = first + line
    for j in range(count):
        prefetch_line(cells, homes[(begin + np.uint64(j)) & _RING], 0)


@kernel
def _fits(there: int, place: Place) -> bool:
    """Whether every segment lies in the lines that there are."""
    bits, ways, grown, _ = place
    if bits > np.uint64(36) or ways < np.uint64(2) or ways > np.uint64(3) or grown > ONE << bits:
        return False
    return bool(((ways << bits) + grown) * LINES <= np.uint64(there))


@kernel
def _claim(
    cells: Cells, row_ids: Int64, state: Int64, scratch: Cells, ids: Int64, positions: Int64, fresh: Int64, begin: int
) -> tuple[int, int]:
    """`RowDirectory.claim` of ids[begin:]; the index grows by a segment at a time as it fills.

    Returns:
        How many were fresh, and the next of `ids`: their end, or where ids fall together too much to go on, as one
        finds its segment full, or the index cannot grow (`_must_grow`).
    """
    count = 0
    if not _grow_to_load(cells, state, scratch):
        return count, begin
    for i in range(begin, len(ids)):
        first, at = _home_of(ids[min(i + _AHEAD, len(ids) - 1)], _place_of(state))
        prefetch_line(cells, first + at, 0)
        first, at = _home_of(ids[i], _place_of(state))
        line, k = _seek_cell(cells, first, at, ids[i])
        if k < FULL:
            positions[i] = _position_in(cells, line, k)
            continue
        if k > FULL:
            return count, i
        position = state[FREE] - 1
        if position >= 0:
            state[FREE] = row_ids[position]
        else:
            position = state[HIGH]
            state[HIGH] += 1
        row_ids[position] = ids[i]
        _append_cell(cells, line, ids[i], position)
        positions[i] = position
        fresh[count] = i
        count += 1
        state[COUNT] += 1
        if not _grow_to_load(cells, state, scratch):
            return count, i + 1
    return count, len(ids)


@kernel
def _close_gap(cells: Cells, place: Place, hole: Word) -> None:
    """After a cell of a full line was dropped: later ids that passed by it move up, so that they are found."""
    last = LINES - ONE
    first, hole = hole & ~last, hole & last
    at = hole
    while True:
        at = (at + ONE) & last
        if at == hole:
            return
        used = _cells_used(cells, first + at)
        moved = False
        for k in range(used):
            wanted = np.int64(cells[first + at, k])
            _, home = _home_of(wanted, place)
            if ((at - home) & last) >= ((at - hole) & last):
                _append_cell(cells, first + hole, wanted, _position_in(cells, first + at, np.uint64(k)))
                _drop_cell(cells, first + at, np.uint64(k))
                moved = True
                break
        if used < FULL:
            return
        if moved:
            hole = at


@kernel
def _remove(cells: Cells, row_ids: Int64, state: Int64, ids: Int64) -> int:
    """`RowDirectory.remove`; free positions are chained through `row_ids`, the last one first."""
    place = _place_of(state)
    count = 0
    for i in range(len(ids)):
        first, at = _home_of(ids[min(i + _AHEAD, len(ids) - 1)], place)
        prefetch_line(cells, first + at, 0)
        first, at = _home_of(ids[i], place)
        line, k = _seek_cell(cells, first, at, ids[i])
        if k >= FULL:
            continue
        position = _position_in(cells, line, k)
        full = _cells_used(cells, line) == FULL
        _drop_cell(cells, line, k)
        if full:
            _close_gap(cells, place, line)
        row_ids[position] = state[FREE]
        state[FREE] = position + 1
        state[COUNT] -= 1
        count += 1
    return count


@kernel
def _free_positions(row_ids: Int64, state: Int64, positions: Int64) -> None:
    """Writes the positions that come next into `positions`: free ones, then new ones."""
    following, high = state[FREE], state[HIGH]
    for i in range(len(positions)):
        if following > 0:
            positions[i] = following - 1
            following = row_ids[following - 1]
        else:
            positions[i] = high
            high += 1


# How the id index grows, a segment at a time, and how all its ids are spread anew


LEAST_LOAD = 0.52  # of all cells, after every step of growth; a group that is next has half as much more


@kernel
def _grow_to_load(cells: Cells, state: Int64, scratch: Cells) -> bool:
    """Grows as long as there are too many ids; False where a step of it does not fit."""
    while _must_grow(state):
        if not _grow(cells, state, scratch):
            return False
    return True


@kernel
def _must_grow(state: Int64) -> bool:
    """Whether there are more ids than the segments are meant to hold."""
    return bool(state[COUNT] > _rows_before_growth(state))


@kernel
def _grow(cells: Cells, state: Int64, scratch: Cells) -> bool:
    """One more segment for the next group, over which its ids are spread anew.

    False where they do not fit, as too many of them fall into one segment: the index is as it was.
    """
    group, groups, ways = state[GROWN], 1 << state[BITS], state[WAYS]
    for way in range(ways):
        first = (way * groups + group) * SEGMENT_LINES
        scratch[way * SEGMENT_LINES : (way + 1) * SEGMENT_LINES] = cells[first : first + SEGMENT_LINES]
        cells[first : first + SEGMENT_LINES] = np.uint64(0)
    state[GROWN] += 1
    moved = _spread(scratch[: ways * SEGMENT_LINES], cells, _place_of(state))
    if moved < 0:
        state[GROWN] -= 1
        for way in range(ways):
            first = (way * groups + group) * SEGMENT_LINES
            cells[first : first + SEGMENT_LINES] = scratch[way * SEGMENT_LINES : (way + 1) * SEGMENT_LINES]
        last = (ways * groups + group) * SEGMENT_LINES
        cells[last : last + SEGMENT_LINES] = np.uint64(0)
        return False
    state[MOVED] += moved
    if state[GROWN] == groups:
        _next_size_inlined(state)
    return True


@kernel
def _spread(source: Cells, cells: Cells, place: Place) -> int:
    """Puts every id in some lines into empty segments; returns how many there were, -1 where a segment is too full."""
    moved = 0
    for line in range(len(source)):
        used = _cells_used(source, np.uint64(line))
        for k in range(used):
            wanted = np.int64(source[line, k])
            first, at = _home_of(wanted, place)
            if not _put_cell(cells, first, at, wanted, _position_in(source, np.uint64(line), np.uint64(k))):
                return -1
        moved += int(used)
    return moved


def _next_size(state: Int64) -> None:
    """What all groups have grown to is what they grow from."""
    state[BITS], state[WAYS] = state[BITS] + (state[WAYS] == 3), 5 - state[WAYS]
    state[GROWN] = 0


_next_size_inlined = inlined(_next_size)  # for kernels; a large table's first growth has nothing to compile


@kernel
def _all_lines(state: Int64) -> int:
    """Lines of all segments."""
    lines: int = SEGMENT_LINES * ((state[WAYS] << state[BITS]) + state[GROWN])
    return lines


@kernel
def _rows_before_growth(state: Int64) -> np.int64:
    """Ids that there may be before there is another segment."""
    return np.int64(LEAST_LOAD * LINE_CELLS * (_all_lines(state) + SEGMENT_LINES))


@kernel
def _refill(source: Cells, cells: Cells, state: Int64) -> bool:
    """Puts every id of an index into the empty cells of another of the same size; False where one is too full."""
    return bool(_spread(source[: _all_lines(state)], cells, _place_of(state)) >= 0)


# The lines of the id index: how ids are hashed to lines of memory, and what a line holds


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
FREE = 6  # 1 + the first free position below HIGH, which holds the next; 0: none
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
_IN_USE = np.uint64(32)  # where in word 7 the number of cells in use begins
_HIGH_BITS = np.uint64(35)  # where in word 7 the high bits of positions begin


@kernel
def _place_of(state: Int64) -> Place:
    """Where ids lie at present."""
    return np.uint64(state[BITS]), np.uint64(state[WAYS]), np.uint64(state[GROWN]), np.uint64(state[SEED])


@kernel
def _home_of(wanted: Integer, place: Place) -> tuple[Word, Word]:
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
def _cells_used(cells: Cells, line: Word) -> Word:
    return np.uint64((cells[line, 7] >> _IN_USE) & np.uint64(7))


@kernel
def _position_in(cells: Cells, line: Word, k: Word) -> np.int64:
    low = (cells[line, _FIVE + (k >> ONE)] >> (np.uint64(32) * (k & ONE))) & _LOW
    high = (cells[line, 7] >> (_HIGH_BITS + _FIVE * k)) & np.uint64(31)
    return np.int64(low | (high << np.uint64(32)))


@kernel
def _set_cell(cells: Cells, line: Word, k: Word, wanted: Integer, position: Integer) -> None:
    cells[line, k] = np.uint64(wanted)
    word, shift = _FIVE + (k >> ONE), np.uint64(32) * (k & ONE)
    cells[line, word] = (cells[line, word] & ~(_LOW << shift)) | ((np.uint64(position) & _LOW) << shift)
    shift = _HIGH_BITS + _FIVE * k
    high = np.uint64(position) >> np.uint64(32)
    cells[line, 7] = (cells[line, 7] & ~(np.uint64(31) << shift)) | (high << shift)


@kernel
def _append_cell(cells: Cells, line: Word, wanted: Integer, position: Integer) -> None:
    """Into a line that has room; what words 5 to 7 hold of a cell not in use is 0."""
    k = _cells_used(cells, line)
    cells[line, k] = np.uint64(wanted)
    cells[line, _FIVE + (k >> ONE)] |= (np.uint64(position) & _LOW) << (np.uint64(32) * (k & ONE))
    cells[line, 7] += (ONE << _IN_USE) + ((np.uint64(position) >> np.uint64(32)) << (_HIGH_BITS + _FIVE * k))


@kernel
def _put_cell(cells: Cells, first: Word, at: Word, wanted: Integer, position: Integer) -> bool:
    """An id that is not there yet, into the first line from its home that has room; False where none has."""
    for _ in range(SEGMENT_LINES):
        if _cells_used(cells, first + at) < FULL:
            _append_cell(cells, first + at, wanted, position)
            return True
        at = (at + ONE) & (LINES - ONE)
    return False


@kernel
def _drop_cell(cells: Cells, line: Word, k: Word) -> None:
    """The last cell of the line takes the place of cell k."""
    last = _cells_used(cells, line) - ONE
    _set_cell(cells, line, k, np.int64(cells[line, last]), _position_in(cells, line, last))
    _set_cell(cells, line, last, 0, 0)
    cells[line, 7] -= ONE << _IN_USE


@kernel
def _seek_cell(cells: Cells, first: Word, at: Word, wanted: Integer) -> tuple[Word, Word]:
    """The line and cell of an id; of one that is not there the line with room for it, and 5.

    Where it is not there and its whole segment is full, the cell is 6.
    """
    for _ in range(SEGMENT_LINES):
        line = first + at
        used = _cells_used(cells, line)
        for k in range(used):
            if cells[line, k] == np.uint64(wanted):
                return line, np.uint64(k)
        if used < FULL:
            return line, FULL
        at = (at + ONE) & (LINES - ONE)
    return first, np.uint64(6)
