"""Metrics over replicas: their states summed, never their results averaged."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.replicas.training.variables.exchange import Exchange, Layout
from elastable.replicas.training.variables.variable_memory import value_of

__all__ = ["ReplicaMetrics"]


class ReplicaMetrics:
    """The metrics of a model, of which every replica has counted its own records.

    Args:
        model: Compiled and built.
        exchange: Over the replicas.

    Raises:
        Unsupported: a metric whose state does not begin at zero, and so cannot be summed.
    """

    def __init__(self, model: Any, exchange: Exchange) -> None:
        self._model = model
        self._exchange = exchange
        self._variables: list[Any] = []
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
        """Forgets what was counted."""
        for metric in self._model.metrics:
            metric.reset_state()

    def results(self) -> dict[str, float]:
        """Every metric's value over the records of all replicas, by name; every replica calls it."""
        totals = self._exchange.reduce([value_of(variable) for variable in self._variables], [Layout()] * self._count)
        mapping = [
            (variable, tf.convert_to_tensor(total)) for variable, total in zip(self._variables, totals, strict=True)
        ]
        # The variables keep this replica's counts: the next sum must not count them twice.
        with keras.StatelessScope(state_mapping=mapping):
            named = self._model.get_metrics_result()
        return {name: value for key, result in named.items() for name, value in _scalars(key, result)}

    @property
    def _count(self) -> int:
        return len(self._variables)


def _scalars(name: str, result: Any) -> Iterator[tuple[str, float]]:
    values = np.asarray(result.numpy() if hasattr(result, "numpy") else result)
    if values.ndim == 0:
        yield name, float(values)
    else:
        yield from ((f"{name}_{place}", float(value)) for place, value in enumerate(values.ravel()))
