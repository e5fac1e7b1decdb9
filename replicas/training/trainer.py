"""Data-parallel Keras training over a replica group, with `compile`, `fit`, `evaluate` and `predict` as in Keras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras
import tensorflow as tf

from elastable.embedding_store.composite.placement.locations import LocationSettings
from elastable.embedding_store.errors import BadInput, ModelError
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import Array, ReplicaGroup
from elastable.replicas.processes.world import replica_group
from elastable.replicas.training.data.feed import Feed
from elastable.replicas.training.data.input_adapters import reader_of, require_batch_size, split_off
from elastable.replicas.training.epochs import run_epochs
from elastable.replicas.training.host_embedding_state import HOST, host_embeddings, host_tensors, restore_hosts
from elastable.replicas.training.model_refusals import refuse_losses, refuse_model
from elastable.replicas.training.prediction import predict_all
from elastable.replicas.training.replica_callbacks import ReplicaCallbacks
from elastable.replicas.training.replica_training import ReplicaMemory, Training
from elastable.replicas.training.step import GradientStep, PredictStep, ReplicaEvaluateStep
from elastable.replicas.training.variables.placement import VariablePlacement
from elastable.worker.models.build import build_model, sample_batch
from elastable.worker.readers import NumpyReader, Reader

__all__ = ["ShardedTrainer"]


class ShardedTrainer:
    """Trains one Keras model on all replicas of a group, which may share its weights and optimizer state.

    Every replica makes one, of the same model, and calls the same methods with
    the same arguments and the same data; of every batch each takes its part.
    The gradient of a step is the mean over all records of the batch, summed in
    rank order: what is shared changes no bit of it (docs/sharded-training.md).

    Args:
        model: A Keras model. All replicas begin with the values of rank 0's.
        locations: What is shared: `replicated_tensor_sharding` of `weight` and
            `optimizer_state`, thresholds, and overrides by variable; None: nothing.
        group: The replicas; None: the processes that `elastable replicas` or
            `mpirun` started.
        seed: Of the record order, and of dropout and its kin.

    Raises:
        ModelError, Unsupported: a model that cannot be trained so, by name.
    """

    def __init__(
        self,
        model: Any,
        locations: LocationSettings | None = None,
        group: ReplicaGroup | None = None,
        *,
        seed: int = 0,
    ) -> None:
        refuse_model(model)
        self.model = model
        self.group = replica_group() if group is None else group
        self._locations = LocationSettings() if locations is None else locations
        self.seed = seed
        self._optimizer: Any = None
        self._training: Training | None = None
        self._steps: dict[tuple[type, str], Any] = {}

    def compile(
        self,
        optimizer: Any = "rmsprop",
        loss: Any = None,
        *,
        loss_weights: Any = None,
        metrics: Any = None,
        weighted_metrics: Any = None,
        run_eagerly: bool = False,
    ) -> None:
        """As `keras.Model.compile`.

        Args:
            optimizer: A Keras optimizer that has not been built, or its name.
            loss, loss_weights, metrics, weighted_metrics, run_eagerly: As in Keras.

        Raises:
            Unsupported: a loss that is no mean over records.
        """
        refuse_losses(loss)
        self.close()
        self._optimizer = keras.optimizers.get(optimizer)
        self.model.compile(
            optimizer=self._optimizer,
            loss=loss,
            loss_weights=loss_weights,
            metrics=metrics,
            weighted_metrics=weighted_metrics,
            run_eagerly=run_eagerly,
            jit_compile=False,
            auto_scale_loss=False,
        )

    def fit(
        self,
        x: Any = None,
        y: Any = None,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: int = 1,
        callbacks: Sequence[Any] | None = None,
        validation_split: float = 0.0,
        validation_data: Any = None,
        shuffle: bool = True,
        sample_weight: Any = None,
        initial_epoch: int = 0,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> Any:
        """Trains; every replica calls it with the same data.

        Args:
            x: Features, as in Keras; or a reader (`et.ParquetReader`, ...), of
                which every replica fetches its own records only.
            y, sample_weight: As in Keras.
            batch_size: Records of a batch over all replicas. The last batch of an
                epoch may have fewer, and replicas parts of different sizes.
            epochs: The epoch to end at.
            verbose: 0: nothing; else rank 0 shows a line an epoch.
            callbacks: Keras callbacks, of this replica. Logs are of all replicas.
            validation_split: Of the records, the last ones are for validation, as in Keras.
            validation_data: (x, y), (x, y, sample_weight) or a reader.
            shuffle: Whether records are shuffled, by (seed, epoch).
            initial_epoch: The epoch to begin at.
            validation_batch_size: None: `batch_size`.
            validation_freq: Epochs from one evaluation to the next.

        Returns:
            `keras.callbacks.History`, the same on every replica.

        Raises:
            ElastableError: whatever cannot be used, by name; a replica that is gone, by its rank.
        """
        reader, validation = split_off(reader_of(x, y, sample_weight), validation_split)
        if validation_data is not None:
            validation = reader_of(validation_data)
        if not 0 <= initial_epoch < epochs or validation_freq < 1:
            raise BadInput(
                f"initial_epoch={initial_epoch}, epochs={epochs}, validation_freq={validation_freq}: need "
                "0 <= initial_epoch < epochs and validation_freq >= 1"
            )
        training = self._ready(sample_batch(reader))
        numbers = {"batch_size": batch_size, "epochs": epochs, "initial_epoch": initial_epoch, "shuffle": shuffle}
        self._agree("fit", reader, **numbers, validation_records=0 if validation is None else len(validation))
        feed = Feed(reader, batch_size, self.group.rank, self.group.size, self.seed, shuffle, self._together())
        compute = self._step(GradientStep, sample_batch(reader))
        told = ReplicaCallbacks(callbacks or (), self.model, self.group, epochs, feed.steps, verbose)

        def evaluate(epoch: int) -> dict[str, float]:
            if validation is None or (epoch + 1) % validation_freq:
                return {}
            results = self._evaluate(validation, validation_batch_size or batch_size)
            return {f"val_{name}": value for name, value in results.items()}

        before, self.model.optimizer = self.model.optimizer, training.optimizer.keras
        try:
            run_epochs(training, compute, feed, told, range(initial_epoch, epochs), evaluate)
        finally:
            self.model.optimizer = before
        return told.history

    def evaluate(
        self, x: Any = None, y: Any = None, batch_size: int = 32, sample_weight: Any = None, return_dict: bool = False
    ) -> Any:
        """As `keras.Model.evaluate`, over all replicas; every one calls it with the same data.

        Returns:
            The loss and metrics: a dict, or a list of values (one value where
            there is one); the same on every replica.
        """
        reader = reader_of(x, y, sample_weight)
        self._ready(sample_batch(reader)).weights.make_whole()
        self._agree("evaluate", reader, batch_size=batch_size)
        results = self._evaluate(reader, batch_size)
        if return_dict:
            return results
        values = list(results.values())
        return values[0] if len(values) == 1 else values

    def predict(self, x: Any, batch_size: int = 32) -> Any:
        """As `keras.Model.predict`, each replica a part of the records; every one calls it with the same data.

        Returns:
            A nest of arrays `[records, ...]`: all of them, on every replica.
        """
        reader = x if isinstance(x, Reader) else NumpyReader(x)
        sample = sample_batch(reader)[:1]
        self._built(sample)
        if self._training is not None:
            self._training.weights.make_whole()
        self._agree("predict", reader, batch_size=batch_size)
        return predict_all(self._step(PredictStep, sample), reader, require_batch_size(batch_size), self.group)

    @property
    def optimizer(self) -> Any:
        """The Keras optimizer that updates this replica's parts; `learning_rate` may be set on every replica."""
        return self._optimizer

    @property
    def step(self) -> int:
        """Steps taken so far."""
        return 0 if self._training is None else self._training.step

    @property
    def placements(self) -> tuple[VariablePlacement, ...]:
        """What is shared over replicas, and why.

        Raises:
            ModelError: the model has not been compiled, or is not built yet.
        """
        return self._ready(None).plan

    def memory(self) -> ReplicaMemory:
        """Bytes that this replica held behind the first step of the last `fit`, measured on its variables.

        Raises:
            ModelError: it has not trained yet.
        """
        if self._training is None or self._training.memory is None:
            raise ModelError("no memory has been measured yet: fit() measures it behind its first step")
        return self._training.memory

    def whole_tensors(self) -> Iterator[tuple[str, Array]]:
        """Everything that training has come to, (key, tensor) one after the other, whatever is shared.

        Keys, shapes and order are those of unsharded training: trainable
        variables ("variables/00000"), other variables, and the variables of a
        Keras optimizer that was built on the model; then the states of host
        embeddings. Every replica calls it, takes all of them, and calls
        nothing else meanwhile.

        Raises:
            ModelError: the model is not compiled or built.
        """
        yield from self._ready(None).canonical.tensors()
        yield from host_tensors(self.model)

    def restore(self, tensors: Mapping[str, Array] | None, step: int) -> None:
        """Takes back what `whole_tensors` gave, at whatever number of replicas; every replica calls it.

        Args:
            tensors: By key; those of rank 0 are taken.
            step: Steps that had been taken.

        Raises:
            CheckpointError: they are of another model or optimizer; nothing has been changed.
        """
        training = self._ready(None)
        given = dict(tensors or {})
        dense = {key: tensor for key, tensor in given.items() if not key.startswith(HOST)}
        training.canonical.check(dense)
        restore_hosts(self.model, self.group, given)
        training.canonical.restore(dense)
        training.step = step

    def close(self) -> None:
        """The model is an ordinary one from now on, its weights whole, its optimizer new; every replica calls it."""
        if self._training is not None:
            self._training.weights.close()
            self._training = None
        self._steps.clear()

    def _evaluate(self, reader: Reader, batch_size: int) -> dict[str, float]:
        training = self._training
        assert training is not None  # _ready came before
        step = self._step(ReplicaEvaluateStep, sample_batch(reader))
        training.metrics.reset()
        for part in Feed(reader, batch_size, self.group.rank, self.group.size, together=self._together()).parts():
            if part.batch is not None:
                step(part.batch)
        return training.metrics.results()

    def _step(self, kind: Any, sample: Any) -> Any:
        """The compiled step for batches as `sample`, traced once."""
        shapes = tf.nest.map_structure(lambda tensor: (tensor.dtype.name, tuple(tensor.shape[1:])), sample)
        key = (kind, repr(shapes))
        if key not in self._steps:
            if kind is GradientStep:
                self._steps[key] = self._ready(sample).gradients(sample)
            else:
                self._steps[key] = kind(self.model, sample)
        return self._steps[key]

    def _ready(self, sample: Any) -> Training:
        """What trains, made when it is first needed; every replica calls it."""
        if self._training is None:
            if self._optimizer is None:
                raise ModelError("the trainer is not compiled; call compile(optimizer, loss, ...) first")
            self._built(sample)
            if sample is not None:
                build_model(self.model, sample)
            self._training = Training(self.model, self._optimizer, self._locations, self.group, self.seed)
            # Between trainings the model has an optimizer of its own, without state: one that can be saved.
            self.model.optimizer = self._training.optimizer.clone()
        return self._training

    def _built(self, sample: Any) -> None:
        if self.model.built:
            return
        if sample is None:
            raise ModelError(
                f"model {self.model.name!r} is not built: give it an Input, or call its build(), before this"
            )
        self.model(sample[0], training=False)

    def _together(self) -> str:
        """The name of a layer whose calls all replicas make together; "": there is none."""
        return next((layer.name for layer in host_embeddings(self.model)), "")

    def _agree(self, what: str, reader: Reader, **told: Any) -> None:
        require_same(self.group, what, {"records": len(reader), "seed": self.seed, **told})
