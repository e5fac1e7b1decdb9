"""Weights and slots of a row at different positions: the same bits as side by side."""

import numpy as np
import pytest

from elastable.embedding_store import OptimizerSpec, RowOptimizer, SlotSpec
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.optimizers.registry import row_optimizer
from tests.embedding_store.optimizers.test_row_optimizer import CASES, OURS_ALONE, make

DIM = 19


class Counting(RowOptimizer):
    fused = False
    default_learning_rate = 0.1
    slots = (SlotSpec("updates", 0.0, columns=1),)

    def __init__(self) -> None:
        self.spec = OptimizerSpec("counting", ())

    def apply(self, weights: np.ndarray, slots: np.ndarray, batch: UpdateBatch) -> None:
        weights[batch.weight_positions] -= np.float32(batch.rate) * batch.gradients
        slots[batch.positions] += 1


def optimizers() -> list[RowOptimizer]:
    return [*(row_optimizer(make(name, hyper)) for name, hyper in CASES + OURS_ALONE), Counting()]


@pytest.mark.parametrize("optimizer", optimizers(), ids=lambda optimizer: str(optimizer.spec))
def test_rows_that_lie_apart_are_updated_as_those_side_by_side(optimizer: RowOptimizer) -> None:
    random = np.random.default_rng(1)
    weights = random.normal(size=(40, DIM)).astype(np.float32)
    slots = np.tile(optimizer.initial_slots(DIM), (40, 1))
    apart = weights[::-1].copy(), np.concatenate((slots, slots))[:60].copy()
    for step in range(3):
        positions = random.permutation(40)[:25]
        gradients = random.normal(size=(25, DIM)).astype(np.float32)
        batch = UpdateBatch(positions, positions, gradients, step, 0.05)
        optimizer.apply(weights, slots, batch)
        optimizer.apply(*apart, batch.at(positions + 20, 39 - positions))
    np.testing.assert_array_equal(apart[0][::-1], weights)
    np.testing.assert_array_equal(apart[1][20:60], slots)
    np.testing.assert_array_equal(apart[1][:20], np.tile(optimizer.initial_slots(DIM), (20, 1)))
