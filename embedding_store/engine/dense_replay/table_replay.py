"""What a table in memory has where steps without a gradient move its rows, too."""

from __future__ import annotations

from collections.abc import Callable

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.dense_replay.replayed_rows import ReplayedRows, replayed_rows
from elastable.embedding_store.engine.dense_replay.sweep import Sweep
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.table_rows import MakeRows, TableRows
from elastable.embedding_store.engine.table_versions import TableVersions
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.native.range_pool import SERIAL
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps

__all__ = ["DenseReplay", "dense_replay"]

_MOST_DECAY = 1e15  # in logarithms: beyond it another step would be lost in rounding


class DenseReplay:
    """The steps of one table, and the sweep that keeps them few.

    With weight decay, rows that were never updated decay as well, all by one factor: `TableState.untouched_decay`.

    Attributes:
        steps: That the table has taken.
    """

    def __init__(self, steps: TableSteps) -> None:
        self.steps = steps
        self._sweep = Sweep(steps)

    def rows(self, make_rows: MakeRows) -> MakeRows:
        """Rows as `make_rows` makes them, that follow the steps."""
        return replayed_rows(make_rows, self.steps)

    def sweep(
        self,
        directory: RowDirectory,
        rows: TableRows,
        members: RowMembership,
        versions: TableVersions,
        into_memory: Callable[[Int64], None] | None = None,
    ) -> None:
        """Brings a few rows of the table to a newer chapter; is called once for each step.

        `into_memory`: brings rows at positions int64 `[n]` to where they can be changed; None: they lie there.

        Raises:
            ElastableError: as `into_memory`; no bit of what is read has changed.
        """

        def changing(ids: Int64, positions: Int64) -> None:
            if into_memory is not None:
                into_memory(positions)
            if versions:
                versions.save(ids, positions, rows, members, SERIAL)

        assert isinstance(rows, ReplayedRows)
        self._sweep.go_on(directory, rows, changing, versions.oldest_step)

    def begin_anew(self) -> None:
        """Every row is forgotten."""
        self.steps.begin_anew()
        self._sweep.begin_anew()

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
