"""Minus the sum of the moduli of complex differences (RotatE)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import summing_kernel
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison

__all__ = ["modulus"]


def modulus() -> KernelComparison:
    """`-sum |q_j - e_j|` over complex numbers: all real parts of a row, then all imaginary ones.

    The modulus of each complex difference, as in RotatE (Sun et al., 2019), not
    the sum of the absolute values of its two parts.
    """
    return KernelComparison(_forward, _backward, 2)


@summing_kernel
def _forward(queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int) -> None:
    half = rows.shape[1] // 2
    each = len(queries) // len(places)
    for b in range(start, stop):
        real, imaginary = queries[b, :half], queries[b, half:]
        group = places[b // each]
        for k in range(len(group)):
            row_real, row_imaginary = rows[group[k], :half], rows[group[k], half:]
            total = np.float32(0)
            for j in range(half):
                x = real[j] - row_real[j]
                y = imaginary[j] - row_imaginary[j]
                total += np.sqrt(x * x + y * y)
            scores[b, k] = -total


@summing_kernel
def _backward(
    queries: Float32,
    rows: Float32,
    places: Int64,
    scores: Float32,
    score_gradients: Float32,
    row_places: Int64,
    row_gradients: Float32,
    query_gradients: Float32,
    norm: int,
    start: int,
    stop: int,
) -> None:
    half = rows.shape[1] // 2
    each = len(queries) // len(places)
    zero = np.float32(0)
    for b in range(len(queries)):
        real, imaginary = queries[b, start:stop], queries[b, half + start : half + stop]
        to_real, to_imaginary = query_gradients[b, start:stop], query_gradients[b, half + start : half + stop]
        group = places[b // each]
        targets = row_places[b // each]
        for k in range(len(group)):
            g = score_gradients[b, k]
            if g == zero:
                continue
            row_real, row_imaginary = rows[group[k], start:stop], rows[group[k], half + start : half + stop]
            to_row_real = row_gradients[targets[k], start:stop]
            to_row_imaginary = row_gradients[targets[k], half + start : half + stop]
            for j in range(stop - start):
                x = real[j] - row_real[j]
                y = imaginary[j] - row_imaginary[j]
                size = np.sqrt(x * x + y * y)
                share = g / size if size > zero else zero
                to_real[j] -= share * x
                to_imaginary[j] -= share * y
                to_row_real[j] += share * x
                to_row_imaginary[j] += share * y
