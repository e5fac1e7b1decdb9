"""Row-wise Adagrad against a plain reference, and over rows whose columns lie apart."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store import BadGradient, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.row_data import Commit, TableUpdate, UpdateBatch
from elastable.embedding_store.optimizers.fused import row_squares
from elastable.embedding_store.optimizers.registry import row_optimizer

SPEC = OptimizerSpec.of("rowwise_adagrad", learning_rate=0.05, epsilon=1e-6)


@given(st.integers(1, 70), st.integers(0, 2**32))
def test_equals_the_formula_in_double(dim: int, seed: int) -> None:
    # Source: FBGEMM, EXACT_ROWWISE_ADAGRAD: a += sum(g²) / D; w -= lr / (sqrt(a) + eps) g.
    random = np.random.default_rng(seed)
    weights = random.normal(size=(5, dim)).astype(np.float32)
    slots = np.zeros((5, 1), np.float32)
    expected, accumulator = weights.astype(np.float64), np.zeros(5)
    for step in range(4):
        positions = random.permutation(5)[: 1 + step]
        gradients = random.normal(size=(len(positions), dim)).astype(np.float32)
        row_optimizer(SPEC).apply(weights, slots, UpdateBatch(positions, positions, gradients, step, 0.05))
        wide = gradients.astype(np.float64)
        accumulator[positions] += np.mean(wide * wide, axis=1)
        expected[positions] -= (0.05 / (np.sqrt(accumulator[positions]) + 1e-6))[:, None] * wide
    np.testing.assert_allclose(weights, expected, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(slots[:, 0], accumulator, rtol=1e-6)


@given(st.integers(1, 70), st.integers(1, 4), st.floats(0, 0.5))
def test_columns_apart_with_row_squares_are_the_whole_row_to_the_bit(dim: int, parts: int, decay: float) -> None:
    random = np.random.default_rng(dim)
    optimizer = row_optimizer(OptimizerSpec.of("rowwise_adagrad", weight_decay=decay))
    assert optimizer.cross_column
    assert not optimizer.whole_rows
    weights = random.normal(size=(6, dim)).astype(np.float32)
    slots = np.full((6, 1), 0.25, np.float32)
    split = [(part.copy(), slots.copy()) for part in np.array_split(weights, min(parts, dim), axis=1)]
    positions = np.array([4, 0, 5])
    for step in range(3):
        gradients = random.normal(size=(3, dim)).astype(np.float32)
        squares = row_squares(gradients)
        optimizer.apply(weights, slots, UpdateBatch(positions, positions, gradients, step, 0.1))
        for (part, part_slots), columns in zip(split, np.array_split(gradients, len(split), axis=1), strict=True):
            own = np.ascontiguousarray(columns)
            optimizer.apply(part, part_slots, UpdateBatch(positions, positions, own, step, 0.1, squares))
            assert part_slots.tobytes() == slots.tobytes()
    assert np.concatenate([part for part, _ in split], axis=1).tobytes() == weights.tobytes()


@pytest.mark.parametrize("squares", [np.ones(3, np.float32), np.ones(2), np.ones((2, 1), np.float32)])
def test_row_squares_that_do_not_fit_are_refused(squares: np.ndarray) -> None:
    with MemoryStore(threads=1) as store:
        store.create_table(TableSpec("t", 3, optimizer=SPEC))
        update = TableUpdate(np.array([1, 2]), np.ones((2, 3), np.float32), squares)
        with pytest.raises(BadGradient, match=r"'t': row_squares must be float32 \[2\]"):
            store.commit(Commit(1, {"t": update}, 0, {}))
        assert (store.version(), store.row_count("t")) == (0, 0)
