"""Rows that nobody touches, brought to the present a few at a time, so that no step need be remembered for ever."""

from __future__ import annotations

from collections.abc import Callable

from embedding_store.catch_up.rows import CaughtUpRows
from embedding_store.catch_up.table_steps import TableSteps
from embedding_store.memory.row_directory import RowDirectory
from embedding_store.store import Int64

__all__ = ["Sweep"]

_FEWEST = 64  # rows that are looked at with a step


class Sweep:
    """Walks over a table once half of the steps that it may remember have gathered, and is through before the others.

    Args:
        steps: Of the table.
    """

    def __init__(self, steps: TableSteps) -> None:
        self._steps = steps
        self._begun: int | None = None
        self._cursor = 0

    def go_on(
        self,
        directory: RowDirectory,
        rows: CaughtUpRows,
        save: Callable[[Int64, Int64], None],
        needed: Callable[[], int | None],
    ) -> None:
        """Is called after each step.

        Args:
            directory, rows: Of the table.
            save: Is told of the ids and positions, both int64 `[n]`, of rows that are about to be changed.
            needed: The oldest step that something else asks for; None: nothing does.
        """
        steps = self._steps
        if self._begun is None:
            if 2 * (steps.now - steps.first) < steps.most:
                return
            self._begun, self._cursor = steps.now, 0
        many = max(_FEWEST, 4 * directory.count // steps.most + 1)
        ids, positions, self._cursor = directory.scan(self._cursor, many)
        if len(ids):
            late = rows.behind(positions, self._begun)
            if len(late):
                save(ids[late], positions[late])
                rows.write(positions[late], *rows.block(positions[late]))
            return
        other = needed()
        steps.forget(self._begun if other is None else min(self._begun, other))
        self._begun = None

    def begin_anew(self) -> None:
        """The table has other rows."""
        self._begun = None
