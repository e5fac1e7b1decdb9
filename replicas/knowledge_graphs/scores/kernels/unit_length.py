"""Rows brought to length 1, and the gradient of that."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32

__all__ = ["to_unit_length", "unit_length_gradients"]

_SMALLEST = np.float32(1e-12)  # a row of zeros stays one


def to_unit_length(rows: Float32) -> Float32:
    """float32 `[n, d]`: each row divided by its Euclidean length."""
    units: Float32 = rows / _lengths(rows)
    return units


def unit_length_gradients(rows: Float32, gradients: Float32) -> Float32:
    """Of the rows `[n, d]`, of those of `to_unit_length(rows)`."""
    lengths = _lengths(rows)
    units = rows / lengths
    along = np.einsum("nd,nd->n", units, gradients)[:, None]
    found: Float32 = (gradients - units * along) / lengths
    return found


def _lengths(rows: Float32) -> Float32:
    lengths: Float32 = np.maximum(np.sqrt(np.einsum("nd,nd->n", rows, rows)), _SMALLEST)[:, None]
    return lengths
