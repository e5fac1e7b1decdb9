"""The dense part of the one authoritative model: variables, states, and one or several Keras optimizers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import count
from typing import Any, Protocol

import keras
import numpy as np

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import CheckpointError, Unsupported
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.backend.contract import BackendTensor, backend, take_statistics
from elastable.master.commits.dense_part import DensePart, OptimizerStep
from elastable.master.model.dense_names import NAMES, comparable, keys_by_name, names_tensor, renumbered, saved_names
from elastable.master.model.discovery import store_backed_layers, table_optimizers
from elastable.master.model.keras_optimizer import (
    accumulation_of,
    clipping_of,
    inner_optimizer,
    learning_rate_of,
    optimizer_of,
)
from elastable.master.push_check import TensorSpec

#: How the keys of a version's tensors begin; the learning rates are those of the optimizers of single tables, which
#: a callback may assign.
_KINDS = ("variables", "states", "optimizer", "table_learning_rates")


class DenseTensors(DensePart):
    """What every dense part of a Keras model shares: its variables, read and written.

    Variables are the weights that an optimizer changes; states are all other weights (no metric and no seed of a
    random layer).

    Attributes:
        trained: Keras variables that an optimizer knows, in model order.

    Args:
        model: A built model.
        states: Its other weights, in model order.
        own: The optimizers of its variables, each once, in the order in which checkpoints keep theirs.
        reported: What workers get besides the states, as one more state each.
    """

    def __init__(
        self,
        model: keras.Model,
        trained: Sequence[keras.Variable],
        states: Sequence[keras.Variable],
        own: Sequence[keras.Optimizer],
        reported: Sequence[keras.Variable] = (),
    ) -> None:
        self._own_optimizers = own
        self._weights = variables_of(model.weights)
        self.trained, self._states = list(trained), list(states)
        self._reported = [*self._states, *reported]
        self._table_optimizers = table_optimizers(model)
        self.variables, self.states = tensor_specs(self.trained), tensor_specs(self._reported)
        self._names = tuple(spec.name for spec in self.variables), tuple(spec.name for spec in self.states)
        self._layers = [model, *model._flatten_layers()]
        self.frozen_tables: tuple[str, ...] = ()
        self._flags = b""

    @property
    def optimizers(self) -> list[keras.Optimizer]:
        """All that train the model, each once."""
        found = (*self._own_optimizers, *self._table_optimizers.values())
        return list(dict(zip(map(id, found), found, strict=True)).values())

    def finalize_averages(self) -> None:
        """What Keras does at the end of `fit`: trained variables become their moving averages, if they have some."""

    def snapshot(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> DenseSnapshot:
        known = tensors or {}
        trained, states, *_ = _KINDS
        reported = (
            *_values(states, self._states, known), *map(backend().copied, self._reported[len(self._states) :])
        )  # fmt: skip
        return DenseSnapshot(version, _values(trained, self.trained, known), reported, *self._names, self._flags)

    def take_states(self, values: Sequence[Tensor]) -> None:
        """Makes the states those of a snapshot, or those that workers report."""
        for variable, value in zip(self._states, values, strict=False):
            variable.assign(value)

    def tensors(self) -> dict[str, Tensor]:
        found = {key: backend().copied(variable) for key, variable in self._by_key().items()}
        return {NAMES: self._key_names, **found}

    @cached_property
    def _key_names(self) -> Tensor:
        return names_tensor(self.names(), self._counted())

    def _counted(self) -> dict[str, str]:
        return renumbered((each.path for each in self._weights), map(type, self._layers))

    def names(self) -> dict[str, str]:
        """Key of a tensor -> its name: the path of a variable; of an optimizer's, its class and what it belongs to."""
        found, own = {}, dict[int, str]()
        for number, optimizer in enumerate(self._own_optimizers):
            inner = {id(variable) for variable in inner_optimizer(optimizer).variables}
            for variable in optimizer.variables:
                of = inner_optimizer(optimizer) if id(variable) in inner else optimizer  # which counts steps, too
                kind = f"{type(of).__name__}{f'-{number}' if number else ''}"
                name = variable.path.partition("/")[2]
                flat = (each.path for each in self.trained if name.startswith(f"{each.path.replace('/', '_')}_"))
                owner = max(flat, key=len, default="")
                own[id(variable)] = f"{kind}/{owner}:{name[len(owner) + 1 :]}" if owner else f"{kind}/{name}"
        tables = iter(
            [name for name, each in self._table_optimizers.items() if isinstance(each._learning_rate, keras.Variable)]
        )
        for key, variable in self._by_key().items():
            kind = key.partition("/")[0]
            if kind == "table_learning_rates":
                found[key] = f"learning rate of {next(tables)}"
            else:
                found[key] = own[id(variable)] if kind == "optimizer" else variable.path
        return found

    def from_names(
        self, saved: Mapping[str, Tensor], leave_out: Sequence[str] = ()
    ) -> tuple[dict[str, Tensor], list[str]]:
        """What `restore` takes, of the tensors of a model that may differ from this one: each by its name.

        Args:
            saved: What `tensors` returned there.
            leave_out: Variables, or what their paths begin with, that may be missing here.

        Returns:
            The tensors, and the paths of the variables that are not saved, and stay as they are.

        Raises:
            CheckpointError: a variable that is saved is missing here, has another shape or dtype, or the optimizer is
                another one.
        """
        ours, theirs = comparable(self.names(), self._counted(), *saved_names(saved))
        current = self.tensors()
        if absent := sorted(theirs.keys() - saved.keys()):
            raise CheckpointError(f"{theirs[absent[0]]} ({absent[0]}) is named, and its values are missing")
        same = keys_by_name(ours, theirs)
        taken = set(same.values())
        of_model = ("variables", "states")
        missing = [name for key, name in theirs.items() if key not in taken and key.partition("/")[0] in of_model]
        if unknown := [name for name in missing if not any(f"{name}/".startswith(f"{part}/") for part in leave_out)]:
            raise CheckpointError(
                f"the model has no {', '.join(unknown)}: leave them out by name (--leave-out, leave_out=), or give the "
                "layers the names that they had"
            )
        fresh = [name for key, name in ours.items() if key not in same and key.partition("/")[0] in of_model]
        _refuse_other_optimizer(ours, theirs, same, [*fresh, *missing])
        for key, there in same.items():
            value, wanted = saved[there], current[key]
            if value.shape != wanted.shape or _of_dtype(value, wanted.dtype).dtype != wanted.dtype:
                raise CheckpointError(
                    f"{ours[key]} was {value.dtype} {list(value.shape)} and is {wanted.dtype} {list(wanted.shape)}: "
                    "give its layer another name, under which it begins anew"
                )
            current[key] = value
        return current, fresh

    def weights(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The model's weights by key among what `tensors` returned, in the order of `model.weights`, without rows.

        Raises:
            CheckpointError: a tensor is missing.
        """
        key_of = {id(variable): key for key, variable in self._by_key().items()}
        keys = [key_of[id(weight)] for weight in self._weights]
        if missing := [key for key in keys if key not in tensors]:
            raise CheckpointError(f"the checkpoint lacks {missing[0]}: it is of another model")
        return {key: tensors[key] for key in keys}

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """Restores what `tensors` returned; entries of other kinds are ignored.

        Raises:
            CheckpointError: a tensor is missing, of another shape or dtype, or not
                of the model; nothing has been changed.
        """
        targets = self._by_key()
        for key, tensor in tensors.items():
            if key.partition("/")[0] in _KINDS and key not in targets:
                raise CheckpointError(
                    f"the checkpoint has {key} ({tensor.dtype} {list(tensor.shape)}), and the model has no such "
                    "variable: it is of another model"
                )
        values = {}
        for key, variable in targets.items():
            found = tensors.get(key)
            wanted = f"{variable.dtype} {list(variable.shape)}"
            if found is None:
                raise CheckpointError(f"the checkpoint lacks {key} ({variable.path}, {wanted}): it is of another model")
            values[key] = _of_dtype(found, np.dtype(variable.dtype))
            if tuple(found.shape) != tuple(variable.shape) or values[key].dtype != np.dtype(variable.dtype):
                raise CheckpointError(
                    f"{key} ({variable.path}) is {found.dtype} {list(found.shape)} in the checkpoint and {wanted} in "
                    "the model"
                )
        for key, variable in targets.items():
            backend().assign(variable, values[key])
        take_statistics(self._layers)

    def _by_key(self) -> dict[str, keras.Variable]:
        optimizers = self._table_optimizers.values()
        rates = [each._learning_rate for each in optimizers if isinstance(each._learning_rate, keras.Variable)]
        slots = [variable for optimizer in self._own_optimizers for variable in optimizer.variables]
        # By position: Keras counts names up with every model made in a process.
        return {
            _key(kind, position): variable
            for kind, found in zip(_KINDS, (self.trained, self._states, slots, rates), strict=True)
            for position, variable in enumerate(found)
        }


def _refuse_other_optimizer(
    ours: Mapping[str, str], theirs: Mapping[str, str], same: Mapping[str, str], changed: Sequence[str]
) -> None:
    """Raises `CheckpointError` where optimizers differ in more than the variables that came or went (`changed`)."""
    taken, slots = set(same.values()), tuple(f"/{name}:" for name in changed)
    only_here = [name for key, name in ours.items() if key.startswith("optimizer/") and key not in same]
    only_there = [name for key, name in theirs.items() if key.startswith("optimizer/") and key not in taken]
    for where, names in (("has", only_here), ("had", only_there)):
        for name in names:
            if not any(slot in name for slot in slots):
                raise CheckpointError(
                    f"the optimizer {where} {name}, and {'had' if where == 'has' else 'has'} no such variable: compile "
                    "the model with the optimizer that it had, or begin a new job with its rows by --warm-start"
                )


def _of_dtype(tensor: Tensor, dtype: np.dtype[Any]) -> Tensor:
    """Integers as the model has them, if they fit: Keras counts with 64 bits on TensorFlow, and with 32 on JAX."""
    if tensor.dtype.kind not in "iu" or dtype.kind not in "iu":
        return tensor
    cast: Tensor = tensor.astype(dtype)
    return cast if np.array_equal(cast, tensor) else tensor


def _key(kind: str, position: int) -> str:
    return f"{kind}/{position:05d}"


def _values(kind: str, variables: Sequence[keras.Variable], known: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """Of all variables of a kind, read where they are not known."""
    copied = backend().copied
    if not known:
        return tuple(map(copied, variables))
    keys = [_key(kind, position) for position in range(len(variables))]
    return tuple(known[key] if key in known else copied(each) for key, each in zip(keys, variables, strict=True))


def tensor_specs(variables: Sequence[keras.Variable]) -> tuple[TensorSpec, ...]:
    """Paths, shapes and dtypes of Keras variables."""
    # Of their values: JAX holds a variable of float64 as float32.
    return tuple(
        TensorSpec(each.path, tuple(each.shape), np.dtype(keras.backend.standardize_dtype(each.value.dtype)))
        for each in variables
    )


class DenseState(DenseTensors):
    """A Keras model's dense variables, changed by the model's own optimizer.

    Variables are the weights that are trainable now or were when the optimizer was built. The optimizer's own
    clipping is left out: the master clips dense gradients and tables together.

    Args:
        model: A compiled and built model.

    Raises:
        ModelError: the model is not compiled.
        Unsupported: naming what of its optimizer cannot be honoured.
    """

    def __init__(self, model: keras.Model) -> None:
        self._optimizer = optimizer_of(model)
        self._update = KerasUpdate(self._optimizer)
        self._traces: dict[object, Callable[..., object]] = {}
        trainable = variables_of(model.trainable_weights)
        if not self._optimizer.built:
            self._optimizer.build(model.trainable_weights)  # tables are left out, and noted
        known = {id(variable) for variable in self._optimizer._trainable_variables}
        weights = variables_of(model.weights)
        trained = [weight for weight in weights if id(weight) in known]
        states = [weight for weight in weights if id(weight) not in known]
        # A changing loss scale goes to the workers as one more state, and comes back unchanged.
        reported = [] if self._update.scale is None else [self._update.scale]
        super().__init__(model, trained, states, [self._optimizer], reported)
        # Then a gradient that is not finite is the optimizer's to answer, by a smaller loss scale.
        self.may_overflow = self._update.scale is not None
        _refuse_accumulated(self._optimizer, trained)
        self.hold(trainable)

    def hold(
        self,
        trainable: Sequence[keras.Variable],
        frozen_tables: tuple[str, ...] = (),
        flags: bytes = b"",
        any_table: bool = True,
    ) -> None:
        """From the next version on a step changes these variables, and the tables that are not frozen.

        Args:
            trainable: Keras variables, of those in `trained`.
            frozen_tables: Tables that take no step.
            flags: What workers get of it (`DenseSnapshot.trainable`).
            any_table: Whether any table is trained. Where nothing is, Keras takes no step and counts none.

        Raises:
            Unsupported: variables that the optimizer was not built for.
        """
        places, active, strangers = dict(zip(map(id, self.trained), count(), strict=False)), set[int](), []
        for variable in trainable:
            if id(variable) in places:
                active.add(places[id(variable)])
            else:
                strangers.append(variable.path)
        if strangers:
            raise Unsupported(
                f"the optimizer {self._optimizer.name!r} was built while {', '.join(strangers)} could not be trained: "
                "call model.compile(...) with a new optimizer after you set trainable=True, as in Keras"
            )
        self._active = sorted(active)
        self.frozen_tables, self._flags = frozen_tables, flags
        self._counts = any_table or bool(self._active)

    def steps(self) -> tuple[OptimizerStep, ...]:
        number, own = self._update.number(), {}
        for table, optimizer in self._table_optimizers.items():
            optimizer.iterations.assign(number)  # schedules count the job's steps, as the model's optimizer does
            own[table] = OptimizerStep(number, learning_rate_of(optimizer), clipping_of(optimizer))
        return (OptimizerStep(number, self._update.learning_rate(), clipping_of(self._optimizer), own),)

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        whole = rate_share == 1.0
        form = (whole, self._counts, *self._active)
        if form not in self._traces:
            self._traces[form] = self._compiled(whole)
        share = () if whole else (np.float32(rate_share),)
        self._traces[form](*gradients, *states, *share)

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Replaces `apply` where the gradient is not finite: no step, and a smaller loss scale."""
        self.take_states(states)
        self._update.overflow()

    def skip(self) -> None:
        if self._counts:
            self._update.count()

    def finalize_averages(self) -> None:
        if inner_optimizer(self._optimizer).use_ema:
            self._update.finalize_averages([self.trained[number] for number in self._active])

    def _compiled(self, whole: bool) -> Callable[..., object]:
        """A step at the learning rate as it is, or (not `whole`) at a share of it, which is one more argument."""
        variables, active, counts = len(self.trained), self._active, self._counts

        def apply(*tensors: BackendTensor) -> None:
            if active:
                self._update.apply([tensors[at] for at in active], [self.trained[at] for at in active])
            elif counts:
                self._update.update_tables_only()
            values = tensors[variables : variables + len(self._states)]
            for state, value in zip(self._states, values, strict=True):
                state.assign(value)

        def traced(*tensors: BackendTensor) -> None:
            with self._update.as_traced(None if whole else tensors[-1]):
                apply(*tensors)

        like = [np.empty(spec.shape, spec.dtype) for spec in (*self.variables, *self.states)]
        changed = (*self._optimizer.variables, *self._update.variables, *self.trained, *self._states)
        return backend().update(traced, like if whole else [*like, np.empty((), np.float32)], changed)


def _refuse_accumulated(optimizer: keras.Optimizer, trained: Sequence[keras.Variable]) -> None:
    """Keras applies constraints with every batch, also with those whose gradients it only adds up."""
    constrained = [variable.path for variable in trained if variable.constraint is not None]
    if constrained and accumulation_of(optimizer):
        raise Unsupported(
            f"{constrained[0]!r} has a constraint, and the optimizer gradient_accumulation_steps: Keras applies it "
            "with every batch, and here with every update; leave one of them out"
        )


class KerasUpdate:
    """Updates of a Keras optimizer.

    Under `gradient_accumulation_steps=k` Keras counts batches, k to an update;
    a schedule goes by batches, and so does the count here.

    Under `LossScaleOptimizer` gradients come unscaled. Each update lets its scale
    grow, as in Keras, and `overflow` takes the place of one that is not finite.

    Args:
        optimizer: A Keras optimizer that `refuse_unsupported` lets pass.
    """

    def __init__(self, optimizer: keras.Optimizer) -> None:
        self._scaling = optimizer if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) else None
        self._optimizer = inner_optimizer(optimizer)
        self._batches = accumulation_of(self._optimizer) or 1

    @property
    def variables(self) -> list[keras.Variable]:
        """What an update changes besides the variables that it is for."""
        return list(self._optimizer.variables)

    @property
    def scale(self) -> keras.Variable | None:
        """The variable of a loss scale that changes; None: there is none."""
        return None if self._scaling is None else self._scaling.dynamic_scale

    def number(self) -> int:
        """Updates made so far."""
        return int(backend().copied(self._optimizer._iterations)) // self._batches

    def learning_rate(self) -> float:
        """Of the next update: a schedule's at its last batch, or what was last assigned, also by a callback."""
        rate = self._optimizer._learning_rate
        if self._batches > 1 and isinstance(rate, keras.optimizers.schedules.LearningRateSchedule):
            last = keras.ops.convert_to_tensor(self._optimizer._iterations.value + (self._batches - 1))
            return float(keras.ops.convert_to_tensor(rate(last)))
        return learning_rate_of(self._optimizer)

    def count(self) -> None:
        """Counts an update that changes nothing."""
        self._optimizer._iterations.assign_add(self._batches)
        self._grow()

    def update_tables_only(self) -> None:
        """An update of tables alone, to be traced. Averages of unchanged variables still move, as in Keras."""
        optimizer = self._optimizer
        if optimizer.use_ema:
            known = optimizer._trainable_variables
            optimizer._update_model_variables_moving_average(known)
            if every := optimizer.ema_overwrite_frequency:
                keras.ops.cond(
                    (optimizer.iterations + 1) % every == 0,
                    lambda: optimizer._overwrite_model_variables_with_average_value(known),
                    lambda: None,
                )
        self.count()

    def finalize_averages(self, variables: Sequence[keras.Variable]) -> None:
        """Assigns variables their moving averages, where they have some: what Keras does at the end of `fit`."""
        if not self.number():
            return
        known = zip(self._optimizer._trainable_variables, self._optimizer._model_variables_moving_average, strict=True)
        averages = {id(variable): average for variable, average in known}
        for variable in variables:
            if averages[id(variable)] is not None:
                variable.assign(averages[id(variable)])

    def apply(self, gradients: Sequence[BackendTensor], variables: Sequence[keras.Variable]) -> None:
        """One update; to be traced within `as_traced`."""
        if self._batches > 1:
            # Keras takes this for the last batch: it adds nothing to it, and divides by their number.
            self._optimizer._iterations.assign_add(self._batches - 1)
            gradients = [gradient * self._batches for gradient in gradients]
        self._optimizer.apply(list(gradients), list(variables))
        self._grow()

    def overflow(self) -> None:
        """In the place of an update whose gradient is not finite, as in Keras: the scale is halved, no step counted."""
        if self._scaling is not None:
            self._scaling.step_counter.assign(0)
            self._scaling.dynamic_scale.assign(self._scaling.dynamic_scale.value * 0.5)

    def _grow(self) -> None:
        if self._scaling is None:
            return
        scale, counter = self._scaling.dynamic_scale, self._scaling.step_counter
        due = keras.ops.equal(counter.value, self._scaling.dynamic_growth_steps - 1)
        scale.assign(keras.ops.where(due, scale.value * 2.0, scale.value))
        counter.assign(keras.ops.where(due, keras.ops.zeros_like(counter.value), counter.value + 1))

    @contextmanager
    def as_traced(self, rate_share: BackendTensor | None = None) -> Iterator[None]:
        """While a step is traced: no clipping, no unscaling; the learning rate is that share of itself (None: all)."""
        optimizer = self._optimizer
        names = ("clipnorm", "global_clipnorm", "clipvalue", "loss_scale_factor")
        before = {name: getattr(optimizer, name) for name in names}
        rate = optimizer._get_current_learning_rate
        try:
            for name in names:
                setattr(optimizer, name, None)
            if rate_share is not None:
                optimizer._get_current_learning_rate = lambda: rate() * rate_share
            yield
        finally:
            for name, value in before.items():
                setattr(optimizer, name, value)
            if rate_share is not None:
                del optimizer._get_current_learning_rate


class Apply(Protocol):
    """One `step.apply`; see `elastable.worker.step.step_plan.PlannedApply`, which says what each member is."""

    @property
    def optimizer(self) -> keras.Optimizer: ...
    @property
    def layers(self) -> tuple[keras.Layer, ...]: ...
    @property
    def weights(self) -> tuple[keras.Variable, ...]: ...
    @property
    def variables(self) -> tuple[keras.Variable, ...]: ...
    @property
    def tables(self) -> tuple[str, ...]: ...


class Steps(Protocol):
    """What a step of a model does; see `elastable.worker.step.step_plan.StepPlan`."""

    @property
    def applies(self) -> Sequence[Apply]: ...
    @property
    def several(self) -> bool: ...
    @property
    def variables(self) -> tuple[keras.Variable, ...]: ...
    @property
    def states(self) -> tuple[keras.Variable, ...]: ...


@dataclass(frozen=True, slots=True)
class ModelPart:
    """What `DenseState` needs of a model, for some of its layers.

    Attributes:
        optimizer: A Keras optimizer, which trains them.
        layers: With all that they contain.
        weights: The trainable weights of the layers when the part was made.
        trainable: As of a model.
    """

    optimizer: keras.Optimizer
    layers: tuple[keras.Layer, ...]
    weights: tuple[keras.Variable, ...]
    trainable: bool = True

    @property
    def trainable_weights(self) -> list[keras.Variable]:
        return list(self.weights)

    def _flatten_layers(self, include_self: bool = True, recursive: bool = True) -> list[keras.Layer]:
        return list(self.layers)


class MultiUpdateState(DenseTensors):
    """A dense part whose step makes several updates.

    Variables are the weights that any update changes; states are all others.
    """

    def __init__(self, model: keras.Model, steps: Steps) -> None:
        own = {id(each.optimizer): each.optimizer for each in steps.applies}
        super().__init__(model, steps.variables, steps.states, list(own.values()))
        self._steps = steps
        self._updates = [DenseState(ModelPart(each.optimizer, each.layers, each.weights)) for each in steps.applies]
        self._tables = tuple(sorted(layer.table_name for layer in store_backed_layers(model)))
        position = {id(variable): number for number, variable in enumerate(self.trained)}
        self._positions = [tuple(position[id(variable)] for variable in each.variables) for each in steps.applies]
        self._known = {id(weight) for weight in variables_of(model.trainable_weights)}
        self.hold(variables_of(model.trainable_weights))

    def hold(
        self,
        trainable: Sequence[keras.Variable],
        frozen_tables: tuple[str, ...] = (),
        flags: bytes = b"",
        any_table: bool = True,
    ) -> None:
        """See `DenseState.hold`.

        Raises:
            Unsupported: something is unfrozen that was frozen when the step was planned.
        """
        strangers = [variable.path for variable in trainable if id(variable) not in self._known]
        if strangers:
            raise Unsupported(
                f"{', '.join(strangers)} could not be trained when its train_step was planned: set trainable=True "
                "before training begins, and freeze it then"
            )
        wanted, self._flags = {id(variable) for variable in trainable}, flags
        for update, planned in zip(self._updates, self._steps.applies, strict=True):
            active = [variable for variable in planned.variables if id(variable) in wanted]
            update.hold(active, any_table=any(table not in frozen_tables for table in planned.tables))
        trained = {table for each in self._steps.applies for table in each.tables}
        # Those named here, and those that no update changes.
        self.frozen_tables = tuple(table for table in self._tables if table in frozen_tables or table not in trained)

    def steps(self) -> tuple[OptimizerStep, ...]:
        found = []
        for update, planned, positions in zip(self._updates, self._steps.applies, self._positions, strict=True):
            (step,), tables = update.steps(), planned.tables
            own = {table: each for table, each in step.own.items() if table in tables}
            found.append(replace(step, own=own, places=positions, tables=tables))
        _refuse_other_numbers([step for step in found if step.tables])
        return tuple(found)

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        for update, positions in zip(self._updates, self._positions, strict=True):
            of_variable = {id(self.trained[place]): gradients[place] for place in positions}
            given = [
                of_variable.get(id(variable), np.zeros(spec.shape, spec.dtype))
                for variable, spec in zip(update.trained, update.variables, strict=True)
            ]
            update.apply(given, (), rate_share)
        self.take_states(states)

    def skip(self) -> None:
        for update in self._updates:
            update.skip()


DenseModel = DenseState | MultiUpdateState
"""The dense part of a Keras model."""


def dense_part(model: keras.Model, steps: Steps | None) -> DenseModel:
    """The dense part of a model.

    Args:
        model: A compiled and built model.
        steps: What its own `train_step` does; None: it has Keras' own.
    """
    return DenseState(model) if steps is None or not steps.several else MultiUpdateState(model, steps)


def _refuse_other_numbers(steps: Sequence[OptimizerStep]) -> None:
    """Raises where tables of one version are at different steps of their optimizers: a commit has one number."""
    if len({step.number for step in steps}) > 1:
        steps_taken = "; ".join(f"{', '.join(step.tables or ())}: {step.number}" for step in steps)
        raise Unsupported(
            f"tables that are updated together have optimizers that have taken different numbers of steps "
            f"({steps_taken}); let step.apply call each of them equally often"
        )
