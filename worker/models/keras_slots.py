"""Moves the slots of a Keras optimizer between an offloaded embedding's former variable and its table."""

from __future__ import annotations

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.worker.rows.store_backed import StoreBacked

__all__ = ["give_back_slots", "keras_slots"]

_BLOCK_ROWS = 1 << 16


def keras_slots(optimizer: keras.optimizers.Optimizer, layer: StoreBacked, spec: TableSpec) -> Float32 | None:
    """float32 `[vocabulary, slot_width]`: the optimizer's slots of the layer's former variable.

    None if there are none: the layer never had a variable, or the optimizer was not built with it.

    Raises:
        Unsupported: the optimizer keeps other values.
    """
    variables = _variables(optimizer, layer, spec)
    if variables is None:
        return None
    no_slots = np.zeros((layer.input_dim or 0, 0), np.float32)
    return np.concatenate([no_slots, *map(np.asarray, variables)], axis=1)


def give_back_slots(optimizer: keras.optimizers.Optimizer, layer: StoreBacked, store: EmbeddingStore) -> None:
    """Copies the table's slots into the optimizer's variables, before they are written to a file."""
    spec = store.specs()[layer.table_name]
    variables = _variables(optimizer, layer, spec) or []
    slots = np.concatenate([np.asarray(variable) for variable in variables], axis=1) if variables else None
    if slots is None:
        return
    for block in store.scan(layer.table_name, _BLOCK_ROWS):
        slots[block.ids] = block.slots
    for variable, values in zip(variables, np.split(slots, len(variables), axis=1), strict=True):
        variable.assign(values)


def _variables(
    optimizer: keras.optimizers.Optimizer, layer: StoreBacked, spec: TableSpec
) -> list[keras.Variable] | None:
    path = getattr(layer, "variable_path", None)
    known = [variable.path for variable in getattr(optimizer, "_trainable_variables", ())]
    if path is None or path not in known:
        return None
    by_name = {variable.name: variable for variable in optimizer.variables}
    found = []
    for slot in row_optimizer(spec.optimizer).slots:
        variable = by_name.get(f"{path.replace('/', '_')}_{slot.name}")
        if variable is None or tuple(variable.shape) != (layer.input_dim, layer.output_dim):
            raise Unsupported(
                f"embedding layer {layer.name!r}: the optimizer {optimizer.name!r} has trained it, and what it keeps "
                f"({slot.name}) cannot be moved to a store; compile the model with a new optimizer"
            )
        found.append(variable)
    return found
