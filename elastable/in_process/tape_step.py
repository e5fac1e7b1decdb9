"""`et.step`: a custom training step, with any tapes and losses.

In this process a step applies a gradient at once: variables by the Keras optimizer, rows by a commit to the store, with
the same optimizer's numbers.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import keras
import numpy as np

from elastable.assembly import Assembly
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, ModelError, Unsupported
from elastable.master.api import JobSpec, Push, SyncPushId, Tensor
from elastable.master.backend.contract import BackendTensor, array_backend, backend
from elastable.master.backend.lazy import tf
from elastable.master.commits.committer import Committer
from elastable.master.model.dense import DenseState, ModelPart
from elastable.master.model.keras_optimizer import inner_optimizer
from elastable.master.tasks.progress import Progress
from elastable.worker.keras.same_optimizer import Hyperparameters
from elastable.worker.keras.seeds import global_seed, layers_of
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.rows.array_calls import ArrayTapeScope
from elastable.worker.rows.scope import TapeLookup, TapeScope, entered, slices_of
from elastable.worker.rows.store_backed import StoreBacked
from elastable.worker.step.step_plan import Collector, Trained, current_collector
from elastable.worker.step.trainable import is_trained

_DEADLINE_S = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class _NamedPart(ModelPart):
    """Some layers and the optimizer that trains them.

    Attributes:
        name: For messages.
        roots: ids of the layers that were named.
    """

    name: str
    roots: tuple[int, ...]


class _Trainer:
    """What stays of a model from step to step: its store, and a committer for each optimizer with its layers."""

    def __init__(self, model: keras.Model, store: EmbeddingStore | None, seed: int | None, lazy: bool) -> None:
        self.store = _store_of(model, store)
        self._as_keras = seed is None
        self._seed, self._lazy = global_seed() if seed is None else seed, lazy
        for layer in store_layers(model):
            if layer.source is None:
                layer.attach(None, seed)  # what the first step reads is what its tables begin with
        self._made: dict[tuple[int, tuple[int, ...]], tuple[DenseState, Committer, Hyperparameters]] = {}
        self._owners: dict[str, keras.Optimizer] = {}
        self._trained: list[tuple[StoreBacked, keras.Optimizer]] = []
        self._all = [layer.table_name for layer in store_layers(model)]
        self._held: dict[int, tuple[object, ...]] = {}

    def is_current(self) -> bool:
        """Whether tables are where it trains them, and nothing else has trained them since."""
        specs = self.store.specs()
        return all(
            layer.source is self.store and layer.goes_on_with(optimizer, specs[layer.table_name])
            for layer, optimizer in self._trained
        )

    def commit(self, part: _NamedPart, gradients: dict[int, Tensor], push: Push, trained: Sequence[str]) -> None:
        """One version: the step of one optimizer.

        Args:
            gradients: id of a variable -> its gradient; others take no step.
            push: Its slices, and everything but the dense part.
            trained: Tables that the step moves; one that the loss does not reach takes none, as in Keras.
        """
        dense, committer = self._of(part)
        active = [variable for variable in part.weights if id(variable) in gradients]
        frozen = tuple(sorted({*self._all, *self.store.specs()} - set(trained)))
        holding = (frozen, *map(id, active))
        if self._held.get(id(dense)) != holding:
            dense.hold(active, frozen)
            self._held[id(dense)] = holding
        values = tuple(
            gradients.get(id(variable), np.zeros(spec.shape, spec.dtype))
            for variable, spec in zip(dense.trained, dense.variables, strict=True)
        )
        version = self.store.version() + 1
        push = Push(SyncPushId(version - 1, 0), 1, values, push.slices)
        committer.commit(version, [push], lambda made: Progress(version))

    def _of(self, part: _NamedPart) -> tuple[DenseState, Committer]:
        key = (id(part.optimizer), part.roots)
        if key not in self._made:
            if any(optimizer == id(part.optimizer) for optimizer, _ in self._made):
                raise Unsupported(
                    f"et.step: the optimizer {part.optimizer.name!r} is given for other layers than before; an "
                    "optimizer trains the same layers (of=) in every call of apply, as Keras builds it for them"
                )
            _refuse_averages(part)
            if store_layers(part):
                self._make_tables(part)
            dense = DenseState(part)
            job = JobSpec(job=uuid.uuid4().hex[:12], seed=self._seed)
            committer = Committer(self.store, dense, job, _DEADLINE_S)
            self._made[key] = (dense, committer, Hyperparameters(part.optimizer))
        dense, committer, hyperparameters = self._made[key]
        hyperparameters.require(f"et.step of {part.name}", "take a new optimizer")
        return dense, committer

    def _make_tables(self, part: _NamedPart) -> None:
        # Without a seed small tables begin as in Keras; see first_rows. They were read so by the forward pass.
        parts = Assembly(part, None, self._seed, self._as_keras)
        parts.find_tables(self._lazy)
        for layer in store_layers(part):
            optimizer = layer.optimizer or part.optimizer
            if self._owners.setdefault(layer.table_name, optimizer) is not optimizer:
                raise Unsupported(
                    f"et.step: the table {layer.table_name!r} is trained by two optimizers, "
                    f"{self._owners[layer.table_name].name!r} and {optimizer.name!r}; give both calls of apply the "
                    "same one, or leave the layer out of one of them (of=)"
                )
        parts.fill(self.store, self.store.version())
        self._trained += parts.trained_layers()


def _refuse_averages(part: _NamedPart) -> None:
    """Raises where weights would have to become their averages at the end of training, which nobody tells here."""
    own = [layer.optimizer for layer in store_layers(part) if layer.optimizer is not None]
    for optimizer in (part.optimizer, *own):
        if inner_optimizer(optimizer).use_ema:
            raise Unsupported(
                f"et.step: {type(inner_optimizer(optimizer)).__name__}(use_ema=True): a custom loop has no end "
                "at which rows become their averages; leave it out, or write the step as the model's train_step and "
                "train with et.fit"
            )


@dataclass(frozen=True, slots=True)
class TapeStep:
    """A step in work; made by `et.step`."""

    model: keras.Model
    trainer: _Trainer | Collector
    scope: TapeScope | ArrayTapeScope

    def apply(
        self,
        tape: tf.GradientTape | BackendTensor,
        loss: BackendTensor = None,
        of: Trained = None,
        optimizer: keras.Optimizer | None = None,
    ) -> None:
        """Takes one step of an optimizer, for variables and tables alike.

        Args:
            tape: A `tf.GradientTape` that was open while `loss` was computed; on PyTorch left out: `apply(loss)`.
            loss: What is made smaller.
            of: A layer or model, or a list of them, whose variables and tables take the step; None: the whole model.
            optimizer: A Keras optimizer; None: that of `compile()`.

        Raises:
            ModelError: no optimizer, or nothing that the loss depends on.
            Unsupported: a setting of the optimizer or of a layer that a custom step cannot honour, by name.
        """
        if loss is None:  # PyTorch's losses know what they were computed from
            tape, loss = None, tape
        if not isinstance(self.trainer, _Trainer):  # in a worker, within a model's `train_step`: the master updates
            self.trainer(tape, loss, of, optimizer)
            return
        part = self._part(of, optimizer)
        variables = list(part.weights)
        layers = [layer for layer in store_layers(part) if is_trained(self.model, layer)]
        lookups = [each for each in self.scope.lookups if any(each.layer is layer for layer in layers)]
        _refuse_regularizers(lookups)
        values, of_rows = [each.value for each in variables], [each.rows for each in lookups]
        if backend().has_graphs:
            dense, rows = tape.gradient(loss, (values, of_rows))
        else:
            dense, rows = array_backend().gradients_of(loss, variables, of_rows)
        gradients = {
            id(variable): np.asarray(tf.convert_to_tensor(gradient) if backend().has_graphs else gradient)
            for variable, gradient in zip(variables, dense, strict=True)
            if gradient is not None
        }
        slices = slices_of(lookups, rows)
        if not gradients and not slices:
            raise ModelError(
                f"et.step: the loss depends on no variable and on no table of {part.name}; compute it inside of "
                "`with et.step(model)`, on TensorFlow within `with tf.GradientTape() as tape:`"
            )
        self.trainer.commit(part, gradients, Push(SyncPushId(0, 0), 1, slices=slices), list(slices))

    def _part(self, of: Trained, optimizer: keras.Optimizer | None) -> _NamedPart:
        roots: list[keras.Layer] = [self.model] if of is None else list(of) if isinstance(of, list | tuple) else [of]
        chosen = optimizer if optimizer is not None else getattr(self.model, "optimizer", None)
        if chosen is None:
            raise ModelError(
                f"et.step: model {self.model.name!r} has no optimizer: call model.compile(optimizer=...), or "
                "step.apply(tape, loss, optimizer=...)"
            )
        layers = tuple(dict.fromkeys(layer for root in roots for layer in layers_of(root)))
        weights = {id(each): each for root in roots for each in variables_of(root.trainable_weights)}
        names, ids = ", ".join(repr(root.name) for root in roots), tuple(map(id, roots))
        return _NamedPart(chosen, layers, tuple(weights.values()), name=names, roots=ids)


@contextmanager
def step(
    model: keras.Model, *, store: EmbeddingStore | None = None, seed: int | None = None, lazy: bool = True
) -> Iterator[TapeStep]:
    """A custom training step: `with et.step(model) as step: ... step.apply(tape, loss)`.

    Within the block embedding layers read the rows as they are at the moment of the call, and a `tf.GradientTape` sees
    them. `apply` may be called as often as there are losses; each call is one step of its optimizer. The first step
    makes the tables; later ones go on with them, also after `et.fit`.

    Args:
        model: A built Keras model, or one that its first call builds.
        store: Where the tables live; None: where the layers read already, else in this process's memory.
        seed: Of initial rows that are not Keras' own draws (docs/fit.md); None: Keras' global seed, else 0.
        lazy: See `et.fit`.

    Raises:
        BadInput: the layers read from another store already.
        Unsupported: within a `tf.function`.
    """
    if (collector := current_collector()) is not None:
        yield TapeStep(model, collector, _scope())
        return
    if backend().has_graphs and not tf.executing_eagerly():
        raise Unsupported(
            "et.step within a tf.function: let the loop run eagerly, without @tf.function and with "
            "compile(run_eagerly=True)"
        )
    trainer = getattr(model, "_elastable_trainer", None)
    if trainer is None or (store is not None and store is not trainer.store) or not trainer.is_current():
        trainer = _Trainer(model, store, seed, lazy)
        # Past Keras' tracking: it lives as long as the model does.
        object.__setattr__(model, "_elastable_trainer", trainer)
    scope = _scope()
    with entered(scope):
        yield TapeStep(model, trainer, scope)


def _scope() -> TapeScope | ArrayTapeScope:
    return TapeScope() if backend().has_graphs else ArrayTapeScope()


def _store_of(model: keras.Model, store: EmbeddingStore | None) -> EmbeddingStore:
    sources = {id(layer.source): layer.source for layer in store_layers(model) if layer.source is not None}
    if store is not None:
        return store
    if len(sources) == 1 and isinstance(source := next(iter(sources.values())), EmbeddingStore):
        return source
    if any(not isinstance(source, EmbeddingStore) for source in sources.values()):
        raise BadInput("et.step: the model's layers read from a store that this process may not change: give store=")
    return MemoryStore()


def _refuse_regularizers(lookups: Sequence[TapeLookup]) -> None:
    for lookup in lookups:
        if lookup.layer.embeddings_regularizer is not None:
            raise Unsupported(
                f"embedding layer {lookup.layer.name!r}: within et.step the loss is yours to compute; leave "
                "embeddings_regularizer out, and add it to the loss for the rows that the layer returned"
            )
