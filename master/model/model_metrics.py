"""The model's metrics, from summed metric state: an AUC is merged as counts, never as an average."""

from __future__ import annotations

from collections import UserDict
from collections.abc import Callable, Iterator, Mapping
from functools import cached_property

import keras
import numpy as np

from elastable.embedding_store.errors import Unsupported
from elastable.master.api import Tensor
from elastable.master.backend.contract import BackendTensor, backend
from elastable.master.model.dense import tensor_specs


class ModelMetrics:
    """Turns metric state into named results through the model's own metric objects; for any thread.

    Args:
        model: A compiled model whose metrics are built; None: no metrics.

    Raises:
        Unsupported: a metric whose state does not begin at zero, so that
            states of several micro-batches cannot be summed.
    """

    def __init__(self, model: keras.Model | None = None) -> None:
        self._model = model
        self._variables: list[keras.Variable] = []
        for metric in model.metrics if model is not None else ():
            metric.reset_state()
            for variable in metric.variables:
                if np.any(backend().copied(variable)):
                    raise Unsupported(
                        f"metric {metric.name!r}: its state {variable.path!r} does not begin at zero, so it cannot be "
                        "summed over micro-batches"
                    )
                self._variables.append(variable)
        tracker = getattr(model, "_loss_tracker", None)
        places = {id(variable): place for place, variable in enumerate(self._variables)}
        step = None if model is None else vars(model).get("train_step", type(model).train_step)
        own = step is not keras.Model.train_step
        counted = own and not any(each.name == "loss" and each is not tracker for each in getattr(model, "metrics", ()))
        self._loss_count = places.get(id(tracker.count)) if counted and tracker is not None else None
        self.specs = tensor_specs(self._variables)

    def results(self, total: tuple[Tensor, ...], prefix: str = "") -> dict[str, float]:
        """Every metric's value.

        Args:
            total: Summed metric state, in the order of `specs`; () for none.
            prefix: Put before every name, as "val_".

        Returns:
            Name -> value; a metric of several values gives name_0, name_1, ..., and one of a single value
            in an array its name, as in Keras.
        """
        if not total or self._model is None:
            return {}
        values = []
        for variable, value, spec in zip(self._variables, total, self.specs, strict=True):
            values.append((variable, keras.ops.convert_to_tensor(value.astype(spec.dtype))))
        # The variables themselves are left alone: any thread may ask, and a worker in this process may be using them.
        with keras.StatelessScope(state_mapping=values):
            named = self._model.get_metrics_result()
        if self._loss_count is not None and not total[self._loss_count]:
            named.pop("loss", None)  # a train_step of the model's own counts its loss elsewhere, or not at all
        found = {}
        for key, result in named.items():
            for name, number in _scalars(key, result):
                found[prefix + name] = number
        return found


class LazyLogs(UserDict[str, float]):
    """Metric results that are computed when they are first read."""

    def __init__(self, compute: Callable[[], dict[str, float]]) -> None:
        self._compute = compute

    @cached_property
    def data(self) -> dict[str, float]:  # type: ignore[override]
        return self._compute()


def _scalars(name: str, result: BackendTensor) -> Iterator[tuple[str, float]]:
    if isinstance(result, Mapping):  # of one metric, by names of its own
        yield from (pair for key, value in result.items() for pair in _scalars(key, value))
        return
    values = keras.ops.convert_to_numpy(result)
    if values.size == 1:
        yield name, float(values.item())
    else:
        yield from ((f"{name}_{place}", float(value)) for place, value in enumerate(values.ravel()))
