"""An optimizer of rows around another one, which does something more with the rows that the inner one updated."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping

from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.registry import row_optimizer

OuterConfig = DocumentFields
"""What `outer_spec` was given, as parsed JSON."""

__all__ = ["OuterConfig", "OuterRowOptimizer", "outer_spec"]


def outer_spec(name: str, inner: OptimizerSpec, config: Mapping[str, object]) -> OptimizerSpec:
    """The spec of an outer optimizer.

    Args:
        name: That it is registered by.
        inner: The optimizer within.
        config: What the outer one does; JSON can hold it.
    """
    within = {"name": inner.name, "hyperparameters": inner.hyperparameters, "config": inner.keras_config}
    text = json.dumps({"optimizer": within, **config}, sort_keys=True)
    return OptimizerSpec(name, (("learning_rate", inner.get("learning_rate", 0.01)),), text)


class OuterRowOptimizer(RowOptimizer):
    """What optimizers around another one share; made of a spec by `outer_spec`.

    Raises:
        BadSpec: the spec holds no such config.
    """

    def __init__(self, spec: OptimizerSpec) -> None:
        try:
            config = json.loads(spec.keras_config)
            inner = config["optimizer"]
            pairs = tuple((str(name), float(value)) for name, value in inner["hyperparameters"])
            self._inner = row_optimizer(OptimizerSpec(inner["name"], pairs, inner["config"]))
            self._configure(config)
        except BadSpec:
            raise
        except MALFORMED as error:
            raise BadSpec(f"optimizer spec {spec.name!r}: {spec.keras_config[:200]!r} is no such config") from error
        self.spec = spec
        self.slots = self._inner.slots
        self.fused = self._inner.fused
        self.cross_column = self._inner.cross_column
        self.whole_rows = self._inner.whole_rows
        self.default_learning_rate = self._inner.default_learning_rate

    @abstractmethod
    def _configure(self, config: OuterConfig) -> None:
        """Reads what `outer_spec` was given; raises `BadSpec`, or one of `MALFORMED`."""

    @property
    def told_name(self) -> str:
        """That of the optimizer within."""
        return self._inner.told_name
