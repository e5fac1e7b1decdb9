"""The training state of one model over replicas, and the step that all replicas take together."""

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, BadSpec, CheckpointError, ModelError, Unsupported
from elastable.master.backend.contract import take_statistics
from elastable.replicas.groups.group import ReplicaGroup, require_same, run_at_root
from elastable.replicas.host_embeddings.host_embedding import HostEmbedding
from elastable.replicas.host_embeddings.host_table import require_state
from elastable.replicas.training.part_optimizer import (
    PartOptimizer,
    clip_parts,
    refuse_optimizer,
    refuse_parts,
    slots_of,
)
from elastable.replicas.training.sharded_variables import (
    DenseVariable,
    Exchange,
    Layout,
    VariablePlacement,
    plan_variables,
    update_domains,
)
from elastable.replicas.training.step import BatchPart, GradientStep, host_embeddings, refuse_own_changes
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import TensorBatch


def value_of(variable: keras.Variable) -> Array:
    """The variable's values, read-only."""
    value = variable.value
    # No copy: TensorFlow copies a shared buffer only when it changes.
    array: Array = np.asarray(tf.raw_ops.ReadVariableOp(resource=value.handle, dtype=value.dtype))
    view = array.view()
    view.setflags(write=False)
    return view


def put(variable: keras.Variable, array: Array) -> None:
    """Replaces the values of a variable, which may have been freed, with as many elements."""
    value = variable.value
    tensor = tf.convert_to_tensor(array.reshape(tuple(variable.shape)), value.dtype)
    tf.raw_ops.AssignVariableOp(resource=value.handle, value=tensor, validate_shape=False)


def give_back(variable: keras.Variable) -> None:
    """Frees a variable's memory; it must not be read until the next `put`."""
    value = variable.value
    nothing = tf.zeros([0], value.dtype)
    # Graphs keep the static shape; only the resource behind the handle becomes empty.
    tf.raw_ops.AssignVariableOp(resource=value.handle, value=nothing, validate_shape=False)


def held_bytes(variable: keras.Variable) -> int:
    """Bytes of the variable's values now, measured on its buffer."""
    return int(value_of(variable).nbytes)


_MARK = "_elastable_sharded_by"


class ReplicaWeights:
    """Trainable variables, of which replicas may hold or update only parts.

    A variable with a sharded weight is gathered before the forward pass and freed after the backward pass (after the
    update, if its state is not sharded and every replica updates all of it). One with only its state sharded is whole
    everywhere: each replica copies its part into a buffer, updates it, and the parts are gathered at once.

    Args:
        variables: The model's variables, in order.
        plan: From `plan_variables`.
        group: All replicas; each creates this.

    Attributes:
        layouts: How each variable is updated.
        targets: What is updated for each variable: a flat buffer, or itself.

    Raises:
        BadSpec: another trainer shards a variable already.
    """

    def __init__(
        self, variables: Sequence[keras.Variable], plan: Sequence[VariablePlacement], group: ReplicaGroup
    ) -> None:
        weights = {line.variable: line.domain for line in plan if line.kind == "weight"}
        updates = update_domains(plan)
        self.variables = list(variables)
        self._refuse_marked()
        self.layouts = [Layout(int(np.prod(variable.shape)), updates[variable.path]) for variable in variables]
        self._kept = [Layout(int(np.prod(variable.shape)), weights[variable.path]) for variable in variables]
        every = [*self.layouts, *self._kept]
        self.exchange = Exchange(group, [layout.domain for layout in every if layout.domain is not None])
        updated = [place for place, layout in enumerate(self.layouts) if layout.domain is not None]
        # Of the variables that are updated in parts: those with a sharded weight, and those with a whole one.
        self._apart = [place for place in updated if self._kept[place].domain is not None]
        self._copied = [place for place in updated if self._kept[place].domain is None]
        self.targets = [
            variable if layout.domain is None else _buffer(variable, self._part(layout, value_of(variable)))
            for variable, layout in zip(variables, self.layouts, strict=True)
        ]
        # This replica's parts of sharded weights: the update target, or a copy of its part of what is updated whole.
        self._parts = {
            place: self.targets[place]
            if self.layouts[place].domain is not None
            else _buffer(variable, self._part(kept, value_of(variable)))
            for place, (variable, kept) in enumerate(zip(variables, self._kept, strict=True))
            if kept.domain is not None
        }
        self._whole = True
        for place, variable in enumerate(variables):
            if place in self._parts or self.layouts[place].domain is not None:
                setattr(variable, _MARK, weakref.ref(self))

    def part_of(self, place: int, array: Array) -> Array:
        """This replica's part of an array with the elements of a variable that is updated in parts."""
        return self._part(self.layouts[place], array)

    def make_whole(self) -> None:
        """Gathers sharded weights that are not gathered yet; every replica calls it."""
        if not self._whole:
            self._gather(list(self._parts), self._parts, self._kept)
            self._whole = True

    def give_back(self) -> None:
        """Frees the gathered copies of weights that are updated in parts."""
        for place in self._apart:
            give_back(self.variables[place])
            self._whole = False

    def take_back(self) -> None:
        """Copies the parts from the whole variables, which the user may have changed."""
        if self._whole:
            for place, part in self._parts.items():
                put(part, self._part(self._kept[place], value_of(self.variables[place])))

    def taken(self) -> None:
        """Call after replacing all variables: their parts are copied from them."""
        self._whole = True
        self.take_back()

    def forget_buffers(self) -> None:
        """Frees the buffers that only copy whole variables."""
        for place in self._copied:
            give_back(self.targets[place])

    def begin_update(self) -> None:
        """Copies the variables into the buffers; call before updating `targets`."""
        for place in self._copied:
            put(self.targets[place], self.part_of(place, value_of(self.variables[place])))

    def end_update(self, constrained: Sequence[bool] | None = None) -> None:
        """Gathers what was updated in parts and frees sharded weights updated whole; every replica calls it.

        Args:
            constrained: For every variable, whether its constraint applies now: Keras applies those of variables that
                an optimizer step has updated.
        """
        self._gather(self._copied, self.targets, self.layouts)
        self.forget_buffers()
        for place in self._copied:
            variable = self.variables[place]
            if variable.constraint is not None and (constrained is None or constrained[place]):
                variable.assign(variable.constraint(variable.value))
        for place, part in self._parts.items():
            if self.layouts[place].domain is None:
                put(part, self._part(self._kept[place], value_of(self.variables[place])))
                give_back(self.variables[place])
            self._whole = False

    def close(self) -> None:
        """Makes the variables whole and ordinary again; every replica calls it."""
        self.make_whole()
        for variable in self.variables:
            if hasattr(variable, _MARK):
                delattr(variable, _MARK)

    def bytes(self) -> tuple[int, int]:
        """(bytes of the model's variables, of the buffers), now."""
        updated = {place: target for place, target in enumerate(self.targets) if self.layouts[place].domain is not None}
        buffers = {**updated, **self._parts}
        return sum(map(held_bytes, self.variables)), sum(map(held_bytes, buffers.values()))

    def _part(self, layout: Layout, array: Array) -> Array:
        assert layout.domain is not None
        return layout.split.take(self.exchange.part(layout.domain), array)

    def _gather(
        self,
        places: Sequence[int],
        parts: Mapping[int, keras.Variable] | Sequence[keras.Variable],
        layouts: Sequence[Layout],
    ) -> None:
        """Gathers variables from everyone's parts."""
        if not places:
            return
        buffers = [value_of(parts[place]) for place in places]
        found = self.exchange.gather(buffers, [layouts[place] for place in places])
        for place, array in zip(places, found, strict=True):
            put(self.variables[place], array)

    def _refuse_marked(self) -> None:
        for variable in self.variables:
            held = getattr(variable, _MARK, None)
            if held is not None and held() is not None:
                raise BadSpec(
                    f"variable {variable.path!r} is sharded already, by another et.ReplicaTrainer; close() that first"
                )


def _buffer(variable: keras.Variable, part: Array) -> keras.Variable:
    return keras.Variable(part, name=variable.path.replace("/", "_"), dtype=variable.dtype)


@dataclass(frozen=True, slots=True)
class _Entry:
    """A tensor: the variable that holds it, and the position of the variable it is split like (None: it is whole)."""

    name: str
    shape: tuple[int, ...]
    variable: keras.Variable
    place: int | None = None

    @property
    def dtype(self) -> np.dtype[np.generic]:
        return value_of(self.variable).dtype

    @property
    def kind(self) -> str:
        return f"{self.dtype} {list(self.shape)}"


_HOST = "host/"  # of keys of host embeddings' tensors: "host/TABLE/ARRAY", with the arrays of `HostTable.state`


class WholeTensors:
    """Trainable variables, states and optimizer variables by kind and index ("variables/00000"); then host embeddings.

    Keys, shapes and order are those of an unsharded model and a Keras
    optimizer built on it, whatever the replicas and the sharding.

    Args:
        weights: The model's trainable variables.
        states: Its other variables, those of frozen layers included.
        hosts: Its host embeddings.
    """

    def __init__(
        self,
        weights: ReplicaWeights,
        states: Sequence[keras.Variable],
        optimizer: PartOptimizer,
        hosts: Sequence[HostEmbedding] = (),
    ) -> None:
        self._weights = weights
        self._group = weights.exchange.group
        self._hosts = {f"{_HOST}{layer.table.spec.name}/": layer for layer in hosts}
        slots = {id(slot): (place, name) for slot, place, name in optimizer.slots}
        entries: dict[str, _Entry] = {}
        for kind, variables in (("variables", weights.variables), ("states", states)):
            for place, variable in enumerate(variables):
                entries[f"{kind}/{place:05d}"] = _Entry(variable.path, tuple(variable.shape), variable)
        for place, variable in enumerate(optimizer.keras.variables):
            key = f"optimizer/{place:05d}"
            if id(variable) not in slots:
                entries[key] = _Entry(variable.path, tuple(variable.shape), variable)
                continue
            of, name = slots[id(variable)]
            whole = weights.variables[of]
            split = weights.layouts[of].domain is not None
            entries[key] = _Entry(f"{whole.path}/{name}", tuple(whole.shape), variable, of if split else None)
        self._entries = entries

    def tensors(self) -> Iterator[tuple[str, Array]]:
        """(key, tensor) one after another; every replica iterates to the end."""
        self._weights.make_whole()
        for key, entry in self._entries.items():
            value = value_of(entry.variable)
            if entry.place is not None:
                (value,) = self._weights.exchange.gather([value], [self._weights.layouts[entry.place]])
            yield key, value.reshape(entry.shape)
        for start, layer in self._hosts.items():
            yield from ((f"{start}{name}", np.asarray(array)) for name, array in layer.state().items())

    def restore(self, tensors: Mapping[str, Array] | None) -> None:
        """Restores what `tensors` gave, of any number of replicas; every replica calls it.

        Args:
            tensors: Tensors by key; only rank 0's are used.

        Raises:
            CheckpointError: a tensor is missing, unknown, or of another shape or dtype; nothing has changed.
        """
        given = dict(tensors or {})
        kinds = run_at_root(self._group, lambda: self._checked(given))

        def everyones(key: str, shape: Sequence[int], dtype: npt.DTypeLike) -> Array:
            mine = np.ascontiguousarray(given[key]) if self._group.rank == 0 else np.empty(shape, dtype)
            return self._group.broadcast(mine.reshape(shape))

        for start, layer in self._hosts.items():
            layer.restore({name: everyones(start + name, *kind) for name, kind in kinds[start].items()})
        for key, entry in self._entries.items():
            array = everyones(key, entry.shape, entry.dtype)
            put(entry.variable, array if entry.place is None else self._weights.part_of(entry.place, array))
        self._weights.taken()

    def _checked(self, tensors: Mapping[str, Array]) -> dict[str, dict[str, tuple[Sequence[int], str]]]:
        """Shape and dtype of the arrays of each host embedding, by the beginning of their keys."""
        states: dict[str, dict[str, Array]] = {start: {} for start in self._hosts}
        for key, tensor in tensors.items():
            start = max((each for each in states if key.startswith(each)), key=len, default=None)
            if start is not None:
                states[start][key.removeprefix(start)] = np.asarray(tensor)
            elif key.startswith(_HOST):
                raise CheckpointError(f"the checkpoint has {key}, and the model has no such host embedding")
            elif key not in self._entries:
                raise CheckpointError(
                    f"the checkpoint has {key} ({tensor.dtype} {list(tensor.shape)}), and the model has no such "
                    "variable: it is of another model or optimizer"
                )
        for key, entry in self._entries.items():
            found = tensors.get(key)
            if found is None:
                raise CheckpointError(
                    f"the checkpoint lacks {key} ({entry.name}, {entry.kind}): it is of another model or optimizer"
                )
            if tuple(found.shape) != entry.shape or found.dtype != entry.dtype:
                raise CheckpointError(
                    f"{key} ({entry.name}) is {found.dtype} {list(found.shape)} in the checkpoint and {entry.kind} in "
                    "the model"
                )
        for start, layer in self._hosts.items():
            try:
                require_state(layer.table.spec, states[start])
            except BadInput as error:
                raise CheckpointError(f"the checkpoint is of another model: {error}") from error
        return {start: {name: (each.shape, str(each.dtype)) for name, each in state.items()}
                for start, state in states.items()}  # fmt: skip


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
        self.whole_tensors = WholeTensors(
            self.weights, model.non_trainable_weights, self.optimizer, host_embeddings(model)
        )
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
        take_statistics(layers_of(model))


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
