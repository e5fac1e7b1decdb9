"""The forward pass of one batch, as in Keras: the model, its loss and its metrics."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass

import keras

from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import TensorBatch, TensorStructure
from elastable.worker.step.batch_checks import records_in

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
