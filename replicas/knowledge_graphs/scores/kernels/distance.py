"""Minus the distance of a query from its candidates (TransE)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import summing_kernel
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison

__all__ = ["distance"]


def distance(norm: int) -> KernelComparison:
    """`-|q - e|` by the norm 1 or 2; a query is as wide as a row.

    Raises:
        BadInput: another norm.
    """
    return KernelComparison(_forward, _backward, 1, norm)


@summing_kernel
def _forward(queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int) -> None:
    width = rows.shape[1]
    each = len(queries) // len(places)
    for b in range(start, stop):
        query = queries[b]
        group = places[b // each]
        for k in range(len(group)):
            row = rows[group[k]]
            total = np.float32(0)
            if norm == 1:
                for j in range(width):
                    total += abs(query[j] - row[j])
            else:
                for j in range(width):
                    total += (query[j] - row[j]) * (query[j] - row[j])
                total = np.sqrt(total)
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
    each = len(queries) // len(places)
    zero = np.float32(0)
    for b in range(len(queries)):
        query = queries[b, start:stop]
        to_query = query_gradients[b, start:stop]
        group = places[b // each]
        targets = row_places[b // each]
        for k in range(len(group)):
            g = score_gradients[b, k]
            if g == zero:
                continue
            row = rows[group[k], start:stop]
            to_row = row_gradients[targets[k], start:stop]
            if norm == 1:
                for j in range(stop - start):
                    x = query[j] - row[j]
                    step = g if x > zero else (-g if x < zero else zero)
                    to_query[j] -= step
                    to_row[j] += step
            elif scores[b, k] != zero:
                g = g / scores[b, k]
                for j in range(stop - start):
                    step = g * (query[j] - row[j])
                    to_query[j] += step
                    to_row[j] -= step
