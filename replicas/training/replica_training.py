"""The training state of one model over replicas, and the step that all replicas take together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import keras
import numpy as np

from elastable.embedding_store.composite import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import ModelError
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.data.feed import BatchPart
from elastable.replicas.training.model_refusals import refuse_own_changes
from elastable.replicas.training.model_states import ReplicaStates
from elastable.replicas.training.replica_metrics import ReplicaMetrics
from elastable.replicas.training.step import GradientStep
from elastable.replicas.training.variables.clipping import clip_parts
from elastable.replicas.training.variables.optimizer import PartOptimizer, refuse_optimizer, refuse_parts, slots_of
from elastable.replicas.training.variables.placement import DenseVariable, plan_variables, update_domains
from elastable.replicas.training.variables.variable_memory import held_bytes, put, value_of
from elastable.replicas.training.variables.weights import ReplicaWeights
from elastable.replicas.training.variables.whole_tensors import WholeTensors
from elastable.worker.keras.structures import TensorBatch

__all__ = ["ReplicaMemory", "Training"]


@dataclass(frozen=True, slots=True)
class ReplicaMemory:
    """Bytes that one replica holds between two steps, measured on the variables.

    Attributes:
        weights: The model's trainable variables.
        buffers: Shards of weights.
        optimizer_state: The optimizer's variables.
        whole_weights: What `weights` and `buffers` would be without sharding.
        whole_optimizer_state: What `optimizer_state` would be without sharding.
    """

    weights: int
    buffers: int
    optimizer_state: int
    whole_weights: int
    whole_optimizer_state: int


class Training:
    """A model's variables, optimizer, states and metrics over replicas.

    Args:
        model: Compiled and built; every replica starts from rank 0's values.
        optimizer: A Keras optimizer, not built.
        locations: What to shard.
        group: All replicas; each creates this.
        seed: Seed of dropout.

    Attributes:
        plan: What is sharded, and why.
        weights: The trainable variables.
        optimizer: The optimizer of this replica's parts.
        metrics: The model's metrics.
        whole_tensors: The whole state, for checkpoints.
        step: Number of steps taken.
        memory: Measured after the last step with `measure`; None: not yet.

    Raises:
        ElastableError: the model, optimizer or locations cannot be used.
    """

    def __init__(
        self,
        model: keras.Model,
        optimizer: keras.optimizers.Optimizer,
        locations: LocationSettings,
        group: ReplicaGroup,
        seed: int,
    ) -> None:
        self._model, self._group, self._seed = model, group, seed
        variables = list(model.trainable_weights)
        if not variables:
            raise ModelError(f"model {model.name!r} has no trainable variables")
        refuse_optimizer(optimizer)
        self.plan = plan_variables(_described(variables, slots_of(optimizer)), locations, group.size)
        refuse_parts(optimizer, [name for name, domain in update_domains(self.plan).items() if domain is not None])
        _begin_equal(model, group)
        self.weights = ReplicaWeights(variables, self.plan, group)
        self.optimizer = PartOptimizer(optimizer, variables, self.weights.targets)
        self.weights.forget_buffers()
        self.count_metrics()
        self._states = ReplicaStates(model, group)
        self.whole_tensors = WholeTensors(self.weights, model.non_trainable_weights, self.optimizer)
        self.step = 0
        self.memory: ReplicaMemory | None = None

    def count_metrics(self) -> None:
        """Sums the metrics that the model has by now."""
        self.metrics = ReplicaMetrics(self._model, self.weights.exchange)

    def gradients(self, sample: TensorBatch) -> GradientStep:
        """The compiled forward and backward pass for batches shaped like `sample`.

        Raises:
            Unsupported: the pass cannot be divided over replicas; names the reason.
        """
        step = GradientStep(self._model, sample, self._seed, self.optimizer.keras.scale_loss)
        if self._group.size > 1:
            refuse_own_changes(self._model, step.graph)
        return step

    def train(self, compute: GradientStep, part: BatchPart, measure: bool = False) -> None:
        """One step; every replica calls it with its part of the same batch."""
        self.weights.make_whole()
        gradients = self._computed(compute, part)
        self.weights.give_back()
        layouts = [layout for layout, here in zip(self.weights.layouts, compute.reached, strict=True) if here]
        gradients = self.weights.exchange.reduce(gradients, layouts)
        gradients = clip_parts(self._group, self.optimizer.clipping, gradients, layouts)
        self.weights.begin_update()
        self.optimizer.apply(gradients, compute.reached)
        self.weights.end_update(compute.reached)
        self._states.share(part.shares)
        self.step += 1
        if measure:
            self.memory = self._measured()

    def finish(self) -> None:
        """Ends training as Keras does and makes all variables whole; every replica calls it."""
        self.weights.make_whole()
        if self.optimizer.keras.use_ema:
            self.weights.begin_update()
            self.optimizer.finish()
            self.weights.end_update([False] * len(self.weights.variables))
            self.weights.make_whole()

    def _computed(self, compute: GradientStep, part: BatchPart) -> list[Array]:
        if part.batch is not None:
            number = self.step * self._group.size + self._group.rank
            return compute(part.batch, number, part.shares[self._group.rank])
        # A replica without records contributes zeros to every exchange.
        reached = zip(self.weights.variables, compute.reached, strict=True)
        return [np.zeros(tuple(variable.shape), value_of(variable).dtype) for variable, here in reached if here]

    def _measured(self) -> ReplicaMemory:
        weights, buffers = self.weights.bytes()
        slots = {id(slot): place for slot, place, _ in self.optimizer.slots}
        state = whole = 0
        for variable in self.optimizer.keras.variables:
            held = held_bytes(variable)
            state += held
            whole += _whole_bytes(self.weights.variables[slots[id(variable)]]) if id(variable) in slots else held
        return ReplicaMemory(weights, buffers, state, sum(map(_whole_bytes, self.weights.variables)), whole)


def _described(variables: Sequence[keras.Variable], slots: int) -> list[DenseVariable]:
    return [
        DenseVariable(
            variable.path, tuple(variable.shape), variable.value.dtype.size, slots, variable.constraint is not None
        )
        for variable in variables
    ]


def _whole_bytes(variable: keras.Variable) -> int:
    return int(np.prod(variable.shape)) * int(variable.value.dtype.size)


def _begin_equal(model: keras.Model, group: ReplicaGroup) -> None:
    """Gives every replica's model rank 0's values."""
    variables = [variable for variable in model.variables if variable.name != "seed_generator_state"]
    shapes = [[variable.name, str(variable.dtype), list(variable.shape)] for variable in variables]
    require_same(group, "the model's variables", {str(place): shape for place, shape in enumerate(shapes)})
    if group.size > 1:
        for variable in variables:
            put(variable, group.broadcast(value_of(variable)))
