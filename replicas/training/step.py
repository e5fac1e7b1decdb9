"""What a replica computes of a batch: gradients of its part, metrics, predictions; compiled, without communication."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.replicas.groups.group import Array
from elastable.worker.keras.seeds import seed_states, set_seeds
from elastable.worker.step.tensor_specs import batch_spec, flat_spec, pack_flat, records_in

__all__ = ["GradientStep", "PredictStep", "ReplicaEvaluateStep"]


class _Step:
    """A function of a batch, traced once for every number of records."""

    def __init__(self, model: Any, sample: Any, extra: Sequence[Any] = ()) -> None:
        self._model = model
        self._spec = batch_spec(sample)
        signature = [*flat_spec(self._spec), *extra]
        self._function = tf.function(self._body, input_signature=signature).get_concrete_function()
        self._parts = len(signature) - len(extra)
        if getattr(model, "run_eagerly", False):
            self._function = self._body

    def _body(self, *flat: Any) -> Any:
        raise NotImplementedError

    def _call(self, batch: Any, *extra: Any) -> Any:
        flat = tf.nest.flatten(batch, expand_composites=True)
        return self._function(*flat, *map(tf.convert_to_tensor, extra))

    def _loss(self, batch: Any, training: bool) -> Any:
        """The loss, with the metrics moved on."""
        x, y, weight = (*batch, None, None)[:3]
        predicted = self._model(x, training=training)
        _refuse_masks(self._model, predicted)
        loss = self._model.compute_loss(x=x, y=y, y_pred=predicted, sample_weight=weight, training=training)
        records = records_in(x)
        for metric in self._model.metrics:
            if metric.name == "loss":
                metric.update_state(loss, sample_weight=tf.cast(records, tf.float32))
        self._model.compute_metrics(x, y, predicted, weight)
        return loss


class GradientStep(_Step):
    """Forward and backward pass of a replica's part of a batch.

    Args:
        model: Compiled and built.
        sample: A batch, for its shapes.
        seed: Of dropout and its kin.
        scale_loss: The optimizer's.

    Attributes:
        reached: For every trainable variable whether the loss reaches it.
    """

    def __init__(self, model: Any, sample: Any, seed: int, scale_loss: Any) -> None:
        self.reached: tuple[bool, ...] = ()
        self._seed = seed
        self._seed_states = seed_states(model, seed)
        self._scale_loss = scale_loss
        super().__init__(model, sample, [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32)])

    def __call__(self, batch: Any, number: int, share: float) -> list[Array]:
        """The gradients of the variables that the loss reaches, times `share`.

        Args:
            batch: (x,), (x, y) or (x, y, sample_weight), as tensors.
            number: Of this part among all parts of all batches; seeds dropout.
            share: Of the whole batch's records that these are.
        """
        return [gradient.numpy() for gradient in self._call(batch, np.int64(number), np.float32(share))]

    def _body(self, *flat: Any) -> Any:
        batch, (number, share) = pack_flat(self._spec, flat[:-2]), flat[-2:]
        set_seeds(self._seed_states, self._seed, number)
        variables = [variable.value for variable in self._model.trainable_weights]
        with tf.GradientTape() as tape:
            loss = self._scale_loss(self._loss(batch, training=True))
        gradients = tape.gradient(loss, variables)
        self.reached = tuple(gradient is not None for gradient in gradients)
        return [
            tf.convert_to_tensor(gradient) * tf.cast(share, gradient.dtype)
            for gradient in gradients
            if gradient is not None
        ]


class ReplicaEvaluateStep(_Step):
    """Moves the metrics on by a replica's part of a batch, as in inference."""

    def __call__(self, batch: Any) -> None:
        """Arguments as of `GradientStep`."""
        self._call(batch)

    def _body(self, *flat: Any) -> Any:
        return self._loss(pack_flat(self._spec, flat), training=False)


class PredictStep(_Step):
    """The model's outputs for a replica's records."""

    def __call__(self, batch: Any) -> Any:
        """A nest of arrays `[n, ...]` for `batch`, (x,) as tensors."""
        return tf.nest.map_structure(lambda tensor: tensor.numpy(), self._call(batch))

    def _body(self, *flat: Any) -> Any:
        (x,) = pack_flat(self._spec, flat)
        return self._model(x, training=False)


def _refuse_masks(model: Any, predicted: Any) -> None:
    if any(getattr(output, "_keras_mask", None) is not None for output in tf.nest.flatten(predicted)):
        raise Unsupported(
            f"model {model.name!r} has an output with a mask: its loss is a mean over what is not masked, whose number "
            "differs from replica to replica, so the mean over replicas would be another. Mask inside the model "
            "(pool or concatenate), or give the masked places sample weights of 0"
        )
