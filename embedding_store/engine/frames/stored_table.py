"""One table's side of a tier: reading its records by position."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.tier import MappedRecords, Records, Tier
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.measures.counters import Total
from elastable.embedding_store.support.memory_budget import RowBudget

__all__ = ["StoredTable"]


class StoredTable:
    """What the rows of a table know of the tier behind them. A table that is cleared gets another one.

    Attributes:
        name: Of the table in the tier.
        there: Whether the tier has such a table.
        reads: Records that the tier was asked for, as somebody wanted these rows and they were not in memory.

    Args:
        tier: The tier.
        name: Of the table in the tier.
        title: Of the table, for messages.
        budget: Shares memory out among tables.
        row_ids: The ids whose rows lie at positions 0, 1, ...: int64 `[rows]`; empty: an id is its position.
        make_clean: Writes every changed row of the store to the tier now; the caller has the store alone.
    """

    def __init__(
        self,
        tier: Tier,
        name: str,
        title: str,
        budget: RowBudget,
        row_ids: Callable[[], Int64],
        make_clean: Callable[[], None],
    ) -> None:
        self.name, self.title, self.budget = name, title, budget
        self.there, self.reads = False, Total()
        self.row_ids, self.make_clean = row_ids, make_clean
        self._tier = tier

    @property
    def far(self) -> bool:
        """As of the tier."""
        return self._tier.far

    def ids_at(self, positions: Int64) -> Int64:
        """The ids whose rows lie at positions int64 `[n]`."""
        ids = self.row_ids()
        return ids[positions] if len(ids) else positions

    def wanted(self, positions: Int64, record_bytes: int) -> Records:
        """What to ask the tier for: records of the rows at positions int64 `[n]`, each once."""
        self.reads.add(len(positions))
        return self._asking(positions, record_bytes)

    def _asking(self, positions: Int64, record_bytes: int) -> Records:
        return Records(self.name, self.ids_at(positions), positions, np.empty((len(positions), record_bytes), np.uint8))

    def read(self, positions: Int64, record_bytes: int) -> UInt8:
        """The first bytes of the records at positions int64 `[n]`, each once: uint8 `[n, record_bytes]`.

        Raises:
            StoreBroken: the tier has lost one of them.
            StoreFailed, Unavailable, DeadlineExceeded: as `Tier.read`.
        """
        wanted = self.wanted(positions, record_bytes)
        (missing,) = self._tier.read([wanted])
        self.require_all(wanted, missing)
        return wanted.rows

    def read_some(self, positions: Int64, record_bytes: int) -> tuple[UInt8, Int64]:
        """As `read`, of rows that nobody wants now; some of the positions may have no record.

        Returns:
            Records, and the indices of those that there are, int64 ascending.
        """
        wanted = self._asking(positions, record_bytes)
        (missing,) = self._tier.read([wanted])
        there = np.ones(len(positions), np.bool_)
        there[missing] = False
        return wanted.rows, np.flatnonzero(there)

    def mapped(self) -> MappedRecords | None:
        """As `Tier.mapped`, of this table; None where the tier has no such table yet, too."""
        return self._tier.mapped(self.name) if self.there else None

    def require_all(self, wanted: Records, missing: Int64) -> None:
        """Raises `StoreBroken` where the tier has no record of a row that was written to it."""
        if len(missing):
            raise StoreBroken(
                f"{self._tier.place} has lost {len(missing)} of {len(wanted.ids)} rows of table {self.title!r} that "
                f"were asked for, among them id {wanted.ids[missing[0]]}: restore a checkpoint"
            )
