"""Rows of a table that follow every step: caught up as they are updated, and seen as if they were."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.table_rows import MakeRows, TableRows
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.row_gather import scatter_rows
from elastable.embedding_store.native.slab import Slab
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.dense_replay.following_optimizer import CatchUpOptimizer, stamped
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps

__all__ = ["ReplayedRows", "replayed_rows"]


class ReplayedRows(TableRows):
    """Other rows, with the slot that says up to which step each is caught up.

    What is read (`read`, `block`) is of the present, and nothing is written by
    reading it. What is written is taken to be of the present. The slot is seen
    in what `copy` gives alone.

    Args:
        inner: The rows, whose optimizer is a `CatchUpOptimizer`.
        steps: Of the table.
        step: The one to read as of; None: the present one.
    """

    def __init__(self, inner: TableRows, steps: TableSteps, step: int | None = None) -> None:
        self._inner, self._steps, self._step = inner, steps, step
        # Where moments alone decay, weights are what lies there, and are read as any others.
        self._moving = steps.form.moves_weights

    def as_of(self, step: int | None) -> ReplayedRows:
        """The same rows, to be read as of a step that is remembered."""
        return ReplayedRows(self._inner, self._steps, step)

    @property
    def plain(self) -> Float32 | None:
        return None if self._moving else self._inner.plain

    def slabs(self) -> tuple[Slab, ...] | None:
        """As in `TableRows.slabs`: none where whoever reads has to know of steps."""
        return None if self._moving else self._inner.slabs()

    @property
    def untouched(self) -> np.float32:
        return self._steps.at(self._step).kept

    @property
    def follows(self) -> bool:
        return True

    def grow(self, rows: int) -> None:
        self._inner.grow(rows)

    def allocate(self, positions: Int64) -> None:
        self._inner.allocate(positions)

    def prepare(self, positions: Int64, fresh: Int64, pool: RangePool) -> Int64 | None:
        return self._inner.prepare(positions, fresh, pool)

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None:
        if not self._moving:
            self._inner.read(positions, out, stream)
            return
        weights, slots = self._inner.plain, self._inner.plain_slots
        live = np.flatnonzero(positions >= 0)
        if weights is None or slots is None:
            out[live] = self.block(positions[live])[0]
        elif len(live) == len(positions) and out.flags.c_contiguous:
            self._steps.at(self._step).read(weights, slots, positions, out)
        else:
            rows = np.empty((len(live), out.shape[1]), np.float32)
            self._steps.at(self._step).read(weights, slots, positions[live], rows)
            scatter_rows(rows, live, out)

    def block(self, positions: Int64) -> tuple[Float32, Float32]:
        return self.seen(*self._inner.block(positions))

    def copy(self, positions: Int64, weights: Float32, slots: Float32, stream: bool = False) -> None:
        """As in `TableRows.copy`: with the last slot, which says how far rows are caught up."""
        self._inner.copy(positions, weights, slots, stream)

    def seen(self, weights: Float32, slots: Float32) -> tuple[Float32, Float32]:
        order = np.arange(len(weights))
        self._steps.at(self._step).catch_up(weights, order, slots, order)
        return weights, slots[:, :-1].copy()

    def write(self, positions: Int64, weights: Float32, slots: Float32) -> None:
        self._inner.write(positions, weights, stamped(slots, self._steps.now))

    def bring(self, positions: Int64, step: int) -> None:
        """Writes the rows at positions int64 `[n]` as of a step where a chapter ends, so that no later bit changes."""
        weights, slots = self.as_of(step).block(positions)
        self._inner.write(positions, weights, stamped(slots, step))

    def behind(self, positions: Int64, step: int) -> Int64:
        """Indices in `positions` int64 `[n]` of the rows that are not caught up to `step`."""
        kept: Int64 = self._inner.block(positions)[1][:, -1].copy().view(np.int32).astype(np.int64)
        return np.flatnonzero((kept < step) & (kept > 0))

    def initialise(self, ids: Int64, positions: Int64) -> None:
        """As in `TableRows.initialise`; steps follow with the first update."""
        self._inner.initialise(ids, positions)

    def update(self, batch: UpdateBatch) -> None:
        self._inner.update(batch)

    def close(self) -> None:
        self._inner.close()


def replayed_rows(make_rows: MakeRows, steps: TableSteps) -> MakeRows:
    """Rows as `make_rows` makes them, which follow the steps of a table."""

    def make(spec: TableSpec, optimizer: RowOptimizer, rows: int) -> TableRows:
        return ReplayedRows(make_rows(spec, CatchUpOptimizer(optimizer, steps), rows), steps)

    return make
