"""A fused optimizer whose rows have followed every step of their table when it updates them."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.optimizers.base import FusedOptimizer, RowOptimizer, SlotSpec
from elastable.embedding_store.optimizers.dense_replay.one_pass import update_adam
from elastable.embedding_store.optimizers.dense_replay.steps_at import PIECE_BYTES
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.optimizers.fused.adam import Adam

__all__ = ["CatchUpOptimizer", "stamped"]


class CatchUpOptimizer(FusedOptimizer):
    """Another optimizer's step on rows that are brought to the present first.

    Beside the other's slots a row has one more, the last: the step up to which
    it is caught up, an int32 whose bits lie in a float32; 0 of a row that was
    never updated. It is seen by nobody but the table.

    Args:
        inner: The optimizer; its kernels look at the slots that they know, whatever comes after them.
        steps: Of the table.
    """

    def __init__(self, inner: RowOptimizer, steps: TableSteps) -> None:
        self._inner, self._steps = inner, steps
        self.spec, self.hyperparameters = inner.spec, inner.hyperparameters
        self.default_learning_rate = inner.default_learning_rate
        self.cross_column, self.whole_rows = inner.cross_column, inner.whole_rows
        # In one pass over memory, where that is written down.
        self._adam = inner if isinstance(inner, Adam) and len(inner.slots) == 2 else None
        self.slots = (*inner.slots, SlotSpec("caught_up", columns=1))

    def apply_apart(
        self,
        weights: Float32,
        places: Int64,
        slots: Float32,
        positions: Int64,
        gradients: Float32,
        squares: Float32 | None,
        step: int,
        learning_rate: float,
    ) -> None:
        """As in `RowOptimizer.apply_apart`; the rows have followed this step, too, then."""
        present = self._steps.at()
        if self._adam is not None and present.cubic:
            _, which = present.reach(weights, places, slots, positions)
            steps, table = slots.view(np.int32), (which, present.coefficients, present.step + 1)
            scalars = self._adam.scalars(step, learning_rate)
            update_adam(weights, places, slots, steps, positions, gradients, *table, *scalars)
            return
        rows = max(64, PIECE_BYTES // (4 * (weights.shape[1] + slots.shape[1])))
        for start in range(0, len(positions), rows):
            piece = slice(start, start + rows)
            there, here = places[piece], positions[piece]
            given = None if squares is None else squares[piece]
            present.catch_up(weights, there, slots, here, present.step + 1)
            self._inner.apply_apart(weights, there, slots, here, gradients[piece], given, step, learning_rate)


def stamped(slots: Float32, step: int) -> Float32:
    """Slots float32 `[n, width]` as a table keeps them, float32 `[n, width + 1]`, caught up to a step."""
    kept = np.empty((len(slots), slots.shape[1] + 1), np.float32)
    kept[:, :-1] = slots
    kept.view(np.int32)[:, -1] = step
    return kept
