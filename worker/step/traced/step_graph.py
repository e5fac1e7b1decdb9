"""Dependencies in a traced step: which values are computed from which reads of variables and rows, and when.

A `train_step` with several updates reads some weights before an update and some after it. Each read and each change has
a position among the operations of the graph; comparing them shows whether a version contains the values that were read.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import keras
import tensorflow as tf

from elastable.worker.keras.graphs import is_stateful

__all__ = ["Change", "Reads", "StepGraph", "here", "stale_reads"]

#: Operations that take a variable without reading its value.
_NO_READ = ("VariableShape", "VarIsInitializedOp", "Assign", "DestroyResourceOp")
_CALLS = ("If", "While", "Case", "PartitionedCall", "StatefulPartitionedCall")


@dataclass(frozen=True, slots=True)
class Reads:
    """What tensors are computed from.

    Attributes:
        places: (variable or table that was read, position of the read).
        drawn: Names of random operations, or operations with effects, that they depend on.
    """

    places: frozenset[tuple[Hashable, int]]
    drawn: frozenset[str]


@dataclass(frozen=True, slots=True)
class Change:
    """A change of variables or tables.

    Attributes:
        keys: What is changed.
        position: After which operation.
        turn: Of the step, in which it is made.
    """

    keys: frozenset[Hashable]
    position: int
    turn: int


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

    def reads(self, tensors: object) -> Reads:
        """What the tensors in a structure are computed from; other values are skipped."""
        flat = tf.nest.flatten(tensors, expand_composites=True)
        waiting = [each.op for each in flat if tf.is_tensor(each) and hasattr(each, "op")]
        seen: set[str] = set()
        places, drawn = set(), set()
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
            elif not touched and _draws(operation):
                drawn.add(operation.name)
            waiting.extend(each.op for each in operation.inputs if each.name not in self._handles)
        return Reads(frozenset(places), frozenset(drawn))

    def assigned(
        self, variables: Iterable[keras.Variable]
    ) -> list[tuple[keras.Variable, int, tf.Tensor | keras.Variable]]:
        """(variable, position, new value or increment) of every assignment to one of these, in order.

        For one within a condition, a loop or a compiled function the value is the variable itself.
        """
        wanted = {id(variable): variable for variable in variables}
        found = []
        for place, operation in enumerate(self._operations):
            touched = [
                wanted[key] for each in operation.inputs if (key := self._handles.get(each.name)) is not None
                and key in wanted
            ]  # fmt: skip
            if touched and operation.type.startswith("Assign"):
                found.append((touched[0], place, operation.inputs[1]))
            elif touched and operation.type in _CALLS:
                found += [(variable, place, variable) for variable in touched]
        return found


def _draws(operation: tf.Operation) -> bool:
    return is_stateful(operation) and operation.type not in ("ReadVariableOp", "ResourceGather")


def stale_reads(reads: Reads, turn: int, applied: Sequence[Change], assigned: Sequence[Change] = ()) -> list[Hashable]:
    """What was read at another time than the version of a turn provides; empty: it can be computed in that turn.

    Args:
        reads: Reads of the value to compute.
        turn: The turn that would compute it.
        applied: Changes by the step's updates; visible from the next turn on.
        assigned: Changes by assignments; also visible in their own turn.
    """
    stale = []
    for key, position in sorted(reads.places, key=lambda read: read[1]):
        for changes, own_turn in ((applied, False), (assigned, True)):
            before = {at for at, change in enumerate(changes) if key in change.keys and change.position <= position}
            holds = {
                at
                for at, change in enumerate(changes)
                if key in change.keys
                and (change.turn < turn or (own_turn and change.turn == turn and change.position <= position))
            }
            if before != holds:
                stale.append(key)
                break
    return list(dict.fromkeys(stale))
