"""Bags of rows folded into one row each, in the order of their ids, without a copy of the rows."""

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.intrinsics import fold_row
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import WorkCounter, fail_work, join_work, leave_work, next_pieces
from elastable.embedding_store.native.row_gather import rows_ahead

COMBINERS = ("sum", "mean", "sqrtn")
_SUM, _MEAN, _SQRTN = range(3)

_VALUES_A_PIECE = 1 << 16  # as in `row_gather`

_Bags = tuple[Float32, Int64, Int64]
"""Rows, positions and offsets as of `fold_bags`."""


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

    Every sum is a left fold in float32 from zero, in the order of positions; a weighted row is rounded before it is
    added. `mean` divides by the number of rows or the sum of their weights, `sqrtn` by the root of the number or of the
    sum of squared weights. An empty bag, or a divisor of zero, gives zeros.

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
    kind = COMBINERS.index(combiner)
    return bool(_fold((rows, positions, offsets), fresh, weights, kind, out, rows_ahead(rows.shape[1])))


def fold_bags_shared(
    rows: Float32,
    ids: Int64,
    offsets: Int64,
    weights: Float32 | None,
    combiner: str,
    out: Float32,
    counter: WorkCounter,
) -> None:
    """As `fold_bags` without fresh rows, by as many threads as call this with the same arguments.

    Fails `counter` where there is no row for an id.
    """
    bags, dim = out.shape
    size = max(1, _VALUES_A_PIECE * bags // max(1, len(ids) * dim))
    kind, ahead = COMBINERS.index(combiner), rows_ahead(dim)
    _fold_shared((rows, ids, offsets), weights, kind, out, ahead, counter.state, size)


@kernel
def _has_rows(positions: Int64, start: int, stop: int, rows: int, fresh: int) -> bool:
    """Looked at bag by bag, just before it is folded: a separate pass would wait for the positions."""
    there = True
    for i in range(start, stop):
        there &= (positions[i] >= -fresh) & (positions[i] < rows)
    return there


@kernel
def _divide(out: Float32, bag: int, divisor: np.float32) -> None:
    for j in range(out.shape[1]):
        out[bag, j] = out[bag, j] / divisor if divisor != np.float32(0) else np.float32(0)


@kernel
def _divisor(kind: int, weights: Float32 | None, start: int, stop: int) -> np.float32:
    total = np.float32(0)
    if weights is None:
        total = np.float32(stop - start)
    else:
        for i in range(start, stop):
            total += weights[i] if kind == _MEAN else weights[i] * weights[i]
    return total if kind == _MEAN else np.sqrt(total)


@kernel
def _fold(bags: _Bags, fresh: Float32, weights: Float32 | None, kind: int, out: Float32, ahead: int) -> bool:
    """Compiled once with weights and once without."""
    rows, positions, offsets = bags
    for b in range(len(offsets) - 1):
        start, stop = offsets[b] - offsets[0], offsets[b + 1] - offsets[0]
        if not _has_rows(positions, start, stop, len(rows), len(fresh)):
            return False
        fold_row(out, b, rows, fresh, positions, weights, start, stop, ahead)
        if kind != _SUM:
            _divide(out, b, _divisor(kind, weights, start, stop))
    return True


@kernel
def _fold_shared(
    bags: _Bags, weights: Float32 | None, kind: int, out: Float32, ahead: int, counter: Int64, size: int
) -> None:
    rows, ids, offsets = bags
    join_work(counter)
    total = (len(out) + size - 1) // size
    first, last = next_pieces(counter, total)
    while first < last:
        start, stop = first * size, min(last * size, len(out))
        begin, end = offsets[start], offsets[stop]
        some, its = (rows, ids[begin:end], offsets[start : stop + 1]), out[start:stop]
        if weights is None:
            there = _fold(some, rows[:0], None, kind, its, ahead)
        else:
            there = _fold(some, rows[:0], weights[begin:end], kind, its, ahead)
        if not there:
            fail_work(counter)
        first, last = next_pieces(counter, total)
    leave_work(counter)
