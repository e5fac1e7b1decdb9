"""The rows of a table as of one step: caught up in place, or read as if they were; for Adam in one pass."""

from collections.abc import Callable

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int32, Int64, UInt8
from elastable.embedding_store.native.intrinsics import prefetch_line
from elastable.embedding_store.native.kernel import by_whole_lines, inlined, kernel, prefetch, prefetch_distance
from elastable.embedding_store.native.row_gather import gather, scatter_rows
from elastable.embedding_store.optimizers.base import DenseForm
from elastable.embedding_store.optimizers.dense_replay.replay_kernels import (
    CAUGHT_UP,
    OF_STEPS,
    UNTOUCHED,
    RowsBehind,
    cubic,
    move_rows,
    rows_behind,
    shrink_slots,
    shrunk,
    stamp_rows,
)
from elastable.embedding_store.optimizers.fused import Scalars, adam_step

PIECE_BYTES = 1 << 19
"""Of rows that are looked at first and moved then: they stay in the processor's second cache."""


class StepsAt:
    """Brings rows to one step of a replay epoch. Good until the table takes, forgets or restores steps.

    Attributes:
        step: The step that rows are brought to.
        kept: What decay has made of rows that were never updated: their initial values are multiplied by it.
        first: The step at which the replay epoch begins.
        coefficients, known: As of `elastable.embedding_store.optimizers.dense_replay.replay_kernels`.
        cubic: Whether one polynomial of degree 3, of a divisor's root, replaces all steps missed.
    """

    def __init__(
        self,
        form: DenseForm,
        degree: int,
        first: int,
        step: int,
        kept: float,
        room: tuple[Float32, UInt8],
        fill: "Callable[[StepsAt, Int64], None]",
        before: "tuple[StepsAt, ...]" = (),
    ) -> None:
        """Coefficients of no step are known yet.

        Args:
            form, degree, first, step, kept: See the class, and `Segments`.
            room: `coefficients` and `known`, at least a row for each step and one; they hold anything.
            fill: Writes those of the rows of coefficients that it is given which are missing.
            before: The ends of the replay epochs before this one, the oldest first: each ends where the next one
                begins.
        """
        self.step, self.kept, self.first = step, np.float32(kept), first
        self.coefficients, self.known = room
        self.known[: OF_STEPS + step - first] = 0
        for row, factor in ((UNTOUCHED, self.kept), (CAUGHT_UP, np.float32(1))):
            self.coefficients[row] = 0.0
            self.coefficients[row, 0], self.coefficients[row, 1 : 1 + len(form.factors)] = factor, 1.0
            self.known[row] = 1
        self._fill, self._before = fill, before
        self._form, self._degree = form, degree
        self._factors = len(form.factors)
        self.cubic = degree == 3 and form.root and self.coefficients.shape[1] == 1 + self._factors + 5

    def replay(
        self, weights: Float32, places: Int64, slots: Float32, positions: Int64, stamp: int | None = None
    ) -> None:
        """Brings rows to this step, in place.

        Args:
            weights: float32 `[some rows, dim]`, C-contiguous.
            places: int64 `[n]`, of the rows in `weights`.
            slots: float32 `[other rows, width]`, C-contiguous, the step last.
            positions: int64 `[n]`, of the rows in `slots`.
            stamp: The step that they get; None: this one.
        """
        behind, which = self.reach(weights, places, slots, positions)
        if behind:
            late = np.flatnonzero(which != CAUGHT_UP) if behind < len(which) else slice(None)
            there, here, of = places[late], positions[late], which[late]
            move_rows((weights, there, slots, here, of, self.coefficients), self._form, self._degree)
            shrink_slots(slots, here, of, self.coefficients, weights.shape[1], self._factors)
        stamp_rows(slots.view(np.int32), positions, self.step if stamp is None else stamp)

    def reach(self, weights: Float32, places: Int64, slots: Float32, positions: Int64) -> tuple[int, Int64]:
        """Brings rows of older replay epochs to the step at which this one begins, in place; arguments as of
        `replay`.

        Returns:
            How many rows are behind all the same, and the row of the
            coefficients of each, int64 `[n]`; all of them are known now.
        """
        behind, which, older = self._learn(slots, positions)
        if older:
            self._end_replay_epochs(weights, places, slots, positions)
            behind, which, _ = self._learn(slots, positions)
        return behind, which

    def read(self, weights: Float32, slots: Float32, positions: Int64, out: Float32) -> None:
        """out[i] = the weights at positions[i] as of this step.

        Args:
            weights: float32 `[rows, dim]`, C-contiguous.
            slots: float32 `[rows, width]`, C-contiguous, the step last.
            positions: int64 `[n]`, none of them negative.
            out: float32 `[n, dim]`, C-contiguous.
        """
        older = 0
        if self.cubic:
            _, which, older = self._learn(slots, positions)
            if older < len(positions):
                form = self._form.moving, self._form.divisor, np.float32(self._form.epsilon)
                every = weights, positions, slots, positions, which, self.coefficients
                read_cubic(every, out, 1 + self._factors, *form)
        else:
            rows = _rows_of_a_piece(weights, slots)
            for start in range(0, len(positions), rows):
                here, some = positions[start : start + rows], out[start : start + rows]
                gather(weights, here, some, stream=False)
                behind, which, left = self._learn(slots, here)
                older += left
                if behind:
                    late = np.flatnonzero(which != CAUGHT_UP)
                    of = which[late]
                    move_rows((some, late, slots, here[late], of, self.coefficients), self._form, self._degree)
        if older:
            self._read_older(weights, slots, positions, out)

    def _read_older(self, weights: Float32, slots: Float32, positions: Int64, out: Float32) -> None:
        """As `read`, of the rows of older replay epochs alone."""
        older = np.flatnonzero(self._is_older(_stamps(slots, positions)))
        rows = _rows_of_a_piece(weights, slots)
        for start in range(0, len(older), rows):
            some = older[start : start + rows]
            here, order = positions[some], np.arange(len(some))
            copies = np.empty((len(some), weights.shape[1]), np.float32)
            their_slots = np.empty((len(some), slots.shape[1]), np.float32)
            gather(weights, here, copies, stream=False)
            gather(slots, here, their_slots, stream=False)
            self._end_replay_epochs(copies, order, their_slots, order)
            self.read(copies, their_slots, order, found := np.empty_like(copies))
            scatter_rows(found, some, out)

    def _end_replay_epochs(self, weights: Float32, places: Int64, slots: Float32, positions: Int64) -> None:
        """Brings rows of older replay epochs to the end of each of them in turn, in place; arguments as of
        `replay`."""
        stamps = _stamps(slots, positions)
        older = np.flatnonzero(self._is_older(stamps))
        stamps = stamps[older]
        oldest = int(stamps.min(initial=self.first))
        for end in self._before:
            if end.step > oldest and len(some := older[stamps < end.step]):
                end.replay(weights, places[some], slots, positions[some])

    def _is_older(self, stamps: Int32) -> npt.NDArray[np.bool_]:
        older: npt.NDArray[np.bool_] = (stamps > 0) & (stamps < self.first)
        return older

    def _learn(self, slots: Float32, positions: Int64) -> tuple[int, Int64, int]:
        """As `reach` returns it, and how many rows of older replay epochs there are, which count as caught up."""
        which = np.empty(len(positions), np.int64)
        behind, missing, older = rows_behind(slots.view(np.int32), positions, self.known, self.first, self.step, which)
        if missing:
            self._fill(self, which)
        return behind, which, older


def _stamps(slots: Float32, positions: Int64) -> Int32:
    """int32 `[n]`: the steps that rows are caught up to."""
    stamps: Int32 = slots.view(np.int32)[positions, slots.shape[1] - 1]
    return stamps


def _rows_of_a_piece(weights: Float32, slots: Float32) -> int:
    columns: int = weights.shape[1] + slots.shape[1]
    return max(64, PIECE_BYTES // (4 * columns))


# What Adam is used for most, in one pass over memory: rows read, and rows caught up and updated


@kernel
def read_cubic(behind: RowsBehind, out: Float32, at: int, moving: int, divisor: int, epsilon: np.float32) -> None:
    """out[i] = the weights of rows as of the step of the coefficients, whose segments begin in column `at`.

    Other arguments are as of `DenseForm`; the divisor's root divides.
    """
    weights, places, slots, positions, which, c = behind
    dim, one = weights.shape[1], np.float32(1)
    far, end, last = prefetch_distance(dim), len(positions) - 1, slots.shape[1] - 1
    for i in range(len(positions)):
        prefetch(weights, places[min(i + far, end)])
        prefetch(slots, positions[min(i + far, end)])
        prefetch_line(slots, positions[min(i + far, end)], last)
        p, row = positions[i], which[i]
        w, m = weights[places[i]], slots[p, moving * dim : (moving + 1) * dim]
        v, o = slots[p, divisor * dim : (divisor + 1) * dim], out[i]
        kept, centre = c[row, 0], c[row, at]
        m0, m1, m2, m3 = c[row, at + 1], c[row, at + 2], c[row, at + 3], c[row, at + 4]
        for j in range(dim):
            x = np.sqrt(v[j]) * centre
            y = one / (x + epsilon)
            o[j] = w[j] * kept + m[j] * y * cubic(x * y, m0, m1, m2, m3)


_AdamArguments = tuple[
    Float32, Int64, Float32, Int32, Int64, Float32, Int64, Float32, int, np.float32, np.float32, Scalars
]


def _adam_rows(dim: int, arguments: _AdamArguments) -> None:
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
update_adam = kernel(by_whole_lines(_adam_rows))
"""Catches rows up, and takes Adam's step on them: `update_adam(dim, arguments)`.

The arguments, as a tuple:
    weights, places, slots: As of `replay_kernels.RowsBehind`, of all rows.
    steps: int32, the memory of the slots.
    positions: As of `RowsBehind`.
    gradients: float32 `[n, dim]`.
    which, coefficients: As of `RowsBehind`.
    stamp: The step that rows are caught up to then.
    rate, decay, scalars: As of `UpdateKernel`, of Adam.
"""
