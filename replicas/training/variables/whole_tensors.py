"""The whole training state as tensors, in an order that does not depend on the replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import CheckpointError
from elastable.replicas.groups.agreement import run_at_root
from elastable.replicas.training.variables.optimizer import PartOptimizer
from elastable.replicas.training.variables.variable_memory import put, value_of
from elastable.replicas.training.variables.weights import ReplicaWeights

__all__ = ["WholeTensors"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor: the variable that holds it, and the position of the variable it is split like (None: it is whole)."""

    name: str
    shape: tuple[int, ...]
    variable: keras.Variable
    place: int | None = None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return value_of(self.variable).dtype

    @property
    def kind(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class WholeTensors:
    """Trainable variables, states and optimizer variables by kind and index ("variables/00000").

    Keys, shapes and order are those of an unsharded model and a Keras
    optimizer built on it, whatever the replicas and the sharding.

    Args:
        weights: The model's trainable variables.
        states: Its other variables, those of frozen layers included.
        optimizer: The optimizer of the weights.
    """

    def __init__(self, weights: ReplicaWeights, states: Sequence[keras.Variable], optimizer: PartOptimizer) -> None:
        self._weights = weights
        self._group = weights.exchange.group
        slots = {id(slot): (place, name) for slot, place, name in optimizer.slots}
        entries: dict[str, _Entry] = {}
        for place, variable in enumerate(weights.variables):
            entries[f"variables/{place:05d}"] = _Entry(variable.path, tuple(variable.shape), variable)
        for place, variable in enumerate(states):
            entries[f"states/{place:05d}"] = _Entry(variable.path, tuple(variable.shape), variable)
        for place, variable in enumerate(optimizer.keras.variables):
            key = f"optimizer/{place:05d}"
            if id(variable) not in slots:
                entries[key] = _Entry(variable.path, tuple(variable.shape), variable)
                continue
            of, name = slots[id(variable)]
            whole = weights.variables[of]
            split = weights.layouts[of].split is not None
            entries[key] = _Entry(f"{whole.path}/{name}", tuple(whole.shape), variable, of if split else None)
        self._entries = entries

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """(key, tensor) one after another; every replica iterates to the end."""
        self._weights.make_whole()
        for key, entry in self._entries.items():
            value = value_of(entry.variable)
            if entry.place is not None:
                (value,) = self._weights.exchange.gather([value], [self._weights.layouts[entry.place]])
            yield key, value.reshape(entry.shape)

    def restore(self, tensors: Mapping[str, Array] | None) -> None:
        """Restores what `tensors` gave, of any number of replicas; every replica calls it.

        Args:
            tensors: Tensors by key; only rank 0's are used.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape or dtype; nothing has changed.
        """
        given = dict(tensors or {})
        self.check(given)
        for key, entry in self._entries.items():
            mine = np.ascontiguousarray(given[key]) if self._group.rank == 0 else np.empty(entry.shape, entry.dtype)
            array = self._group.broadcast(mine.reshape(entry.shape))
            put(entry.variable, array if entry.place is None else self._weights.part_of(entry.place, array))
        self._weights.taken()

    def check(self, tensors: Mapping[str, Array]) -> None:
        """Raises what `restore` would raise; every replica calls it."""
        run_at_root(self._group, lambda: self._checked(tensors))

    def _checked(self, tensors: Mapping[str, Array]) -> str:
        for key, tensor in tensors.items():
            if key not in self._entries:
                raise CheckpointError(
                    f"the checkpoint has {key} ({tensor.dtype} {list(tensor.shape)}), and the model has no such "
                    "variable: it is of another model or optimizer"
                )
        for key, entry in self._entries.items():
            found = tensors.get(key)
            if found is None:
                raise CheckpointError(
                    f"the checkpoint lacks {key} ({entry.name}, {entry.kind}): it is of another model or optimizer"
                )
            if tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
                raise CheckpointError(
                    f"{key} ({entry.name}) is {found.dtype} {list(found.shape)} in the checkpoint and {entry.kind} in "
                    "the model"
                )
        return ""
