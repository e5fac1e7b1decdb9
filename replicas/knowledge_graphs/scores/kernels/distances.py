"""Minus a distance of a query from its candidates: of vectors, complex numbers, linear forms, points from boxes."""

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.native.kernel import summing_inlined, summing_kernel
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import Comparison, length, pair_comparison


def distance(norm: int) -> Comparison:
    """`-|q - e|` by the norm 1 or 2; a query is as wide as a row."""
    return pair_comparison(
        _distance_score, _distance_add, lambda queries, highest, norm: length(np.abs(queries) + highest, norm), 1, norm
    )


def _distance_score(query: Float32, row: Float32, norm: int) -> np.float32:
    total = np.float32(0)
    if norm == 1:
        for j in range(len(row)):
            total += abs(query[j] - row[j])
    else:
        for j in range(len(row)):
            total += (query[j] - row[j]) * (query[j] - row[j])
        total = np.sqrt(total)
    return -total


def _distance_add(
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


def modulus() -> Comparison:
    """`-sum |q_j - e_j|` over complex numbers: all real parts of a row, then all imaginary ones.

    The modulus of each complex difference, as in RotatE (Sun et al., 2019), not
    the sum of the absolute values of its two parts.
    """
    return pair_comparison(_modulus_score, _modulus_add, _modulus_size, 2)


def _modulus_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    real, imaginary = np.split(np.abs(queries) + highest, 2, axis=1)
    found: Float64 = np.hypot(real, imaginary).sum(axis=1)
    return found


def _modulus_score(query: Float32, row: Float32, norm: int) -> np.float32:
    half, total = len(row) // 2, np.float32(0)
    real, imaginary, row_real, row_imaginary = query[:half], query[half:], row[:half], row[half:]
    for j in range(half):
        x = real[j] - row_real[j]
        y = imaginary[j] - row_imaginary[j]
        total += np.sqrt(x * x + y * y)
    return -total


def _modulus_add(
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


def affine(norm: int) -> Comparison:
    """`-|a + b * e|`, elementwise; a query is `[a, b]`, twice as wide as a row."""
    return pair_comparison(_affine_score, _affine_add, _affine_size, 1, norm)


def affine_of_two(norm: int) -> Comparison:
    """`-|a + b * e + c * f|`, elementwise; a row is `[e, f]`, a query `[a, b, c]`."""
    return Comparison(_affine_forward_of_two, _affine_backward_of_two, _affine_size_of_two, 2, norm)


def _affine_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    a, b = np.split(np.abs(queries), 2, axis=1)
    return length(a + b * highest, norm)


def _affine_size_of_two(queries: Float64, highest: Float64, norm: int) -> Float64:
    (a, b, c), (e, f) = np.split(np.abs(queries), 3, axis=1), np.split(highest, 2)
    return length(a + b * e + c * f, norm)


def _affine_score(query: Float32, row: Float32, norm: int) -> np.float32:
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


def _affine_add(
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
def _affine_forward_of_two(
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
def _affine_backward_of_two(
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
    return Comparison(_box_forward, _box_backward, _box_size, 2, norm)


def _box_size(queries: Float64, highest: Float64, norm: int) -> Float64:
    (x, v, y, w), (e, f) = np.split(np.abs(queries), 4, axis=1), np.split(highest, 2)
    return length((x + e + v) * (v + 1), norm) + length((y + f + w) * (w + 1), norm)


@summing_inlined
def _far(z: np.float32, width: np.float32) -> np.float32:
    size = abs(z)
    grown = width + np.float32(1)
    inside = size / grown
    outside = size * grown - np.float32(0.5) * width * (grown - np.float32(1) / grown)
    return inside if size <= np.float32(0.5) * width else outside


@summing_inlined
def _box_length(points: Float32, middles: Float32, widths: Float32, norm: int) -> np.float32:
    total = np.float32(0)
    if norm == 1:
        for j in range(len(points)):
            total += _far(points[j] + middles[j], widths[j])
    else:
        for j in range(len(points)):
            x = _far(points[j] + middles[j], widths[j])
            total += x * x
        total = np.sqrt(total)
    return total


@summing_kernel
def _box_forward(
    queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int
) -> None:
    dim = rows.shape[1] // 2
    each = len(queries) // len(places)
    for q in range(start, stop):
        x, v, y, w = queries[q, :dim], queries[q, dim : 2 * dim], queries[q, 2 * dim : 3 * dim], queries[q, 3 * dim :]
        group = places[q // each]
        for k in range(len(group)):
            row = rows[group[k]]
            scores[q, k] = -_box_length(row[:dim], x, v, norm) - _box_length(row[dim:], y, w, norm)


@summing_kernel
def _box_backward(
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
    dim = rows.shape[1] // 2
    each = len(queries) // len(places)
    zero, half, one = np.float32(0), np.float32(0.5), np.float32(1)
    for q in range(len(queries)):
        group = places[q // each]
        targets = row_places[q // each]
        for k in range(len(group)):
            g = score_gradients[q, k]
            if g == zero:
                continue
            for part in range(2):
                points = rows[group[k], part * dim : part * dim + dim]
                middles = queries[q, 2 * part * dim : 2 * part * dim + dim]
                widths = queries[q, (2 * part + 1) * dim : (2 * part + 2) * dim]
                to_point = row_gradients[targets[k], part * dim : part * dim + dim]
                to_middle = query_gradients[q, 2 * part * dim : 2 * part * dim + dim]
                to_width = query_gradients[q, (2 * part + 1) * dim : (2 * part + 2) * dim]
                share = -g
                if norm == 2:
                    length = _box_length(points, middles, widths, norm)
                    share = -g / length if length > zero else zero
                for j in range(start, stop):
                    z, width = points[j] + middles[j], widths[j]
                    size, grown = abs(z), width + one
                    inside = size <= half * width
                    step = share if norm == 1 else share * _far(z, width)
                    slope = one / grown if inside else grown
                    by_width = -size / (grown * grown)
                    if not inside:
                        # minus the derivative of w (w + 1 - 1 / (w + 1)) / 2
                        by_width = size - half * (grown - one / grown + width + width / (grown * grown))
                    along = slope if z > zero else (-slope if z < zero else zero)
                    to_point[j] += step * along
                    to_middle[j] += step * along
                    to_width[j] += step * by_width
