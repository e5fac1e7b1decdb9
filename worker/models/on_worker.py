"""Keeps small tables on the workers, as Keras variables trained like any other dense variable.

For tables so small that a lookup costs more than sending the whole table with the dense variables
(`elastable.embedding_store.composite.locations`).
"""

from __future__ import annotations

from collections.abc import Mapping

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.models.offload import OffloadedEmbedding, bring_back
from elastable.worker.rows.keras_draw import first_rows
from elastable.worker.rows.store_backed import StoreBacked

__all__ = ["keep_on_worker"]


def keep_on_worker(
    model: keras.Model, tables: Mapping[str, TableSpec], initial: Mapping[str, Float32] | None = None
) -> None:
    """Replaces the store of these tables' layers by a Keras variable.

    It starts with the rows that the store would have started with: those in `initial` or of the layer, those that the
    layer already reads, or else the initial values. Layers that share a table share the variable. Call this before the
    optimizer is built.

    Args:
        model: A built model.
        tables: Tables of fixed vocabulary, by name.
        initial: Table name -> float32 `[vocabulary, dim]`, for tables that do not start with initial values.

    Raises:
        ModelError: the optimizer is already built.
        Unsupported: a table with a separate optimizer.
    """
    if tables and getattr(model.optimizer, "built", False):
        raise ModelError(
            f"model {model.name!r}: its optimizer {model.optimizer.name!r} is built, so no table can become a "
            "variable of the workers; create the model again, or compile it again after it was loaded"
        )
    variables: dict[str, keras.Variable] = {}
    for layer in store_layers(model):
        spec = tables.get(layer.table_name)
        if spec is None:
            continue
        if layer.optimizer is not None:
            raise Unsupported(
                f"embedding layer {layer.name!r}: its table {spec.name!r} is placed on the workers, where the "
                "model's optimizer trains it, but the layer has a separate optimizer "
                f"({type(layer.optimizer).__name__}): place the table in a store, or leave optimizer= out"
            )
        rows = _rows_of(layer, spec, (initial or {}).get(spec.name))
        if isinstance(layer, OffloadedEmbedding):
            bring_back(layer, rows)
            continue
        if spec.name not in variables:
            variables[spec.name] = _variable_of(layer, spec, rows)
        layer.keep_on_worker(variables[spec.name])


def _rows_of(layer: StoreBacked, spec: TableSpec, initial: Float32 | None) -> Float32:
    if initial is not None:
        return initial
    assert spec.vocabulary_size is not None
    ids = np.arange(spec.vocabulary_size, dtype=np.int64)
    if layer.source is not None:
        return np.asarray(layer.read_rows(ids), np.float32)
    rows = first_rows(layer, unseeded=False)
    return initial_rows(spec, ids) if rows is None else rows


def _variable_of(layer: keras.Layer, spec: TableSpec, rows: Float32) -> keras.Variable:
    layer._tracker.unlock()
    variable = layer.add_weight(
        shape=rows.shape,
        dtype="float32",
        initializer="zeros",
        name=f"{spec.name.replace('/', '_')}_rows",
        regularizer=layer.embeddings_regularizer,
        constraint=layer.embeddings_constraint,
    )
    layer._tracker.lock()
    variable.assign(rows)
    return variable
