"""Follow the regularised leader (McMahan et al., KDD 2013), with shrinkage."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.update_batch import UpdateBatch
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.native.kernel import kernel, prefetch, prefetch_distance
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec, hyperparameters

__all__ = ["Ftrl"]

_DEFAULTS = {
    "learning_rate": 0.001,
    "learning_rate_power": -0.5,
    "initial_accumulator_value": 0.1,
    "l1_regularization_strength": 0.0,
    "l2_regularization_strength": 0.0,
    "l2_shrinkage_regularization_strength": 0.0,
    "beta": 0.0,
    "weight_decay": 0.0,
}


class Ftrl(RowOptimizer):
    """Keras' Ftrl; slots are the accumulator of squared gradients and the linear term."""

    def __init__(self, spec: OptimizerSpec) -> None:
        values = self.hyperparameters = hyperparameters(spec, _DEFAULTS)
        if values["initial_accumulator_value"] < 0:
            raise BadSpec(
                f"optimizer 'ftrl': initial_accumulator_value {values['initial_accumulator_value']} is below 0"
            )
        if values["learning_rate_power"] > 0:
            raise BadSpec(f"optimizer 'ftrl': learning_rate_power {values['learning_rate_power']} is above 0")
        self.spec = spec
        self.default_learning_rate = values["learning_rate"]
        self.slots = (SlotSpec("accumulator", values["initial_accumulator_value"]), SlotSpec("linear"))
        self._values = values
        self._decay = np.float32(values["weight_decay"])

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        values, rate = self._values, np.float32(batch.rate)
        l2 = np.float32(values["l2_regularization_strength"]) + np.float32(values["beta"]) / (np.float32(2) * rate)
        scalars = (
            np.float32(values["l1_regularization_strength"]),
            np.float32(2) * l2,
            np.float32(2 * values["l2_shrinkage_regularization_strength"]),
        )
        arguments = (
            weights,
            batch.weight_positions,
            slots,
            batch.positions,
            batch.gradients,
            rate,
            self._decay,
            *scalars,
        )
        power = -values["learning_rate_power"]
        if power == 0.5:
            _ftrl_root(*arguments)
        else:
            _ftrl_power(*arguments, power)


@kernel
def _new_weight(
    linear: np.float32, grown: np.float32, rate: np.float32, l1: np.float32, l2_twice: np.float32
) -> np.float32:
    clipped = min(max(linear, -l1), l1)
    return (clipped - linear) / (grown / rate + l2_twice)


@kernel
def _ftrl_root(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    l1: np.float32,
    l2_twice: np.float32,
    shrinkage_twice: np.float32,
) -> None:
    """The usual power of -1/2: a root, which IEEE fixes to the bit."""
    count, dim = gradients.shape
    far = prefetch_distance(dim)
    for i in range(count):
        ahead = min(i + far, count - 1)
        prefetch(weights, places[ahead])
        prefetch(slots, positions[ahead])
        w = weights[places[i]]
        squares = slots[positions[i], :dim]
        linears = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            x = w[j] - w[j] * decay * rate
            accumulator = squares[j] + g[j] * g[j]
            grown, before = np.sqrt(accumulator), np.sqrt(squares[j])
            linear = linears[j] + ((g[j] + shrinkage_twice * x) - (grown - before) / rate * x)
            squares[j] = accumulator
            linears[j] = linear
            w[j] = _new_weight(linear, grown, rate, l1, l2_twice)


@kernel
def _ftrl_power(
    weights: Float32,
    places: Int64,
    slots: Float32,
    positions: Int64,
    gradients: Float32,
    rate: np.float32,
    decay: np.float32,
    l1: np.float32,
    l2_twice: np.float32,
    shrinkage_twice: np.float32,
    power: float,
) -> None:
    count, dim = gradients.shape
    for i in range(count):
        w = weights[places[i]]
        squares = slots[positions[i], :dim]
        linears = slots[positions[i], dim:]
        g = gradients[i]
        for j in range(dim):
            x = w[j] - w[j] * decay * rate
            accumulator = squares[j] + g[j] * g[j]
            # In double and rounded once: float32 library powers differ between machines.
            grown = np.float32(np.float64(accumulator) ** power)
            before = np.float32(np.float64(squares[j]) ** power)
            linear = linears[j] + ((g[j] + shrinkage_twice * x) - (grown - before) / rate * x)
            squares[j] = accumulator
            linears[j] = linear
            w[j] = _new_weight(linear, grown, rate, l1, l2_twice)
