"""How the id index grows, a segment at a time, and how all its ids are spread anew.

What a line of memory holds is in `id_lines`.
"""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.native.ids.id_lines import (
    BITS,
    COUNT,
    GROWN,
    LINE_CELLS,
    MOVED,
    SEGMENT_LINES,
    WAYS,
    Cells,
    Place,
    cells_used,
    home_of,
    place_of,
    position_in,
    put_cell,
)
from elastable.embedding_store.native.kernel import inlined, kernel

__all__ = ["all_lines", "grow_to_load", "must_grow", "next_size", "refill", "rows_before_growth"]

LEAST_LOAD = 0.52  # of all cells, after every step of growth; a group that is next has half as much more


@kernel
def grow_to_load(cells: Cells, state: Int64, scratch: Cells) -> bool:
    """Grows as long as there are too many ids; False where a step of it does not fit."""
    while must_grow(state):
        if not _grow(cells, state, scratch):
            return False
    return True


@kernel
def must_grow(state: Int64) -> bool:
    """Whether there are more ids than the segments are meant to hold."""
    return bool(state[COUNT] > rows_before_growth(state))


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
    moved = _spread(scratch[: ways * SEGMENT_LINES], cells, place_of(state))
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
        _next_size(state)
    return True


@kernel
def _spread(source: Cells, cells: Cells, place: Place) -> int:
    """Puts every id in some lines into empty segments; returns how many there were, -1 where a segment is too full."""
    moved = 0
    for line in range(len(source)):
        used = cells_used(source, np.uint64(line))
        for k in range(used):
            wanted = np.int64(source[line, k])
            first, at = home_of(wanted, place)
            if not put_cell(cells, first, at, wanted, position_in(source, np.uint64(line), np.uint64(k))):
                return -1
        moved += int(used)
    return moved


def next_size(state: Int64) -> None:
    """What all groups have grown to is what they grow from."""
    state[BITS], state[WAYS] = state[BITS] + (state[WAYS] == 3), 5 - state[WAYS]
    state[GROWN] = 0


_next_size = inlined(next_size)  # for kernels; a large table's first growth has nothing to compile


@kernel
def all_lines(state: Int64) -> int:
    """Lines of all segments."""
    lines: int = SEGMENT_LINES * ((state[WAYS] << state[BITS]) + state[GROWN])
    return lines


@kernel
def rows_before_growth(state: Int64) -> np.int64:
    """Ids that there may be before there is another segment."""
    return np.int64(LEAST_LOAD * LINE_CELLS * (all_lines(state) + SEGMENT_LINES))


@kernel
def refill(source: Cells, cells: Cells, state: Int64) -> bool:
    """Puts every id of an index into the empty cells of another of the same size; False where one is too full."""
    return bool(_spread(source[: all_lines(state)], cells, place_of(state)) >= 0)
