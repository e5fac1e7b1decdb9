"""Minus a distance of a query from its candidates: of vectors, complex numbers, linear forms, points from boxes."""

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import (
    Columns,
    Comparison,
    distance_comparison,
    length,
)


def distance(norm: int) -> Comparison:
    """`-|q - e|` by the norm 1 or 2; a query is as wide as a row."""
    return distance_comparison(_difference, _spread_difference, 1, 1, _difference_size, norm)


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


def modulus() -> Comparison:
    """`-sum |q_j - e_j|` over complex numbers: all real parts of a row, then all imaginary ones.

    The modulus of each complex difference, as in RotatE (Sun et al., 2019), not
    the sum of the absolute values of its two parts.
    """
    return distance_comparison(_modulus, _spread_modulus, 2, 2, _modulus_size, 1)


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


def affine(norm: int) -> Comparison:
    """`-|a + b * e|`, elementwise; a query is `[a, b]`, twice as wide as a row."""
    return distance_comparison(_affine, _spread_affine, 2, 1, _affine_size, norm)


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


def affine_of_two(norm: int) -> Comparison:
    """`-|a + b * e + c * f|`, elementwise; a row is `[e, f]`, a query `[a, b, c]`."""
    return distance_comparison(_affine_of_two, _spread_affine_of_two, 3, 2, _affine_size_of_two, norm)


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


def boxes(norm: int) -> Comparison:
    """`-|D(e + x, v)| - |D(f + y, w)|`; a row is `[e, f]`, a query `[x, v, y, w]`.

    `D(z, w)` is the distance of BoxE (Abboud et al., 2020) from the middle of a box of width w: `|z| / (w + 1)` inside,
    that is where `|z| <= w / 2`, and `|z| (w + 1) - w (w + 1 - 1 / (w + 1)) / 2` outside.
    """
    return distance_comparison(_far, _spread_far, 2, 1, _box_size, norm, blocks=2)


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
