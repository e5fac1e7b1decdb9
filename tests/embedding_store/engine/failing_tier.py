"""A tier in a dictionary, which fails when it is told to; what is in it survives the store that wrote it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.errors import Unavailable


class FailingTier(Tier):
    """Records by id, or by position."""

    def __init__(self, keeps_positions: bool) -> None:
        self._keeps_positions = keeps_positions
        self._tables: dict[str, tuple[TierTable, dict[int, tuple[int, int, bytes]]]] = {}
        self._state: bytes | None = None
        self._sequence = 0
        self.left: int | None = None  # rows, deletions and states that are written before it fails

    def copy(self) -> FailingTier:
        """As it is now, and does not fail."""
        other = copy.deepcopy(self)
        other.left = None
        return other

    def _step(self) -> None:
        if self.left is not None:
            self.left -= 1
            if self.left < 0:
                raise Unavailable("the tier fails, as it was told to")

    @property
    def place(self) -> str:
        return "dictionary"

    @property
    def keeps_positions(self) -> bool:
        return self._keeps_positions

    def tables(self) -> dict[str, TierTable]:
        return {name: table for name, (table, _) in self._tables.items()}

    def create(self, table: TierTable) -> None:
        self._step()
        assert table.name not in self._tables
        self._tables[table.name] = table, {}

    def drop(self, table: str) -> None:
        self._step()
        self._tables.pop(table, None)

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        missing = []
        for some in wanted:
            rows, lost = self._tables[some.table][1], []
            for i, (one, position) in enumerate(zip(some.ids.tolist(), some.positions.tolist(), strict=True)):
                found = rows.get(position if self._keeps_positions else one)
                if found is None:
                    lost.append(i)
                else:
                    assert found[0] == one
                    some.rows[i] = np.frombuffer(found[2], np.uint8)[: some.rows.shape[1]]
            missing.append(np.array(lost, np.int64))
        return missing

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        assert sequence >= self._sequence
        self._sequence = sequence
        for name, (ids, positions) in deleted.items():
            for one, position in zip(ids.tolist(), positions.tolist(), strict=True):
                self._step()
                self._tables[name][1].pop(position if self._keeps_positions else one, None)
        for some in changed:
            table, rows = self._tables[some.table]
            assert some.rows.shape == (len(some.ids), table.record_bytes)
            for i, (one, position) in enumerate(zip(some.ids.tolist(), some.positions.tolist(), strict=True)):
                self._step()
                rows[position if self._keeps_positions else one] = one, position, some.rows[i].tobytes()

    @property
    def sequence(self) -> int:
        return self._sequence

    def scan(self, table: str, block_rows: int = 65_536, width: int | None = None) -> Iterator[Records]:
        found, rows = self._tables[table]
        width = found.record_bytes if width is None else width
        kept = list(rows.values())
        for start in range(0, len(kept), block_rows):
            some = kept[start : start + block_rows]
            records = np.frombuffer(b"".join(row[:width] for _, _, row in some), np.uint8).reshape(len(some), width)
            positions = [position if self._keeps_positions else -1 for _, position, _ in some]
            yield Records(table, np.array([one for one, _, _ in some]), np.array(positions), records.copy())

    def state(self) -> bytes | None:
        return self._state

    def put_state(self, state: bytes) -> None:
        self._step()
        self._state = state

    def close(self) -> None:
        """There is nothing to free."""
