"""Rows that nobody touches, brought to the newest chapter a few at a time: no step need be remembered for ever."""

from __future__ import annotations

from collections.abc import Callable

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.engine.dense_replay.replayed_rows import ReplayedRows
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.optimizers.dense_replay.table_steps import TableSteps

__all__ = ["Sweep"]

_FEWEST = 64  # rows that are looked at with a step
_CHAPTERS = 64  # that rows may be behind; as each of them takes time


class Sweep:
    """Walks over a table once half of the steps that it may remember have gathered, and is through before the others.

    So it does where many chapters have gathered. Rows are brought to the end of
    a chapter, to which they would be brought later anyway: when a row is met,
    and whether it is, changes no bit.

    Args:
        steps: Of the table.
    """

    def __init__(self, steps: TableSteps) -> None:
        self._steps = steps
        self._begun: int | None = None
        self._cursor = self._within = 0

    def go_on(
        self,
        directory: RowDirectory,
        rows: ReplayedRows,
        changing: Callable[[Int64, Int64], None],
        needed: Callable[[], int | None],
    ) -> None:
        """Is called once for each step.

        Args:
            directory, rows: Of the table.
            changing: Is told of the ids and positions, both int64 `[n]`, of rows that are about to be changed.
            needed: The oldest step that something else asks for; None: nothing does.

        Raises:
            ElastableError: as `changing`; the same rows are met again.
        """
        steps = self._steps
        if self._begun is None:
            gathered = steps.now - steps.first
            if steps.chapters == 1 or (2 * gathered < steps.most and steps.chapters <= _CHAPTERS):
                return
            self._begun, self._cursor = steps.chapter, 0
            self._within = max(1, min(steps.most // 4, gathered // 2))
        many = max(_FEWEST, directory.count // self._within + 1)
        if self._bring_some(directory, rows, changing, many):
            return
        other = needed()
        steps.forget(self._begun if other is None else min(self._begun, other))
        self._begun = None

    def _bring_some(
        self, directory: RowDirectory, rows: ReplayedRows, changing: Callable[[Int64, Int64], None], many: int
    ) -> bool:
        """Looks at the next rows; False: there are no more."""
        assert self._begun is not None
        ids, positions, cursor = directory.scan(self._cursor, many)
        if not len(ids):
            return False
        late = rows.behind(positions, self._begun)
        if len(late):
            changing(ids[late], positions[late])
            rows.bring(positions[late], self._begun)
        self._cursor = cursor
        return True

    def begin_anew(self) -> None:
        """The table has other rows."""
        self._begun = None
