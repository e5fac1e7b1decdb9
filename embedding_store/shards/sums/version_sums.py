"""The row gradient of the version in work: summed once, then measured and committed. The same wherever rows are."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.shards.row_pushes import Measured, PushedCommit, RowSums, Slices
from elastable.embedding_store.shards.sums.exact_squares import exact_squares
from elastable.embedding_store.shards.sums.pushed_sums import clipped_update, sum_pushes

__all__ = ["Pushes", "VersionSums"]

Pushes = Mapping[int, Sequence[Mapping[str, Slices]]]
"""The parts of every push, by micro-batch (or sequence): table name -> gradient."""


class VersionSums:
    """Used by one thread at a time.

    Args:
        pushes: Those that a sum is made of.
    """

    def __init__(self, pushes: Callable[[RowSums], Pushes]) -> None:
        self._pushes = pushes
        self._last: tuple[RowSums, dict[str, TableUpdate]] | None = None

    def forget(self) -> None:
        """The next version is another one, or made of other pushes."""
        self._last = None

    def summed(self, sums: RowSums) -> dict[str, TableUpdate]:
        """Table name -> the summed gradient, of those that have one."""
        if self._last is None or self._last[0] != sums:
            self._last = sums, sum_pushes(sums, self._pushes(sums))
        return self._last[1]

    def measured(self, sums: RowSums) -> Measured:
        """What whoever clips has to know of it."""
        squares = {table: exact_squares(update.gradients) for table, update in self.summed(sums).items()}
        finite = {table: square for table, square in squares.items() if square is not None}
        return Measured(finite, tuple(table for table in squares if table not in finite))

    def unclipped(self, pushed: PushedCommit) -> Commit:
        """As `to_commit`, for whoever asks only which rows have a gradient."""
        return _commit_of(pushed, {} if pushed.dropped else self.summed(pushed.sums))

    def to_commit(self, pushed: PushedCommit) -> Commit:
        """The commit of rows that a commit of pushes comes to."""
        updates = {} if pushed.dropped else self.summed(pushed.sums)
        clips = pushed.clips
        return _commit_of(
            pushed,
            {
                table: clipped_update(update, clips[table]) if table in clips else update
                for table, update in updates.items()
            },
        )


def _commit_of(pushed: PushedCommit, updates: Mapping[str, TableUpdate]) -> Commit:
    return Commit(
        pushed.version,
        updates,
        pushed.step,
        pushed.learning_rates,
        pushed.record,
        pushed.ends_chapter,
        pushed.sums.frozen,
        pushed.time,
        pushed.cuts,
    )
