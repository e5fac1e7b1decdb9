"""Everything that training has come to, as whole tensors in an order that does not know of replicas."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from elastable.embedding_store.errors import CheckpointError
from elastable.replicas.groups.agreement import run_at_root
from elastable.replicas.groups.group import Array
from elastable.replicas.training.variables.optimizer import PartOptimizer
from elastable.replicas.training.variables.variable_memory import put, value_of
from elastable.replicas.training.variables.weights import ReplicaWeights

__all__ = ["WholeTensors"]


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor: the variable it lies in, and the place of the variable whose parts it follows (None: it is whole)."""

    told: str
    shape: tuple[int, ...]
    variable: Any
    place: int | None = None

    @property
    def dtype(self) -> np.dtype[Any]:
        return value_of(self.variable).dtype

    @property
    def kind(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


class WholeTensors:
    """Trainable variables, states and optimizer variables by kind and place ("variables/00000").

    Keys, shapes and order are those that an unsharded model and a Keras
    optimizer built on it have, whatever replicas there are and whatever they share.

    Args:
        weights: Of the model.
        states: Of the model, those of frozen layers included.
        optimizer: Of the weights.
    """

    def __init__(self, weights: ReplicaWeights, states: Sequence[Any], optimizer: PartOptimizer) -> None:
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

    def names(self) -> dict[str, str]:
        """Key -> what a person calls it."""
        return {key: entry.told for key, entry in self._entries.items()}

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """(key, tensor) one after the other; every replica takes all of them."""
        self._weights.make_whole()
        for key, entry in self._entries.items():
            value = value_of(entry.variable)
            if entry.place is not None:
                (value,) = self._weights.exchange.gather([value], [self._weights.layouts[entry.place]])
            yield key, value.reshape(entry.shape)

    def restore(self, tensors: Mapping[str, Array] | None) -> None:
        """Takes back what `tensors` gave, also with other replicas; every replica calls it.

        Args:
            tensors: By key, on rank 0; the others' are not looked at.

        Raises:
            CheckpointError: a tensor is missing, of another shape or dtype, or
                not of the model; nothing has been changed.
        """
        given = dict(tensors or {})
        self.check(given)
        for key, entry in self._entries.items():
            mine = np.ascontiguousarray(given[key]) if self._group.rank == 0 else np.empty(entry.shape, entry.dtype)
            array = self._group.broadcast(mine.reshape(entry.shape))
            put(entry.variable, array if entry.place is None else self._weights.part_of(entry.place, array))
        self._weights.taken()

    def check(self, tensors: Mapping[str, Array]) -> None:
        """Refuses what `restore` would refuse; every replica calls it."""
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
                    f"the checkpoint lacks {key} ({entry.told}, {entry.kind}): it is of another model or optimizer"
                )
            if tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
                raise CheckpointError(
                    f"{key} ({entry.told}) is {found.dtype} {list(found.shape)} in the checkpoint and {entry.kind} in "
                    "the model"
                )
        return ""
