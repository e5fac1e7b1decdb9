"""The dot product of a query with its candidates (DistMult, ComplEx, ConvE, CP, TuckER)."""

from __future__ import annotations

from typing import TypeVar

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.native.kernel import summing_kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison
from elastable.replicas.knowledge_graphs.scores.kernels.products import product_gradients, products

__all__ = ["Dot"]

F = TypeVar("F", np.float32, np.float64)


class Dot(KernelComparison):
    """`q . e`; candidates shared by many queries are a matrix product.

    Args:
        bias: Whether the last value of a row is added to its score as it is.
            A query is then narrower than a row by one.
    """

    def __init__(self, bias: bool = False) -> None:
        super().__init__(_forward, _backward, _size, 1)
        self._bias = bias

    def scores(self, queries: Float32, rows: Float32, places: Int64, pool: RangePool = SERIAL) -> Float32:
        queries = self._widened(queries)
        if len(places) == len(queries):
            return super().scores(queries, rows, places, pool)
        each = len(queries) // len(places)
        found = np.empty((len(queries), places.shape[1]), np.float32)
        for group, some in enumerate(places):
            part = slice(group * each, (group + 1) * each)
            products(queries[part], rows, some, found[part], pool)
        return found

    def exact_scores(self, queries: Float64, rows: Float64) -> Float64:
        return super().exact_scores(self._widened(queries), rows)

    def rounding(self, queries: Float64, highest: Float64) -> Float64:
        return super().rounding(self._widened(queries), highest)

    def gradients(
        self,
        queries: Float32,
        rows: Float32,
        places: Int64,
        scores: Float32,
        score_gradients: Float32,
        row_places: Int64,
        row_gradients: Float32,
        pool: RangePool = SERIAL,
    ) -> Float32:
        queries = self._widened(queries)
        if len(places) == len(queries):
            found = super().gradients(queries, rows, places, scores, score_gradients, row_places, row_gradients, pool)
        else:
            each = len(queries) // len(places)
            found = np.empty_like(queries)
            for group, some in enumerate(places):
                part = slice(group * each, (group + 1) * each)
                found[part] = product_gradients(
                    queries[part], rows, some, score_gradients[part], row_places[group], row_gradients, pool
                )
        return found[:, :-1] if self._bias else found

    def _widened(self, queries: npt.NDArray[F]) -> npt.NDArray[F]:
        if not self._bias:
            return queries
        return np.concatenate([queries, np.ones((len(queries), 1), queries.dtype)], axis=1)


def _size(queries: Float64, highest: Float64, norm: int) -> Float64:
    found: Float64 = np.abs(queries) @ highest
    return found


@summing_kernel
def _forward(queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int) -> None:
    width = rows.shape[1]
    for b in range(start, stop):
        query = queries[b]
        group = places[b]
        for k in range(len(group)):
            row = rows[group[k]]
            total = np.float32(0)
            for j in range(width):
                total += query[j] * row[j]
            scores[b, k] = total


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
    for b in range(len(queries)):
        query = queries[b, start:stop]
        to_query = query_gradients[b, start:stop]
        group = places[b]
        targets = row_places[b]
        for k in range(len(group)):
            g = score_gradients[b, k]
            if g == np.float32(0):
                continue
            row = rows[group[k], start:stop]
            to_row = row_gradients[targets[k], start:stop]
            for j in range(stop - start):
                to_query[j] += g * row[j]
                to_row[j] += g * query[j]
