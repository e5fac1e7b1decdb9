"""Clipping: what Keras does to the same gradients, tables taken as the dense gradients they stand for."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.shards import TableClip, clipped_update, exact_squares, square_of
from elastable.master.api import Tensor
from elastable.master.commits.clipping import Clipping, clip
from elastable.master.keras.keras_optimizer import clipping_of

IDS = np.array([7, 1, 4])


def gradients(scale: float) -> list[Array]:
    random = np.random.default_rng(0)
    return [(random.normal(size=shape) * scale).astype(np.float32) for shape in ((4, 3), (3,), (10, 2))]


def clipped(parts: list[Array], clipping: Clipping) -> tuple[tuple[Tensor, ...], TableUpdate]:
    """Two variables and a table, of which clipping is told the square alone."""
    update = TableUpdate(IDS, parts[2][IDS])
    square = exact_squares(update.gradients)
    assert square is not None
    got = clip(parts[:2], {"t": square_of(square)}, clipping)
    return got.dense, clipped_update(update, got.tables.get("t", TableClip()))


@pytest.mark.parametrize("scale", [0.0, 1e-3, 1.0, 50.0])
@pytest.mark.parametrize("how", [{"clipnorm": 1.5}, {"global_clipnorm": 1.5}, {"clipvalue": 0.3}, {"clipnorm": 0}, {}])
def test_clipping_is_keras_own(how: dict[str, float], scale: float) -> None:
    parts = gradients(scale)
    parts[2][[row for row in range(10) if row not in IDS]] = 0
    optimizer = keras.optimizers.SGD(1.0, **how)
    variables = [keras.Variable(np.zeros_like(part)) for part in parts]
    optimizer.apply([keras.ops.convert_to_tensor(part) for part in parts], variables)
    expected = [-variable.value.numpy() for variable in variables]

    dense, update = clipped(parts, clipping_of(optimizer))
    for ours, keras_own in zip(dense, expected[:2], strict=True):
        np.testing.assert_allclose(ours, keras_own, rtol=1e-6, atol=1e-9)
        assert ours.dtype == np.float32
    np.testing.assert_allclose(update.gradients, expected[2][IDS], rtol=1e-6, atol=1e-9)
    assert update.gradients.dtype == np.float32
    assert update.ids is IDS


def test_what_is_within_the_norm_is_left_alone_to_the_bit() -> None:
    parts = gradients(1e-3)
    for clipping in (Clipping(clipnorm=1.0), Clipping(global_clipnorm=1.0), Clipping()):
        dense, update = clipped(parts, clipping)
        assert np.array_equal(update.gradients, parts[2][IDS])
        assert all(np.array_equal(one, other) for one, other in zip(dense, parts[:2], strict=True))
