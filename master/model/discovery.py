"""Finds the store-backed embedding layers of a model and what tables they need."""

import logging
from collections.abc import Mapping, Sequence
from typing import Protocol, runtime_checkable

import keras

from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ModelError, SpecConflict, Unsupported
from elastable.master.model.keras_block import TABLE_VARIABLE
from elastable.master.model.keras_optimizer import (
    accumulation_of,
    refuse_of_table,
    refuse_scaled_loss,
    refuse_unsupported,
    sees_occurrences,
    table_optimizer,
)
from elastable.master.model.wrapping_optimizers import constrained

_log = logging.getLogger(__name__)


@runtime_checkable
class StoreBackedLayer(Protocol):
    """What a Keras layer has whose table lives in a store; it has no Keras variables.

    A layer may also have `embeddings_constraint`, a Keras constraint or None; `optimizer`, a Keras optimizer of the
    table's own or None; `lazy`, as of `table_optimizer`, or None; and `variable_name` and `variable_key`, of the Keras
    variable that the table replaces.
    """

    @property
    def name(self) -> str:
        """The layer's name."""

    @property
    def table_name(self) -> str:
        """The table's name."""

    @property
    def table_is_explicit(self) -> bool:
        """Whether the user named the table; then layers may share it."""

    def table_spec(self, seed: int, optimizer: OptimizerSpec) -> TableSpec:
        """The table, with initial values of `seed`, trained by `optimizer`."""


def store_backed_layers(model: keras.Model) -> tuple[StoreBackedLayer, ...]:
    """Every store-backed layer of a Keras model, however nested, each object once."""
    # Keras' own walk: it sees layers in lists, dicts, wrappers and submodels, which `model.layers` does not.
    found = []
    for layer in model._flatten_layers():
        # A table may have been kept on the worker: then it is a variable as any other.
        if isinstance(layer, StoreBackedLayer) and not getattr(layer, "on_worker", False):
            found.append(layer)
    return tuple(found)


def discover_tables(
    model: keras.Model,
    seed: int,
    *,
    lazy: bool | None = True,
    optimizers: Mapping[str, keras.Optimizer] | None = None,
) -> dict[str, TableSpec]:
    """The tables that a model needs, by name, in the order in which its layers come.

    None where all of them were kept on the worker.

    Args:
        model: A built Keras model.
        seed: Of the initial values, where a layer does not set its own.
        lazy: As of `table_optimizer`, where a layer does not say itself. None: as plain Keras would, which has tables
            of fixed vocabularies and float32 alone, and moves all of their rows.
        optimizers: Table name -> the Keras optimizer that trains it in the place of the one of `compile()`.

    Raises:
        ModelError: the model has no store-backed layer, or two layers have a
            table of one name without having named it; or it is not compiled.
        SpecConflict: layers that share a table want different ones.
        Unsupported: a constraint that is not one of a row alone; a constraint or regularizer with `lazy=False`; or
            something of an optimizer that cannot be honoured.
    """
    layers = store_backed_layers(model)
    if not layers and not any(getattr(layer, "on_worker", False) for layer in model._flatten_layers()):
        raise ModelError(
            f"model {model.name!r} has no embedding layer with a table in a store: use et.Embedding in the place of "
            "keras.layers.Embedding, or move the large ones with --offload-embeddings-above"
        )
    of_model = getattr(model, "optimizer", None)
    refuse_unsupported(of_model)
    specs: dict[str, TableSpec] = {}
    owners: dict[str, StoreBackedLayer] = {}
    seen: dict[str, list[str]] = {}
    for layer in layers:
        given = (optimizers or {}).get(layer.table_name, of_model)
        trained_by = _trained_by(layer, given, lazy)
        _refuse_regularizer(layer, trained_by)
        constraint = getattr(layer, "embeddings_constraint", None)
        _refuse_accumulated(layer, given, constraint)
        spec = layer.table_spec(seed, constrained(layer.name, trained_by, constraint))
        if spec.name in specs:
            _refuse_unlike(model, owners[spec.name], layer, specs[spec.name], spec)
        else:
            specs[spec.name], owners[spec.name] = spec, layer
            by = getattr(layer, "optimizer", None) or given
            if getattr(layer, "embeddings_regularizer", None) is None:
                seen.setdefault(sees_occurrences(by, of_model), []).append(spec.name)
    _tell_of_occurrences(seen)
    return specs


def _tell_of_occurrences(tables: Mapping[str, Sequence[str]]) -> None:
    """Says of which tables rows may differ from plain Keras' on TensorFlow: `sees_occurrences` -> tables."""
    for what, names in tables.items():
        if what:
            _log.info(
                "tables %s: gradients of an id that a batch has several times are summed before %s is applied, as in "
                "Keras on JAX and PyTorch; on TensorFlow plain Keras applies it to each of them: "
                "docs/fit.md#ids-that-repeat-in-a-batch",
                ", ".join(names),
                what,
            )


def table_optimizers(model: keras.Model) -> dict[str, keras.Optimizer]:
    """The Keras optimizers of the tables that have one of their own: table name -> optimizer."""
    layers = store_backed_layers(model)
    return {
        layer.table_name: layer.optimizer  # type: ignore[attr-defined]
        for layer in layers
        if getattr(layer, "optimizer", None) is not None
    }


def create_tables(store: EmbeddingStore, specs: Mapping[str, TableSpec]) -> tuple[str, ...]:
    """Makes the tables that are not there yet; returns their names.

    Raises:
        SpecConflict: a table of that name is there with another spec.
    """
    return tuple(name for name, spec in specs.items() if store.create_table(spec))


def _refuse_unlike(
    model: keras.Model, first: StoreBackedLayer, other: StoreBackedLayer, ours: TableSpec, theirs: TableSpec
) -> None:
    name = ours.name
    if not (first.table_is_explicit and other.table_is_explicit):
        raise ModelError(
            f"layers {_whose(model, first)} and {_whose(model, other)} both have a table {name!r} without sharing it "
            "on purpose: "
            f"give the layers different names, or share it with table={name!r} on both"
        )
    _refuse_other_optimizer(first, other)
    differences = ours.differences(theirs)
    if differences:
        listed = "; ".join(f"{field} {mine!r} and {other!r}" for field, (mine, other) in differences.items())
        raise SpecConflict(
            f"layers {_where(first)} and {_where(other)} share the table {name!r} but want different ones: {listed}"
        )


def _trained_by(layer: StoreBackedLayer, given: keras.Optimizer | None, lazy: bool | None) -> OptimizerSpec:
    """The optimizer of the layer's rows: its own, or the given one; as lazy as the layer says, or the job."""
    said, own = getattr(layer, "lazy", None), getattr(layer, "optimizer", None)
    if lazy is None:
        lazy = getattr(layer, "input_dim", None) is None or getattr(layer, "table_dtype", None) not in (None, "float32")
    try:
        if own is not None:
            refuse_of_table(own)
        spec = table_optimizer(
            given if own is None else own,
            lazy if said is None else said,
            getattr(layer, "variable_name", TABLE_VARIABLE),
            getattr(layer, "variable_key", None),
        )
        refuse_scaled_loss(given, spec)  # the loss of all tables is scaled alike
        return spec
    except (ModelError, Unsupported) as error:
        raise type(error)(f"embedding layer {layer.name!r}: {error}") from error


def _refuse_accumulated(layer: StoreBackedLayer, given: keras.Optimizer | None, constraint: object) -> None:
    """Keras applies constraints with every batch, also with those whose gradients it only adds up."""
    if constraint is not None and given is not None and accumulation_of(given):
        raise Unsupported(
            f"embedding layer {layer.name!r}: embeddings_constraint with gradient_accumulation_steps: Keras applies it "
            "with every batch, and here with every update; leave one of them out"
        )


def _refuse_regularizer(layer: StoreBackedLayer, optimizer: OptimizerSpec) -> None:
    """A penalty's gradient moves every row at every step, and no optimizer with moments has a closed form of that."""
    if getattr(layer, "embeddings_regularizer", None) is not None and not optimizer.lazy:
        raise Unsupported(
            f"embedding layer {layer.name!r}: embeddings_regularizer reaches the rows that a batch touches, and "
            "lazy=False promises that every row follows every step; give the optimizer a weight_decay, which does "
            "(with plain SGD, L2(l) is weight_decay=2*l), or say lazy=True on the layer"
        )


def _refuse_other_optimizer(first: StoreBackedLayer, other: StoreBackedLayer) -> None:
    ours, theirs = (_optimizer_config(layer) for layer in (first, other))
    if ours != theirs:
        raise SpecConflict(
            f"layers {_where(first)} and {_where(other)} share the table {first.table_name!r} and train it with "
            f"different optimizers: {_shown(ours)} and {_shown(theirs)}; give both layers the same optimizer="
        )


def _optimizer_config(layer: StoreBackedLayer) -> dict[str, object] | None:
    optimizer = getattr(layer, "optimizer", None)
    if optimizer is None:
        return None
    config = keras.optimizers.serialize(optimizer)
    # The name that Keras counts up says nothing about how it trains.
    return {"class": config["class_name"], **{key: value for key, value in config["config"].items() if key != "name"}}


def _shown(config: dict[str, object] | None) -> str:
    return "the model's own, from compile()" if config is None else repr(config)


def _whose(model: keras.Model, layer: StoreBackedLayer) -> str:
    """The layer with the innermost layer or model that holds it, which tells two of one name apart."""
    holders = [part for part in model._flatten_layers() if any(each is layer for each in part._layers)]
    return f"{_where(layer)} of {holders[-1].name!r}" if holders else _where(layer)


def _where(layer: StoreBackedLayer) -> str:
    path = getattr(layer, "path", None)
    return repr(path if path else layer.name)
