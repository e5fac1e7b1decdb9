"""Sums of squares are exact, so that neither the order of values nor who holds them shows."""

from fractions import Fraction

import numpy as np
import pytest

from elastable.embedding_store.shards.version_sums import UNIT, exact_squares, square_of


def values(count: int) -> np.ndarray:
    """float32 of all magnitudes, the smallest subnormal and the largest number among them."""
    random = np.random.default_rng(5)
    some = random.integers(0, 0x7F800000, count, np.uint32) | (random.integers(0, 2, count, np.uint32) << 31)
    edges = np.array([0, 1, 0x7FFFFF, 0x800000, 0x7F7FFFFF, 0x80000001], np.uint32)
    return np.concatenate([some.astype(np.uint32), edges]).view(np.float32)


def test_the_sum_is_that_of_fractions() -> None:
    given = values(2_000)
    exact = sum(Fraction(float(value)) ** 2 for value in given)
    total = exact_squares(given)
    assert total is not None
    assert total * Fraction(UNIT) == exact
    assert square_of(total) == float(exact)


def test_parts_add_up_to_the_whole_whatever_the_split() -> None:
    given = values(3_000).reshape(-1, 2)
    whole = exact_squares(given)
    for parts in (2, 3, 5):
        assert sum(exact_squares(given[part::parts]) or 0 for part in range(parts)) == whole
    assert (exact_squares(given[:, :1]) or 0) + (exact_squares(given[:, 1:]) or 0) == whole
    assert exact_squares(given[::-1]) == whole


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_what_is_not_finite_has_no_sum(bad: float) -> None:
    assert exact_squares(np.array([1.0, bad, 2.0], np.float32)) is None
    assert square_of(exact_squares(np.zeros((0, 4), np.float32)) or 0) == 0.0
