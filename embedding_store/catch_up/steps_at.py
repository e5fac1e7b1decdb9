"""The rows of a table as of one step: caught up in place, or read as if they were."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from embedding_store.catch_up.coefficients import Bytes
from embedding_store.catch_up.dense_form import DenseForm
from embedding_store.catch_up.kernels import (
    CAUGHT_UP,
    OF_STEPS,
    UNTOUCHED,
    move_rows,
    rows_behind,
    shrink_slots,
    stamp_rows,
)
from embedding_store.catch_up.one_pass import read_cubic
from embedding_store.memory.row_gather import gather
from embedding_store.store import Float32, Int64

__all__ = ["PIECE_BYTES", "StepsAt"]

PIECE_BYTES = 1 << 19
"""Of rows that are looked at first and moved then: they stay in the processor's second cache."""


class StepsAt:
    """Brings rows to one step. Good until the table takes, forgets or restores steps.

    Attributes:
        step: The step that rows are brought to.
        kept: What decay has made of rows that were never updated: their initial values are multiplied by it.
        first: The oldest step that is remembered.
        coefficients, known: As of `embedding_store.catch_up.kernels`.
        cubic: Whether one polynomial of degree 3, of a divisor's root, stands for all steps missed.
    """

    def __init__(
        self,
        form: DenseForm,
        degree: int,
        first: int,
        step: int,
        kept: float,
        room: tuple[Float32, Bytes],
        fill: Callable[[StepsAt, Int64], None],
    ) -> None:
        """Coefficients of no step are known yet.

        Args:
            form, degree, first, step, kept: See the class, and `Segments`.
            room: `coefficients` and `known`, at least a row for each step and one; they hold anything.
            fill: Writes those of the rows of coefficients that it is given which are missing.
        """
        self.step, self.kept, self.first = step, np.float32(kept), first
        self.coefficients, self.known = room
        self.known[: OF_STEPS + step - first] = 0
        for row, factor in ((UNTOUCHED, self.kept), (CAUGHT_UP, np.float32(1))):
            self.coefficients[row] = 0.0
            self.coefficients[row, 0], self.coefficients[row, 1 : 1 + len(form.factors)] = factor, 1.0
            self.known[row] = 1
        self._fill = fill
        self._scalars = (form.moving, form.divisor, form.root, np.float32(form.epsilon), degree)
        self._factors = len(form.factors)
        self.cubic = degree == 3 and form.root and self.coefficients.shape[1] == 1 + self._factors + 5

    def catch_up(
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
        behind, which = self.learn(slots, positions)
        if behind:
            late = np.flatnonzero(which != CAUGHT_UP) if behind < len(which) else slice(None)
            there, here, of = places[late], positions[late], which[late]
            move_rows(weights, there, slots, here, of, self.coefficients, self._factors, *self._scalars)
            shrink_slots(slots, here, of, self.coefficients, weights.shape[1], self._factors)
        stamp_rows(slots.view(np.int32), positions, self.step if stamp is None else stamp)

    def read(self, weights: Float32, slots: Float32, positions: Int64, out: Float32) -> None:
        """out[i] = the weights at positions[i] as of this step.

        Args:
            weights: float32 `[rows, dim]`, C-contiguous.
            slots: float32 `[rows, width]`, C-contiguous, the step last.
            positions: int64 `[n]`, none of them negative.
            out: float32 `[n, dim]`, C-contiguous.
        """
        if self.cubic:
            _, which = self.learn(slots, positions)
            read_cubic(weights, slots, positions, which, out, self.coefficients, self._factors, *self._scalars[:4])
            return
        rows = max(64, PIECE_BYTES // (4 * (weights.shape[1] + slots.shape[1])))
        for start in range(0, len(positions), rows):
            here, some = positions[start : start + rows], out[start : start + rows]
            gather(weights, here, some, stream=False)
            behind, which = self.learn(slots, here)
            if behind:
                late = np.flatnonzero(which != CAUGHT_UP)
                of = which[late]
                move_rows(some, late, slots, here[late], of, self.coefficients, self._factors, *self._scalars)

    def learn(self, slots: Float32, positions: Int64) -> tuple[int, Int64]:
        """How many rows are behind, and the row of the coefficients of each, int64 `[n]`; all of them are known now."""
        which = np.empty(len(positions), np.int64)
        behind, missing = rows_behind(slots.view(np.int32), positions, self.known, self.first, self.step, which)
        if missing:
            self._fill(self, which)
        return behind, which
