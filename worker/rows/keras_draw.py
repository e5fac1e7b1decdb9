"""Initial rows that are not a function of each id: given by the user, or Keras' own draw."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.tables.row_dtypes import rounded_rows
from elastable.worker.rows.initializers import was_seeded
from elastable.worker.rows.store_layer import StoreLayer

__all__ = ["LARGEST_DRAW", "first_rows"]

LARGEST_DRAW = 1 << 22
"""Elements (16 MiB) of the largest table that is drawn whole."""

_DRAWN = "_elastable_drawn"


def first_rows(layer: StoreLayer, unseeded: bool) -> Float32 | None:
    """All initial rows of a layer's table, if they are not `initial_rows` of its spec.

    They are the layer's `weights=`, the array of a `Constant`, or what Keras' own layer would draw with the
    initializer's seed. Without a seed Keras chooses one, by `keras.utils.set_random_seed` if that was called.

    Args:
        layer: A store-backed layer.
        unseeded: Whether to draw also from an initializer without a seed.

    Returns:
        float32 `[input_dim, output_dim]`. None for rows that are not random, tables of any ids, and more than
            `LARGEST_DRAW` elements.

    Raises:
        BadSpec: a `Constant` whose array does not fit the table.
    """
    if layer.pretrained is not None:
        return np.asarray(layer.pretrained, np.float32)
    if np.ndim(getattr(layer.embeddings_initializer, "value", 0)):
        return _constant_rows(layer)
    if not unseeded and not was_seeded(layer.embeddings_initializer):
        return None
    drawn = vars(layer).get(_DRAWN)
    if drawn is None:
        rows = _draw(layer)
        drawn = () if rows is None else (rounded_rows(layer.table_dtype or "float32", rows),)
        object.__setattr__(layer, _DRAWN, drawn)  # past Keras' tracking
    return drawn[0] if drawn else None


def _draw(layer: StoreLayer) -> Float32 | None:
    initializer = layer.embeddings_initializer
    # A SeedGenerator counts the draws of everything that shares it: what Keras would draw is unknown here.
    if layer.input_dim is None or not isinstance(getattr(initializer, "seed", None), int):
        return None
    if layer.input_dim * layer.output_dim > LARGEST_DRAW:
        return None
    return np.asarray(initializer((layer.input_dim, layer.output_dim), dtype=layer.variable_dtype), np.float32)


def _constant_rows(layer: StoreLayer) -> Float32:
    """Of an array that is no matrix, as one row for all, only up to `LARGEST_DRAW` elements are made."""
    array = np.asarray(layer.embeddings_initializer.value, np.float32)
    shape = (layer.input_dim or 0, layer.output_dim)
    fits = array.shape == shape or (shape[0] * shape[1] <= LARGEST_DRAW and _broadcasts(array.shape, shape))
    if not fits:
        raise BadSpec(
            f"embedding layer {layer.name!r}: Constant of shape {array.shape} for a table of shape {shape}: give all "
            "rows, or one number"
        )
    return rounded_rows(layer.table_dtype or "float32", np.ascontiguousarray(np.broadcast_to(array, shape)))


def _broadcasts(given: tuple[int, ...], shape: tuple[int, int]) -> bool:
    try:
        return np.broadcast_shapes(given, shape) == shape
    except ValueError:
        return False
