"""What a table in memory has where steps without a gradient move its rows, too."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.following.following_rows import CaughtUpRows, caught_up_rows
from elastable.embedding_store.engine.following.sweep import Sweep
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.table_rows import MakeRows, TableRows
from elastable.embedding_store.engine.table_versions import TableVersions
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.native.ids.row_directory import RowDirectory
from elastable.embedding_store.native.range_pool import SERIAL
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps

__all__ = ["Following", "following"]

_DECAY_BYTES = 8
_MOST_DECAY = 1e15  # in logarithms: beyond it another step would be lost in rounding


class Following:
    """The steps of one table, and the sweep that keeps them few.

    Where the optimizer has weight decay, rows that were never updated decay,
    too. How far they have is kept once for all of them, and travels with the
    table's sketch of sightings, as its last 8 bytes.

    Attributes:
        steps: That the table has taken.
    """

    def __init__(self, steps: TableSteps) -> None:
        self.steps = steps
        self._sweep = Sweep(steps)

    def rows(self, make_rows: MakeRows) -> MakeRows:
        """Rows as `make_rows` makes them, that follow the steps."""
        return caught_up_rows(make_rows, self.steps)

    def take(
        self,
        step: int,
        rate: float,
        ends_chapter: bool,
        directory: RowDirectory,
        rows: TableRows,
        members: RowMembership,
        versions: TableVersions,
    ) -> None:
        """Counts a step, once the rows that it updates have been; others are those of the table."""

        def save(ids: Int64, positions: Int64) -> None:
            if versions:
                versions.save(ids, positions, rows, members, SERIAL)

        self.steps.take(step, rate, ends_chapter)
        assert isinstance(rows, CaughtUpRows)
        self._sweep.go_on(directory, rows, save, versions.oldest_step)

    def begin_anew(self) -> None:
        """Every row is forgotten."""
        self.steps.begin_anew()
        self._sweep.begin_anew()

    def with_decay(self, counters: UInt8 | None, step: int | None = None) -> UInt8 | None:
        """The table's sketch, with what decay has made of rows that were never updated, until a step (None: now)."""
        if not self.steps.form.decay:
            return counters
        decay = np.frombuffer(self.steps.untouched(step), np.uint8)
        return decay.copy() if counters is None else np.concatenate((counters, decay))

    def without_decay(self, counters: UInt8) -> tuple[UInt8, float | None]:
        """What `with_decay` gave in two: the sketch, and what `TableSteps.put_untouched` takes; None without decay.

        Raises:
            BadInput: it holds no decay that rows can have had.
        """
        if not self.steps.form.decay:
            return counters, None
        if not isinstance(counters, np.ndarray) or counters.dtype != np.uint8 or counters.ndim != 1:
            raise BadInput("sightings must be uint8 [counters]")
        if len(counters) < _DECAY_BYTES:
            raise BadInput(f"{len(counters)} bytes of sightings do not hold the decay of rows that were never updated")
        decay = float(np.frombuffer(counters[-_DECAY_BYTES:].tobytes(), "<f8")[0])
        if not abs(decay) <= _MOST_DECAY:
            raise BadInput(f"rows that were never updated cannot have decayed by e**{decay:g}")
        return counters[:-_DECAY_BYTES], decay


def following(spec: TableSpec, optimizer: RowOptimizer) -> Following | None:
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
    return Following(TableSteps(spec.name, optimizer.dense_form))
