"""Data-parallel Keras training over a replica group, with `compile`, `fit`, `evaluate` and `predict` as in Keras."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import keras

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, ModelError
from elastable.replicas.training.data.feed import Feed
from elastable.replicas.training.data.input_adapters import reader_of, require_batch_size, split_off
from elastable.replicas.training.epochs import run_epochs
from elastable.replicas.training.host_embedding_state import HOST, host_tensors, restore_hosts
from elastable.replicas.training.model_refusals import refuse_losses
from elastable.replicas.training.prediction import predict_all
from elastable.replicas.training.replica_callbacks import ReplicaCallbacks
from elastable.replicas.training.replica_training import ReplicaMemory
from elastable.replicas.training.step import GradientStep, PredictStep
from elastable.replicas.training.trainer_core import TrainerCore
from elastable.replicas.training.variables.placement import VariablePlacement
from elastable.worker.models.build import for_model, sample_batch
from elastable.worker.readers import NumpyReader, Reader
from elastable.worker.readers.records.pytrees import Structure

__all__ = ["ShardedTrainer"]


class ShardedTrainer(TrainerCore):
    """Trains one Keras model on all replicas of a group, which may shard its weights and optimizer state.

    Every replica creates a trainer for the same model and calls the same methods with the same arguments and data; each
    takes its part of every batch. The gradient of a step is the mean over all records of the batch, summed in rank
    order: sharding does not change a bit of it (docs/sharded-training.md).

    Args:
        model: A Keras model. All replicas start from rank 0's values.
        locations: What to shard: `replicated_tensor_sharding` of `weight` and
            `optimizer_state`, thresholds, and overrides by variable. None: nothing.
        group: The replicas. None: the processes that `elastable replicas` or `mpirun` started.
        seed: Seed of the record order and of dropout.

    Raises:
        ModelError, Unsupported: the model cannot be trained this way; names the reason.
    """

    def compile(
        self,
        optimizer: keras.optimizers.Optimizer | str = "rmsprop",
        loss: object = None,
        *,
        loss_weights: object = None,
        metrics: object = None,
        weighted_metrics: object = None,
        run_eagerly: bool = False,
    ) -> None:
        """Same as `keras.Model.compile`; the optimizer must not have been built.

        Raises:
            Unsupported: the loss is not a mean over records.
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
        x: object = None,
        y: object = None,
        batch_size: int = 32,
        epochs: int = 1,
        verbose: int = 1,
        callbacks: Sequence[keras.callbacks.Callback] | None = None,
        validation_split: float = 0.0,
        validation_data: object = None,
        shuffle: bool = True,
        sample_weight: object = None,
        initial_epoch: int = 0,
        validation_batch_size: int | None = None,
        validation_freq: int = 1,
    ) -> keras.callbacks.History:
        """Same as `keras.Model.fit`; every replica calls it with the same data. What differs:

        Args:
            x: May be a reader (`et.ParquetReader`, ...); each replica reads only its own records.
            batch_size: Records of a batch over all replicas. The last batch of an epoch may have fewer.
            verbose: 0: silent; otherwise rank 0 prints a line per epoch.
            callbacks: Callbacks of this replica; their logs cover all replicas.
            validation_data: (x, y), (x, y, sample_weight) or a reader; nothing is split off then, as in Keras.
            shuffle: Whether to shuffle records, by (seed, epoch).

        Returns:
            `keras.callbacks.History`, the same on every replica.

        Raises:
            ElastableError: an argument cannot be used, or a replica has left; names it.
        """
        reader, validation = for_model(reader_of(x, y, sample_weight), self.model), None
        if validation_data is not None:
            validation = for_model(reader_of(validation_data), self.model)
        else:
            reader, validation = split_off(reader, validation_split)
        if not 0 <= initial_epoch < epochs or validation_freq < 1:
            raise BadInput(
                f"initial_epoch={initial_epoch}, epochs={epochs}, validation_freq={validation_freq}: need "
                "0 <= initial_epoch < epochs and validation_freq >= 1"
            )
        numbers = {"batch_size": batch_size, "epochs": epochs, "initial_epoch": initial_epoch, "shuffle": shuffle}
        training = self._ready(sample_batch(reader, self.model))
        self._agree("fit", reader, **numbers, validation_records=0 if validation is None else len(validation))
        feed = Feed(reader, batch_size, self.group, self.seed, shuffle, self._collective_layer(), self.model)
        listeners = ReplicaCallbacks(callbacks or (), self.model, self.group, epochs, feed.steps, verbose)
        evaluate = self._validation(validation, validation_batch_size or batch_size, validation_freq, listeners)
        compute = self._step(GradientStep, sample_batch(reader, self.model))
        before, self.model.optimizer = self.model.optimizer, training.optimizer.keras
        try:
            run_epochs(training, compute, feed, listeners, range(initial_epoch, epochs), evaluate)
        finally:
            self.model.optimizer = before
        return listeners.history

    def evaluate(
        self,
        x: object = None,
        y: object = None,
        batch_size: int = 32,
        sample_weight: object = None,
        return_dict: bool = False,
    ) -> Any:  # as in Keras: a dict, a list, or one number
        """Same as `keras.Model.evaluate`, over all replicas; each calls it with the same data and gets the same."""
        reader = for_model(reader_of(x, y, sample_weight), self.model)
        self._ready(sample_batch(reader, self.model)).weights.make_whole()
        self._agree("evaluate", reader, batch_size=batch_size)
        results = self._evaluate(reader, batch_size)
        if return_dict:
            return results
        values = list(results.values())
        return values[0] if len(values) == 1 else values

    def predict(self, x: object, batch_size: int = 32) -> Structure[Array]:
        """Same as `keras.Model.predict`; each replica calls it with all records and gets all outputs."""
        reader = for_model(x if isinstance(x, Reader) else NumpyReader(x), self.model)
        sample = sample_batch(reader, self.model)[:1]
        self._require_built(sample)
        if self._training is not None:
            self._training.weights.make_whole()
        self._agree("predict", reader, batch_size=batch_size)
        return predict_all(
            self.model, self._step(PredictStep, sample), reader, require_batch_size(batch_size), self.group
        )

    @property
    def optimizer(self) -> keras.optimizers.Optimizer:
        """The Keras optimizer of this replica's parts; set `learning_rate` on every replica."""
        return self._optimizer

    @property
    def step(self) -> int:
        """Number of steps taken."""
        return 0 if self._training is None else self._training.step

    @property
    def placements(self) -> tuple[VariablePlacement, ...]:
        """What is sharded, and why.

        Raises:
            ModelError: the model is not compiled or not built yet.
        """
        return self._ready(None).plan

    def memory(self) -> ReplicaMemory:
        """Bytes that this replica held after the first step of the last `fit`, measured on its variables.

        Raises:
            ModelError: it has not trained yet.
        """
        if self._training is None or self._training.memory is None:
            raise ModelError("no memory has been measured yet: fit() measures it after its first step")
        return self._training.memory

    def whole_tensors(self) -> Iterator[tuple[str, Array]]:
        """The whole training state, one (key, tensor) after another, however it is sharded.

        Keys, shapes and order are those of unsharded training: trainable variables ("variables/00000"), other
        variables, the variables of a Keras optimizer built on the model, then the states of host embeddings. Every
        replica calls it, iterates to the end, and calls nothing else meanwhile.

        Raises:
            ModelError: the model is not compiled or not built.
        """
        yield from self._ready(None).whole_tensors.tensors()
        yield from host_tensors(self.model)

    def restore(self, tensors: Mapping[str, Array] | None, step: int) -> None:
        """Restores the state of `whole_tensors`, of any number of replicas; every replica calls it.

        Args:
            tensors: Tensors by key; only rank 0's are used.
            step: Number of steps taken by then.

        Raises:
            CheckpointError: they belong to another model or optimizer; nothing has changed.
        """
        training = self._ready(None)
        every = dict(tensors or {})
        dense = {key: tensor for key, tensor in every.items() if not key.startswith(HOST)}
        training.whole_tensors.check(dense)
        restore_hosts(self.model, self.group, every)
        training.whole_tensors.restore(dense)
        training.step = step

    def close(self) -> None:
        """Makes the model an ordinary one again, with whole weights and a new optimizer; every replica calls it."""
        if self._training is not None:
            self._training.weights.close()
            self._training = None
        self._tried = False
        self._steps.clear()
