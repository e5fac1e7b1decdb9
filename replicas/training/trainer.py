"""Data-parallel Keras training over a replica group, with `compile`, `fit`, `evaluate` and `predict` as in Keras."""

from __future__ import annotations

import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput, CheckpointError, ModelError, Unsupported
from elastable.master.api import JobSpec, Tensor
from elastable.master.backend.contract import take_statistics
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.writing import write_tensors
from elastable.master.tasks.progress import Progress
from elastable.replicas.groups.group import ReplicaGroup, require_same, run_at_root
from elastable.replicas.groups.world import replica_group
from elastable.replicas.training.replica_training import ReplicaMemory, Training
from elastable.replicas.training.sharded_variables import VariablePlacement, VariableSplit
from elastable.replicas.training.step import (
    BatchStep,
    Feed,
    GradientStep,
    PredictStep,
    ReplicaEvaluateStep,
    host_embeddings,
    reader_of,
    refuse_losses,
    refuse_model,
    refuse_scaled_tables,
    require_batch_size,
    split_off,
)
from elastable.worker.keras.keras_methods import history_of, require_callback, sees_batches
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.readers.batch.pytrees import Structure
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.user_model.build import as_tensors, build_model, for_model, sample_batch

_TEST_BATCHES = ("on_test_batch_begin", "on_test_batch_end")


class ReplicaCallbacks:
    """Calls each replica's callbacks, with logs that are the same on all of them.

    Args:
        callbacks, model: This replica's.
        group: All replicas; each creates this.
        verbose: 0: silent; otherwise rank 0 prints a line per epoch.

    Attributes:
        list: The callbacks, to be called as Keras calls them.
        sees_batches: Whether a callback of any replica handles batches.

    Raises:
        Unsupported: a callback that replicas cannot support; names it.
    """

    def __init__(
        self,
        callbacks: Sequence[keras.callbacks.Callback],
        model: keras.Model,
        group: ReplicaGroup,
        epochs: int,
        steps: int,
        verbose: int,
    ) -> None:
        for callback in callbacks:
            _refuse_unsupported(callback)
        self.model, self._group = model, group
        self.sees_batches = self._anyone(sees_batches(callbacks))
        shown = bool(verbose) and group.rank == 0
        self.list = keras.callbacks.CallbackList(
            list(callbacks),
            add_history=True,
            add_progbar=shown,
            model=model,
            epochs=epochs,
            steps=steps,
            verbose=2 if shown else 0,
        )

    def end_batch(self, step: int, logs: Mapping[str, float]) -> bool:
        """Whether a callback of any replica stops training."""
        self.list.on_train_batch_end(step, dict(logs))
        return self._anyone(bool(self.model.stop_training))

    def end_epoch(self, epoch: int, logs: Mapping[str, float]) -> bool:
        """Whether a callback of any replica stops training."""
        self.list.on_epoch_end(epoch, dict(logs))
        return self._anyone(bool(self.model.stop_training))

    def agree(self, learning_rate: float) -> None:
        """Raises BadInput if the replicas' learning rates differ; every replica calls it."""
        rates = self._group.all_gather(np.array(learning_rate, np.float64))
        for rank, rate in enumerate(rates):
            if rate != rates[0] and not np.isnan([rate, rates[0]]).all():
                raise BadInput(
                    f"rank {rank} continues at learning rate {rate:g}, and rank 0 at {rates[0]:g}: give a "
                    "callback that sets it to every replica"
                )

    def _anyone(self, here: bool) -> bool:
        return bool(self._group.all_reduce(np.array([here], np.uint8), "max")[0])


def _refuse_unsupported(callback: keras.callbacks.Callback) -> None:
    kinds, name = keras.callbacks, require_callback(callback)
    if isinstance(callback, kinds.BackupAndRestore):
        raise Unsupported(
            f"callback {name} saves the optimizer's state as one replica holds it; use ReplicaTrainer.save and load"
        )
    if isinstance(callback, kinds.SwapEMAWeights):
        raise Unsupported(
            f"callback {name} needs whole moving averages, of which replicas may hold parts; leave it out"
        )
    if type(callback).__module__.split(".")[0] != "keras":
        for hook in _TEST_BATCHES:
            if getattr(type(callback), hook) is not getattr(kinds.Callback, hook):
                raise Unsupported(
                    f"callback {name} has {hook}, and replicas evaluate the batches of a validation by themselves: use "
                    "on_test_begin and on_test_end, whose logs are of all of them"
                )
    if isinstance(callback, kinds.ModelCheckpoint) and not callback.save_weights_only:
        raise Unsupported(
            f"callback {name} saves the optimizer's state as one replica holds it; give save_weights_only=True, or use "
            "ReplicaTrainer.save"
        )


StepKind = TypeVar("StepKind", bound=BatchStep)


class ReplicaTrainer:
    """Trains one Keras model on all replicas of a group, which may shard its weights and optimizer state.

    Every replica creates a trainer for the same model and calls the same methods with the same arguments and data; each
    takes its part of every batch. The gradient of a step is the mean over all records of the batch, summed in rank
    order: sharding does not change a bit of it (docs/replicas.md).

    Checkpoints have the format of a job without tables (docs/checkpoints.md). They hold whole tensors in the order of
    unsharded training; `elastable checkpoint` reads them.

    Args:
        model: A Keras model. All replicas start from rank 0's values.
        locations: What to shard: `replicated_tensor_sharding` of `weight` and
            `optimizer_state`, thresholds, and overrides by variable. None: nothing.
        group: The replicas. None: the processes that `elastable replicas` or `mpirun` started.
        seed: Seed of the record order and of dropout.

    Raises:
        ModelError, Unsupported: the model cannot be trained this way; names the reason.
    """

    def __init__(
        self,
        model: keras.Model,
        locations: LocationSettings | None = None,
        group: ReplicaGroup | None = None,
        *,
        seed: int = 0,
    ) -> None:
        refuse_model(model)
        self.model = model
        self.group = replica_group() if group is None else group
        self.seed = seed
        self._locations = LocationSettings() if locations is None else locations
        self._optimizer: keras.optimizers.Optimizer | None = None
        self._training: Training | None = None
        self._tried = False
        self._job = ""
        self._steps: dict[tuple[type[BatchStep], str], BatchStep] = {}

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
        return history_of(listeners.list)

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

    def restore(self, tensors: Mapping[str, Array] | None, step: int) -> None:
        """Restores the state of `whole_tensors`, of any number of replicas; every replica calls it.

        Args:
            tensors: Tensors by key; only rank 0's are used.
            step: Number of steps taken by then.

        Raises:
            CheckpointError: they belong to another model or optimizer; nothing has changed.
        """
        training = self._ready(None)
        training.whole_tensors.restore(tensors)
        take_statistics(self.model._flatten_layers())
        training.step = step

    def close(self) -> None:
        """Makes the model an ordinary one again, with whole weights and a new optimizer; every replica calls it."""
        if self._training is not None:
            self._training.weights.close()
            self._training = None
        self._tried = False
        self._steps.clear()

    def save(self, directory: str | Path, *, keep: int = 3) -> str:
        """Writes a checkpoint of the current step; every replica calls it, rank 0 writes.

        Rank 0 needs memory for one copy of all weights and optimizer state.

        Args:
            directory: Directory of checkpoints: a path, or a URL that fsspec supports.
            keep: How many of this training's newest checkpoints to keep; 0: all.

        Returns:
            The checkpoint's address.

        Raises:
            CheckpointError: it cannot be written; raised on every replica.
            ModelError: the model is not compiled or not built.
        """
        tensors = {key: tensor for key, tensor in self.whole_tensors() if self.group.rank == 0}
        self._job = self._job or uuid.uuid4().hex[:12]

        def write() -> str:
            job = JobSpec(job=self._job, seed=self.seed)
            return write_tensors(directory, tensors, job, Progress(self.step), keep=keep)

        return run_at_root(self.group, write)

    def load(self, place: str | Path) -> None:
        """Loads a checkpoint of any number of replicas and any sharding; every replica calls it.

        Training continues as if it had never stopped, to the bit with the same
        number of replicas: pass `initial_epoch` to `fit`.

        Args:
            place: A checkpoint, or a directory of them (its newest); rank 0 reads it.

        Raises:
            CheckpointError: there is none, a file is damaged (named), or it belongs to
                another model or optimizer; raised on every replica, and nothing has changed.
            ModelError: the model is not compiled or not built.
        """
        read: dict[str, Tensor] = {}

        def open_it() -> tuple[int, str]:
            found = open_checkpoint(place)
            if found.manifest.tables:
                raise CheckpointError(
                    f"{found.address} holds tables ({', '.join(sorted(found.manifest.tables))}): it is of a job with a "
                    "master, and not of a ReplicaTrainer"
                )
            read.update(found.dense())
            return found.version, str(found.job.get("job", ""))

        step, job = run_at_root(self.group, open_it)
        self.restore(read, step)
        self._job = job

    def _evaluate(self, reader: Reader, batch_size: int) -> dict[str, float]:
        training = self._ready(None)
        step = self._step(ReplicaEvaluateStep, sample_batch(reader, self.model))
        training.metrics.reset()
        for part in Feed(
            reader, batch_size, self.group, collective_layer=self._collective_layer(), model=self.model
        ).parts():
            if part.batch is not None:
                step(part.batch, part.shares[self.group.rank])
        return training.metrics.results()

    def _validation(
        self, reader: Reader | None, batch_size: int, every: int, listeners: ReplicaCallbacks
    ) -> Callable[[int], Mapping[str, float]]:
        """Epoch -> validation logs: of every `every`-th epoch, or none without a reader. `listeners` hear of each."""

        def evaluate(epoch: int) -> Mapping[str, float]:
            if reader is None or (epoch + 1) % every:
                return {}
            listeners.list.on_test_begin()
            found = self._evaluate(reader, batch_size)
            listeners.list.on_test_end(dict(found))
            return {f"val_{name}": value for name, value in found.items()}

        return evaluate

    def _step(self, kind: type[StepKind], sample: TensorBatch) -> StepKind:
        """The compiled step for batches shaped like `sample`, traced once."""
        shapes = tf.nest.map_structure(lambda tensor: (tensor.dtype.name, tuple(tensor.shape[1:])), sample)
        key = (kind, repr(shapes))
        if key not in self._steps:
            if issubclass(kind, GradientStep):
                self._steps[key] = self._ready(sample).gradients(sample)
            else:
                self._steps[key] = kind(self.model, sample)
        return cast(StepKind, self._steps[key])

    def _ready(self, sample: TensorBatch | None) -> Training:
        """The training state, created on first use; every replica calls it."""
        if self._optimizer is None:
            raise ModelError("the trainer is not compiled; call compile(optimizer, loss, ...) first")
        if self._training is None or (sample is not None and not self._tried):
            self._require_built(sample)
        if sample is not None and not self._tried:
            build_model(self.model, sample)
            self._tried = True
            if self._training is not None:
                self._training.count_metrics()  # Keras has made those of compile() only now
        if self._training is None:
            refuse_scaled_tables(self.model, self._optimizer)
            self._training = Training(self.model, self._optimizer, self._locations, self.group, self.seed)
            # Between trainings the model has a fresh optimizer without state, so that it can be saved.
            self.model.optimizer = self._training.optimizer.clone()
        return self._training

    def _require_built(self, sample: TensorBatch | None) -> None:
        if self.model.built:
            return
        if sample is None:
            raise ModelError(f"model {self.model.name!r} is not built: give it an Input or call its build() first")
        self.model(sample[0], training=False)

    def _collective_layer(self) -> str:
        """The name of a layer that all replicas must call together; "": there is none."""
        return next((layer.name for layer in host_embeddings(self.model)), "")

    def _agree(self, what: str, reader: Reader, **settings: object) -> None:
        require_same(self.group, what, {"records": len(reader), "seed": self.seed, **settings})


def predict_all(
    model: keras.Model, step: PredictStep, reader: Reader, batch_size: int, group: ReplicaGroup
) -> Structure[Array]:
    """The outputs of all records, in their order, on every replica; each calls it.

    Args:
        reader: The same records on every replica.
        batch_size: Most records that a replica computes at once.
    """
    split = VariableSplit(len(reader), group.size)
    mine = np.arange(*split.bounds(group.rank))
    # As many calls on every replica, as a call may be a collective lookup: without records, it takes the first.
    outputs = [_outputs(model, step, reader, part) for part in np.array_split(mine, -(-split.length // batch_size))]
    joined = tf.nest.map_structure(lambda *arrays: np.concatenate(arrays), *outputs)
    found: Structure[Array] = tf.nest.map_structure(
        lambda array: np.concatenate(group.all_gather_uneven(array)), joined
    )
    return found


def _outputs(model: keras.Model, step: PredictStep, reader: Reader, indices: Int64) -> Structure[Array]:
    taken = indices if len(indices) else np.zeros(1, np.int64)
    outputs: Structure[Array] = tf.nest.map_structure(
        lambda array: array[: len(indices)],
        step(as_tensors(reader.take(taken)[:1], f"{type(reader).__name__}.take()", model, taken)),
    )
    return outputs


def run_epochs(
    training: Training,
    compute: GradientStep,
    feed: Feed,
    listeners: ReplicaCallbacks,
    epochs: range,
    evaluate: Callable[[int], Mapping[str, float]],
) -> None:
    """Trains; every replica calls it.

    Callbacks and evaluation see the model's whole weights; what callbacks change in them counts.

    Args:
        compute: For batches shaped like the feed's.
        evaluate: Epoch -> validation logs to add.
    """
    logs: dict[str, float] = {}
    listeners.model.stop_training = False
    listeners.list.on_train_begin()
    for epoch in epochs:
        listeners.list.on_epoch_begin(epoch)
        training.weights.take_back()
        stop = _epoch(training, compute, feed, epoch, listeners)
        logs = training.metrics.results()
        training.weights.make_whole()
        logs |= evaluate(epoch)
        stop |= listeners.end_epoch(epoch, logs)
        training.weights.take_back()
        listeners.agree(training.optimizer.learning_rate())
        if stop:
            break
    training.finish()
    listeners.list.on_train_end(dict(logs))
    training.weights.take_back()


def _epoch(training: Training, compute: GradientStep, feed: Feed, epoch: int, listeners: ReplicaCallbacks) -> bool:
    """True if a callback stopped it."""
    training.metrics.reset()
    measured = training.memory
    for step, part in enumerate(feed.parts(epoch)):
        if listeners.sees_batches:
            listeners.list.on_train_batch_begin(step)
        training.train(compute, part, measure=training.memory is measured)
        if listeners.sees_batches:
            training.weights.make_whole()
            stop = listeners.end_batch(step, training.metrics.results())
            training.weights.take_back()
            if stop:
                return True
    return False
