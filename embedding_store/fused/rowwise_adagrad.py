"""Row-wise Adagrad: one accumulator a row, of the mean of its squared gradient."""

from __future__ import annotations

import numpy as np

from embedding_store.kernel import kernel, prefetch
from embedding_store.row_optimizer import RowOptimizer, SlotSpec, hyperparameters
from embedding_store.spec import OptimizerSpec
from embedding_store.store import Float32, Int64

__all__ = ["RowwiseAdagrad", "row_squares"]

# Those of FBGEMM's SplitTableBatchedEmbeddingBagsCodegen(optimizer=EXACT_ROWWISE_ADAGRAD), to which
# TorchRec's fused row-wise Adagrad comes down; Keras has none.
_DEFAULTS = {"learning_rate": 0.01, "initial_accumulator_value": 0.0, "epsilon": 1e-8, "weight_decay": 0.0}
_AHEAD = 8
_LANES = 16
_NO_SQUARES = np.empty(0, np.float32)


class RowwiseAdagrad(RowOptimizer):
    """`a += mean(g²); w -= lr / (sqrt(a) + epsilon) g`, a being one value a row."""

    cross_column = True

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("accumulator", values["initial_accumulator_value"], columns=1),)
        self._epsilon = np.float32(values["epsilon"])
        self._decay = np.float32(values["weight_decay"])

    def apply(
        self, weights: Float32, slots: Float32, positions: Int64, gradients: Float32, step: int, learning_rate: float
    ) -> None:
        """As in `RowOptimizer.apply`."""
        self.apply_columns(weights, slots, positions, gradients, None, step, learning_rate)

    def apply_columns(
        self,
        weights: Float32,
        slots: Float32,
        positions: Int64,
        gradients: Float32,
        squares: Float32 | None,
        step: int,
        learning_rate: float,
    ) -> None:
        """As in `RowOptimizer.apply_columns`."""
        given = _NO_SQUARES if squares is None else squares
        rate = np.float32(learning_rate)
        _rowwise_adagrad(weights, slots, positions, gradients, given, rate, self._decay, self._epsilon)


def row_squares(gradients: Float32) -> Float32:
    """The mean of each row's squares, float32 `[u]`, to the bit as `RowwiseAdagrad` takes it.

    For `TableUpdate.row_squares`, where the columns of a row lie in several places.

    Args:
        gradients: float32 `[u, dim]`, C-contiguous, of whole rows.
    """
    squares = np.empty(len(gradients), np.float32)
    _row_squares(gradients, squares)
    return squares


@kernel
def _mean_of_squares(g: Float32, lanes: Float32) -> np.float32:
    """In 16 sums, joined pairwise: an order of its own, so that the processor may add 16 numbers at once."""
    dim = len(g)
    whole = dim - dim % _LANES
    lanes[:] = np.float32(0)
    for start in range(0, whole, _LANES):
        for k in range(_LANES):
            lanes[k] += g[start + k] * g[start + k]
    for j in range(whole, dim):
        lanes[j - whole] += g[j] * g[j]
    width = _LANES // 2
    while width:
        for k in range(width):
            lanes[k] += lanes[k + width]
        width //= 2
    mean: np.float32 = lanes[0] / np.float32(dim)
    return mean


@kernel
def _row_squares(gradients: Float32, squares: Float32) -> None:
    lanes = np.empty(_LANES, np.float32)
    for i in range(len(gradients)):
        squares[i] = _mean_of_squares(gradients[i], lanes)


@kernel
def _rowwise_adagrad(
    weights: Float32,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    squares: Float32,
    rate: np.float32,
    decay: np.float32,
    epsilon: np.float32,
) -> None:
    count, dim = gradients.shape
    lanes = np.empty(_LANES, np.float32)
    for i in range(count):
        ahead = positions[min(i + _AHEAD, count - 1)]
        prefetch(weights, ahead)
        prefetch(slots, ahead)
        g = gradients[i]
        square = squares[i] if len(squares) else _mean_of_squares(g, lanes)
        a = slots[positions[i], 0] + square
        slots[positions[i], 0] = a
        scale = rate / (np.sqrt(a) + epsilon)
        w = weights[positions[i]]
        for j in range(dim):
            x = w[j] - w[j] * decay * rate
            w[j] = x - scale * g[j]
