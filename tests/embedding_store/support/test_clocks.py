import numba
import pytest

from elastable.embedding_store.errors import DeadlineExceeded
from elastable.embedding_store.support.clocks import compile_seconds
from elastable.embedding_store.tiers.redis.connection import Deadline


def test_compiling_is_counted_once_however_kernels_are_nested() -> None:
    @numba.njit
    def inner(value: int) -> int:
        return value + 1

    @numba.njit
    def outer(value: int) -> int:
        return inner(value) * 2

    before = compile_seconds()
    assert outer(3) == 8
    compiled = compile_seconds()
    assert compiled > before
    assert outer(3) == 8
    assert compile_seconds() == compiled


def test_a_deadline_stands_still_while_kernels_are_compiled() -> None:
    @numba.njit
    def fresh(value: float) -> float:
        for _ in range(10):
            value = value * value + 1.0
        return value

    before = compile_seconds()
    deadline = Deadline(1.0)
    while compile_seconds() - before < 2.0:  # of compiling, which no server has to answer for
        numba.njit(fresh.py_func)(1.0)
    assert 0 < deadline.left("nobody") <= 1.0
    with pytest.raises(DeadlineExceeded, match="redis at nobody within the deadline of 1e-09 s"):
        Deadline(1e-9).left("nobody")
