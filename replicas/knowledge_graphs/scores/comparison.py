"""How queries are compared with candidates, the half of a score function that costs time: products, distances."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import summing_inlined, summing_kernel
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.replicas.knowledge_graphs.scores import dot_products

Size = Callable[[Float64, Float64, int], Float64]
"""`size(queries, highest, norm)`: float64 `[b]`; see `Comparison`."""

_PAIRS_A_THREAD = 2048
_COLUMNS_A_THREAD = 16
_ROUNDINGS = 8.0


class Comparison:
    """Scores of queries against candidates, and the gradients of both, by two kernels.

    Candidates are rows of an array, named by their places, so that they are never copied out for each query: one list
    that all queries share, or as many lists as queries.

    Threads share the queries forward, and the columns backward, so that nobody meets.

    A dot product of many queries with one list is a matrix product, and not by the kernels.

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
        if norm not in (1, 2):
            raise BadInput(f"norm {norm}: distances are by the norm 1 or 2")
        self.is_product = forward is _dot_forward
        self._forward, self._backward, self._size, self._parts, self.norm = forward, backward, size, parts, norm

    def scores(self, queries: Float32, rows: Float32, places: Int64, pool: RangePool = SERIAL) -> Float32:
        """Higher is more plausible.

        Args:
            queries: float32 `[b, query width]`.
            rows: float32 `[r, entity width]`, C-contiguous.
            places: int64 `[g, n]`, of candidates in `rows`; g is 1 or b.
            pool: Threads to compute with; they change no bit.

        Returns:
            float32 `[b, n]`.
        """
        scores = np.empty((len(queries), places.shape[1]), queries.dtype)
        if self.is_product and len(places) == 1 < len(queries):
            dot_products.products(queries, rows, places[0], scores, pool)
            return scores
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
        if self.is_product and len(places) == 1 < len(queries):
            shared = places[0], score_gradients, row_places[0], row_gradients
            return dot_products.product_gradients(queries, rows, *shared, pool)
        to_queries = np.zeros_like(queries)
        given = queries, rows, places, scores, score_gradients, row_places, row_gradients, to_queries, self.norm
        columns = rows.shape[1] // self._parts
        pool.run(lambda start, stop: self._backward(*given, start, stop), columns, _COLUMNS_A_THREAD)
        return to_queries


@summing_kernel
def _dot_forward(
    queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int
) -> None:
    for q in range(start, stop):
        query, group = queries[q], places[q]
        for k in range(len(group)):
            row, total = rows[group[k]], np.float32(0)
            for j in range(len(row)):
                total += query[j] * row[j]
            scores[q, k] = total


@summing_kernel
def _dot_backward(
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
    for q in range(len(queries)):
        query, to_query = queries[q, start:stop], query_gradients[q, start:stop]
        for k in range(places.shape[1]):
            g = score_gradients[q, k]
            if g != np.float32(0):
                row, to_row = rows[places[q, k], start:stop], row_gradients[row_places[q, k], start:stop]
                for j in range(stop - start):
                    to_query[j] += g * row[j]
                    to_row[j] += g * query[j]


def dot() -> Comparison:
    """`q . e`."""
    return Comparison(_dot_forward, _dot_backward, lambda queries, highest, norm: np.abs(queries) @ highest, 1)


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


@dataclass(frozen=True, slots=True)
class Distance:
    """Minus the norm 1 or 2 of the vector of `term`s of a pair.

    Attributes:
        term, spread: The same functions at each use, as kernels are compiled once for each.
        size: As of `Comparison`.
        query_parts, row_parts: Into how many equal parts queries and rows are cut for them.
        blocks: Queries and rows are first cut into as many blocks, whose norms are added.
    """

    term: Term
    spread: Spread
    size: Size
    query_parts: int
    row_parts: int
    blocks: int = 1

    def by(self, norm: int) -> Comparison:
        """Raises BadInput for another norm than 1 or 2."""
        return Comparison(*_distance_kernels(self), self.size, self.blocks * self.row_parts, norm)


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
def _distance_kernels(kind: Distance) -> tuple[Callable[..., None], Callable[..., None]]:
    term, spread = summing_inlined(kind.term), summing_inlined(kind.spread)
    query_parts, row_parts, blocks = kind.query_parts, kind.row_parts, kind.blocks
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


# Minus a distance of a query from its candidates: of vectors, complex numbers, linear forms, points from boxes


def _difference(query: Columns, row: Columns, j: int) -> np.float32:
    x: np.float32 = query[0][j] - row[0][j]
    return x


def _spread_difference(
    query: Columns, row: Columns, to_query: Columns, to_row: Columns, j: int, step: np.float32
) -> None:
    to_query[0][j] += step
    to_row[0][j] -= step


def _difference_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    return length(np.abs(queries) + highest, norm)


DIFFERENCE = Distance(_difference, _spread_difference, _difference_size, 1, 1)
"""`-|q - e|`; a query is as wide as a row."""


def _modulus_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    real, imaginary = np.split(np.abs(queries) + highest, 2, axis=1)
    found: Float64 = np.hypot(real, imaginary).sum(axis=1)
    return found


def _modulus(query: Columns, row: Columns, j: int) -> np.float32:
    x = query[0][j] - row[0][j]
    y = query[1][j] - row[1][j]
    size: np.float32 = np.sqrt(x * x + y * y)
    return size


def _spread_modulus(query: Columns, row: Columns, to_query: Columns, to_row: Columns, j: int, step: np.float32) -> None:
    x = query[0][j] - row[0][j]
    y = query[1][j] - row[1][j]
    size = np.sqrt(x * x + y * y)
    share = step / size if size > np.float32(0) else np.float32(0)
    to_query[0][j] += share * x
    to_query[1][j] += share * y
    to_row[0][j] -= share * x
    to_row[1][j] -= share * y


MODULUS = Distance(_modulus, _spread_modulus, _modulus_size, 2, 2)
"""`-sum |q_j - e_j|` over complex numbers, by the norm 1: all real parts of a row, then all imaginary ones.

The modulus of each complex difference, as in RotatE (Sun et al., 2019), not the sum of the sizes of its two parts.
"""


def _affine(query: Columns, row: Columns, j: int) -> np.float32:
    a, b = query
    x: np.float32 = a[j] + b[j] * row[0][j]
    return x


def _spread_affine(query: Columns, row: Columns, to_query: Columns, to_row: Columns, j: int, step: np.float32) -> None:
    to_query[0][j] += step
    to_query[1][j] += step * row[0][j]
    to_row[0][j] += step * query[1][j]


def _affine_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    a, b = np.split(np.abs(queries), 2, axis=1)
    return length(a + b * highest, norm)


AFFINE = Distance(_affine, _spread_affine, _affine_size, 2, 1)
"""`-|a + b * e|`, elementwise; a query is `[a, b]`, twice as wide as a row."""


def _affine_of_two(query: Columns, row: Columns, j: int) -> np.float32:
    (a, b, c), (e, f) = query, row
    x: np.float32 = a[j] + b[j] * e[j] + c[j] * f[j]
    return x


def _spread_affine_of_two(
    query: Columns, row: Columns, to_query: Columns, to_row: Columns, j: int, step: np.float32
) -> None:
    to_query[0][j] += step
    to_query[1][j] += step * row[0][j]
    to_row[0][j] += step * query[1][j]
    to_query[2][j] += step * row[1][j]
    to_row[1][j] += step * query[2][j]


def _affine_size_of_two(queries: Float64, highest: Float64, norm: int) -> Float64:
    (a, b, c), (e, f) = np.split(np.abs(queries), 3, axis=1), np.split(highest, 2)
    return length(a + b * e + c * f, norm)


AFFINE_OF_TWO = Distance(_affine_of_two, _spread_affine_of_two, _affine_size_of_two, 3, 2)
"""`-|a + b * e + c * f|`, elementwise; a row is `[e, f]`, a query `[a, b, c]`."""


_SMALLEST = np.float32(1e-12)  # a row of zeros stays one


def to_unit_length(rows: Float32) -> Float32:
    """float32 `[n, d]`: each row divided by its Euclidean length."""
    units: Float32 = rows / _lengths(rows)
    return units


def unit_length_gradients(rows: Float32, gradients: Float32) -> Float32:
    """Of the rows `[n, d]`, of those of `to_unit_length(rows)`."""
    lengths = _lengths(rows)
    units = rows / lengths
    along = np.einsum("nd,nd->n", units, gradients)[:, None]
    found: Float32 = (gradients - units * along) / lengths
    return found


def _lengths(rows: Float32) -> Float32:
    lengths: Float32 = np.maximum(np.sqrt(np.einsum("nd,nd->n", rows, rows)), _SMALLEST)[:, None]
    return lengths


def _box_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    (x, v, y, w), (e, f) = np.split(np.abs(queries), 4, axis=1), np.split(highest, 2)
    return length((x + e + v) * (v + 1), norm) + length((y + f + w) * (w + 1), norm)


def _far(query: Columns, row: Columns, j: int) -> np.float32:
    size, width = abs(row[0][j] + query[0][j]), query[1][j]
    grown = width + np.float32(1)
    inside = size / grown
    outside = size * grown - np.float32(0.5) * width * (grown - np.float32(1) / grown)
    far: np.float32 = inside if size <= np.float32(0.5) * width else outside
    return far


def _spread_far(query: Columns, row: Columns, to_query: Columns, to_row: Columns, j: int, step: np.float32) -> None:
    zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
    z, width = row[0][j] + query[0][j], query[1][j]
    size, grown = abs(z), width + one
    inside = size <= half * width
    slope = one / grown if inside else grown
    by_width = -size / (grown * grown)
    if not inside:
        # minus the derivative of w (w + 1 - 1 / (w + 1)) / 2
        by_width = size - half * (grown - one / grown + width + width / (grown * grown))
    along = slope if z > zero else (-slope if z < zero else zero)
    to_row[0][j] += step * along
    to_query[0][j] += step * along
    to_query[1][j] += step * by_width


BOXES = Distance(_far, _spread_far, _box_size, 2, 1, blocks=2)
"""`-|D(e + x, v)| - |D(f + y, w)|`; a row is `[e, f]`, a query `[x, v, y, w]`.

`D(z, w)` is the distance of BoxE (Abboud et al., 2020) from the middle of a box of width w: `|z| / (w + 1)` inside,
that is where `|z| <= w / 2`, and `|z| (w + 1) - w (w + 1 - 1 / (w + 1)) / 2` outside.
"""
