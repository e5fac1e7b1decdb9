"""What a replica takes of every global batch, and computes of it without communication; what it cannot train."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, ModelError, Unsupported
from elastable.master.api import DivisorKind
from elastable.master.tasks.record_order import record_order
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.host_embeddings.host_embedding import HostEmbedding
from elastable.replicas.training.sharded_variables import VariableSplit
from elastable.worker.keras.seeds import layers_of, seed_states, set_seeds
from elastable.worker.keras.structures import TensorBatch, TensorStructure
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.losses.loss_terms import LossTerms
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import Recording, recording
from elastable.worker.readers.batch.pytrees import Structure
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.numpy_reader import NumpyReader, as_reader
from elastable.worker.readers.pass_reader import PartReader
from elastable.worker.step.forward import batch_spec, flat_spec, forward, pack_flat, update_metrics
from elastable.worker.step.step_plan import changed_weight
from elastable.worker.user_model.build import as_tensors

# The inputs of `fit`, `evaluate` and `predict`, and which of their records a replica takes of every global batch


@dataclass(frozen=True, slots=True)
class BatchPart:
    """A replica's part of a global batch.

    Attributes:
        batch: Its records as tensors; None: this replica has none.
        shares: By rank: its records / the records of the whole batch.
    """

    batch: TensorBatch | None
    shares: tuple[float, ...]


class Feed:
    """This replica's part of the global batches, which are the same on every replica.

    A batch is a slice of the epoch's seeded order; its records are split over
    the replicas in that order, evenly, the longer parts first.

    Args:
        reader: The same records on every replica.
        batch_size: Records of a global batch; the last of an epoch may have fewer.
        shuffle: False: records keep their order.
        collective_layer: The name of a layer that all replicas call together,
            so that none may be without records; "": there is none.
        model: The model that takes the records; None: any.

    Raises:
        BadInput: a batch size below 1, or one that leaves a replica without records that it needs.
    """

    def __init__(
        self,
        reader: Reader,
        batch_size: int,
        group: ReplicaGroup,
        seed: int = 0,
        shuffle: bool = False,
        collective_layer: str = "",
        model: keras.Model | None = None,
    ) -> None:
        batch_size = require_batch_size(batch_size)
        fewest = min(batch_size, len(reader) % batch_size or batch_size)
        if collective_layer and fewest < group.size:
            raise BadInput(
                f"batches of {batch_size} of {len(reader)} records: one has {fewest} for {group.size} replicas, and "
                f"every replica needs records, as all look up together in {collective_layer!r}; choose another "
                "batch_size"
            )
        if reader.parts:
            raise Unsupported(
                "an et.PartsReader in a replica group, which has one order of all records: give its parts"
            )
        self._reader, self._batch_size, self._group = reader, batch_size, group
        self._seed, self._shuffle, self._model = seed, shuffle, model

    @property
    def steps(self) -> int:
        """Batches of an epoch."""
        return -(-len(self._reader) // self._batch_size)

    def parts(self, epoch: int = 0) -> Iterator[BatchPart]:
        """This replica's part of every batch of an epoch, counted from 0."""
        records = len(self._reader)
        order = record_order(records, epoch, self._seed, self._shuffle, self._reader.shuffle_block)
        for first in range(0, records, self._batch_size):
            last = min(first + self._batch_size, records)
            split = VariableSplit(last - first, self._group.size)
            bounds = [split.bounds(rank) for rank in range(self._group.size)]
            begin, end = bounds[self._group.rank]
            batch = None
            if end > begin:
                rows = order.take(first + begin, first + end)
                batch = as_tensors(self._reader.take(rows), f"{type(self._reader).__name__}.take()", self._model, rows)
            yield BatchPart(batch, tuple((stop - start) / (last - first) for start, stop in bounds))


def reader_of(x: object, y: object = None, sample_weight: object = None) -> Reader:
    """Arrays as Keras takes them, or whatever `as_reader` takes, as a reader."""
    if isinstance(x, Reader | tuple | Mapping) and y is None and sample_weight is None:
        return as_reader(x)
    return NumpyReader(x, y, sample_weight)


def split_off(reader: Reader, validation_split: float) -> tuple[Reader, Reader | None]:
    """(training records, validation records): the last fraction `validation_split` is for validation, as in Keras.

    Raises:
        BadInput: the split leaves the training or the validation records empty.
    """
    if validation_split == 0:
        return reader, None
    records = len(reader)
    first = math.floor(records * (1 - validation_split))
    if not 0 < first < records:
        raise BadInput(
            f"validation_split={validation_split} of {records} records leaves the training or the validation split "
            "empty"
        )
    return PartReader(reader, 0, first), PartReader(reader, first, records)


def require_batch_size(batch_size: object) -> int:
    """The batch size as an int.

    Raises:
        BadInput: not an integer of at least 1.
    """
    if isinstance(batch_size, bool) or not isinstance(batch_size, int | np.integer) or batch_size < 1:
        raise BadInput(f"batch_size={batch_size!r}: give the records of a whole batch, over all replicas; 1 or more")
    return int(batch_size)


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


# Refuses models and losses that cannot be trained over replicas


_MEANS = ("sum_over_batch_size", "mean")
_DIVISORS = {
    DivisorKind.NOTHING: "is a sum",
    DivisorKind.AMOUNT: "is divided by weights, or by how many values count (a mask, ignore_class)",
    None: "is divided by an unknown number",
}
_OWN_STEPS = ("train_step", "test_step", "predict_step")


def refuse_model(model: object) -> None:
    """Raises ModelError for anything but a Keras model, Unsupported for one that replicas cannot train."""
    if not isinstance(model, keras.Model):
        raise ModelError(f"et.ReplicaTrainer needs a keras.Model, got {type(model).__name__}")
    for method in _OWN_STEPS:
        if getattr(type(model), method) is not getattr(keras.Model, method):
            raise Unsupported(
                f"model {model.name!r} overrides {method}, which et.ReplicaTrainer cannot run: between its gradients "
                "and its update the replicas exchange; put what it does into call() or compute_loss()"
            )
    for layer in store_layers(model):
        raise Unsupported(
            f"embedding layer {layer.name!r} keeps its table in a store, which replicas cannot update; use "
            "keras.layers.Embedding or et.create_host_embedding, or train with et.fit"
        )
    for layer in layers_of(model):
        if getattr(layer, "synchronized", False):
            raise Unsupported(
                f"layer {layer.name!r} with synchronized=True: statistics of a batch are those of each replica's part; "
                "leave synchronized out, or use LayerNormalization"
            )


def refuse_losses(loss: object) -> None:
    """Raises Unsupported for a loss of `compile()` that is not a mean over records: averaging it would change it."""
    for one in keras.tree.flatten(loss):
        reduction = getattr(one, "reduction", "mean")
        if isinstance(one, keras.losses.Loss) and reduction not in _MEANS:
            raise Unsupported(
                f"loss {one.name!r} with reduction={reduction!r}: replicas weigh their gradients by their records, "
                f"which is right for a mean over records only; give it reduction={_MEANS[0]!r}"
            )


def host_embeddings(model: keras.Model) -> list[HostEmbedding]:
    """The model's layers that are host embeddings, by the names of their tables."""
    found = [layer for layer in layers_of(model) if isinstance(layer, HostEmbedding)]
    return sorted(found, key=lambda layer: str(layer.table.spec.name))


def refuse_scaled_tables(model: keras.Model, optimizer: keras.optimizers.Optimizer) -> None:
    """Raises Unsupported for loss scaling with a host embedding, whose own optimizer would take scaled gradients."""
    scale = getattr(optimizer, "loss_scale_factor", None)
    layers = [layer for layer in host_embeddings(model) if layer.table.optimizer]
    if scale and layers:
        raise Unsupported(
            f"{type(optimizer).__name__}(loss_scale_factor={scale:g}) with host embedding {layers[0].name!r}: the "
            "table's own optimizer would take the gradients of the scaled loss; leave loss_scale_factor out"
        )


def refuse_terms(model: keras.Model, loss: tf.Tensor, recorded: Recording, batch: TensorBatch) -> None:
    """Raises Unsupported for a traced loss with a term that is not a mean over the records of its batch.

    Args:
        model: For the message.
        loss: The loss; nothing is refused in eager mode, where its terms cannot be seen.
        batch: Of symbolic tensors.
    """
    if tf.executing_eagerly():
        return
    origins = Origins(batch, (), recorded.calls)
    for term in LossTerms(recorded.losses, origins).of(loss):
        if term.kind is not DivisorKind.RECORDS:
            raise Unsupported(
                f"model {model.name!r}: the term of its loss that operation {term.where} computes "
                f"{_DIVISORS[term.kind]}, and replicas weigh their gradients by their records, which is right for a "
                "mean over records only. Return one value per record from a loss function, so that Keras averages "
                "them; or end a term of add_loss or compute_loss in keras.ops.mean over the records; or mark it with "
                "et.averaged(term)"
            )


def refuse_own_changes(model: keras.Model, graph: tf.Graph) -> None:
    """Raises Unsupported if a traced forward pass assigns weights: replicas update them together, some in parts."""
    changed = changed_weight(model, graph)
    if changed is not None:
        raise Unsupported(
            f"model {model.name!r} changes its weight {changed!r} in the forward pass, as "
            "keras.layers.SpectralNormalization does: a replica that holds a part of it, or has no records, would "
            "not take part in the change; train it with et.fit, or on one replica"
        )
