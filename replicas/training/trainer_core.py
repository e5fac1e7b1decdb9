"""What a trainer's methods share: the training state, created on first use, compiled steps and evaluation."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeVar, cast

import keras
import tensorflow as tf

from elastable.embedding_store.composite import LocationSettings
from elastable.embedding_store.errors import ModelError
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.processes.world import replica_group
from elastable.replicas.training.data.feed import Feed
from elastable.replicas.training.host_embedding_state import host_embeddings
from elastable.replicas.training.model_refusals import refuse_model, refuse_scaled_tables
from elastable.replicas.training.replica_callbacks import ReplicaCallbacks
from elastable.replicas.training.replica_training import Training
from elastable.replicas.training.step import BatchStep, GradientStep, ReplicaEvaluateStep
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.models.build import build_model, sample_batch
from elastable.worker.readers import Reader

__all__ = ["TrainerCore"]

StepKind = TypeVar("StepKind", bound=BatchStep)


class TrainerCore:
    """The model, its replicas and what training keeps; `ShardedTrainer` describes the arguments."""

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
        self._steps: dict[tuple[type[BatchStep], str], BatchStep] = {}

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
            listeners.begin_validation()
            found = self._evaluate(reader, batch_size)
            listeners.end_validation(found)
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
