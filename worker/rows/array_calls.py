"""Embedding calls on JAX and PyTorch: dense integer ids; rows come in the shape of the ids."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeAlias

import keras

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadIds, Unsupported
from elastable.embedding_store.native.row_fold import COMBINERS
from elastable.embedding_store.tables.grouping import unique_ids
from elastable.master.backend.contract import BackendTensor, array_backend
from elastable.worker.keras.seeds import stateless_values
from elastable.worker.rows.scope import PlannedCalls, RowScope, TapeLookup, current_scope
from elastable.worker.rows.store_layer import StoreLayer

_Rows: TypeAlias = tuple[BackendTensor, BackendTensor | None]
"""The rows of a call, ids' shape + `[dim]`, and under `mask_zero` which ids are no padding."""


#: Regularizers to which rows of zeros add nothing.
ZEROS_COUNT_NOTHING = (keras.regularizers.L1, keras.regularizers.L2, keras.regularizers.L1L2)


class ArrayScope(RowScope):
    """A scope whose calls are given ids of any shape.

    Attributes:
        mask: Of the last call, for `compute_mask`.
    """

    mask: BackendTensor | None = None

    def call(self, layer: StoreLayer, ids: BackendTensor) -> _Rows:
        """The rows of a call."""
        raise NotImplementedError


class ArrayPlanScope(ArrayScope):
    """Records the ids of every embedding call, and returns zeros as rows.

    Attributes:
        calls: (layer, ids) of every call.

    Args:
        zero: What rows are made of: a tensor by which a backend sees what depends on them.
    """

    def __init__(self, zero: BackendTensor = 0.0) -> None:
        self._zero = zero
        self.calls: list[tuple[StoreLayer, BackendTensor]] = []

    def call(self, layer: StoreLayer, ids: BackendTensor) -> _Rows:
        self.calls.append((layer, ids))
        self.mask = keras.ops.not_equal(ids, 0) if layer.mask_zero else None
        return keras.ops.full((*ids.shape, layer.output_dim), self._zero, "float32"), self.mask


@dataclass(slots=True)
class ArrayStepScope(PlannedCalls, ArrayScope):
    """Hands out the rows that were gathered for each call of a step.

    Attributes:
        gathered: For every call its rows.
        masks: Number of a call -> which of its ids are no padding; of ids that a tensor of the backend may not hold.
        planned: For every call the ids that its rows are of; () where the step is compiled.
    """

    gathered: Sequence[BackendTensor]
    masks: Mapping[int, BackendTensor] = field(default_factory=dict)
    planned: Sequence[Int64] = ()
    mask: BackendTensor | None = None

    def call(self, layer: StoreLayer, ids: BackendTensor) -> _Rows:
        number = self.numbered(layer)
        rows = self.gathered[number]
        others = bool(self.planned) and not array_backend().holds(ids, self.planned[number])
        if others or tuple(rows.shape[:-1]) != tuple(ids.shape):
            raise Unsupported(
                f"embedding layer {layer.name!r}: it is called with other ids than were planned for the batch: compute "
                "ids from the batch alone, in the same way for every batch"
            )
        self.mask = self.masks.get(number)
        return rows, self.mask


class ArrayTapeScope(ArrayScope):
    """Reads the current rows at each call, and records the lookups; for the user's own steps."""

    def __init__(self) -> None:
        self.lookups: list[TapeLookup] = []

    def call(self, layer: StoreLayer, ids: BackendTensor) -> _Rows:
        asked = layer.ids_of(keras.ops.convert_to_numpy(ids))
        unique, inverse = unique_ids(asked.reshape(-1))
        lookup = TapeLookup(layer, unique, array_backend().watched(layer.read_rows(unique)))
        self.lookups.append(lookup)
        self.mask = keras.ops.not_equal(ids, 0) if layer.mask_zero else None
        return keras.ops.take(lookup.rows, inverse.reshape(asked.shape), axis=0), self.mask


def embed(layer: Any, inputs: BackendTensor, weights: BackendTensor | None, training: bool | None) -> BackendTensor:
    """The forward pass of one call.

    Args:
        layer: A `elastable.worker.rows.store_backed.StoreBacked`, which imports this module.
        inputs, weights, training: As of `et.Embedding`.
    """
    layer.note_ids(keras.backend.standardize_dtype(inputs.dtype))
    if weights is not None and layer.combiner is None:
        raise BadIds(f"embedding layer {layer.name!r}: weights need a combiner ({', '.join(COMBINERS)})")
    if weights is not None and tuple(weights.shape) != tuple(inputs.shape):
        raise BadIds(
            f"embedding layer {layer.name!r}: weights must be shaped as the ids; ids are {tuple(inputs.shape)}, "
            f"weights {tuple(weights.shape)}"
        )
    rows, kept = _rows_of(layer, inputs, training)
    return keras.ops.cast(_combined(rows, weights, kept, layer.combiner), layer.compute_dtype)


def rows_of(layer: Any, ids: BackendTensor, training: bool | None = None) -> BackendTensor:
    """float32 ids' shape + `[dim]`: the rows of a call, uncombined; arguments as of `embed`."""
    layer.note_ids(keras.backend.standardize_dtype(ids.dtype))
    return _rows_of(layer, ids, training)[0]


def _rows_of(layer: Any, ids: BackendTensor, training: bool | None) -> _Rows:
    scope = current_scope()
    if not layer.on_worker and isinstance(scope, ArrayScope) and not scope.leaves_out(layer):
        return scope.call(layer, ids)
    kept = keras.ops.not_equal(ids, 0) if layer.mask_zero else None
    if isinstance(scope, ArrayScope):
        scope.mask = kept
    if layer.on_worker:
        return keras.ops.take(layer.embeddings, ids, axis=0), kept
    layer.refuse_untrained(training and scope is None)
    rows = array_backend().rows_within(layer.read_rows, ids, layer.output_dim)
    if layer.trainable:
        rows = array_backend().constant(rows, stateless_values(), partial(layer.refuse_untrained, True))
    if scope is None and layer.embeddings_regularizer is not None and layer.trainable:
        _add_penalty(layer, ids, rows)
    return rows, kept


def _add_penalty(layer: Any, ids: BackendTensor, rows: BackendTensor) -> None:
    """As of `StoreBacked.add_penalty`."""
    if not isinstance(layer.embeddings_regularizer, ZEROS_COUNT_NOTHING):
        raise Unsupported(
            f"embedding layer {layer.name!r}: outside of training Keras' {array_backend().name} backend adds only L1 "
            "and L2 regularizers of the rows that a batch touches; leave embeddings_regularizer out of the layer, and "
            "add it to the loss"
        )
    flat = keras.ops.reshape(ids, (-1,))
    seen = flat[:0] if layer.seen_ids is None or not layer.losses else layer.seen_ids
    every = keras.ops.concatenate([seen, flat])
    order = keras.ops.argsort(every)  # stable: of equal ids the first is the first
    in_order = keras.ops.take(every, order)
    first = keras.ops.concatenate([keras.ops.ones((1,), "bool"), in_order[1:] != in_order[:-1]])[: every.shape[0]]
    once = keras.ops.scatter(order[:, None], keras.ops.cast(first, rows.dtype), every.shape)[seen.shape[0] :]
    layer.add_loss(layer.embeddings_regularizer(keras.ops.reshape(rows, (-1, layer.output_dim)) * once[:, None]))
    layer.see_ids(every)


def _combined(
    rows: BackendTensor, weights: BackendTensor | None, kept: BackendTensor | None, combiner: str | None
) -> BackendTensor:
    if combiner is None:
        return rows
    scale = None if weights is None else keras.ops.cast(weights, "float32")
    if kept is not None:
        ones = keras.ops.cast(kept, "float32")
        scale = ones if scale is None else scale * ones
    total = keras.ops.sum(rows if scale is None else rows * keras.ops.expand_dims(scale, -1), axis=-2)
    if combiner == "sum":
        return total
    if scale is None:
        count = float(rows.shape[-2])
        return total / (count if combiner == "mean" else count**0.5) if count else total
    norm = keras.ops.sum(scale if combiner == "mean" else scale * scale, axis=-1, keepdims=True)
    return keras.ops.divide_no_nan(total, norm if combiner == "mean" else keras.ops.sqrt(norm))
