"""Initial rows that are not a function of each id: the user's `weights=`, or Keras' own draw."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.rows.row_dtypes import rounded_rows
from elastable.worker.rows.initializers import was_seeded
from elastable.worker.rows.store_layer import StoreLayer

__all__ = ["LARGEST_DRAW", "first_rows"]

LARGEST_DRAW = 1 << 22
"""Elements (16 MiB) of the largest table that is drawn whole."""

_DRAWN = "_elastable_drawn"


def first_rows(layer: StoreLayer, unseeded: bool) -> Float32 | None:
    """All initial rows of a layer's table, if they are not `initial_rows` of its spec.

    They are the layer's `weights=`, or what Keras' own layer would draw with the initializer's seed. Without a seed
    Keras chooses one, by `keras.utils.set_random_seed` if that was called.

    Args:
        layer: A store-backed layer.
        unseeded: Whether to draw also from an initializer without a seed.

    Returns:
        float32 `[input_dim, output_dim]`. None for rows that are not random, tables of any ids, and more than
            `LARGEST_DRAW` elements.
    """
    if layer.pretrained is not None:
        return np.asarray(layer.pretrained, np.float32)
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
    return np.asarray(initializer((layer.input_dim, layer.output_dim), dtype="float32"))
