"""What Adam is used for most, in one pass over memory: rows read, and rows caught up and updated.

The arithmetic is that of `kernels` and of `elastable.embedding_store.optimizers.fused.adam`, value by
value. It holds where one polynomial of degree 3 stands for all steps missed,
as with Adam's usual betas, and beta_1 slot comes first, the divisor second.
"""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.native.kernel import inlined, kernel, prefetch, prefetch_distance, prefetch_line
from elastable.embedding_store.optimizers.dense_replay.replay_kernels import Int32

__all__ = ["read_cubic", "update_adam"]

_SMALLEST = np.float32(1.2e-38)


@kernel
def read_cubic(
    weights: Float32,
    slots: Float32,
    positions: Int64,
    which: Int64,
    out: Float32,
    coefficients: Float32,
    factors: int,
    moving: int,
    divisor: int,
    root: bool,
    epsilon: np.float32,
) -> None:
    """out[i] = the weights at positions[i], none of which is negative, as of the step of the coefficients.

    Arguments are as of `kernels.move_rows`; the divisor's root divides.
    """
    c, at, dim, one = coefficients, 1 + factors, weights.shape[1], np.float32(1)
    far, end, last = prefetch_distance(dim), len(positions) - 1, slots.shape[1] - 1
    for i in range(len(positions)):
        prefetch(weights, positions[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        prefetch_line(slots, positions[min(i + far, end)], last)
        p, row = positions[i], which[i]
        w, m = weights[p], slots[p, moving * dim : (moving + 1) * dim]
        v, o = slots[p, divisor * dim : (divisor + 1) * dim], out[i]
        kept, centre = c[row, 0], c[row, at]
        m0, m1, m2, m3 = c[row, at + 1], c[row, at + 2], c[row, at + 3], c[row, at + 4]
        for j in range(dim):
            x = np.sqrt(v[j]) * centre
            y = one / (x + epsilon)
            u = x * y
            o[j] = w[j] * kept + m[j] * y * (m0 - u * (m1 - u * (m2 - u * m3)))


@inlined
def _adam_rows(
    weights: Float32,
    places: Int64,
    slots: Float32,
    steps: Int32,
    positions: Int64,
    gradients: Float32,
    which: Int64,
    c: Float32,
    stamp: int,
    dim: int,
    rate: np.float32,
    decay: np.float32,
    alpha: np.float32,
    share_1: np.float32,
    share_2: np.float32,
    epsilon: np.float32,
) -> None:
    one, zero = np.float32(1), np.float32(0)
    far, end, last = prefetch_distance(dim), len(positions) - 1, slots.shape[1] - 1
    for i in range(len(positions)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        prefetch_line(slots, positions[min(i + far, end)], last)
        w = weights[places[i]]
        momenta = slots[positions[i], :dim]
        velocities = slots[positions[i], dim:]
        g, row = gradients[i], which[i]
        kept, factor_1, factor_2, centre = c[row, 0], c[row, 1], c[row, 2], c[row, 3]
        m0, m1, m2, m3 = c[row, 4], c[row, 5], c[row, 6], c[row, 7]
        for j in range(dim):
            y = one / (np.sqrt(velocities[j]) * centre + epsilon)
            u = np.sqrt(velocities[j]) * centre * y
            x = w[j] * kept + momenta[j] * y * (m0 - u * (m1 - u * (m2 - u * m3)))
            m, v = momenta[j] * factor_1, velocities[j] * factor_2
            m = m if abs(m) > _SMALLEST else zero
            v = v if abs(v) > _SMALLEST else zero
            m = m + (g[j] - m) * share_1
            v = v + (g[j] * g[j] - v) * share_2
            momenta[j] = m
            velocities[j] = v
            x = x - x * decay * rate
            w[j] = x - m * alpha / (np.sqrt(v) + epsilon)
        steps[positions[i], last] = stamp


@kernel
def update_adam(
    weights: Float32,
    places: Int64,
    slots: Float32,
    steps: Int32,
    positions: Int64,
    gradients: Float32,
    which: Int64,
    coefficients: Float32,
    stamp: int,
    rate: np.float32,
    decay: np.float32,
    alpha: np.float32,
    share_1: np.float32,
    share_2: np.float32,
    epsilon: np.float32,
) -> None:
    """Catches rows up, and takes Adam's step on them.

    Args:
        weights, places, slots, positions, which, coefficients: As of `kernels.move_rows`, of all rows.
        steps: int32, the memory of the slots.
        gradients: float32 `[n, dim]`.
        stamp: The step that rows are caught up to then.
        rate, decay, alpha, share_1, share_2, epsilon: As of `fused.adam`.
    """
    dim, c = gradients.shape[1], coefficients
    p, g, e = positions, gradients, epsilon
    if dim == 64:
        _adam_rows(weights, places, slots, steps, p, g, which, c, stamp, 64, rate, decay, alpha, share_1, share_2, e)
    else:
        _adam_rows(weights, places, slots, steps, p, g, which, c, stamp, dim, rate, decay, alpha, share_1, share_2, e)
