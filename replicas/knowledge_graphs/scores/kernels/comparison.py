"""What a query is compared with candidates by: the half of a score function that costs time."""

from collections.abc import Callable
from functools import cache

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import summing_inlined, summing_kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool

Size = Callable[[Float64, Float64, int], Float64]
"""`size(queries, highest, norm)`: float64 `[b]`; see `Comparison`."""

NORMS = (1, 2)
"""The norms of distances."""

_PAIRS_A_THREAD = 2048
_COLUMNS_A_THREAD = 16
_ROUNDINGS = 8.0


class Comparison:
    """Scores of queries against candidates, and the gradients of both, by two kernels.

    Candidates are rows of an array, named by their places, so that they are never copied out for each query. They come
    in groups: the queries of a batch, in order, are cut into as many equal groups as there are groups of candidates.
    One group is "shared by all"; as many groups as queries is "candidates of each its own".

    Threads share the queries forward, and the columns backward, so that nobody meets.

    Args:
        forward: Scores the queries `start..stop`.
        backward: Adds to the columns `start..stop` (in units of `columns`) of both gradients.
        size: The sum of the absolute values of all terms of a score, which bounds its rounding errors.
        parts: Into how many independent parts the gradients fall, by the width of a row.
        norm: 1 or 2, for kernels that know both.
    """

    def __init__(
        self, forward: Callable[..., None], backward: Callable[..., None], size: Size, parts: int, norm: int = 1
    ) -> None:
        if norm not in NORMS:
            raise BadInput(f"norm {norm}: distances are by the norm 1 or 2")
        self._forward, self._backward, self._size, self._parts, self.norm = forward, backward, size, parts, norm

    def scores(self, queries: Float32, rows: Float32, places: Int64, pool: RangePool = SERIAL) -> Float32:
        """Higher is more plausible.

        Args:
            queries: float32 `[b, query width]`.
            rows: float32 `[r, entity width]`, C-contiguous.
            places: int64 `[g, n]`, of candidates in `rows`; g divides b.
            pool: Threads to compute with; they change no bit.

        Returns:
            float32 `[b, n]`.
        """
        scores = np.empty((len(queries), places.shape[1]), queries.dtype)
        fewest = max(1, _PAIRS_A_THREAD // max(1, places.shape[1]))
        arguments = queries, rows, places, scores, self.norm
        pool.run(lambda start, stop: self._forward(*arguments, start, stop), len(queries), fewest)
        return scores

    def exact_scores(self, queries: Float64, rows: Float64) -> Float64:
        """float64 `[p]`: scores of pairs, `[p, width]` each, in double precision; equal pairs have equal bits."""
        # The same kernel, compiled for float64.
        found = np.empty((len(queries), 1), np.float64)
        self._forward(queries, rows, np.arange(len(queries))[:, None], found, self.norm, 0, len(queries))
        return found[:, 0]

    def rounding(self, queries: Float64, highest: Float64) -> Float64:
        """How far `scores`, in float32, may be from `exact_scores`.

        Args:
            queries: float64 `[b, query width]`.
            highest: float64 `[entity width]`: the largest absolute value of each column of the candidates.

        Returns:
            float64 `[b]`.
        """
        # Terms are rounded a few times each, and sums have lanes of some dozen terms for the widths in use.
        roundings = np.sqrt(len(highest)) + _ROUNDINGS
        bound: Float64 = roundings * float(np.finfo(np.float32).epsneg) * self._size(queries, highest, self.norm)
        return bound

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
        """Of the sum of `score_gradients * scores`; adds those of the rows in place.

        Args:
            queries, rows, places, pool: See `scores`.
            scores: float32 `[b, n]`, what `scores` gave.
            score_gradients: float32 `[b, n]`.
            row_places: int64 `[g, n]`: where in `row_gradients` each candidate's gradient is summed.
            row_gradients: float32 `[u, entity width]`, added to in place.

        Returns:
            Gradients of the queries, float32 `[b, query width]`.
        """
        to_queries = np.zeros_like(queries)
        given = queries, rows, places, scores, score_gradients, row_places, row_gradients, to_queries, self.norm
        columns = rows.shape[1] // self._parts
        pool.run(lambda start, stop: self._backward(*given, start, stop), columns, _COLUMNS_A_THREAD)
        return to_queries


def length(terms: Float64, norm: int) -> Float64:
    """float64 `[b]`: the norm 1 or 2 of rows `[b, n]`."""
    found: Float64 = terms.sum(axis=1) if norm == 1 else np.sqrt((terms * terms).sum(axis=1))
    return found


Columns = tuple[Float32, ...]
"""Equal parts of the columns of a query or a row, `[n]` each."""

Term = Callable[[Columns, Columns, int], np.float32]
"""`term(query, row, j)`: term j of what the norm is taken of."""

Spread = Callable[[Columns, Columns, Columns, Columns, int, np.float32], None]
"""`spread(query, row, to_query, to_row, j, step)`: adds to gradients, given that of term j."""


def distance_comparison(
    term: Term, spread: Spread, query_parts: int, row_parts: int, size: Size, norm: int, blocks: int = 1
) -> Comparison:
    """Minus the norm 1 or 2 of the vector of `term`s of a pair.

    Args:
        term, spread: The same functions at each call, as kernels are compiled once for each.
        query_parts, row_parts: Into how many equal parts queries and rows are cut for them.
        size, norm: As of `Comparison`.
        blocks: Queries and rows are first cut into as many blocks, whose norms are added.

    Raises:
        BadInput: another norm than 1 or 2.
    """
    kernels = _distance_kernels(term, spread, query_parts, row_parts, blocks)
    return Comparison(*kernels, size, blocks * row_parts, norm)


@summing_inlined
def _one(row: Float32, width: int, start: int, stop: int) -> Columns:
    return (row[start:stop],)


@summing_inlined
def _two(row: Float32, width: int, start: int, stop: int) -> Columns:
    return row[start:stop], row[width + start : width + stop]


@summing_inlined
def _three(row: Float32, width: int, start: int, stop: int) -> Columns:
    return row[start:stop], row[width + start : width + stop], row[2 * width + start : 2 * width + stop]


_CUTS = {1: _one, 2: _two, 3: _three}


@cache
def _distance_kernels(
    term: Term, spread: Spread, query_parts: int, row_parts: int, blocks: int
) -> tuple[Callable[..., None], Callable[..., None]]:
    term, spread = summing_inlined(term), summing_inlined(spread)
    cut_query, cut_row = _CUTS[query_parts], _CUTS[row_parts]

    @summing_inlined
    def distance(query: Columns, row: Columns, width: int, norm: int) -> np.float32:
        total = np.float32(0)
        if norm == 1:
            for j in range(width):
                total += abs(term(query, row, j))
        else:
            for j in range(width):
                x = term(query, row, j)
                total += x * x
            total = np.sqrt(total)
        return total

    @summing_kernel
    def forward(
        queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int
    ) -> None:
        each, columns = len(queries) // len(places), rows.shape[1] // blocks
        width = columns // row_parts
        for q in range(start, stop):
            group = places[q // each]
            for block in range(blocks):
                first, from_query = block * columns, block * query_parts * width
                query = cut_query(queries[q], width, from_query, from_query + width)
                for k in range(len(group)):
                    row = cut_row(rows[group[k]], width, first, first + width)
                    far = distance(query, row, width, norm)
                    scores[q, k] = scores[q, k] - far if block else -far

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
        each, columns, zero = len(queries) // len(places), rows.shape[1] // blocks, np.float32(0)
        width = columns // row_parts
        for q in range(len(queries)):
            group, targets = places[q // each], row_places[q // each]
            for block in range(blocks):
                first, from_query = block * columns, block * query_parts * width
                query = cut_query(queries[q], width, from_query + start, from_query + stop)
                to_query = cut_query(query_gradients[q], width, from_query + start, from_query + stop)
                for k in range(len(group)):
                    g, score = score_gradients[q, k], scores[q, k]
                    if blocks > 1 and norm == 2 and g != zero:  # the score is the sum of several
                        every = cut_query(queries[q], width, from_query, from_query + width)
                        score = -distance(every, cut_row(rows[group[k]], width, first, first + width), width, norm)
                    if g == zero or (norm == 2 and score == zero):
                        continue
                    row = cut_row(rows[group[k]], width, first + start, first + stop)
                    to_row = cut_row(row_gradients[targets[k]], width, first + start, first + stop)
                    if norm == 1:
                        for j in range(stop - start):
                            x = term(query, row, j)
                            spread(query, row, to_query, to_row, j, -g if x > zero else (g if x < zero else zero))
                    else:
                        g = g / score
                        for j in range(stop - start):
                            spread(query, row, to_query, to_row, j, g * term(query, row, j))

    return forward, backward
