"""Minus the sum of the moduli of complex differences (RotatE)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison
from elastable.replicas.knowledge_graphs.scores.kernels.pair_kernels import pair_comparison

__all__ = ["modulus"]


def modulus() -> KernelComparison:
    """`-sum |q_j - e_j|` over complex numbers: all real parts of a row, then all imaginary ones.

    The modulus of each complex difference, as in RotatE (Sun et al., 2019), not
    the sum of the absolute values of its two parts.
    """
    return pair_comparison(_score, _add, _size, 2)


def _size(queries: Float64, highest: Float64, norm: int) -> Float64:
    real, imaginary = np.split(np.abs(queries) + highest, 2, axis=1)
    found: Float64 = np.hypot(real, imaginary).sum(axis=1)
    return found


def _score(query: Float32, row: Float32, norm: int) -> np.float32:
    half, total = len(row) // 2, np.float32(0)
    real, imaginary, row_real, row_imaginary = query[:half], query[half:], row[:half], row[half:]
    for j in range(half):
        x = real[j] - row_real[j]
        y = imaginary[j] - row_imaginary[j]
        total += np.sqrt(x * x + y * y)
    return -total


def _add(
    query: Float32,
    row: Float32,
    to_query: Float32,
    to_row: Float32,
    g: np.float32,
    score: np.float32,
    norm: int,
    start: int,
    stop: int,
) -> None:
    half, zero = len(row) // 2, np.float32(0)
    real, imaginary = query[start:stop], query[half + start : half + stop]
    to_real, to_imaginary = to_query[start:stop], to_query[half + start : half + stop]
    row_real, row_imaginary = row[start:stop], row[half + start : half + stop]
    to_row_real, to_row_imaginary = to_row[start:stop], to_row[half + start : half + stop]
    for j in range(stop - start):
        x = real[j] - row_real[j]
        y = imaginary[j] - row_imaginary[j]
        size = np.sqrt(x * x + y * y)
        share = g / size if size > zero else zero
        to_real[j] -= share * x
        to_imaginary[j] -= share * y
        to_row_real[j] += share * x
        to_row_imaginary[j] += share * y
