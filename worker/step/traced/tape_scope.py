"""Lookups under the user's own tapes: current rows, and their gradients."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.errors import Unsupported
from elastable.master.api import Slices
from elastable.worker.keras.structures import Gradient
from elastable.worker.rows.scope import RowScope
from elastable.worker.rows.store_backed import StoreBacked

__all__ = ["TapeLookup", "TapeScope", "seen_by_tapes", "slices_of"]

_anchor: list[tf.Variable] = []


@dataclass(frozen=True, slots=True)
class TapeLookup:
    """One call of a layer.

    Attributes:
        layer: The layer called.
        unique: int64 `[u]`: its unique ids.
        rows: float32 `[u, dim]` tensor that the call gathered from, watched by all open tapes.
    """

    layer: StoreBacked
    unique: Int64
    rows: tf.Tensor


class TapeScope(RowScope):
    """Reads the current rows at each call, and records the lookups."""

    def __init__(self) -> None:
        self.lookups: list[TapeLookup] = []

    def rows(self, layer: StoreBacked, ids: tf.Tensor) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of this call's ids.

        Raises:
            Unsupported: within a `tf.function`.
        """
        if not tf.executing_eagerly():
            raise Unsupported(
                f"embedding layer {layer.name!r} is called by a tf.function within et.step: let the loop run eagerly, "
                "without @tf.function and with compile(run_eagerly=True)"
            )
        unique, inverse = tf.unique(ids)
        looked_up = TapeLookup(layer, unique.numpy(), seen_by_tapes(layer.read_rows(unique.numpy())))
        self.lookups.append(looked_up)
        return tf.gather(looked_up.rows, inverse)


def seen_by_tapes(rows: tf.Tensor) -> tf.Tensor:
    """The same rows, watched by every open tape.

    Tapes record everything computed from a trainable variable, so zero times a variable is added.
    """
    if not _anchor:
        with tf.init_scope():
            _anchor.append(tf.Variable(0.0, trainable=True, name="elastable_anchor"))
    return rows + _anchor[0] * 0.0


def slices_of(lookups: Sequence[TapeLookup], gradients: Sequence[Gradient]) -> dict[str, Slices]:
    """Table name -> the gradients of its lookups; a gradient of None is skipped."""
    found: dict[str, list[tuple[Int64, Float32]]] = {}
    for lookup, gradient in zip(lookups, gradients, strict=True):
        if gradient is None:
            continue
        part = (lookup.unique, np.asarray(gradient))
        if isinstance(gradient, tf.IndexedSlices):
            part = (lookup.unique[np.asarray(gradient.indices)], np.asarray(gradient.values))
        found.setdefault(lookup.layer.table_name, []).append(part)
    return {
        table: Slices(np.concatenate([ids for ids, _ in parts]), np.concatenate([values for _, values in parts]))
        for table, parts in found.items()
    }
