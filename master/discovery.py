"""Finds the store-backed embedding layers of a model and what tables they need."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable

from elastable.embedding_store.errors import ModelError, SpecConflict
from elastable.embedding_store.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.store import EmbeddingStore
from elastable.master.constraints import constrained

__all__ = ["StoreBackedLayer", "create_tables", "discover_tables", "store_backed_layers"]


@runtime_checkable
class StoreBackedLayer(Protocol):
    """What a Keras layer has whose table lives in a store; it has no Keras variables.

    A layer may also have `embeddings_constraint`, a Keras constraint or None.
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


def store_backed_layers(model: Any) -> tuple[StoreBackedLayer, ...]:
    """Every store-backed layer of a Keras model, however nested, each object once."""
    # Keras' own walk: it sees layers in lists, dicts, wrappers and submodels, which `model.layers` does not.
    layers = (layer for layer in model._flatten_layers() if isinstance(layer, StoreBackedLayer))
    # A table may have been kept on the worker: then it is a variable as any other.
    return tuple(layer for layer in layers if not getattr(layer, "on_worker", False))


def discover_tables(model: Any, seed: int, optimizer: OptimizerSpec) -> dict[str, TableSpec]:
    """The tables that a model needs, by name, in the order in which its layers come.

    None where all of them were kept on the worker.

    Args:
        model: A built Keras model.
        seed: Of the initial values, where a layer has none of its own.
        optimizer: Of the rows (`elastable.master.keras_optimizer.table_optimizer`).

    Raises:
        ModelError: the model has no store-backed layer, or two layers have a
            table of one name without having named it.
        SpecConflict: layers that share a table want different ones.
        Unsupported: a constraint that is not one of a row alone.
    """
    layers = store_backed_layers(model)
    if not layers and not any(getattr(layer, "on_worker", False) for layer in model._flatten_layers()):
        raise ModelError(
            f"model {model.name!r} has no embedding layer with a table in a store: use et.Embedding in the place of "
            "keras.layers.Embedding, or move the large ones with --offload-embeddings-above"
        )
    specs: dict[str, TableSpec] = {}
    owners: dict[str, StoreBackedLayer] = {}
    for layer in layers:
        own = constrained(layer.name, optimizer, getattr(layer, "embeddings_constraint", None))
        spec = layer.table_spec(seed, own)
        if spec.name in specs:
            _refuse_unlike(owners[spec.name], layer, specs[spec.name], spec)
        else:
            specs[spec.name], owners[spec.name] = spec, layer
    return specs


def create_tables(store: EmbeddingStore, specs: Mapping[str, TableSpec]) -> tuple[str, ...]:
    """Makes the tables that are not there yet; returns their names.

    Raises:
        SpecConflict: a table of that name is there with another spec.
    """
    return tuple(name for name, spec in specs.items() if store.create_table(spec))


def _refuse_unlike(first: StoreBackedLayer, other: StoreBackedLayer, ours: TableSpec, theirs: TableSpec) -> None:
    name = ours.name
    if not (first.table_is_explicit and other.table_is_explicit):
        raise ModelError(
            f"layers {_where(first)} and {_where(other)} both have a table {name!r} without sharing it on purpose: "
            f"give the layers different names, or share it with table={name!r} on both"
        )
    differences = ours.differences(theirs)
    if differences:
        told = "; ".join(f"{field} {mine!r} and {other!r}" for field, (mine, other) in differences.items())
        raise SpecConflict(
            f"layers {_where(first)} and {_where(other)} share the table {name!r} but want different ones: {told}"
        )


def _where(layer: StoreBackedLayer) -> str:
    path = getattr(layer, "path", None)
    return repr(path if path else layer.name)
