"""The loops over pairs of queries and candidates, compiled for the score of one pair and its gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import summing_inlined, summing_kernel
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison, Size

__all__ = ["PairGradients", "PairScore", "pair_comparison"]

PairScore = Callable[[Float32, Float32, int], np.float32]
"""`score(query, row, norm)` of one pair."""

PairGradients = Callable[[Float32, Float32, Float32, Float32, np.float32, np.float32, int, int, int], None]
"""`add(query, row, to_query, to_row, gradient, score, norm, start, stop)`: adds those of one pair in some columns.

`gradient` is that of the pair's score, and not 0.
"""


def pair_comparison(score: PairScore, add: PairGradients, size: Size, parts: int, norm: int = 1) -> KernelComparison:
    """The comparison whose kernels compute `score` and `add`; the other arguments are as of `KernelComparison`.

    Raises:
        BadInput: another norm than 1 or 2.
    """
    forward, backward = _KERNELS.get((score, add)) or _KERNELS.setdefault((score, add), _compiled(score, add))
    return KernelComparison(forward, backward, size, parts, norm)


def _compiled(score: PairScore, add: PairGradients) -> tuple[Callable[..., None], Callable[..., None]]:
    score, add = summing_inlined(score), summing_inlined(add)

    @summing_kernel
    def forward(
        queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int
    ) -> None:
        each = len(queries) // len(places)
        for q in range(start, stop):
            query, group = queries[q], places[q // each]
            for k in range(len(group)):
                scores[q, k] = score(query, rows[group[k]], norm)

    @summing_kernel
    def backward(
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
        for q in range(len(queries)):
            query, to_query, group, targets = queries[q], query_gradients[q], places[q // each], row_places[q // each]
            for k in range(len(group)):
                g = score_gradients[q, k]
                if g != np.float32(0):
                    to_row = row_gradients[targets[k]]
                    add(query, rows[group[k]], to_query, to_row, g, scores[q, k], norm, start, stop)

    return forward, backward


_KERNELS: dict[tuple[PairScore, PairGradients], tuple[Callable[..., None], Callable[..., None]]] = {}
