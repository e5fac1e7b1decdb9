"""The rows that a table begins with where they are not a function of each id: given ones, or Keras' own draw."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.rows.row_dtypes import rounded_rows
from elastable.worker.rows.initializers import was_seeded
from elastable.worker.rows.store_layer import StoreLayer

__all__ = ["LARGEST_DRAW", "first_rows"]

LARGEST_DRAW = 1 << 22
"""Elements, 16 MiB: the largest table that is drawn whole."""

_DRAWN = "_elastable_drawn"


def first_rows(layer: StoreLayer, unseeded: bool) -> Float32 | None:
    """All rows that a layer's table begins with, where they are not `initial_rows` of its spec.

    They are those that the layer was given as `weights=`, or what Keras' own layer would draw: of the initializer's
    seed, which Keras chooses where a person gave none, by `keras.utils.set_random_seed` if that was called.

    Args:
        layer: A store-backed layer.
        unseeded: Whether an initializer without a seed of its own draws, too.

    Returns:
        float32 `[input_dim, output_dim]`. None for rows that are not random, for tables of any ids, and for more than
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
    # A SeedGenerator as its seed counts the draws of all that share it: what Keras would draw is not known here.
    if layer.input_dim is None or not isinstance(getattr(initializer, "seed", None), int):
        return None
    if layer.input_dim * layer.output_dim > LARGEST_DRAW:
        return None
    return np.asarray(initializer((layer.input_dim, layer.output_dim), dtype="float32"))
