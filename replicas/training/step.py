"""What a replica computes of a batch: gradients, metrics, predictions; compiled, without communication."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import Unsupported
from elastable.replicas.training.model_refusals import refuse_terms
from elastable.worker.keras.seeds import seed_states, set_seeds
from elastable.worker.keras.structures import TensorBatch, TensorStructure
from elastable.worker.losses.recording import recording
from elastable.worker.readers.batch.pytrees import Structure
from elastable.worker.step.batch_checks import batch_spec, flat_spec, pack_flat
from elastable.worker.step.forward import forward, update_metrics


class BatchStep:
    """A function of a batch, traced once for any number of records."""

    def __init__(self, model: keras.Model, sample: TensorBatch, extra: Sequence[tf.TensorSpec] = ()) -> None:
        self._model = model
        self._spec = batch_spec(sample)
        signature = [*flat_spec(self._spec), *extra]
        body = tf.autograph.experimental.do_not_convert(self._body)  # as `Model.fit` compiles its steps
        self._function = tf.function(body, input_signature=signature).get_concrete_function()
        self.graph: tf.Graph = self._function.graph
        if getattr(model, "run_eagerly", False):
            self._function = self._body

    def _body(self, *flat: tf.Tensor) -> TensorStructure:
        raise NotImplementedError

    def _call(self, batch: TensorBatch, *extra: np.generic) -> tf.Tensor:
        flat = tf.nest.flatten(batch, expand_composites=True)
        return self._function(*flat, *map(tf.convert_to_tensor, extra))

    def _loss(self, batch: TensorBatch, share: tf.Tensor, training: bool) -> tf.Tensor:
        """The loss; also updates the metrics. `share`: these records / the records of the whole batch."""
        with recording() as recorded, _counted_as(self._model, share):
            done = forward(self._model, batch, training)
        _refuse_masks(self._model, done.predicted)
        refuse_terms(self._model, done.loss, recorded, batch)
        update_metrics(self._model, done, done.loss)
        return done.loss


class GradientStep(BatchStep):
    """Forward and backward pass of a replica's part of a batch.

    Args:
        model: Compiled and built.
        sample: A batch, for its shapes.
        seed: Seed of dropout.
        scale_loss: The optimizer's loss scaling.

    Attributes:
        reached: For every trainable variable, whether the loss depends on it.
    """

    def __init__(
        self, model: keras.Model, sample: TensorBatch, seed: int, scale_loss: Callable[[tf.Tensor], tf.Tensor]
    ) -> None:
        self.reached: tuple[bool, ...] = ()
        self._seed = seed
        self._seed_states = seed_states(model, seed)
        self._scale_loss = scale_loss
        super().__init__(model, sample, [tf.TensorSpec([], tf.int64), tf.TensorSpec([], tf.float32)])

    def __call__(self, batch: TensorBatch, number: int, share: float) -> list[Array]:
        """The gradients of the variables that the loss depends on, times `share`.

        Args:
            batch: (x,), (x, y) or (x, y, sample_weight), as tensors.
            number: Index of this part among all parts of all batches; seeds dropout.
            share: These records / the records of the whole batch.
        """
        return [gradient.numpy() for gradient in self._call(batch, np.int64(number), np.float32(share))]

    def _body(self, *flat: tf.Tensor) -> TensorStructure:
        batch, (number, share) = pack_flat(self._spec, flat[:-2]), flat[-2:]
        set_seeds(self._seed_states, self._seed, number)
        variables = [variable.value for variable in self._model.trainable_weights]
        with tf.GradientTape() as tape:
            loss = self._scale_loss(self._loss(batch, share, training=True))
        gradients = tape.gradient(loss, variables)
        self.reached = tuple(gradient is not None for gradient in gradients)
        return [
            tf.convert_to_tensor(gradient) * tf.cast(share, gradient.dtype)
            for gradient in gradients
            if gradient is not None
        ]


class ReplicaEvaluateStep(BatchStep):
    """Updates the metrics with a replica's part of a batch, in inference mode."""

    def __init__(self, model: keras.Model, sample: TensorBatch) -> None:
        super().__init__(model, sample, [tf.TensorSpec([], tf.float32)])

    def __call__(self, batch: TensorBatch, share: float) -> None:
        """Arguments as of `GradientStep`."""
        self._call(batch, np.float32(share))

    def _body(self, *flat: tf.Tensor) -> TensorStructure:
        return self._loss(pack_flat(self._spec, flat[:-1]), flat[-1], training=False)


class PredictStep(BatchStep):
    """The model's outputs for a replica's records."""

    def __call__(self, batch: TensorBatch) -> Structure[Array]:
        """A pytree of arrays `[n, ...]` for `batch`, (x,) as tensors."""
        found: Structure[Array] = tf.nest.map_structure(lambda tensor: tensor.numpy(), self._call(batch))
        return found

    def _body(self, *flat: tf.Tensor) -> TensorStructure:
        (x,) = pack_flat(self._spec, flat)
        return self._model(x, training=False)


@contextmanager
def _counted_as(model: keras.Model, share: tf.Tensor) -> Iterator[None]:
    """Lets the loss of each output, of which Keras counts every batch once, count as a part of a batch."""
    trackers: list[keras.metrics.Metric] = list(getattr(getattr(model, "_compile_loss", None), "metrics", ()))

    def counting(tracker: keras.metrics.Metric) -> Callable[..., None]:
        update = tracker.update_state

        def update_state(value: tf.Tensor, sample_weight: object = None) -> None:
            update(value, sample_weight=share if sample_weight is None else sample_weight)

        return update_state

    for tracker in trackers:
        tracker.update_state = counting(tracker)
    try:
        yield
    finally:
        for tracker in trackers:
            del tracker.update_state


def _refuse_masks(model: keras.Model, predicted: TensorStructure) -> None:
    if any(getattr(output, "_keras_mask", None) is not None for output in tf.nest.flatten(predicted)):
        raise Unsupported(
            f"model {model.name!r} has an output with a mask: its loss is a mean over what is not masked, whose number "
            "differs from replica to replica, so the mean over replicas would be another. Mask inside the model "
            "(pool or concatenate), or give the masked positions sample weights of 0"
        )
