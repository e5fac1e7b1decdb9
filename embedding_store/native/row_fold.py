"""Bags of rows folded into one row each, in the order of their ids, without a copy of the rows."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.row_gather import rows_ahead
from elastable.embedding_store.native.row_moves import FOLDS, WEIGHTED_FOLDS
from elastable.embedding_store.native.turns import Turns, fail_turns, join_turns, leave_turns, next_turns

__all__ = ["COMBINERS", "fold_bags", "fold_bags_in_turns"]

COMBINERS = ("sum", "mean", "sqrtn")
_SUM, _MEAN, _SQRTN = range(3)

_VALUES_A_TURN = 1 << 16  # as in `row_gather`

_NO_WEIGHTS = np.empty(0, np.float32)
_FOLD_128, _FOLD_64, _FOLD_32, _FOLD_16, _FOLD_8, _FOLD_4, _FOLD_2, _FOLD_1 = FOLDS
_WEIGH_128, _WEIGH_64, _WEIGH_32, _WEIGH_16, _WEIGH_8, _WEIGH_4, _WEIGH_2, _WEIGH_1 = WEIGHTED_FOLDS


def fold_bags(
    rows: Float32,
    fresh: Float32,
    positions: Int64,
    offsets: Int64,
    weights: Float32 | None,
    combiner: str,
    out: Float32,
) -> bool:
    """out[b] = the rows of bag b, each times its weight, summed and divided as the combiner says.

    Every sum is a left fold in float32 from zero, in the order of positions;
    a weighted row is rounded before it is added. `mean` divides by the number
    of rows or the sum of their weights, `sqrtn` by the root of the number or
    of the sum of squared weights. An empty bag, or a divisor of zero, gives zeros.

    Args:
        rows: float32 `[m, dim]`.
        fresh: float32 `[k, dim]`: where a position p < 0 finds its row, at `~p`.
        positions: int64 `[n]`, contiguous.
        offsets: int64 `[bags + 1]`, ascending; bag b is positions
            `offsets[b] - offsets[0]` to `offsets[b + 1] - offsets[0]`.
        weights: float32 `[n]`, contiguous, or None.
        combiner: One of `COMBINERS`.
        out: float32 `[bags, dim]`; rows may lie apart, columns may not.

    Returns:
        Whether there is a row at every position; else some of `out` is as it was.
    """
    ahead = rows_ahead(rows.shape[1])
    kind = COMBINERS.index(combiner)
    if weights is None:
        return bool(_fold(rows, fresh, positions, offsets, _NO_WEIGHTS, kind, out, ahead))
    return bool(_fold_weighted(rows, fresh, positions, offsets, weights, kind, out, ahead))


def fold_bags_in_turns(
    rows: Float32, ids: Int64, offsets: Int64, weights: Float32 | None, combiner: str, out: Float32, turns: Turns
) -> None:
    """As `fold_bags` without fresh rows, by as many threads as call this with the same arguments.

    Fails `turns` where there is no row for an id.
    """
    bags, dim = out.shape
    size = max(1, _VALUES_A_TURN * bags // max(1, len(ids) * dim))
    weighted, factors = weights is not None, _NO_WEIGHTS if weights is None else weights
    kind, ahead = COMBINERS.index(combiner), rows_ahead(dim)
    _fold_in_turns(rows, ids, offsets, weighted, factors, kind, out, ahead, turns.state, size)


@kernel
def _has_rows(positions: Int64, start: int, stop: int, rows: int, fresh: int) -> bool:
    """Looked at bag by bag, just before it is folded: a pass of its own would wait for the positions."""
    there = True
    for i in range(start, stop):
        there &= (positions[i] >= -fresh) & (positions[i] < rows)
    return there


@kernel
def _divide(out: Float32, bag: int, divisor: np.float32) -> None:
    for j in range(out.shape[1]):
        out[bag, j] = out[bag, j] / divisor if divisor != np.float32(0) else np.float32(0)


@kernel
def _weight_divisor(kind: int, weights: Float32) -> np.float32:
    total = np.float32(0)
    for weight in weights:
        total += weight if kind == _MEAN else weight * weight
    return total if kind == _MEAN else np.sqrt(total)


@kernel
def _fold(
    rows: Float32,
    fresh: Float32,
    positions: Int64,
    offsets: Int64,
    weights: Float32,
    kind: int,
    out: Float32,
    ahead: int,
) -> bool:
    dim = rows.shape[1]
    for b in range(len(offsets) - 1):
        i, stop = offsets[b] - offsets[0], offsets[b + 1] - offsets[0]
        if not _has_rows(positions, i, stop, len(rows), len(fresh)):
            return False
        j = 0
        while dim - j >= 128:
            _FOLD_128(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 128
        if dim - j >= 64:
            _FOLD_64(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 64
        if dim - j >= 32:
            _FOLD_32(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 32
        if dim - j >= 16:
            _FOLD_16(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 16
        if dim - j >= 8:
            _FOLD_8(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 8
        if dim - j >= 4:
            _FOLD_4(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 4
        if dim - j >= 2:
            _FOLD_2(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 2
        if dim - j >= 1:
            _FOLD_1(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
        if kind != _SUM:
            count = np.float32(stop - i)
            _divide(out, b, count if kind == _MEAN else np.sqrt(count))
    return True


@kernel
def _fold_weighted(
    rows: Float32,
    fresh: Float32,
    positions: Int64,
    offsets: Int64,
    weights: Float32,
    kind: int,
    out: Float32,
    ahead: int,
) -> bool:
    dim = rows.shape[1]
    for b in range(len(offsets) - 1):
        i, stop = offsets[b] - offsets[0], offsets[b + 1] - offsets[0]
        if not _has_rows(positions, i, stop, len(rows), len(fresh)):
            return False
        j = 0
        while dim - j >= 128:
            _WEIGH_128(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 128
        if dim - j >= 64:
            _WEIGH_64(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 64
        if dim - j >= 32:
            _WEIGH_32(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 32
        if dim - j >= 16:
            _WEIGH_16(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 16
        if dim - j >= 8:
            _WEIGH_8(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 8
        if dim - j >= 4:
            _WEIGH_4(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 4
        if dim - j >= 2:
            _WEIGH_2(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
            j += 2
        if dim - j >= 1:
            _WEIGH_1(out, b, j, rows, fresh, positions, weights, i, stop, ahead)
        if kind != _SUM:
            _divide(out, b, _weight_divisor(kind, weights[i:stop]))
    return True


@kernel
def _fold_in_turns(
    rows: Float32,
    ids: Int64,
    offsets: Int64,
    weighted: bool,
    weights: Float32,
    kind: int,
    out: Float32,
    ahead: int,
    turns: Int64,
    size: int,
) -> None:
    join_turns(turns)
    total = (len(out) + size - 1) // size
    first, last = next_turns(turns, total)
    while first < last:
        start, stop = first * size, min(last * size, len(out))
        begin, end, cuts = offsets[start], offsets[stop], offsets[start : stop + 1]
        if weighted:
            factors = weights[begin:end]
            there = _fold_weighted(rows, rows[:0], ids[begin:end], cuts, factors, kind, out[start:stop], ahead)
        else:
            there = _fold(rows, rows[:0], ids[begin:end], cuts, weights, kind, out[start:stop], ahead)
        if not there:
            fail_turns(turns)
        first, last = next_turns(turns, total)
    leave_turns(turns)
