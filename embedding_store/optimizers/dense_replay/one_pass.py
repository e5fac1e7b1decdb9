"""What Adam is used for most, in one pass over memory: rows read, and rows caught up and updated.

It holds where one polynomial of degree 3 stands for all steps missed,
as with Adam's usual betas, and beta_1 slot comes first, the divisor second.
"""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64
from elastable.embedding_store.native.kernel import (
    by_whole_lines,
    inlined,
    kernel,
    prefetch,
    prefetch_distance,
    prefetch_line,
)
from elastable.embedding_store.native.update_kernel import Scalars
from elastable.embedding_store.optimizers.dense_replay.replay_kernels import cubic, shrunk
from elastable.embedding_store.optimizers.fused.adam import adam_step

__all__ = ["read_cubic", "update_adam"]


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

    Arguments are as of `replay_kernels.move_rows`; the divisor's root divides.
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
            o[j] = w[j] * kept + m[j] * y * cubic(x * y, m0, m1, m2, m3)


def _adam_rows(
    dim: int,
    arguments: tuple[
        Float32, Int64, Float32, Int32, Int64, Float32, Int64, Float32, int, np.float32, np.float32, Scalars
    ],
) -> None:
    weights, places, slots, steps, positions, gradients, which, c, stamp, rate, decay, scalars = arguments
    epsilon, one = scalars[3], np.float32(1)
    far, end, last = prefetch_distance(dim), len(positions) - 1, slots.shape[1] - 1
    for i in range(len(positions)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        prefetch_line(slots, positions[min(i + far, end)], last)
        w, momenta, velocities = weights[places[i]], slots[positions[i], :dim], slots[positions[i], dim:]
        g, row = gradients[i], which[i]
        kept, factor_1, factor_2, centre = c[row, 0], c[row, 1], c[row, 2], c[row, 3]
        m0, m1, m2, m3 = c[row, 4], c[row, 5], c[row, 6], c[row, 7]
        for j in range(dim):
            x = np.sqrt(velocities[j]) * centre
            y = one / (x + epsilon)
            x = w[j] * kept + momenta[j] * y * cubic(x * y, m0, m1, m2, m3)
            m, v = shrunk(momenta[j], factor_1), shrunk(velocities[j], factor_2)
            w[j], momenta[j], velocities[j] = _step(x - x * decay * rate, g[j], m, v, rate, scalars)
        steps[positions[i], last] = stamp


_step = inlined(adam_step)
_adam = inlined(by_whole_lines(_adam_rows))


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
    scalars: Scalars,
) -> None:
    """Catches rows up, and takes Adam's step on them.

    Args:
        weights, places, slots, positions, which, coefficients: As of `replay_kernels.move_rows`, of all rows.
        steps: int32, the memory of the slots.
        gradients: float32 `[n, dim]`.
        stamp: The step that rows are caught up to then.
        rate, decay, scalars: As of `fused.update_kernel`, of Adam.
    """
    rows = (weights, places, slots, steps, positions, gradients)
    _adam(gradients.shape[1], (*rows, which, coefficients, stamp, rate, decay, scalars))
