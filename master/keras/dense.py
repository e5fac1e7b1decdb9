"""The dense part of the one authoritative model: variables, states, and their Keras optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.errors import Unsupported
from elastable.master.api import DenseSnapshot, Tensor
from elastable.master.commits.clipping import Clipping
from elastable.master.commits.dense_part import OptimizerStep, TableStep
from elastable.master.keras.dense_tensors import DenseTensors, copied, tensor_specs
from elastable.master.keras.discovery import table_optimizers
from elastable.master.keras.keras_optimizer import clipping_of, learning_rate_of, optimizer_of
from elastable.master.keras.keras_update import KerasUpdate

__all__ = ["DenseState"]


class DenseState:
    """A Keras model's dense variables, changed by the model's own optimizer.

    Variables are the weights that the optimizer knows: those that are trainable
    now or were when it was built. States are all other weights (no metric and
    no seed of a random layer). The optimizer's own clipping is left out: the
    master clips dense gradients and tables together.

    Attributes:
        trained: Keras variables that the optimizer knows, in model order.
        frozen_tables: Tables that take no step.

    Args:
        model: A compiled and built model.

    Raises:
        ModelError: the model is not compiled.
        Unsupported: naming what of its optimizer cannot be honoured.
    """

    def __init__(self, model: keras.Model) -> None:
        self._optimizer = optimizer_of(model)
        self._update = KerasUpdate(self._optimizer)
        self._applies: dict[bool, Callable[..., None]] = {}
        trainable = list(model.trainable_weights)
        if not self._optimizer.built:
            self._optimizer.build(trainable)
        known = {id(variable) for variable in self._optimizer._trainable_variables}
        self._weights = list(model.weights)
        self.trained = [weight for weight in self._weights if id(weight) in known]
        self._states = [weight for weight in self._weights if id(weight) not in known]
        # A loss scale that changes goes to the workers as one more state, and comes back as it went.
        self._told = [*self._states, *([] if self._update.scale is None else [self._update.scale])]
        self.hold(trainable)
        self._own = table_optimizers(model)
        self.variables = tensor_specs(self.trained)
        self.states = tensor_specs(self._told)
        self._traced_rate: object = None
        # States of the last snapshot; None: they have changed since.
        self._standing: tuple[Tensor, ...] | None = None

    def hold(
        self,
        trainable: Sequence[keras.Variable],
        frozen_tables: tuple[str, ...] = (),
        flags: bytes = b"",
        any_table: bool = True,
    ) -> None:
        """From the next version on a step moves these variables, and tables that are not frozen.

        Args:
            trainable: Keras variables, of those in `trained`.
            frozen_tables: Tables that take no step.
            flags: What workers are told of it (`DenseSnapshot.trainable`).
            any_table: Whether any table is trained. Where nothing is, Keras takes no step and counts none.

        Raises:
            Unsupported: variables that the optimizer was not built for.
        """
        wanted, known = {id(variable) for variable in trainable}, {id(variable) for variable in self.trained}
        strangers = [variable.path for variable in trainable if id(variable) not in known]
        if strangers:
            raise Unsupported(
                f"the optimizer {self._optimizer.name!r} was built while {', '.join(strangers)} could not be trained: "
                "call model.compile(...) with a new optimizer after you set trainable=True, as in Keras"
            )
        self._active = [number for number, variable in enumerate(self.trained) if id(variable) in wanted]
        self.frozen_tables, self._flags = frozen_tables, flags
        self._counts = any_table or bool(self._active)
        self._applies = {}

    @property
    def clipping(self) -> Clipping:
        """How the optimizer would clip."""
        return clipping_of(self._optimizer)

    def step(self) -> int | None:
        """The optimizer's `iterations`."""
        return self._update.number()

    def learning_rate(self) -> float | None:
        """The schedule's, or what was last assigned, also by a callback."""
        return self._update.learning_rate()

    def table_steps(self) -> Mapping[str, TableStep]:
        """Schedules count the job's steps, as the model's optimizer does."""
        for optimizer in self._own.values():
            optimizer.iterations.assign(self._update.number())
        return {table: TableStep(learning_rate_of(own), clipping_of(own)) for table, own in self._own.items()}

    def steps(self, version: int) -> tuple[OptimizerStep, ...]:
        """One, of the model's optimizer."""
        return (OptimizerStep(self.step(), self.learning_rate(), self.clipping, self.table_steps()),)

    def snapshot(self, version: int) -> DenseSnapshot:
        """Read-only copies of all variables and states."""
        self._standing = tuple(copied(variable) for variable in self._told)
        return DenseSnapshot(
            version,
            tuple(copied(variable) for variable in self.trained),
            self._standing,
            tuple(spec.name for spec in self.variables),
            tuple(spec.name for spec in self.states),
            self._flags,
        )

    def rewind(self) -> None:
        """Makes the states those of the version again: a worker that shares the model moves them as it computes."""
        for variable, value in zip(self._states, self._standing or (), strict=False):
            variable.assign(value)

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        """One step of the Keras optimizer; `iterations` grows by one.

        Args:
            gradients: Of every variable, in model order, clipped; those of frozen ones are left aside.
            states: New values of every state, in model order.
            rate_share: What the learning rate of this step is multiplied by, weight decay included.
        """
        rate, whole = self._update.rate, rate_share == 1.0
        if rate is not self._traced_rate:
            # A schedule is part of the compiled function: one that a callback puts in place means another.
            self._applies, self._traced_rate = {}, rate
        if whole not in self._applies:
            self._applies[whole] = self._compiled(whole)
        share = () if whole else (np.float32(rate_share),)
        self._applies[whole](*(tf.constant(tensor) for tensor in (*gradients, *states, *share)))
        self._standing = None

    @property
    def may_overflow(self) -> bool:
        """Whether a gradient that is not finite is the optimizer's to answer, by a smaller loss scale."""
        return self._update.scale is not None

    def overflow(self, states: Sequence[Tensor]) -> None:
        """What takes the place of `apply` where the gradient is not finite: no step, and a smaller loss scale."""
        for state, value in zip(self._states, states, strict=False):
            state.assign(value)
        self._update.overflow()
        self._standing = None

    def skip(self) -> None:
        """Counts a step that changes nothing, so that schedules go by the version."""
        self.rewind()
        if self._counts:
            self._update.count()

    def finalize_averages(self) -> None:
        """What Keras does at the end of `fit`: trained variables become their moving averages, if they have some."""
        self._update.finalize_averages([self.trained[number] for number in self._active])

    def tensors(self) -> dict[str, Tensor]:
        """Everything a checkpoint must hold: variables, states, optimizer variables, by kind and place."""
        return self._kept().tensors()

    def weights(self, tensors: Mapping[str, Tensor]) -> list[Tensor]:
        """As of `DenseTensors`."""
        return self._kept().weights(tensors)

    def restore(self, tensors: Mapping[str, Tensor]) -> None:
        """As of `DenseTensors`."""
        self._kept().restore(tensors)
        self._standing = None

    def _kept(self) -> DenseTensors:
        return DenseTensors(
            self._weights, self.trained, self._states, self._optimizer.variables, list(self._own.values())
        )

    def _compiled(self, whole: bool) -> Callable[..., None]:
        """A step at the learning rate as it is, or (not `whole`) at a share of it, which is one more argument."""
        told = (*self.variables, *self.states)
        signature = [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)) for spec in told]
        count, active, counts = len(self.trained), self._active, self._counts

        def apply(*tensors: tf.Tensor) -> None:
            if active:
                self._update.apply([tensors[at] for at in active], [self.trained[at] for at in active])
            elif counts:
                self._update.stand()
            for state, value in zip(self._states, tensors[count : count + len(self._states)], strict=True):
                state.assign(value)

        def traced(*tensors: tf.Tensor) -> None:
            with self._update.as_traced(None if whole else tensors[-1]):
                apply(*tensors)

        share = [] if whole else [tf.TensorSpec((), tf.float32)]
        compiled = tf.function(traced, autograph=False, input_signature=[*signature, *share])
        step: Callable[..., None] = compiled.get_concrete_function()
        return step
