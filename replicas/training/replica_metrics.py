"""Metrics over replicas: their states are summed; their results are never averaged."""

from __future__ import annotations

from collections.abc import Iterator

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.replicas.training.variables.exchange import Exchange, Layout
from elastable.replicas.training.variables.variable_memory import value_of

__all__ = ["ReplicaMetrics"]


class ReplicaMetrics:
    """The metrics of a compiled and built model; every replica counts its own records.

    Raises:
        Unsupported: a metric's state does not start at zero, so it cannot be summed.
    """

    def __init__(self, model: keras.Model, exchange: Exchange) -> None:
        self._model = model
        self._exchange = exchange
        self._variables: list[keras.Variable] = []
        for metric in model.metrics:
            metric.reset_state()
            for variable in metric.variables:
                if np.any(value_of(variable)):
                    raise Unsupported(
                        f"metric {metric.name!r}: its state {variable.path!r} does not begin at zero, so it cannot be "
                        "summed over replicas"
                    )
                self._variables.append(variable)

    def reset(self) -> None:
        for metric in self._model.metrics:
            metric.reset_state()

    def results(self) -> dict[str, float]:
        """Every metric over the records of all replicas, by name; every replica calls it."""
        totals = self._exchange.reduce(
            [value_of(variable) for variable in self._variables], [Layout()] * len(self._variables)
        )
        mapping = [
            (variable, tf.convert_to_tensor(total)) for variable, total in zip(self._variables, totals, strict=True)
        ]
        # The variables keep this replica's counts: the next sum must not count them twice.
        with keras.StatelessScope(state_mapping=mapping):
            named = self._model.get_metrics_result()
        return {name: value for key, result in named.items() for name, value in _scalars(key, result)}


def _scalars(name: str, result: tf.Tensor | float) -> Iterator[tuple[str, float]]:
    values = np.asarray(result.numpy() if hasattr(result, "numpy") else result)
    if values.ndim == 0:
        yield name, float(values)
    else:
        yield from ((f"{name}_{place}", float(value)) for place, value in enumerate(values.ravel()))
