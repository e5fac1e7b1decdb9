"""`embeddings_constraint` on tables: applied to the rows that an update touched."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.optimizers.registry import register_row_optimizer
from elastable.master.keras.row_optimizers.outer_optimizer import OuterConfig, OuterRowOptimizer, outer_spec

if TYPE_CHECKING:
    import keras

__all__ = ["ConstrainedRowOptimizer", "constrained"]

_CONSTRAINED = "constrained"
# Keras' own; `constrained` notes another one, so that a server without Keras computes with it, too.
_EPSILON = 1e-7
_SUPPORTED = "NonNeg, and MaxNorm, MinMaxNorm and UnitNorm with axis=1"

Constrain = Callable[[Float32], Float32]


def constrained(layer: str, optimizer: OptimizerSpec, constraint: keras.constraints.Constraint | None) -> OptimizerSpec:
    """The optimizer that also keeps `constraint` on the rows it touches.

    Unlike Keras, rows without a gradient are left alone, so that a row's
    constraint is first kept when the row is first trained.

    Args:
        layer: Name of the embedding layer, for messages.
        optimizer: Of the table.
        constraint: A Keras constraint, or None.

    Raises:
        Unsupported: a constraint that is not one of a row alone.
    """
    if constraint is None:
        return optimizer
    if not optimizer.lazy:
        raise Unsupported(
            f"embedding layer {layer!r}: embeddings_constraint reaches the rows that a batch touches, and "
            "lazy=False promises that every row follows every step; leave one of them out, or say lazy=True on the "
            "layer"
        )
    import keras  # not above: servers without Keras import this module, too

    config, epsilon = keras.constraints.serialize(constraint), float(keras.config.epsilon())
    try:
        _numpy_constraint(config, epsilon)
    except BadSpec as error:
        raise Unsupported(f"embedding layer {layer!r}: {error}") from error
    other = {} if epsilon == _EPSILON else {"epsilon": epsilon}
    return outer_spec(_CONSTRAINED, optimizer, {"constraint": config, **other})


class ConstrainedRowOptimizer(OuterRowOptimizer):
    """Another optimizer's step, then the constraint on the rows it updated."""

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.whole_rows = self.whole_rows or self._joins_columns

    def _configure(self, config: OuterConfig) -> None:
        self._constrain = _numpy_constraint(config["constraint"], float(config.get("epsilon", _EPSILON)))
        self._joins_columns = config["constraint"].get("class_name") != "NonNeg"

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        self._inner.apply(weights, slots, batch)
        weights[batch.weight_positions] = self._constrain(weights[batch.weight_positions])


def _numpy_constraint(config: object, epsilon: float) -> Constrain:
    """float32 `[n, dim]` -> `[n, dim]`, as Keras 3.15 computes it (`keras/src/constraints/constraints.py`)."""
    name = config.get("class_name") if isinstance(config, dict) else None
    values = config.get("config", {}) if isinstance(config, dict) else {}
    builtin = isinstance(config, dict) and config.get("module") == "keras.constraints"
    if builtin and name == "NonNeg":
        return lambda rows: np.maximum(rows, np.float32(0))
    if not builtin or name not in ("MaxNorm", "MinMaxNorm", "UnitNorm"):
        raise BadSpec(f"constraint {name or config!r} is not supported on a table (supported: {_SUPPORTED})")
    if values.get("axis") not in (1, -1, [1], [-1]):
        raise BadSpec(
            f"constraint {name}(axis={values.get('axis')!r}) joins the rows of a table, which is not supported: "
            f"use axis=1 (supported: {_SUPPORTED})"
        )
    if name == "UnitNorm":
        return lambda rows: rows / (np.float32(epsilon) + _norms(rows))
    if name == "MaxNorm":
        highest = np.float32(float(values["max_value"]))
        return lambda rows: _scaled(rows, epsilon, lambda norms: np.clip(norms, 0, highest))
    low, high, rate = (np.float32(float(values[key])) for key in ("min_value", "max_value", "rate"))
    return lambda rows: _scaled(rows, epsilon, lambda norms: rate * np.clip(norms, low, high) + (1 - rate) * norms)


def _norms(rows: Float32) -> Float32:
    norms: Float32 = np.sqrt(np.sum(np.square(rows), axis=1, keepdims=True))
    return norms


def _scaled(rows: Float32, epsilon: float, desired: Callable[[Float32], Float32]) -> Float32:
    """Rows whose L2 norms are brought to `desired(norms)`."""
    norms = _norms(rows)
    scaled: Float32 = rows * (desired(norms) / (np.float32(epsilon) + norms))
    return scaled


register_row_optimizer(_CONSTRAINED, ConstrainedRowOptimizer)
