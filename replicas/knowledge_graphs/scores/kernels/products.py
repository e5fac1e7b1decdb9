"""Matrix products in blocks of fixed size, shared by our own threads, with one thread of BLAS each.

BLAS' own threads spin while they wait for each other: two of them take 1.5 times the processor time of one for the same
product, and more where another process needs the cores. Blocks do not depend on the number of threads, so no bit does.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.scores.kernels.blas_threads import one_blas_thread
from elastable.replicas.knowledge_graphs.scores.kernels.row_sums import add_rows

__all__ = ["product_gradients", "products"]

_BLOCK = 2048
"""Candidates of a block: its scores with 512 queries are 4 MiB."""


def products(queries: Float32, rows: Float32, places: Int64, found: Float32, pool: RangePool = SERIAL) -> None:
    """`found = queries @ rows[places].T`.

    Args:
        queries: float32 `[b, width]`.
        rows: float32 `[r, width]`.
        places: int64 `[n]`.
        found: float32 `[b, n]`, C-contiguous rows; written.
        pool: Threads to compute with; they change no bit.
    """
    whole = _in_order(places, len(rows))

    def score(first: int, last: int) -> None:
        for block in _blocks(first, last, len(places)):
            some = rows[block] if whole else rows[places[block]]
            np.matmul(queries, some.T, out=found[:, block])

    with one_blas_thread():
        pool.share(score, -(-len(places) // _BLOCK), 1)


def product_gradients(
    queries: Float32,
    rows: Float32,
    places: Int64,
    slopes: Float32,
    row_places: Int64,
    row_gradients: Float32,
    pool: RangePool = SERIAL,
) -> Float32:
    """The gradients of `(slopes * products).sum()`: returns those of the queries, and adds those of the rows.

    Args:
        queries, rows, places, pool: As in `products`.
        slopes: float32 `[b, n]`.
        row_places: int64 `[n]`: where in `row_gradients` each candidate's gradient is added.
        row_gradients: float32 `[u, width]`, added to in place.

    Returns:
        float32 `[b, width]`.
    """
    count = len(places)
    whole, apart = _in_order(places, len(rows)), _in_order(row_places, len(row_gradients))
    to_queries = np.empty((-(-count // _BLOCK), *queries.shape), np.float32)
    to_rows = None if apart else np.empty((count, queries.shape[1]), np.float32)

    def add(first: int, last: int) -> None:
        for number, block in enumerate(_blocks(first, last, count), start=first):
            some = rows[block] if whole else rows[places[block]]
            np.matmul(slopes[:, block], some, out=to_queries[number])
            if to_rows is None:
                row_gradients[block] += slopes[:, block].T @ queries
            else:
                np.matmul(slopes[:, block].T, queries, out=to_rows[block])

    with one_blas_thread():
        pool.share(add, len(to_queries), 1)
    if to_rows is not None:  # places may repeat, so this is for one thread
        add_rows(row_gradients, row_places, to_rows)
    return to_queries[0] if len(to_queries) == 1 else np.asarray(to_queries.sum(axis=0), np.float32)


def _blocks(first: int, last: int, count: int) -> Iterator[slice]:
    """The blocks `first .. last - 1` of `count` candidates."""
    for block in range(first, last):
        yield slice(block * _BLOCK, min((block + 1) * _BLOCK, count))


def _in_order(places: Int64, count: int) -> bool:
    """Whether `places` are all of 0 .. count - 1, in order."""
    return len(places) == count and bool(np.array_equal(places, np.arange(count)))
