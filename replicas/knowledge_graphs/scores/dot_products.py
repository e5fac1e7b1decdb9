"""Matrix products of queries and candidates in blocks of fixed size, with one thread of BLAS each.

BLAS' own threads spin while they wait for each other: two of them take 1.5 times the processor time of one for the same
product, and more where another process needs the cores. Blocks do not depend on the number of threads, so no bit does.
"""

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import lru_cache
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool

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
        queries, rows, places, pool: See `products`.
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


@kernel
def add_rows(rows: Float32, places: Int64, parts: Float32) -> None:
    """`rows[places[k]] += parts[k]`, k ascending, so that places may repeat.

    Args:
        rows: float32 `[n, width]`, changed in place.
        places: int64 `[m]`; trusted.
        parts: float32 `[m, width]`.
    """
    for k in range(len(places)):
        row = rows[places[k]]
        part = parts[k]
        for j in range(len(row)):
            row[j] += part[j]


@lru_cache(maxsize=1)
def _libraries() -> list[tuple[Callable[[], int], Callable[[int], object]]]:
    """Of every OpenBLAS that this process has loaded, what reads and what sets its threads, those of all the process.

    Their names have a prefix and a suffix in NumPy's wheels, and none elsewhere.
    """
    files = set()
    with suppress(OSError), Path("/proc/self/maps").open() as lines:
        for line in lines:
            file = line.rstrip("\n").partition("/")[2]
            if "openblas" in file.rpartition("/")[2]:
                files.add(f"/{file}")
    found = []
    for file in sorted(files):
        with suppress(OSError):
            library = ctypes.CDLL(file)
            for prefix, suffix in itertools.product(("scipy_", ""), ("64_", "")):
                names = (f"{prefix}openblas_{what}_num_threads{suffix}" for what in ("get", "set"))
                get, put = (getattr(library, name, None) for name in names)
                if get is not None and put is not None:
                    found.append((get, put))
                    break
    return found


class _Users:
    """How many callers are inside `one_blas_thread`: the first sets the limit, the last lifts it."""

    lock, inside, before = threading.Lock(), 0, list[int]()


def blas_threads() -> list[int]:
    """The number of threads of every OpenBLAS of this process."""
    return [int(threads()) for threads, _ in _libraries()]


@contextmanager
def one_blas_thread() -> Iterator[None]:
    """Within it, OpenBLAS computes in its caller's thread alone, in all threads of this process.

    Another library for matrix products is left as it is.
    """
    with _Users.lock:
        if _Users.inside == 0:
            _Users.before = blas_threads()
            _set([1] * len(_Users.before))
        _Users.inside += 1
    try:
        yield
    finally:
        with _Users.lock:
            _Users.inside -= 1
            if _Users.inside == 0:
                _set(_Users.before)


def _set(threads: list[int]) -> None:
    for (_, set_threads), count in zip(_libraries(), threads, strict=True):
        set_threads(count)
