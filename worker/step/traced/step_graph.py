"""Dependencies in a traced step: which values are computed from which reads of variables and rows, and when.

A `train_step` with several updates reads some weights before an update and some after it. Each read and each change has
a position among the operations of the graph; comparing them shows what a step reads that it has changed before.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import keras
import tensorflow as tf

__all__ = ["Change", "Read", "StepGraph", "here", "stale_reads"]

Read: TypeAlias = tuple[Hashable, int]
"""The variable or table that was read, and the position of the read."""

#: Operations that take a variable without reading its value.
_NO_READ = ("VariableShape", "VarIsInitializedOp", "Assign", "DestroyResourceOp")


@dataclass(frozen=True, slots=True)
class Change:
    """A change of variables or tables.

    Attributes:
        keys: What is changed.
        position: After which operation.
    """

    keys: frozenset[Hashable]
    position: int


def here() -> int:
    """The position of the next operation to be created."""
    return len(tf.compat.v1.get_default_graph().get_operations())


class StepGraph:
    """The graph of a step.

    Args:
        graph: A traced graph.
        variables: Keras variables whose reads matter.
        rows: Name of an operation that yields rows -> what it reads, and the position of the lookup.
    """

    def __init__(
        self,
        graph: tf.Graph,
        variables: Iterable[keras.Variable],
        rows: Mapping[str, tuple[Hashable, int]] | None = None,
    ) -> None:
        self._operations = graph.get_operations()
        self._places = {operation.name: place for place, operation in enumerate(self._operations)}
        known = {id(variable.value.handle): id(variable) for variable in variables}
        self._handles = {inner.name: known[id(outer)] for outer, inner in graph.captures if id(outer) in known}
        self._rows = rows or {}

    def reads(self, tensors: object) -> set[Read]:
        """What the tensors in a structure are computed from; other values are skipped."""
        flat = tf.nest.flatten(tensors, expand_composites=True)
        waiting = [each.op for each in flat if tf.is_tensor(each) and hasattr(each, "op")]
        seen: set[str] = set()
        places: set[Read] = set()
        while waiting:
            operation = waiting.pop()
            if operation.name in seen:
                continue
            seen.add(operation.name)
            if operation.name in self._rows:
                places.add(self._rows[operation.name])
                continue
            touched = [self._handles[each.name] for each in operation.inputs if each.name in self._handles]
            if touched and not operation.type.startswith(_NO_READ):
                places |= {(key, self._places[operation.name]) for key in touched}
            waiting.extend(each.op for each in operation.inputs if each.name not in self._handles)
        return places

    def assigned(self, variables: Iterable[keras.Variable]) -> list[tuple[keras.Variable, tf.Tensor]]:
        """(variable, new value or increment) of every assignment to one of these, in order."""
        wanted = {id(variable): variable for variable in variables}
        return [
            (wanted[key], operation.inputs[1])
            for operation in self._operations
            if operation.type.startswith("Assign")
            for each in operation.inputs
            if (key := self._handles.get(each.name)) is not None and key in wanted
        ]


def stale_reads(reads: Iterable[Read], applied: Sequence[Change]) -> list[Hashable]:
    """What was read after one of these changes to it, in the order of the reads."""
    stale = [
        key
        for key, position in sorted(reads, key=lambda read: read[1])
        if any(key in change.keys and change.position <= position for change in applied)
    ]
    return list(dict.fromkeys(stale))
