"""Row optimizers around another one: moving averages (`use_ema`) and constraints."""

import json
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.contract.row_data import RowBlock, UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.optimizers.base import KERAS_BLOCK, RowOptimizer, SlotSpec
from elastable.embedding_store.optimizers.registry import register_row_optimizer, row_optimizer
from elastable.embedding_store.support.extras import needs

if TYPE_CHECKING:
    import keras

OuterConfig = DocumentFields
"""What `outer_spec` was given, as parsed JSON."""


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
    """What optimizers around another one share; made of a spec by `outer_spec`."""

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
    def shown_name(self) -> str:
        """That of the optimizer within."""
        return self._inner.shown_name


_AVERAGED = "averaged"
_BLOCK_ROWS = 1 << 16

# Beside the slots of the optimizer within: the average, and 1 where there is one. A row that was never updated
# has none; its average begins at what it reads then, which no constant could say.
_SLOTS = (SlotSpec("average"), SlotSpec("averaged", columns=1))


def with_averages(optimizer: OptimizerSpec, momentum: float, overwrite_every: int | None) -> OptimizerSpec:
    """The optimizer that also keeps a moving average of the rows it touches.

    Args:
        momentum: Keras' `ema_momentum`.
        overwrite_every: Keras' `ema_overwrite_frequency`: in each so-manieth step the rows that it touches become
            their averages; None: in none.
    """
    config = {"momentum": float(momentum), "overwrite_every": int(overwrite_every or 0)}
    return outer_spec(_AVERAGED, optimizer, config)


def keeps_averages(spec: OptimizerSpec) -> bool:
    """Whether an optimizer, also one with a constraint, keeps averages of rows."""
    return row_optimizer(spec).slots[-len(_SLOTS) :] == _SLOTS


def rows_become_averages(
    store: EmbeddingStore, tables: Iterable[str], changed: Callable[[str, Int64], None] = lambda table, ids: None
) -> None:
    """Writes the averages of rows into the rows, as Keras does at the end of training; slots and version stay.

    Doing it again changes nothing.

    Args:
        store: Holds the tables; nothing is committed to it meanwhile.
        tables: Names; tables without averages are left alone.
        changed: Called with a table and the ids of rows that were written.

    Raises:
        StoreFailed, Unavailable: the store failed; some rows may have been written then.
    """
    specs = store.specs()
    for name in tables:
        if not keeps_averages(specs[name].optimizer):
            continue
        # Ids first: nothing is written while a scan is under way.
        for ids in [block.ids for block in store.scan(name, _BLOCK_ROWS)]:
            block = store.read_rows(name, ids)
            have = block.slots[:, -1] > 0
            averages = block.slots[have, -1 - specs[name].dim : -1]
            touches = None if block.touches is None else block.touches[have]
            if have.any():
                averaged = RowBlock(
                    block.ids[have], np.ascontiguousarray(averages), block.slots[have], touches, block.trained
                )
                store.put(name, [averaged])
                changed(name, block.ids[have])


class AveragedRowOptimizer(OuterRowOptimizer):
    """Another optimizer's step, then a step of the averages of the rows it updated, as Keras takes it."""

    def __init__(self, spec: OptimizerSpec) -> None:
        super().__init__(spec)
        self.slots = (*self.slots, *_SLOTS)

    def _configure(self, config: OuterConfig) -> None:
        self._momentum, self._every = float(config["momentum"]), int(config["overwrite_every"])
        if not 0.0 <= self._momentum <= 1.0 or self._every < 0:
            raise BadSpec(
                f"optimizer spec 'averaged': momentum must lie from 0 to 1 and overwrite_every not be negative, got "
                f"{self._momentum} and {self._every}"
            )

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        width, positions = self._inner.slot_width(weights.shape[1]), batch.weight_positions
        before, states_before = weights[positions], slots[batch.positions]
        states = np.ascontiguousarray(states_before[:, :width])
        self._inner.apply(weights, states, batch.at(np.arange(len(batch)), positions))
        # In the first step of all the average is the row itself.
        kept = np.float32(self._momentum if batch.step else 0.0)
        average = np.where(states_before[:, -1:] > 0, states_before[:, width:-1], before)
        average = kept * average + (np.float32(1.0) - kept) * weights[positions]
        slots[batch.positions] = np.concatenate([states, average, np.ones((len(average), 1), np.float32)], axis=1)
        if self._every and (batch.step + 1) % self._every == 0:
            weights[positions] = average


register_row_optimizer(_AVERAGED, AveragedRowOptimizer)


_CONSTRAINED = "constrained"
# Keras' own; `constrained` notes another one, so that a server without Keras computes with it, too.
_EPSILON = 1e-7
_SUPPORTED = "NonNeg, and MaxNorm, MinMaxNorm and UnitNorm with axis=1"

Constrain = Callable[[Float32], Float32]


def constrained(
    layer: str, optimizer: OptimizerSpec, constraint: "keras.constraints.Constraint | None"
) -> OptimizerSpec:
    """The optimizer that also keeps `constraint` on the rows it touches.

    Unlike Keras, rows without a gradient are left alone, so that a row's
    constraint is first kept when the row is first trained.

    Args:
        layer: Name of the embedding layer, for messages.

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


def register_job_optimizers(import_keras: Callable[[], None] = lambda: None) -> None:
    """Lets `row_optimizer` make every optimizer that a job's tables may have.

    Args:
        import_keras: Called before Keras is first imported, so that nobody sees what its backend says at its start.

    Raises (from `row_optimizer`):
        NotInstalled: Keras is needed for a spec and is not installed here.
    """
    register_row_optimizer(KERAS_BLOCK, partial(_keras_block, import_keras))


def _keras_block(import_keras: Callable[[], None], spec: OptimizerSpec) -> RowOptimizer:
    with needs("a table whose Keras optimizer has no kernel of its own"):
        import_keras()
        from elastable.master.model.keras_block import (
            KerasBlockOptimizer,  # registers itself in the place of this
        )
    return KerasBlockOptimizer(spec)
