"""The training state of one model over replicas, and the step that all replicas take together."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.replicas.groups.agreement import require_same
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.training.feed import BatchPart
from elastable.replicas.training.model_refusals import refuse_own_changes
from elastable.replicas.training.step import GradientStep
from elastable.replicas.training.variables.exchange import Exchange, Layout
from elastable.replicas.training.variables.optimizer import (
    PartOptimizer,
    clip_parts,
    refuse_optimizer,
    refuse_parts,
    slots_of,
)
from elastable.replicas.training.variables.placement import DenseVariable, plan_variables, update_domains
from elastable.replicas.training.variables.weights import ReplicaWeights, WholeTensors, held_bytes, put, value_of
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import TensorBatch


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
        optimizer: The optimizer of this replica's parts.
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


def model_states(model: keras.Model) -> list[keras.Variable]:
    """Variables that layers update in the forward pass: no frozen weights, and no seeds, which follow the step."""
    layers = layers_of(model)
    found = [variable for layer in layers for variable in getattr(layer, "_non_trainable_variables", ())]
    unique = {id(variable): variable for variable in found if variable.name != "seed_generator_state"}
    return list(unique.values())


class ReplicaStates:
    """The states of a built model over replicas.

    After every step a state becomes the mean of the replicas' values, weighted
    by their records, as `tf.distribute` aggregates the moving statistics of
    BatchNormalization; integers become rank 0's. Equal values stay equal to the bit.
    """

    def __init__(self, model: keras.Model, group: ReplicaGroup) -> None:
        self._group = group
        self._variables = model_states(model) if group.size > 1 else []

    def share(self, shares: Sequence[float]) -> None:
        """Averages the states; every replica calls it. `shares`: each rank's part of the batch's records."""
        values = [value_of(variable) for variable in self._variables]
        for dtype in dict.fromkeys(value.dtype for value in values):
            places = [place for place, value in enumerate(values) if value.dtype == dtype]
            rows = self._group.all_gather(np.concatenate([values[place].reshape(-1) for place in places]))
            if all(row.tobytes() == rows[0].tobytes() for row in rows[1:]):
                continue
            mean, first = _mean(rows, shares), 0
            for place in places:
                size = values[place].size
                put(self._variables[place], mean[first : first + size])
                first += size


def _mean(rows: Array, shares: Sequence[float]) -> Array:
    first: Array = rows[0]
    if rows.dtype.kind in "iub":
        return first
    total: Array = first * rows.dtype.type(shares[0])
    for row, share in zip(rows[1:], shares[1:], strict=True):
        total += row * row.dtype.type(share)
    same = (rows == first).all(axis=0)
    total[same] = first[same]
    return total


class ReplicaMetrics:
    """The metrics of a compiled and built model; every replica counts its own records.

    Raises:
        Unsupported: a metric's state does not start at zero, so it cannot be summed.
    """

    def __init__(self, model: keras.Model, exchange: Exchange) -> None:
        self._model = model
        self._exchange = exchange
        self._variables: list[keras.Variable] = []
        for metric in model.metrics:
            metric.reset_state()
            for variable in metric.variables:
                if np.any(value_of(variable)):
                    raise Unsupported(
                        f"metric {metric.name!r}: its state {variable.path!r} does not begin at zero, so it cannot be "
                        "summed over replicas"
                    )
                self._variables.append(variable)

    def reset(self) -> None:
        for metric in self._model.metrics:
            metric.reset_state()

    def results(self) -> dict[str, float]:
        """Every metric over the records of all replicas, by name; every replica calls it."""
        totals = self._exchange.reduce(
            [value_of(variable) for variable in self._variables], [Layout()] * len(self._variables)
        )
        mapping = [
            (variable, tf.convert_to_tensor(total)) for variable, total in zip(self._variables, totals, strict=True)
        ]
        # The variables keep this replica's counts: the next sum must not count them twice.
        with keras.StatelessScope(state_mapping=mapping):
            named = self._model.get_metrics_result()
        return {name: value for key, result in named.items() for name, value in _scalars(key, result)}


def _scalars(name: str, result: tf.Tensor | float) -> Iterator[tuple[str, float]]:
    values = np.asarray(result.numpy() if hasattr(result, "numpy") else result)
    if values.ndim == 0:
        yield name, float(values)
    else:
        yield from ((f"{name}_{place}", float(value)) for place, value in enumerate(values.ravel()))
