"""The variables of a model over replicas: which parts are here, made whole to be used, updated in parts."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.errors import BadSpec
from elastable.worker.replicas.group import Array, ReplicaGroup
from elastable.worker.sharded.exchange import Exchange, Layout
from elastable.worker.sharded.placing import VariablePlacement
from elastable.worker.sharded.split import Split
from elastable.worker.sharded.variable_memory import give_back, held_bytes, put, value_of

__all__ = ["ReplicaWeights"]

_MARK = "_elastable_sharded_by"


class ReplicaWeights:
    """Trainable variables, of some of which replicas hold or update parts only.

    A variable whose weight is shared lies in parts: it is gathered before the
    forward pass, and its memory is given back behind the backward pass. One
    whose state alone is shared is whole everywhere: its part is copied into a
    buffer to be updated, and gathered from everyone's buffers at once.

    Args:
        variables: Keras variables of the model, in its order.
        plan: From `plan_variables`.
        group: All replicas; each makes this.

    Attributes:
        layouts: For every variable how it is updated.
        targets: For every variable what is updated: a flat buffer, or itself.
        exchange: Over the replicas.

    Raises:
        BadSpec: a variable is shared already, by another trainer.
    """

    def __init__(self, variables: Sequence[Any], plan: Sequence[VariablePlacement], group: ReplicaGroup) -> None:
        weights = {line.variable: line.domain for line in plan if line.kind == "weight"}
        states = {line.variable: line.domain for line in plan if line.kind == "optimizer_state"}
        self.variables = list(variables)
        self._refuse_marked(weights)
        self.layouts: list[Layout] = []
        for variable in variables:
            domain = weights[variable.path] or states.get(variable.path)
            split = None if domain is None else Split(int(np.prod(variable.shape)), domain.group_size)
            self.layouts.append(Layout(split, domain))
        self.exchange = Exchange(group, [layout.domain for layout in self.layouts if layout.domain is not None])
        self._in_parts = [weights[variable.path] is not None for variable in variables]
        self.targets = [
            variable if layout.split is None else _buffer(variable, self.part_of(place, value_of(variable)))
            for place, (variable, layout) in enumerate(zip(variables, self.layouts, strict=True))
        ]
        self._whole = True
        for variable, layout in zip(variables, self.layouts, strict=True):
            if layout.split is not None:
                setattr(variable, _MARK, weakref.ref(self))

    def part_of(self, place: int, array: Array) -> Array:
        """This replica's buffer of an array with as many elements as a variable that is split."""
        layout = self.layouts[place]
        assert layout.split is not None
        assert layout.domain is not None
        return layout.split.take(self.exchange.part(layout.domain), array)

    def make_whole(self) -> None:
        """Gathers what lies in parts, if it is not gathered; every replica calls it."""
        if not self._whole:
            self._gather([place for place, apart in enumerate(self._in_parts) if apart])
            self._whole = True

    def give_back(self) -> None:
        """Frees what lies in parts but for this replica's parts, as they were last updated."""
        for place in self._places(self._in_parts):
            give_back(self.variables[place])
        self._whole = not any(self._in_parts)

    def take_back(self) -> None:
        """Takes the parts from the whole variables, which a person may have changed."""
        if self._whole:
            self._fill(self._places(self._in_parts))

    def taken(self) -> None:
        """All variables have been replaced from outside: their parts are taken from them."""
        self._whole = True
        self.take_back()

    def forget_buffers(self) -> None:
        """Frees the buffers that nothing is in but copies of whole variables."""
        for place in self._places([not apart for apart in self._in_parts]):
            give_back(self.targets[place])

    def begin_update(self) -> None:
        """Makes the buffers those of the variables; to be called before `targets` are updated."""
        self._fill(self._places([not apart for apart in self._in_parts]))

    def end_update(self) -> None:
        """Brings variables that are whole everywhere up to the buffers; every replica calls it."""
        places = self._places([not apart for apart in self._in_parts])
        self._gather(places)
        self.forget_buffers()
        for place in places:
            variable = self.variables[place]
            if variable.constraint is not None:
                variable.assign(variable.constraint(variable.value))
        if any(self._in_parts):
            self._whole = False

    def close(self) -> None:
        """The variables are whole, and ordinary, from now on; every replica calls it."""
        self.make_whole()
        for variable in self.variables:
            if hasattr(variable, _MARK):
                delattr(variable, _MARK)

    def bytes(self) -> tuple[int, int]:
        """(of the model's variables, of the buffers), as their memory is now."""
        buffers = [target for target, layout in zip(self.targets, self.layouts, strict=True) if layout.split]
        return sum(map(held_bytes, self.variables)), sum(map(held_bytes, buffers))

    def _places(self, among: Sequence[bool]) -> list[int]:
        """Places of the variables that are split and meant."""
        return [place for place, meant in enumerate(among) if meant and self.layouts[place].split is not None]

    def _fill(self, places: Sequence[int]) -> None:
        for place in places:
            put(self.targets[place], self.part_of(place, value_of(self.variables[place])))

    def _gather(self, places: Sequence[int]) -> None:
        if not places:
            return
        buffers = [value_of(self.targets[place]) for place in places]
        found = self.exchange.gather(buffers, [self.layouts[place] for place in places])
        for place, array in zip(places, found, strict=True):
            put(self.variables[place], array)

    def _refuse_marked(self, weights: Any) -> None:
        for variable in self.variables:
            held = getattr(variable, _MARK, None)
            if held is not None and held() is not None:
                raise BadSpec(
                    f"variable {variable.path!r} is sharded already, by another et.ReplicaTrainer; close() that first"
                )


def _buffer(variable: Any, part: Array) -> Any:
    return keras.Variable(part, name=variable.path.replace("/", "_"), dtype=variable.dtype)
