"""Minus how far two points lie from two boxes (BoxE)."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Float64, Int64
from elastable.embedding_store.native.kernel import summing_inlined, summing_kernel
from elastable.replicas.knowledge_graphs.scores.kernels.comparison import KernelComparison, length

__all__ = ["boxes"]


def boxes(norm: int) -> KernelComparison:
    """`-|D(e + x, v)| - |D(f + y, w)|`; a row is `[e, f]`, a query `[x, v, y, w]`.

    `D(z, w)` is the distance of BoxE (Abboud et al., 2020) from the middle of a
    box of width w: `|z| / (w + 1)` inside, that is where `|z| <= w / 2`, and
    `|z| (w + 1) - w (w + 1 - 1 / (w + 1)) / 2` outside.

    Raises:
        BadInput: another norm than 1 or 2.
    """
    return KernelComparison(_forward, _backward, _size, 2, norm)


def _size(queries: Float64, highest: Float64, norm: int) -> Float64:
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
def _length(points: Float32, middles: Float32, widths: Float32, norm: int) -> np.float32:
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
def _forward(queries: Float32, rows: Float32, places: Int64, scores: Float32, norm: int, start: int, stop: int) -> None:
    dim = rows.shape[1] // 2
    each = len(queries) // len(places)
    for q in range(start, stop):
        x, v, y, w = queries[q, :dim], queries[q, dim : 2 * dim], queries[q, 2 * dim : 3 * dim], queries[q, 3 * dim :]
        group = places[q // each]
        for k in range(len(group)):
            row = rows[group[k]]
            scores[q, k] = -_length(row[:dim], x, v, norm) - _length(row[dim:], y, w, norm)


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
                    length = _length(points, middles, widths, norm)
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
