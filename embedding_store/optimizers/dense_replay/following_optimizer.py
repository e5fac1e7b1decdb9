"""A fused optimizer whose rows have followed every step of their table when it updates them."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec
from elastable.embedding_store.optimizers.dense_replay.steps_at import PIECE_BYTES, update_adam
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.optimizers.fused.adam import Adam

__all__ = ["CatchUpOptimizer", "stamped"]


class CatchUpOptimizer(RowOptimizer):
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

    def apply(self, weights: Float32, slots: Float32, batch: UpdateBatch) -> None:
        """The rows have followed this step too afterwards."""
        present = self._steps.at()
        stamp = present.step + 1
        if self._adam is not None and present.cubic:
            rows = (weights, batch.weight_positions, slots)
            _, which = present.reach(*rows, batch.positions)
            rate, (decay,) = np.float32(batch.rate), self._adam.single("weight_decay")
            table, scalars = (which, present.coefficients, stamp), (rate, decay, self._adam.scalars(batch.step, rate))
            update_adam(*rows, slots.view(np.int32), batch.positions, batch.gradients, *table, *scalars)
            return
        many = max(64, PIECE_BYTES // (4 * (weights.shape[1] + slots.shape[1])))
        for start in range(0, len(batch), many):
            piece = batch.part(start, start + many)
            present.catch_up(weights, piece.weight_positions, slots, piece.positions, stamp)
            self._inner.apply(weights, slots, piece)


def stamped(slots: Float32, step: int) -> Float32:
    """Slots float32 `[n, width]` as a table keeps them, float32 `[n, width + 1]`, caught up to a step."""
    kept = np.empty((len(slots), slots.shape[1] + 1), np.float32)
    kept[:, :-1] = slots
    kept.view(np.int32)[:, -1] = step
    return kept
