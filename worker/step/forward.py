"""A batch: its signature, its checks, and its forward pass, as in Keras: the model, its loss and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import BatchSpec, TensorBatch, TensorLike, TensorStructure
from elastable.worker.readers.batch.pytrees import named_parts
from elastable.worker.readers.batch.reader import Batch
from elastable.worker.rows.model_inputs import map_inputs, pads_lists


def require_parts(batch: object, source: str) -> Batch:
    """A batch as a tuple of one to three parts, without trailing None.

    Raises:
        BadInput: anything else.
    """
    if not isinstance(batch, tuple | list):
        raise BadInput(f"{source} gave a {type(batch).__name__}; a batch is (x,), (x, y) or (x, y, sample_weight)")
    parts = tuple(batch)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:
        raise BadInput(f"{source} gave a tuple of {len(parts)}; a batch is (x,), (x, y) or (x, y, sample_weight)")
    for leaf, value in named_parts(parts):
        if value is None:
            raise BadInput(f"{source}: {leaf} is None; leave it out, or give an array")
    return parts


def require_like(spec: BatchSpec, batch: TensorBatch, records: int, source: str) -> None:
    """Refuses a batch that does not match `spec`.

    Args:
        spec: `batch_spec` of the first records of the training data.
        records: Number of records requested.
        source: Origin of the batch, for messages.

    Raises:
        BadInput: other columns, dtypes, shapes or number of records; names the column.
    """
    wanted, given = dict(named_parts(spec)), dict(named_parts(batch))
    if list(wanted) != list(given):
        raise BadInput(
            f"{source}: holds {', '.join(given)}, and the first records of the training data {', '.join(wanted)}"
        )
    for name, value in given.items():
        if not wanted[name].is_compatible_with(value):  # also if only one of them is ragged
            message, first = (_described(part) for part in (batch_spec(value), wanted[name]))
            raise BadInput(f"{source}: {name} is {message}, and {first} in the first records of the training data")
        if len(value.shape) == 0:
            raise BadInput(f"{source}: {name} is a single value; the first axis must be the records")
        found = value.shape[0]
        if found != records:
            raise BadInput(f"{source}: {name} holds {found} records, and {records} were asked for")


def not_finite_columns(batch: Sequence[TensorStructure]) -> dict[str, Int64]:
    """Name of each column with NaN or Inf -> the records (positions in the batch, ascending) that hold them."""
    found = {}
    for name, value in named_parts(batch):
        if "float" not in np.dtype(getattr(value.dtype, "as_numpy_dtype", value.dtype)).name:
            continue
        graphs = backend().has_graphs
        flat = value.flat_values if graphs and isinstance(value, tf.RaggedTensor) else getattr(value, "values", value)
        bad = ~np.isfinite(np.asarray(flat))
        if not bad.any():
            continue
        records = np.flatnonzero(bad.reshape(len(bad), -1).any(axis=1))  # of a ragged or sparse column: elements
        if graphs and isinstance(value, tf.RaggedTensor):
            for rows in reversed(value.nested_value_rowids()):
                records = np.unique(rows.numpy()[records])
        elif graphs and isinstance(value, tf.SparseTensor):
            records = np.unique(value.indices.numpy()[records, 0])
        found[name] = records
    return found


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """The dtype and shape of an array of any number of records.

    Attributes:
        lists: Whether it is of padded lists `[records, width]`, which may have another width.
    """

    dtype: np.dtype
    shape: tuple[int | None, ...]
    lists: bool = False

    def is_compatible_with(self, value: Array) -> bool:
        """Whether an array is of this dtype and shape."""
        alike = value.dtype == self.dtype and value.ndim == len(self.shape)
        shape = (None, None) if self.lists else self.shape
        return alike and all(size in (None, found) for size, found in zip(shape, value.shape, strict=True))


def _described(spec: tf.TypeSpec) -> str:
    shape = ", ".join("n" if place == 0 else str(size) for place, size in enumerate(spec.shape))
    kind = {"RaggedTensorSpec": "ragged ", "SparseTensorSpec": "sparse "}.get(type(spec).__name__, "")
    return f"{kind}{spec.dtype.name} [{shape}]"


# Signatures of batches: one trace serves all batch sizes and row lengths


def batch_spec(batch: TensorBatch, model: keras.Model | None = None) -> BatchSpec:
    """The TypeSpecs of a batch, or of arrays `ArraySpec`s, with an open first axis.

    Args:
        model: It takes the batch: of padded lists (`padded_lists`) the second axis is open, too.
    """
    if not backend().has_graphs:
        made: BatchSpec = keras.tree.map_structure(lambda leaf: ArraySpec(leaf.dtype, (None, *leaf.shape[1:])), batch)
        return made if model is None else (map_inputs(model, made[0], _open_lists), *made[1:])

    def open_first_axis(value: TensorLike) -> tf.TypeSpec:
        if isinstance(value, tf.RaggedTensor):
            shape = tf.TensorShape([None, *value.shape[1:]])
            return tf.RaggedTensorSpec(shape, value.dtype, value.ragged_rank, value.row_splits.dtype)
        if isinstance(value, tf.SparseTensor):
            return tf.SparseTensorSpec([None] * value.shape.rank, value.dtype)
        tensor = tf.convert_to_tensor(value)
        return tf.TensorSpec([None, *tensor.shape[1:]] if tensor.shape.rank else [], tensor.dtype)

    spec: BatchSpec = tf.nest.map_structure(open_first_axis, batch)
    return spec


def _open_lists(spec: Any, given: Any) -> object:
    return replace(spec, lists=len(spec.shape) == 2 and pads_lists(given)) if isinstance(spec, ArraySpec) else spec


def flat_spec(spec: BatchSpec) -> list[tf.TensorSpec]:
    """The TensorSpecs of the components of a structure of TypeSpecs."""
    return list(tf.nest.flatten(spec, expand_composites=True))


def pack_flat(spec: BatchSpec, tensors: Iterable[tf.Tensor]) -> TensorBatch:
    """The structure that `spec` describes, from component tensors in `flat_spec`'s order."""
    batch: TensorBatch = tf.nest.pack_sequence_as(spec, list(tensors), expand_composites=True)
    return batch


def records_in(structure: TensorStructure) -> tf.Tensor:
    """int32 scalar: the length of the first axis of a structure of dense, ragged or sparse tensors."""
    if not backend().has_graphs:
        return keras.tree.flatten(structure)[0].shape[0]
    first = tf.nest.flatten(structure)[0]
    if isinstance(first, tf.RaggedTensor):
        return tf.cast(first.nrows(), tf.int32)
    if isinstance(first, tf.SparseTensor):
        return tf.cast(first.dense_shape[0], tf.int32)
    return tf.shape(first)[0]


_log = logging.getLogger(__name__)
backend()  # from now on a killed process leaves no files of AutoGraph


@dataclass(frozen=True, slots=True)
class Forward:
    """A batch, what the model predicts for it, and its loss.

    Attributes:
        x, y, weight: The batch; `y` and `weight` may be None.
        loss: What `compute_loss` returned.
    """

    x: TensorStructure
    y: TensorStructure | None
    weight: TensorStructure | None
    predicted: TensorStructure
    loss: tf.Tensor


def forward(model: keras.Model, batch: TensorBatch, training: bool) -> Forward:
    """The forward pass and the loss of a batch (x,), (x, y) or (x, y, sample_weight).

    The id plan and the compiled steps both run it, so an embedding may be called wherever Keras runs a model's code.
    """
    x, y, weight = (*batch, None, None)[:3]
    predicted = model(x, training=training)
    if getattr(model, "_compute_loss_has_training_arg", True):
        loss = model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=training)
    else:
        # An override for Keras before 3.3, without this argument; Keras calls it by position.
        loss = model.compute_loss(x, y, predicted, weight)
    return Forward(x, y, weight, predicted, loss)


def update_metrics(model: keras.Model, done: Forward, loss: tf.Tensor) -> object:
    """Updates the model's metrics, and Keras' loss metric; returns what `compute_metrics` did."""
    records = records_in(done.x)
    tracker = getattr(model, "_loss_tracker", None)
    # A model may leave Keras' tracker out of `metrics` and use its own.
    if tracker is not None and any(metric is tracker for metric in model.metrics):
        tracker.update_state(loss, sample_weight=keras.ops.cast(records, "float32"))
    return model.compute_metrics(done.x, done.y, done.predicted, done.weight)


def warn_of_values(model: keras.Model, method: str, returned: object) -> None:
    """Names values that a method of the model returned for the logs and that no metric holds: they are not shown."""
    if not isinstance(returned, Mapping):
        return
    unknown = sorted(map(str, set(returned) - set(model.get_metrics_result())))
    if unknown:
        _log.warning(
            "model %r: %s() returns %s, of which the history and callbacks will not hear: a value that is no metric "
            "cannot be merged over micro-batches; update a keras.metrics.Mean of that name",
            model.name,
            method,
            ", ".join(map(repr, unknown)),
        )
