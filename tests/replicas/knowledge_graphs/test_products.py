"""Matrix products in blocks: the numbers of float64, the same bits for any number of threads, one thread of BLAS."""

import threading

import numpy as np
import pytest

from elastable.embedding_store.native.range_pool import RangePool
from elastable.replicas.knowledge_graphs.scores.dot_products import (
    blas_threads,
    one_blas_thread,
    product_gradients,
    products,
)

WIDTH = 24


@pytest.mark.parametrize("count", [0, 1, 7, 2048, 5000])
@pytest.mark.parametrize("order", ["all", "some", "repeated"])
def test_products_and_their_gradients_are_those_of_float64(count: int, order: str) -> None:
    draw = np.random.default_rng(count)
    rows = draw.normal(size=(count if order == "all" else count + 100, WIDTH)).astype(np.float32)
    queries, slopes = (draw.normal(size=(9, width)).astype(np.float32) for width in (WIDTH, count))
    places = np.arange(count) if order == "all" else draw.integers(0, max(1, count // 3), count)
    unique, targets = (places, places) if order == "all" else np.unique(places, return_inverse=True)
    if order == "some":  # every candidate is summed for itself, wherever it was read
        unique, targets = places, np.arange(count)
    found: dict[int, tuple[np.ndarray[tuple[int, ...], np.dtype[np.float32]], ...]] = {}
    for threads in (1, 3):
        pool = RangePool(threads)
        scores = np.full((9, count), np.nan, np.float32)
        products(queries, rows, places, scores, pool)
        to_rows = np.ones((len(unique), WIDTH), np.float32)
        to_queries = product_gradients(queries, rows, places, slopes, targets, to_rows, pool)
        found[threads] = scores, to_queries, to_rows
        pool.close()
    exact = queries.astype(np.float64), rows[places].astype(np.float64), slopes.astype(np.float64)
    wanted_rows = np.ones((len(unique), WIDTH))
    np.add.at(wanted_rows, targets, exact[2].T @ exact[0])
    for mine, wanted in zip(found[1], (exact[0] @ exact[1].T, exact[2] @ exact[1], wanted_rows), strict=True):
        np.testing.assert_allclose(mine, wanted, rtol=1e-4, atol=1e-4)
    for one, three in zip(found[1], found[3], strict=True):
        np.testing.assert_array_equal(one, three)


def test_blas_has_one_thread_until_the_last_caller_has_left() -> None:
    before = blas_threads()
    assert before  # NumPy's wheels have OpenBLAS
    inside, leave = threading.Event(), threading.Event()

    def other() -> None:
        with one_blas_thread():
            inside.set()
            leave.wait()

    thread = threading.Thread(target=other)
    with one_blas_thread():
        thread.start()
        assert inside.wait(60)
        assert set(blas_threads()) <= {1}
    assert set(blas_threads()) <= {1}
    leave.set()
    thread.join()
    assert blas_threads() == before
    with pytest.raises(ZeroDivisionError), one_blas_thread():
        _ = 1 / 0
    assert blas_threads() == before
