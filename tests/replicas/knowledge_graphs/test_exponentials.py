"""Exponentials of rows: as NumPy's in double precision, to a few units in the last place."""

from __future__ import annotations

import numpy as np

from elastable.replicas.knowledge_graphs.losses import exponentials, row_total


def test_exponentials_are_exact_to_two_units_in_the_last_place() -> None:
    draw = np.random.default_rng(0)
    values = np.concatenate([draw.uniform(-87, 0, 100_000), draw.uniform(-1, 0, 100_000), [0.0, -86.99]])
    single = values.astype(np.float32)
    found = np.empty_like(single)
    exponentials(single, np.float32(0), found)
    expected = np.exp(single.astype(np.float64))
    assert (np.abs(found - expected) / expected).max() < 2 * np.finfo(np.float32).eps
    shifted = np.empty_like(single)
    exponentials(single + np.float32(3), np.float32(3), shifted)
    np.testing.assert_allclose(shifted, np.exp((single + np.float32(3) - np.float32(3)).astype(np.float64)), rtol=3e-7)


def test_what_is_far_below_is_zero_and_nan_stays_nan() -> None:
    values = np.array([-87.5, -1e30, -np.inf, np.nan, 0.0], np.float32)
    found = np.empty_like(values)
    exponentials(values, np.float32(0), found)
    np.testing.assert_array_equal(found, np.array([0, 0, 0, np.nan, 1], np.float32))
    exponentials(values, np.float32(np.nan), found)
    assert np.isnan(found).all()


def test_a_row_is_summed() -> None:
    values = np.random.default_rng(1).random(1_001).astype(np.float32)
    np.testing.assert_allclose(row_total(values), values.sum(dtype=np.float64), rtol=1e-6)
