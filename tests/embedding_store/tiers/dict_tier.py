"""The smallest tier: records in a dictionary. It shows how little a tier is, and fails wherever a test wants it to."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.errors import SpecConflict, TableNotFound

__all__ = ["DictTier", "Died", "Kept", "Steps"]


@dataclass
class Kept:
    """What outlives a `DictTier`, as a server outlives its clients."""

    tables: dict[str, TierTable] = field(default_factory=dict)
    rows: dict[str, dict[int, bytes]] = field(default_factory=dict)
    sequence: int = 0
    state: bytes | None = None


class Died(BaseException):
    """Nobody catches it: the process is gone."""


class Steps:
    """Counts steps of a tier, and raises `error` at the n-th one.

    Attributes:
        count: Steps so far; one that fails is one.
    """

    def __init__(self, last: int | None = None, error: BaseException | None = None) -> None:
        self.count, self._last, self._error = 0, last, error or Died()

    def __call__(self) -> None:
        """Before each record that is written or deleted, and before each other call."""
        self.count += 1
        if self.count == self._last:
            raise self._error


class DictTier(Tier):
    place, keeps_positions = "a dictionary", False

    def __init__(self, kept: Kept, step: Callable[[], None] = Steps()) -> None:  # noqa: B008 - it counts for nobody
        self.kept, self.step = kept, step

    @property
    def sequence(self) -> int:
        return self.kept.sequence

    def tables(self) -> dict[str, TierTable]:
        return dict(self.kept.tables)

    def create(self, table: TierTable) -> None:
        self.step()
        if table.name in self.kept.tables:
            raise SpecConflict(f"there is a table {table.name!r} already")
        self.kept.tables[table.name], self.kept.rows[table.name] = table, {}

    def drop(self, table: str) -> None:
        self.step()
        self.kept.tables.pop(table, None)
        self.kept.rows.pop(table, None)

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self.step()
        missing = []
        for records in wanted:
            found = [self._rows(records.table).get(row_id) for row_id in records.ids.tolist()]
            for target, row in zip(records.rows, found, strict=True):
                if row is not None:
                    target[:] = np.frombuffer(row, np.uint8)[: len(target)]
            missing.append(np.array([index for index, row in enumerate(found) if row is None], np.int64))
        return missing

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        self.step()
        self.kept.sequence = sequence
        for table, (ids, _) in deleted.items():
            for row_id in ids.tolist():
                self.step()
                self._rows(table).pop(row_id, None)
        for records in changed:
            for row_id, row in zip(records.ids.tolist(), records.rows, strict=True):
                self.step()
                self._rows(records.table)[row_id] = row.tobytes()

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        ids = list(self._rows(table))
        for start in range(0, len(ids), block_rows):
            some = np.array(ids[start : start + block_rows], np.int64)
            rows = np.empty((len(some), self.kept.tables[table].record_bytes if width is None else width), np.uint8)
            records = Records(table, some, np.full(len(some), -1), rows)
            self.read([records])
            yield records

    def state(self) -> bytes | None:
        return self.kept.state

    def put_state(self, state: bytes) -> None:
        self.step()
        self.kept.state = state

    def close(self) -> None:
        pass

    def _rows(self, table: str) -> dict[int, bytes]:
        if table not in self.kept.rows:
            raise TableNotFound(f"there is no table {table!r}")
        return self.kept.rows[table]
