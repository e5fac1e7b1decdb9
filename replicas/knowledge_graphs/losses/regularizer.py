"""Penalties on the embeddings of a step's triples: L2, and the N3 norm of Lacroix et al. (2018)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.replicas.knowledge_graphs.scores import Values

__all__ = ["REGULARIZERS", "penalty", "penalty_gradients"]

REGULARIZERS = ("none", "l2", "n3")
"""By name: nothing; `sum x^2`; `sum |x|^3`, where x is complex with the modulus. Phases are not penalised: as complex
numbers they all have the modulus 1."""


def penalty(kind: str, rows: Float32, values: Values = "real") -> Float32:
    """float32 `[n]`: of each of `rows` `[n, width]`."""
    if kind == "none" or values == "phase" or not rows.shape[1]:
        return np.zeros(len(rows), np.float32)
    if kind == "l2":
        return np.asarray(np.einsum("nd,nd->n", rows, rows), np.float32)
    return np.asarray((_sizes(rows, values) ** 3).sum(axis=1), np.float32)


def penalty_gradients(kind: str, rows: Float32, values: Values = "real") -> Float32:
    """float32 `[n, width]`: of the penalties."""
    if kind == "none" or values == "phase":
        return np.zeros_like(rows)
    if kind == "l2":
        return np.float32(2) * rows
    sizes = _sizes(rows, values)
    if values == "complex":
        sizes = np.concatenate([sizes, sizes], axis=1)
    return np.float32(3) * sizes * rows


def _sizes(rows: Float32, values: Values) -> Float32:
    """Absolute values; of complex numbers, all real parts lie before all imaginary ones."""
    if values == "real":
        return np.abs(rows)
    half = rows.shape[1] // 2
    real, imaginary = rows[:, :half], rows[:, half:]
    return np.asarray(np.sqrt(real * real + imaginary * imaginary), np.float32)
