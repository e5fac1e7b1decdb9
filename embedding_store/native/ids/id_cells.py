"""The cells of the id index: finding, claiming and removing ids.

What a line of memory holds is in `id_lines`.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.ids.id_growth import grow_to_load
from elastable.embedding_store.native.ids.id_lines import (
    COUNT,
    FREE,
    FULL,
    HIGH,
    LINES,
    ONE,
    Cells,
    Place,
    Word,
    append_cell,
    cells_used,
    drop_cell,
    home_of,
    place_of,
    position_in,
    seek_cell,
)
from elastable.embedding_store.native.kernel import kernel, prefetch_line

__all__ = [
    "claim",
    "find",
    "free_positions",
    "remove",
]

_AHEAD = 12
_BLOCK = 32
_RING = np.uint64(2 * _BLOCK - 1)  # homes of two blocks


@kernel
def find(cells: Cells, state: Int64, ids: Int64, positions: Int64) -> int:
    """`RowDirectory.find`; writes nothing but `positions`.

    In blocks, so that the lines of one arrive while those of the block before
    it are looked at, and without a branch where an id lies in its home line:
    no processor foresees a branch on what memory holds.
    """
    place = place_of(state)
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
            used = cells_used(cells, line)
            position = position_in(cells, line, k)
            positions[i] = position if k < used else -1
            missing += 0 if k < used else 1
            overflows = (k >= used) & (used == FULL)
            crowded[count] = i
            count += ONE if overflows else np.uint64(0)
            prefetch_line(cells, line + np.uint64(overflows), 0)
        for j in range(count):
            i = crowded[np.uint64(j)]
            first, at = home_of(ids[i], place)
            line, k = seek_cell(cells, first, at, ids[i])
            if k < FULL:
                positions[i] = position_in(cells, line, k)
                missing -= 1
    return missing


@kernel
def _ask_for_homes(cells: Cells, place: Place, ids: Int64, start: int, homes: npt.NDArray[np.uint64]) -> None:
    """The home lines of a block of ids, which are asked for. Two loops: the first one runs on vectors of ids."""
    begin, count = np.uint64(start), min(_BLOCK, len(ids) - start)
    for j in range(count):
        i = begin + np.uint64(j)
        first, line = home_of(ids[i], place)
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
def claim(
    cells: Cells, row_ids: Int64, state: Int64, scratch: Cells, ids: Int64, positions: Int64, fresh: Int64, begin: int
) -> tuple[int, int]:
    """`RowDirectory.claim` of ids[begin:]; the index grows by a segment at a time as it fills.

    Returns:
        How many were fresh, and the next of `ids`: their end, or where ids fall together too much to go on, as one
        finds its segment full, or the index cannot grow (`must_grow`).
    """
    count = 0
    if not grow_to_load(cells, state, scratch):
        return count, begin
    for i in range(begin, len(ids)):
        first, at = home_of(ids[min(i + _AHEAD, len(ids) - 1)], place_of(state))
        prefetch_line(cells, first + at, 0)
        first, at = home_of(ids[i], place_of(state))
        line, k = seek_cell(cells, first, at, ids[i])
        if k < FULL:
            positions[i] = position_in(cells, line, k)
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
        append_cell(cells, line, ids[i], position)
        positions[i] = position
        fresh[count] = i
        count += 1
        state[COUNT] += 1
        if not grow_to_load(cells, state, scratch):
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
        used = cells_used(cells, first + at)
        moved = False
        for k in range(used):
            wanted = np.int64(cells[first + at, k])
            _, home = home_of(wanted, place)
            if ((at - home) & last) >= ((at - hole) & last):
                append_cell(cells, first + hole, wanted, position_in(cells, first + at, np.uint64(k)))
                drop_cell(cells, first + at, np.uint64(k))
                moved = True
                break
        if used < FULL:
            return
        if moved:
            hole = at


@kernel
def remove(cells: Cells, row_ids: Int64, state: Int64, ids: Int64) -> int:
    """`RowDirectory.remove`; free positions are chained through `row_ids`, the last one first."""
    place = place_of(state)
    count = 0
    for i in range(len(ids)):
        first, at = home_of(ids[min(i + _AHEAD, len(ids) - 1)], place)
        prefetch_line(cells, first + at, 0)
        first, at = home_of(ids[i], place)
        line, k = seek_cell(cells, first, at, ids[i])
        if k >= FULL:
            continue
        position = position_in(cells, line, k)
        full = cells_used(cells, line) == FULL
        drop_cell(cells, line, k)
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
