"""Names for the values that Keras and TensorFlow pass around: tensors of every kind, and structures of them."""

from __future__ import annotations

from typing import TypeAlias

from elastable.master.backend.lazy import tf
from elastable.worker.readers.batch.pytrees import Structure

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
