"""Any Keras optimizer as a row optimizer: Keras itself, run on the gathered block."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array, Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.errors import BadSpec, ElastableError, Unsupported
from elastable.embedding_store.optimizers.base import KERAS_BLOCK, RowOptimizer, SlotSpec
from elastable.embedding_store.optimizers.registry import register_row_optimizer
from elastable.master.backend.contract import BackendTensor, backend

# Rows that one call of Keras updates. Always as many, the last block padded: one compiled function a
# dim, and every element takes the same vectorised path wherever its row is.
_BLOCK_ROWS = 1024

# Keras' name of the variable that a table replaces; patterns of exclude_from_weight_decay are matched with it.
TABLE_VARIABLE = "embeddings"

#: Where PyTorch's own versions of Keras' optimizers are, which take the same steps.
OF_TORCH = "keras.src.backend.torch."

_UNDECAYED = "excluded_from_weight_decay"  # next to the config, of tables that are

# Of the steps that show how an optimizer treats rows and columns: its own rate may be too small for them to show
# anything, and is 0 where a schedule warms up.
_TRIAL_RATE = 0.1


def canonical_config(
    optimizer: keras.Optimizer, learning_rate: float, weight_decay: float | None, undecayed: bool = False
) -> dict[str, object]:
    """The optimizer's serialised config, as it is run on rows: constant rate, no clipping, averages or counted name.

    Args:
        learning_rate, weight_decay: Replace the optimizer's own.
        undecayed: Whether it leaves tables out of weight decay (`exclude_from_weight_decay`), which no config says.

    Raises:
        Unsupported: Keras cannot make the optimizer from its config again.
    """
    kind = type(optimizer).__name__
    config: dict[str, Any] = keras.saving.serialize_keras_object(optimizer)
    if str(config["module"]).startswith(OF_TORCH):
        config |= {"module": "keras.optimizers", "registered_name": None}
    config["config"] |= {
        "name": kind.lower(),
        "learning_rate": learning_rate,
        "weight_decay": weight_decay,
        "clipnorm": None,
        "global_clipnorm": None,
        "clipvalue": None,
        "loss_scale_factor": None,
        "gradient_accumulation_steps": None,
        "use_ema": False,
        "ema_overwrite_frequency": None,
    }
    try:
        return json.loads(json.dumps(config | ({_UNDECAYED: True} if undecayed else {})))  # type: ignore[no-any-return]
    except TypeError as error:
        raise Unsupported(f"optimizer {kind}: its config is not JSON ({error}), so tables cannot use it") from error


class KerasBlockOptimizer(RowOptimizer):
    """Runs a Keras optimizer on blocks of rows; slots are the optimizer's variables.

    Raises (from the constructor):
        BadSpec: the spec holds no config of a Keras optimizer, or of one that takes no step.
        Unsupported: the optimizer has state that cannot be split by row, or treats the rows of a table jointly.
    """

    fused = False

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec
        self._kind = type(self._optimizer()).__name__
        self.default_learning_rate = spec.get("learning_rate", 0.001)
        self._blocks: dict[int, _Block] = {}
        self._lock = threading.Lock()
        try:
            self.slots = self._find_slots()
            self._refuse_joint_rows()
            self.whole_rows = self._joins_columns()
        except ElastableError:
            raise
        except Exception as error:  # of Keras, its backend or anybody: a config may say anything
            message = f"{type(error).__name__}: {error}"
            raise BadSpec(f"optimizer {self._kind} fails in its first steps: {message}") from error

    @property
    def shown_name(self) -> str:
        """The class of the Keras optimizer."""
        return self._kind

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        dim = batch.gradients.shape[1]
        with self._lock:
            if dim not in self._blocks:
                self._blocks[dim] = _Block(self._optimizer(), _BLOCK_ROWS, dim)
            for start in range(0, len(batch), _BLOCK_ROWS):
                part = batch.part(start, start + _BLOCK_ROWS)
                here, there = part.weight_positions, part.positions
                weights[here], slots[there] = self._blocks[dim].run(
                    weights[here], slots[there], part.gradients, part.step, part.rate
                )

    def _optimizer(self) -> keras.Optimizer:
        reason = "it is something else"
        try:
            optimizer = keras.saving.deserialize_keras_object(optimizer_config(self.spec.keras_config), safe_mode=True)
            if isinstance(optimizer, keras.optimizers.Optimizer):
                if json.loads(self.spec.keras_config).get(_UNDECAYED):
                    optimizer.exclude_from_weight_decay(var_names=[TABLE_VARIABLE])
                return optimizer
        except (ValueError, TypeError, KeyError, ImportError, AttributeError, RecursionError) as error:
            reason = str(error)
        raise BadSpec(
            f"optimizer spec 'keras': {self.spec.keras_config[:200]!r} is no config of a Keras optimizer that can be "
            f"made here ({reason}); a class of your own needs @keras.saving.register_keras_serializable()"
        )

    def _find_slots(self) -> tuple[SlotSpec, ...]:
        block = _Block(self._optimizer(), 3, 2)
        found = []
        for variable in block.slots:
            name = variable.name.removeprefix("embeddings_")
            if tuple(variable.shape) != (3, 2):
                raise Unsupported(
                    f"optimizer {self._kind}: its variable {name!r} of shape {tuple(variable.shape)} for a table of "
                    "shape (rows, dim) cannot be split by row, so tables in a store cannot use it"
                )
            values = np.unique(backend().copied(variable))
            if len(values) != 1:
                raise Unsupported(
                    f"optimizer {self._kind}: its variable {name!r} does not start from a constant, so the rows of "
                    "a table in a store cannot be given one when they are first touched"
                )
            found.append(SlotSpec(name, float(values[0])))
        return tuple(found)

    def _refuse_joint_rows(self) -> None:
        """Compares rows updated together with the same rows updated alone."""
        weights, gradients = _trial()
        together = self._steps(weights, gradients)
        for row in range(len(weights)):
            if not self._agree(together[[row]], self._steps(weights[[row]], gradients[:, [row]])):
                raise Unsupported(
                    f"optimizer {self._kind} does not treat the rows of a table separately (a row's update depends "
                    "on other rows), so tables in a store cannot use it"
                )

    def _joins_columns(self) -> bool:
        """Compares columns updated together with the same columns updated alone."""
        weights, gradients = _trial()
        halves = [self._steps(weights[:, part], gradients[:, :, part]) for part in (slice(0, 2), slice(2, 4))]
        return not self._agree(self._steps(weights, gradients), np.concatenate(halves, axis=1))

    def _agree(self, together: Float32, alone: Float32) -> bool:
        return np.allclose(together, alone, rtol=1e-4, atol=1e-6 * _TRIAL_RATE)

    def _steps(self, weights: Float32, gradients: Float32) -> Float32:
        """float32 `[rows, dim]` after steps with gradients `[steps, rows, dim]`."""
        block = _Block(self._optimizer(), *weights.shape)
        slots = np.tile(self.initial_slots(weights.shape[1]), (len(weights), 1))
        for step, gradient in enumerate(gradients):
            weights, slots = block.run(weights, slots, gradient, step, _TRIAL_RATE)
        return weights


def _trial() -> tuple[Float32, Float32]:
    """Weights `[3, 4]` and two gradients of them, whose rows and columns differ in size."""
    random = np.random.default_rng(0)
    weights = random.normal(size=(3, 4)).astype(np.float32)
    scales = np.array([[1], [10], [0.1]], np.float32) * np.array([1, 3, 0.3, 7], np.float32)
    return weights, random.normal(size=(2, 3, 4)).astype(np.float32) * scales


class _Block:
    """A Keras optimizer built on one variable of `[rows, dim]`, as one compiled function."""

    def __init__(self, optimizer: keras.Optimizer, rows: int, dim: int) -> None:
        # Some optimizers (Muon) go by the name; and weights that differ show slots made from them.
        start = np.linspace(-1.0, 1.0, rows * dim, dtype=np.float32).reshape(rows, dim)
        self._variable = keras.Variable(start, dtype="float32", name=TABLE_VARIABLE)
        self._optimizer = optimizer
        optimizer.build([self._variable])
        own = {id(optimizer.iterations), id(optimizer.learning_rate)}
        self.slots = [variable for variable in optimizer.variables if id(variable) not in own]
        self._rows = rows
        self._step: Callable[..., list[Array]] | None = None

    def run(
        self, weights: Float32, slots: Float32, gradients: Float32, step: int, learning_rate: float
    ) -> tuple[Float32, Float32]:
        """Weights and slots of up to `rows` rows after one step."""
        count = len(gradients)
        padding = ((0, self._rows - count), (0, 0))
        parts = [weights, gradients, *np.split(slots, max(1, len(self.slots)), axis=1)[: len(self.slots)]]
        blocks = [np.pad(part, padding).astype(np.float32, copy=False) for part in parts]
        given = (np.int64(step), np.float32(learning_rate), *blocks)
        if self._step is None:
            self._step = backend().update(
                self._traced, list(map(np.asarray, given)), (self._variable, *self._optimizer.variables)
            )
        after = self._step(*given)
        arrays = [array[:count] for array in after]
        return arrays[0], np.concatenate([np.empty((count, 0), np.float32), *arrays[1:]], axis=1)

    def _traced(
        self,
        step: BackendTensor,
        rate: BackendTensor,
        weights: BackendTensor,
        gradients: BackendTensor,
        *slots: BackendTensor,
    ) -> list[BackendTensor]:
        self._variable.assign(weights)
        for variable, values in zip(self.slots, slots, strict=True):
            variable.assign(values)
        self._optimizer.iterations.assign(step)
        self._optimizer.learning_rate.assign(rate)
        self._optimizer.apply([gradients], [self._variable])
        return [keras.ops.copy(variable.value) for variable in (self._variable, *self.slots)]


register_row_optimizer(KERAS_BLOCK, KerasBlockOptimizer)


_MOST_BYTES = 64 << 10
_DEEPEST = 8
_MOST_TURNS = 100
_TURNS = ("ns_steps",)
"""Of loops that Keras writes out turn by turn: those of Muon, which takes 5."""
_KEPT = ("module", "class_name", "config", "registered_name")
"""What `keras.saving.serialize_keras_object` writes, without shapes to build by."""


def optimizer_config(text: str) -> dict[str, object]:
    """The config of an optimizer, with nothing in it that is not one or a schedule.

    Args:
        text: JSON, as of `OptimizerSpec.keras_config`.

    Raises:
        ValueError: it is something else, or too large; says what.
    """
    if len(text) > _MOST_BYTES:
        raise ValueError(f"{len(text)} characters; the most are {_MOST_BYTES}")
    config = json.loads(text)
    if not isinstance(config, dict) or not issubclass(_class_of(config), keras.optimizers.Optimizer):
        raise ValueError("it names no optimizer")
    return _allowed(config, 0)


def _allowed(config: dict[str, object], depth: int) -> dict[str, object]:
    _class_of(config)
    return {key: _checked(config[key], depth + 1) for key in _KEPT if key in config}


def _checked(value: object, depth: int) -> object:
    if depth > _DEEPEST:
        raise ValueError(f"it is nested more than {_DEEPEST} deep")
    if isinstance(value, dict):
        if "class_name" in value or "__class_name__" in value:
            return _allowed(value, depth)
        for key in _TURNS:
            if not (isinstance(turns := value.get(key, 0), int) and turns <= _MOST_TURNS):
                raise ValueError(f"{key}={turns!r:.100}; the most are {_MOST_TURNS}")
        return {key: _checked(held, depth + 1) for key, held in value.items()}
    if isinstance(value, list):
        return [_checked(held, depth + 1) for held in value]
    return value


def _class_of(config: dict[str, object]) -> type:
    """The class that a config names; one of Keras' own, or one that was registered in this process."""
    name, module, registered = (config.get(key) for key in ("class_name", "module", "registered_name"))
    kinds = (keras.optimizers.Optimizer, keras.optimizers.schedules.LearningRateSchedule)
    found: object = None
    if isinstance(name, str) and module in ("keras.optimizers", "keras.optimizers.schedules"):
        found = getattr(keras.optimizers.schedules if module.endswith("schedules") else keras.optimizers, name, None)
    if found is None and isinstance(registered, str):
        found = keras.saving.get_registered_object(registered)
    if not (isinstance(found, type) and issubclass(found, kinds)):
        raise ValueError(f"{str(name)[:100]!r} is no optimizer or learning-rate schedule that is known here")
    return found
