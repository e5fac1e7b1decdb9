"""The tensors of a model's dense part, as checkpoints and records hold them: by kind and place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import Tensor
from elastable.master.push_check import TensorSpec

__all__ = ["DenseTensors", "copied", "tensor_specs"]

#: What tensors of a version are, as their keys begin; learning rates are those of tables' own optimizers, which a
#: callback may assign.
_KINDS = ("variables", "states", "optimizer", "table_learning_rates")


class DenseTensors:
    """Reads and writes them.

    Args:
        weights: All of the model, in the order of `model.get_weights()`.
        trained: Those that an optimizer changes, in model order.
        states: All others.
        optimizer: Variables of the optimizers.
        own: Keras optimizers that tables have of their own.
    """

    def __init__(
        self,
        weights: Sequence[keras.Variable],
        trained: Sequence[keras.Variable],
        states: Sequence[keras.Variable],
        optimizer: Sequence[keras.Variable],
        own: Sequence[keras.Optimizer],
    ) -> None:
        self._weights = weights
        rates = [each._learning_rate for each in own if isinstance(each._learning_rate, keras.Variable)]
        # By place: Keras counts names up with every model made in a process.
        self._by_key = {
            f"{kind}/{place:05d}": variable
            for kind, found in zip(_KINDS, (trained, states, optimizer, rates), strict=True)
            for place, variable in enumerate(found)
        }

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold: variables, states, optimizer variables, by kind and place."""
        return {key: copied(variable) for key, variable in self._by_key.items()}

    def weights(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """The model's weights of what `tensors` gave, in the order of `model.get_weights()`.

        Raises:
            CheckpointError: a tensor is missing.
        """
        places = {id(variable): key for key, variable in self._by_key.items()}
        keys = [places[id(weight)] for weight in self._weights]
        if missing := [key for key in keys if key not in tensors]:
            raise CheckpointError(f"the checkpoint lacks {missing[0]}: it is of another model")
        return [tensors[key] for key in keys]

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Takes back what `tensors` gave; entries of other kinds are left alone.

        Raises:
            CheckpointError: a tensor is missing, of another shape or dtype, or not
                of the model; nothing has been changed.
        """
        targets = self._by_key
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
