"""Penalties on the embeddings of a step's triples: L2, and the N3 norm of Lacroix et al. (2018)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32

__all__ = ["REGULARIZERS", "penalty", "penalty_gradients"]

REGULARIZERS = ("none", "l2", "n3")
"""By name: nothing; `sum x^2`; `sum |x|^3`, where x is complex with the modulus."""


def penalty(kind: str, rows: Float32, complex_numbers: bool) -> Float32:
    """float32 `[n]`: of each of `rows` `[n, width]`."""
    if kind == "none" or not rows.shape[1]:
        return np.zeros(len(rows), np.float32)
    if kind == "l2":
        return np.asarray(np.einsum("nd,nd->n", rows, rows), np.float32)
    return np.asarray((_sizes(rows, complex_numbers) ** 3).sum(axis=1), np.float32)


def penalty_gradients(kind: str, rows: Float32, complex_numbers: bool) -> Float32:
    """float32 `[n, width]`: of the penalties."""
    if kind == "none":
        return np.zeros_like(rows)
    if kind == "l2":
        return np.float32(2) * rows
    sizes = _sizes(rows, complex_numbers)
    if complex_numbers:
        sizes = np.concatenate([sizes, sizes], axis=1)
    return np.float32(3) * sizes * rows


def _sizes(rows: Float32, complex_numbers: bool) -> Float32:
    """Absolute values; of complex numbers, all real parts lie before all imaginary ones."""
    if not complex_numbers:
        return np.abs(rows)
    half = rows.shape[1] // 2
    real, imaginary = rows[:, :half], rows[:, half:]
    return np.asarray(np.sqrt(real * real + imaginary * imaginary), np.float32)
