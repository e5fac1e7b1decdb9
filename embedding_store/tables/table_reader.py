"""Reading a table in memory: ids to positions, positions to rows, and initial values for the rest."""

from __future__ import annotations

from typing import Protocol

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.native.range_pool import RangePool, WorkCounter
from elastable.embedding_store.native.row_fold import fold_bags, fold_bags_shared
from elastable.embedding_store.native.row_gather import gather, gather_apart, gather_marked, gather_shared, scatter_rows
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.rows.initial_values import write_initial_rows

__all__ = ["FindsPositions", "ReadsRows", "TableReader"]


class FindsPositions(Protocol):
    """What is read of a `RowDirectory`."""

    @property
    def count(self) -> int: ...

    @property
    def marks(self) -> UInt64 | None: ...

    def find(self, ids: Int64, positions: Int64) -> int: ...


class ReadsRows(Protocol):
    """What is read of `TableRows` or `RowValues`."""

    @property
    def plain(self) -> Float32 | None: ...

    def read(self, positions: Int64, out: Float32, stream: bool = False) -> None: ...


class TableReader:
    """Rows of one table. Ids handed in have been checked, unless it is said otherwise; callers do the locking.

    Args:
        spec: The table.
        directory: Where its rows lie.
        rows: The rows there.
    """

    def __init__(self, spec: TableSpec, directory: FindsPositions, rows: ReadsRows) -> None:
        self.spec = spec
        self._directory: FindsPositions = directory
        self._rows: ReadsRows = rows

    @property
    def checks_ids(self) -> bool:
        """Whether `read` looks by itself whether ids are in the vocabulary, at no cost."""
        return self._rows.plain is not None and self._directory.marks is not None

    @property
    def all_at_hand(self) -> bool:
        """Whether every id has a row of its own, float32, at its own place, as `read_shared` needs it."""
        plain = self._rows.plain
        return plain is not None and self._directory.marks is not None and self._directory.count == len(plain)

    def read_shared(self, ids: Int64, out: Float32, stream: bool, counter: WorkCounter) -> None:
        """As `read` where `all_at_hand`, by many threads, as `gather_shared`: fails `counter` for ids out of range."""
        plain = self._rows.plain
        assert plain is not None
        gather_shared(plain, ids, out, stream, counter)

    def fold_shared(
        self, ids: Int64, offsets: Int64, weights: Float32 | None, combiner: str, out: Float32, counter: WorkCounter
    ) -> None:
        """As `fold` where `all_at_hand`, by many threads, as `fold_bags_shared`: fails `counter` as well."""
        plain = self._rows.plain
        assert plain is not None
        fold_bags_shared(plain, ids, offsets, weights, combiner, out, counter)

    def read_together(self, ids: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        """As `read`, of ids that have not been checked, by all threads of a pool at once, where the table knows a way.

        Returns:
            Whether it does; if not, nothing has happened.

        Raises:
            IdOutOfRange: rows may have been written.
        """
        return False

    def read(self, ids: Int64, out: Float32, stream: bool = False) -> None:
        """Rows of `ids` int64 `[n]` into `out` float32 `[n, dim]`; writes nothing else.

        Rows of `out` may lie apart, columns may not. `stream`: past the caches, where `can_stream(out)`.

        Raises:
            IdOutOfRange: where `checks_ids`; rows may have been written.
        """
        plain, marks = self._rows.plain, self._directory.marks
        if plain is not None and self.all_at_hand:
            if gather(plain, ids, out, stream) < len(ids):
                require_ids(self.spec, ids)
            return
        if plain is None and marks is not None and self._directory.count == self.spec.vocabulary_size:
            self._rows.read(ids, out, stream)  # every id has a row, at its own position
            return
        positions = np.empty(len(ids), np.int64)
        if plain is not None and marks is not None:
            unseen = positions[: gather_marked(plain, marks, ids, out, positions, stream)]
            require_ids(self.spec, ids[unseen])
        else:
            missing = self._directory.find(ids, positions)
            if plain is not None:
                gather(plain, positions, out, stream)
            elif missing < len(ids):
                self._rows.read(positions, out, stream)
            unseen = np.flatnonzero(positions < 0) if missing else positions[:0]
        if len(unseen):
            self._write_initial(ids[unseen], unseen, out)

    def read_apart(self, ids: Int64, places: Int64, out: Float32, stream: bool = False) -> None:
        """The row of `ids[i]` into `out[places[i]]`; other arguments as those of `read`.

        Args:
            places: int64 `[n]`, each once.
        """
        plain = self._rows.plain
        if plain is not None and self.all_at_hand:
            gather_apart(plain, ids, places, out, stream)
            return
        if plain is None:
            rows = np.empty((len(ids), self.spec.dim), np.float32)
            self.read(ids, rows)
            scatter_rows(rows, places, out)
            return
        positions = np.empty(len(ids), np.int64)
        missing = self._directory.find(ids, positions)
        gather_apart(plain, positions, places, out, stream)
        if missing:
            unseen = np.flatnonzero(positions < 0)
            self._write_initial(ids[unseen], places[unseen], out)

    def fold(self, ids: Int64, offsets: Int64, weights: Float32 | None, combiner: str, out: Float32) -> None:
        """Bags of `ids` int64 `[n]` into `out` float32 `[bags, dim]`; other arguments as those of `fold_bags`.

        The ids have not been checked.

        Raises:
            IdOutOfRange: bags may have been written.
        """
        rows = self._rows.plain
        if rows is not None and self.all_at_hand:
            if not fold_bags(rows, rows[:0], ids, offsets, weights, combiner, out):
                require_ids(self.spec, ids)
            return
        require_ids(self.spec, ids)
        positions = np.empty(len(ids), np.int64)
        missing = self._directory.find(ids, positions)
        fresh = np.empty((missing, self.spec.dim), np.float32)
        if missing:
            unseen = np.flatnonzero(positions < 0)
            self._write_initial(ids[unseen], np.arange(missing), fresh)
            positions[unseen] = ~np.arange(missing)
        if rows is None:
            rows = np.empty((len(ids), self.spec.dim), np.float32)
            self._rows.read(positions, rows)
            positions = np.where(positions < 0, positions, np.arange(len(ids)))
        fold_bags(rows, fresh, positions, offsets, weights, combiner, out)

    def _write_initial(self, ids: Int64, places: Int64, out: Float32) -> None:
        """What `ids[i]`, which has no row, reads, into `out[places[i]]`."""
        write_initial_rows(self.spec, ids, places, out)
