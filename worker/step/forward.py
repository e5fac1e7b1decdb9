"""The forward pass of one batch, as in Keras: the model, its loss and its metrics."""

from __future__ import annotations

import linecache
import logging
import os
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import ModuleType

import keras
import tensorflow as tf
from tensorflow.python.autograph.pyct import loader

from elastable.worker.keras.structures import TensorBatch, TensorStructure
from elastable.worker.step.batch_checks import records_in

_log = logging.getLogger(__name__)


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
        tracker.update_state(loss, sample_weight=tf.cast(records, tf.float32))
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


# AutoGraph writes every function that it converts to a file, and removes the files when the process exits: those of a
# killed process would stay for ever. So a file is removed as soon as it has been read, from the import of this module
# on. Its source is kept in `linecache`, for tracebacks and `inspect.getsource`.

_load_source = loader.load_source


def _load_and_remove(source: str, delete_on_exit: bool) -> tuple[ModuleType, str]:
    """AutoGraph's `load_source`, without leaving the file."""
    module, file = _load_source(source, delete_on_exit)
    if delete_on_exit:
        linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
        with suppress(OSError):  # already gone, removed by a clean-up of the machine
            os.remove(file)
    return module, file


loader.load_source = _load_and_remove
