"""Minus the distance of a query from its candidates (TransE)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison, length
from elastable.replicas.knowledge_graphs.scores.kernels.pair_kernels import pair_comparison

__all__ = ["distance"]


def distance(norm: int) -> KernelComparison:
    """`-|q - e|` by the norm 1 or 2; a query is as wide as a row.

    Raises:
        BadInput: another norm.
    """
    return pair_comparison(_score, _add, _size, 1, norm)


def _size(queries: Float64, highest: Float64, norm: int) -> Float64:
    return length(np.abs(queries) + highest, norm)


def _score(query: Float32, row: Float32, norm: int) -> np.float32:
    total = np.float32(0)
    if norm == 1:
        for j in range(len(row)):
            total += abs(query[j] - row[j])
    else:
        for j in range(len(row)):
            total += (query[j] - row[j]) * (query[j] - row[j])
        total = np.sqrt(total)
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
    zero, q, e, to_q, to_e = np.float32(0), query[start:stop], row[start:stop], to_query[start:stop], to_row[start:stop]
    if norm == 1:
        for j in range(stop - start):
            x = q[j] - e[j]
            step = g if x > zero else (-g if x < zero else zero)
            to_q[j] -= step
            to_e[j] += step
    elif score != zero:
        g = g / score
        for j in range(stop - start):
            step = g * (q[j] - e[j])
            to_q[j] += step
            to_e[j] -= step
