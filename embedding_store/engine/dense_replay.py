"""What a table in memory has where steps without a gradient move its rows, too."""

import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import UpdateBatch
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.before_images import TableVersions
from elastable.embedding_store.engine.membership import RowMembership
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.native.range_pool import SERIAL
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec
from elastable.embedding_store.optimizers.dense_replay.steps_at import PIECE_BYTES, update_adam
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps
from elastable.embedding_store.optimizers.fused import Adam

_FEWEST = 64  # rows that are looked at with a step
_REPLAY_EPOCHS = 64  # that rows may be behind; as each of them takes time
_MOST_DECAY = 1e15  # in logarithms: beyond it another step would be lost in rounding


class CatchUpOptimizer(RowOptimizer):
    """Another optimizer's step on rows that are brought to the present first.

    Beside the other's slots a row has one more, the last: the step up to which it is caught up, an int32 whose bits are
    in a float32; 0 of a row that was never updated. It is seen by nobody but the table.

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
            arrays = *rows, slots.view(np.int32), batch.positions, batch.gradients
            update_adam(weights.shape[1], (*arrays, *table, *scalars))
            return
        many = max(64, PIECE_BYTES // (4 * (weights.shape[1] + slots.shape[1])))
        for start in range(0, len(batch), many):
            piece = batch.part(start, start + many)
            present.replay(weights, piece.weight_positions, slots, piece.positions, stamp)
            self._inner.apply(weights, slots, piece)


class DenseReplay:
    """The steps of one table, and a sweep over its rows that keeps them few.

    The sweep walks over the table once half of the steps that it may remember have gathered, and is through before the
    others; so it does where many replay epochs have gathered. Rows are brought to the end of a replay epoch, to which
    they would be brought later anyway: when a row is met, and whether it is, changes no bit.

    With weight decay, rows that were never updated decay as well, all by one factor: `TableState.untouched_decay`.

    Attributes:
        steps: That the table has taken.
    """

    def __init__(self, steps: TableSteps) -> None:
        self.steps = steps
        self._begun: int | None = None  # the replay epoch that the sweep brings rows to
        self._cursor = self._within = 0

    def sweep(
        self,
        directory: RowDirectory,
        rows: TableRows,
        members: RowMembership,
        versions: TableVersions,
    ) -> None:
        """Brings a few rows of the table to a newer replay epoch; is called once for each step.

        Raises:
            ElastableError: as `TableRows.bring`; no bit of what is read has changed, and the same rows are met again.
        """
        steps = self.steps
        if self._begun is None:
            gathered = steps.now - steps.first
            if steps.replay_epochs == 1 or (2 * gathered < steps.most and steps.replay_epochs <= _REPLAY_EPOCHS):
                return
            self._begun, self._cursor = steps.replay_epoch, 0
            self._within = max(1, min(steps.most // 4, gathered // 2))
        ids, positions, cursor = directory.scan(self._cursor, max(_FEWEST, directory.count // self._within + 1))
        if not len(ids):
            pinned = versions.oldest_step()
            steps.forget(self._begun if pinned is None else min(self._begun, pinned))
            self._begun = None
            return
        late = rows.behind(positions, self._begun)
        if len(late):
            ids, positions = ids[late], positions[late]
            rows.bring(positions)
            if versions.pinned:
                versions.save(ids, positions, rows, members, SERIAL)
            rows.bring_to(positions, self._begun)
        self._cursor = cursor

    def begin_anew(self) -> None:
        """Every row is forgotten."""
        self.steps.begin_anew()
        self._begun = None

    def untouched_decay(self, step: int | None = None) -> float | None:
        """`TableState.untouched_decay` as of a step (None: now)."""
        return self.steps.untouched(step) if self.steps.form.decay else None

    def require_decay(self, decay: float) -> None:
        """Raises `BadInput` for a decay that rows of this table cannot have."""
        if not self.steps.form.decay:
            raise BadInput(f"weight decay does not reach rows that were never updated, so {decay:g} cannot be restored")
        if not abs(decay) <= _MOST_DECAY:
            raise BadInput(f"rows that were never updated cannot have decayed by e**{decay:g}")


def dense_replay(spec: TableSpec, optimizer: RowOptimizer) -> DenseReplay | None:
    """What a table needs to follow steps; None: they only move rows that have a gradient.

    Raises:
        Unsupported: rows of the table's dtype cannot follow.
    """
    if optimizer.dense_form is None:
        return None
    if spec.dtype != "float32":
        raise Unsupported(
            f"table {spec.name!r}: lazy=False needs float32 rows, as catching up moves them by less than {spec.dtype} "
            "can tell; leave lazy=True, or keep the table in float32"
        )
    return DenseReplay(TableSteps(spec.name, optimizer.dense_form))
