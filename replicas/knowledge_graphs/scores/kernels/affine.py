"""Minus the length of a form that is linear in a candidate (PairRE, TripleRE, InterHT, TranS)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.native.kernel import summing_kernel
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison, length
from elastable.replicas.knowledge_graphs.scores.kernels.pair_kernels import pair_comparison

__all__ = ["affine", "affine_of_two"]


def affine(norm: int) -> KernelComparison:
    """`-|a + b * e|`, elementwise; a query is `[a, b]`, twice as wide as a row.

    Raises:
        BadInput: another norm than 1 or 2.
    """
    return pair_comparison(_score, _add, _size, 1, norm)


def affine_of_two(norm: int) -> KernelComparison:
    """`-|a + b * e + c * f|`, elementwise; a row is `[e, f]`, a query `[a, b, c]`.

    Raises:
        BadInput: another norm than 1 or 2.
    """
    return KernelComparison(_forward_of_two, _backward_of_two, _size_of_two, 2, norm)


def _size(queries: Float64, highest: Float64, norm: int) -> Float64:
    a, b = np.split(np.abs(queries), 2, axis=1)
    return length(a + b * highest, norm)


def _size_of_two(queries: Float64, highest: Float64, norm: int) -> Float64:
    (a, b, c), (e, f) = np.split(np.abs(queries), 3, axis=1), np.split(highest, 2)
    return length(a + b * e + c * f, norm)


def _score(query: Float32, row: Float32, norm: int) -> np.float32:
    width, total = len(row), np.float32(0)
    a, b = query[:width], query[width:]
    if norm == 1:
        for j in range(width):
            total += abs(a[j] + b[j] * row[j])
    else:
        for j in range(width):
            x = a[j] + b[j] * row[j]
            total += x * x
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
    width, zero = len(row), np.float32(0)
    a, b, e = query[start:stop], query[width + start : width + stop], row[start:stop]
    to_a, to_b, to_e = to_query[start:stop], to_query[width + start : width + stop], to_row[start:stop]
    if norm == 1:
        for j in range(stop - start):
            x = a[j] + b[j] * e[j]
            step = -g if x > zero else (g if x < zero else zero)
            to_a[j] += step
            to_b[j] += step * e[j]
            to_e[j] += step * b[j]
    elif score != zero:
        g = g / score
        for j in range(stop - start):
            step = g * (a[j] + b[j] * e[j])
            to_a[j] += step
            to_b[j] += step * e[j]
            to_e[j] += step * b[j]


# Separate loops: slicing the query anew for each candidate would cost three times the arithmetic.


@summing_kernel
def _forward_of_two(
    queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int
) -> None:
    width = rows.shape[1] // 2
    each = len(queries) // len(places)
    for q in range(start, stop):
        a, b, c = queries[q, :width], queries[q, width : 2 * width], queries[q, 2 * width :]
        group = places[q // each]
        for k in range(len(group)):
            e, f = rows[group[k], :width], rows[group[k], width:]
            total = np.float32(0)
            if norm == 1:
                for j in range(width):
                    total += abs(a[j] + b[j] * e[j] + c[j] * f[j])
            else:
                for j in range(width):
                    x = a[j] + b[j] * e[j] + c[j] * f[j]
                    total += x * x
                total = np.sqrt(total)
            scores[q, k] = -total


@summing_kernel
def _backward_of_two(
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
    width = rows.shape[1] // 2
    each = len(queries) // len(places)
    zero = np.float32(0)
    for q in range(len(queries)):
        a = queries[q, start:stop]
        b = queries[q, width + start : width + stop]
        c = queries[q, 2 * width + start : 2 * width + stop]
        to_a = query_gradients[q, start:stop]
        to_b = query_gradients[q, width + start : width + stop]
        to_c = query_gradients[q, 2 * width + start : 2 * width + stop]
        group = places[q // each]
        targets = row_places[q // each]
        for k in range(len(group)):
            g = score_gradients[q, k]
            if g == zero or (norm == 2 and scores[q, k] == zero):
                continue
            e, f = rows[group[k], start:stop], rows[group[k], width + start : width + stop]
            to_e = row_gradients[targets[k], start:stop]
            to_f = row_gradients[targets[k], width + start : width + stop]
            share = g if norm == 1 else g / scores[q, k]
            for j in range(stop - start):
                x = a[j] + b[j] * e[j] + c[j] * f[j]
                sign = -share if x > zero else (share if x < zero else zero)
                step = sign if norm == 1 else share * x
                to_a[j] += step
                to_b[j] += step * e[j]
                to_c[j] += step * f[j]
                to_e[j] += step * b[j]
                to_f[j] += step * c[j]
