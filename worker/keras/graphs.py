"""Walking a traced TensorFlow graph backwards."""

from __future__ import annotations

from collections.abc import Iterator

import tensorflow as tf

__all__ = ["ancestors", "is_stateful"]

#: Operations that keep state and yet give the same answer for the same input.
_CONSTANT_STATE = ("Placeholder", "LookupTable", "HashTable", "VarHandleOp", "AnonymousHashTable", "Assert")


def ancestors(tensor: tf.Tensor) -> Iterator[tf.Operation]:
    """The operations that compute a tensor, each once, its own first."""
    waiting, seen = [tensor.op], set()
    while waiting:
        operation = waiting.pop()
        if operation.name not in seen:
            seen.add(operation.name)
            yield operation
            waiting.extend(part.op for part in operation.inputs)


def is_stateful(operation: tf.Operation) -> bool:
    """Whether an operation may give another answer for the same input: it reads a variable, draws or has effects."""
    stateful = operation.op_def is not None and operation.op_def.is_stateful
    return stateful and not operation.type.startswith(_CONSTANT_STATE)
