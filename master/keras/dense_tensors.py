"""The variables of a model's dense part: read for workers and checkpoints, and restored."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.commits.dense_part import DensePart
from elastable.master.keras.discovery import table_optimizers
from elastable.master.push_check import TensorSpec

__all__ = ["DenseTensors", "copied", "tensor_specs"]

#: How the keys of a version's tensors begin; the learning rates are those of the optimizers of single tables, which
#: a callback may assign.
_KINDS = ("variables", "states", "optimizer", "table_learning_rates")


class DenseTensors(DensePart):
    """What every dense part of a Keras model shares: its variables, read and written.

    Variables are the weights that an optimizer changes; states are all other weights (no metric and no seed of a
    random layer).

    Attributes:
        trained: Keras variables that an optimizer knows, in model order.

    Args:
        model: A built model.
        trained: See the attribute.
        states: Its other weights, in model order.
        reported: What workers get besides the states, as one more state each.
    """

    def __init__(
        self,
        model: keras.Model,
        trained: Sequence[keras.Variable],
        states: Sequence[keras.Variable],
        reported: Sequence[keras.Variable] = (),
    ) -> None:
        self._weights = variables_of(model.weights)
        self.trained, self._states = list(trained), list(states)
        self._reported = [*self._states, *reported]
        self._table_optimizers = table_optimizers(model)
        self.variables, self.states = tensor_specs(self.trained), tensor_specs(self._reported)
        self.frozen_tables: tuple[str, ...] = ()
        self._flags = b""
        # States of the last snapshot; None: they have changed since.
        self._snapshot_states: tuple[Tensor, ...] | None = None

    @property
    def optimizers(self) -> list[keras.Optimizer]:
        """All that train the model, each once."""
        found = (*self._optimizers(), *self._table_optimizers.values())
        return list({id(each): each for each in found}.values())

    @abstractmethod
    def _optimizers(self) -> Sequence[keras.Optimizer]:
        """Those of its variables."""

    @abstractmethod
    def _optimizer_variables(self) -> Sequence[keras.Variable]:
        """Of all optimizers of the model, in the order in which checkpoints keep them."""

    def snapshot(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> DenseSnapshot:
        known = tensors or {}
        trained, states, *_ = _KINDS
        self._snapshot_states = _values(states, self._reported[: len(self._states)], known) + tuple(
            copied(variable) for variable in self._reported[len(self._states) :]
        )
        return DenseSnapshot(
            version,
            _values(trained, self.trained, known),
            self._snapshot_states,
            tuple(spec.name for spec in self.variables),
            tuple(spec.name for spec in self.states),
            self._flags,
        )

    def rewind(self) -> None:
        """Makes the states those of the version again: a worker that shares the model changes them as it computes."""
        for variable, value in zip(self._states, self._snapshot_states or (), strict=False):
            variable.assign(value)

    def _take_states(self, values: Sequence[Tensor]) -> None:
        for variable, value in zip(self._states, values, strict=False):
            variable.assign(value)
        self._snapshot_states = None

    def tensors(self) -> dict[str, Tensor]:
        return {key: copied(variable) for key, variable in self._by_key().items()}

    def weights(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The model's weights among what `tensors` returned, in the order of `model.weights`, without rows.

        Raises:
            CheckpointError: a tensor is missing.
        """
        key_of = {id(variable): key for key, variable in self._by_key().items()}
        keys = [key_of[id(weight)] for weight in self._weights]
        if missing := [key for key in keys if key not in tensors]:
            raise CheckpointError(f"the checkpoint lacks {missing[0]}: it is of another model")
        return [tensors[key] for key in keys]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; entries of other kinds are ignored.

        Raises:
            CheckpointError: a tensor is missing, of another shape or dtype, or not
                of the model; nothing has been changed.
        """
        targets = self._by_key()
        for key, tensor in tensors.items():
            if key.partition("/")[0] in _KINDS and key not in targets:
                raise CheckpointError(
                    f"the checkpoint has {key} ({tensor.dtype} {list(tensor.shape)}), and the model has no such "
                    "variable: it is of another model"
                )
        for key, variable in targets.items():
            found = tensors.get(key)
            wanted = f"{variable.dtype} {list(variable.shape)}"
            if found is None:
                raise CheckpointError(f"the checkpoint lacks {key} ({variable.path}, {wanted}): it is of another model")
            if tuple(found.shape) != tuple(variable.shape) or found.dtype != np.dtype(variable.dtype):
                raise CheckpointError(
                    f"{key} ({variable.path}) is {found.dtype} {list(found.shape)} in the checkpoint and {wanted} in "
                    "the model"
                )
        for key, variable in targets.items():
            variable.assign(tensors[key])
        self._snapshot_states = None

    def _by_key(self) -> dict[str, keras.Variable]:
        optimizers = self._table_optimizers.values()
        rates = [each._learning_rate for each in optimizers if isinstance(each._learning_rate, keras.Variable)]
        # By position: Keras counts names up with every model made in a process.
        return {
            _key(kind, position): variable
            for kind, found in zip(
                _KINDS, (self.trained, self._states, self._optimizer_variables(), rates), strict=True
            )
            for position, variable in enumerate(found)
        }


def _key(kind: str, position: int) -> str:
    return f"{kind}/{position:05d}"


def _values(kind: str, variables: Sequence[keras.Variable], known: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Of all variables of a kind, read where they are not known."""
    keys = [_key(kind, position) for position in range(len(variables))]
    return tuple(
        known[key] if key in known else copied(variable) for key, variable in zip(keys, variables, strict=True)
    )


def tensor_specs(variables: Sequence[keras.Variable]) -> tuple[TensorSpec, ...]:
    """Paths, shapes and dtypes of Keras variables."""
    return tuple(TensorSpec(variable.path, tuple(variable.shape), np.dtype(variable.dtype)) for variable in variables)


def copied(variable: keras.Variable) -> Tensor:
    """A read-only copy of its value."""
    # Raw, as every version is read while workers wait. Nothing is copied yet: TensorFlow copies a
    # variable's buffer when it is changed while anybody holds it.
    value = variable.value
    copy: Tensor = np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
    copy.setflags(write=False)
    return copy
