"""The dense part of the one authoritative model: variables, states, and their Keras optimizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import keras
import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import Tensor
from elastable.master.commits.clipping import Clipping
from elastable.master.commits.dense_part import OptimizerStep, TableStep
from elastable.master.keras.dense_tensors import DenseTensors
from elastable.master.keras.keras_optimizer import (
    accumulation_of,
    clipping_of,
    learning_rate_of,
    optimizer_of,
)
from elastable.master.keras.keras_update import KerasUpdate

__all__ = ["DenseState"]


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
        self._applies: dict[bool, Callable[..., None]] = {}
        trainable = variables_of(model.trainable_weights)
        if not self._optimizer.built:
            self._optimizer.build(model.trainable_weights)  # tables are left out, and noted
        known = {id(variable) for variable in self._optimizer._trainable_variables}
        weights = variables_of(model.weights)
        trained = [weight for weight in weights if id(weight) in known]
        states = [weight for weight in weights if id(weight) not in known]
        # A changing loss scale goes to the workers as one more state, and comes back unchanged.
        super().__init__(model, trained, states, [] if self._update.scale is None else [self._update.scale])
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
        for optimizer in self._table_optimizers.values():
            optimizer.iterations.assign(self._update.number())
        return {
            table: TableStep(learning_rate_of(own), clipping_of(own)) for table, own in self._table_optimizers.items()
        }

    def steps(self, version: int) -> tuple[OptimizerStep, ...]:
        return (OptimizerStep(self.step(), self.learning_rate(), self.clipping, self.table_steps()),)

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        whole = rate_share == 1.0
        if whole not in self._applies:
            self._applies[whole] = self._compiled(whole)
        share = () if whole else (np.float32(rate_share),)
        self._applies[whole](*(tf.constant(tensor) for tensor in (*gradients, *states, *share)))
        self._snapshot_states = None

    @property
    def may_overflow(self) -> bool:
        """Whether a gradient that is not finite is the optimizer's to answer, by a smaller loss scale."""
        return self._update.scale is not None

    def overflow(self, states: Sequence[Tensor]) -> None:
        """Replaces `apply` where the gradient is not finite: no step, and a smaller loss scale."""
        self._take_states(states)
        self._update.overflow()

    def skip(self) -> None:
        self.rewind()
        if self._counts:
            self._update.count()

    def finalize_averages(self) -> None:
        """What Keras does at the end of `fit`: trained variables become their moving averages, if they have some."""
        self._update.finalize_averages([self.trained[number] for number in self._active])

    def _optimizers(self) -> Sequence[keras.Optimizer]:
        return [self._optimizer]

    def _optimizer_variables(self) -> Sequence[keras.Variable]:
        return list(self._optimizer.variables)

    def _compiled(self, whole: bool) -> Callable[..., None]:
        """A step at the learning rate as it is, or (not `whole`) at a share of it, which is one more argument."""
        specs = (*self.variables, *self.states)
        signature = [tf.TensorSpec(spec.shape, tf.as_dtype(spec.dtype)) for spec in specs]
        count, active, counts = len(self.trained), self._active, self._counts

        def apply(*tensors: tf.Tensor) -> None:
            if active:
                self._update.apply([tensors[at] for at in active], [self.trained[at] for at in active])
            elif counts:
                self._update.update_tables_only()
            for state, value in zip(self._states, tensors[count : count + len(self._states)], strict=True):
                state.assign(value)

        def traced(*tensors: tf.Tensor) -> None:
            with self._update.as_traced(None if whole else tensors[-1]):
                apply(*tensors)

        share = [] if whole else [tf.TensorSpec((), tf.float32)]
        compiled = tf.function(traced, autograph=False, input_signature=[*signature, *share])
        step: Callable[..., None] = compiled.get_concrete_function()
        return step


def _refuse_accumulated(optimizer: keras.Optimizer, trained: Sequence[keras.Variable]) -> None:
    """Keras applies constraints with every batch, also with those whose gradients it only adds up."""
    constrained = [variable.path for variable in trained if variable.constraint is not None]
    if constrained and accumulation_of(optimizer):
        raise Unsupported(
            f"{constrained[0]!r} has a constraint, and the optimizer gradient_accumulation_steps: Keras applies it "
            "with every batch, and here with every update; leave one of them out"
        )
