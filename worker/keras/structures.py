"""Names for the values that Keras and TensorFlow pass around: tensors of every kind, and structures of them."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TypeAlias

import tensorflow as tf

from elastable.worker.readers.records.pytrees import Structure

__all__ = [
    "BatchSpec",
    "Gradient",
    "SpecStructure",
    "TensorBatch",
    "TensorLike",
    "TensorStructure",
    "ancestors",
    "is_stateful",
]

TensorLike: TypeAlias = "tf.Tensor | tf.RaggedTensor | tf.SparseTensor"
"""A tensor: dense, ragged or sparse."""

TensorStructure: TypeAlias = "Structure[TensorLike]"
"""Tensors in dicts, tuples and lists of any depth."""

TensorBatch: TypeAlias = tuple[TensorStructure, ...]
"""(x,), (x, y) or (x, y, sample_weight)."""

SpecStructure: TypeAlias = "Structure[tf.TypeSpec]"
"""The TypeSpecs of a `TensorStructure`."""

BatchSpec: TypeAlias = tuple[SpecStructure, ...]
"""The TypeSpecs of a `TensorBatch`."""

Gradient: TypeAlias = "tf.Tensor | tf.IndexedSlices | None"
"""What a tape returns for one source; None: the target does not depend on it."""


# Walking a traced TensorFlow graph backwards


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
