"""A tier in a dictionary, which fails when it is told to; what is in it survives the store that wrote it."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import END_OF_IDS, IndexedTier, Records, Tier, TierTable
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


class IndexedFailingTier(FailingTier, IndexedTier):
    """Records by id, which are listed in four stretches."""

    def __init__(self) -> None:
        super().__init__(keeps_positions=False)
        self._ranks: dict[str, dict[int, int] | None] = {}

    def count(self, table: str) -> int:
        return len(self._tables[table][1])

    def create(self, table: TierTable) -> None:
        super().create(table)
        self._ranks[table.name] = {} if table.ranked else None

    def write(self, changed: Sequence[Records], deleted: Mapping[str, tuple[Int64, Int64]], sequence: int) -> None:
        try:
            super().write(changed, deleted, sequence)
        finally:  # what was written until it failed has its rank
            for some in changed:
                self._rank_written(some)
            for name, ids in self._ranks.items():
                for one in set(ids or ()).difference(self._tables[name][1]):
                    del ids[one]  # type: ignore[union-attr]

    def _rank_written(self, some: Records) -> None:
        rows, ranks = self._tables[some.table][1], self._ranks[some.table]
        if some.ranks is None:
            self._ranks[some.table] = None
        elif ranks is not None:
            for one, row, rank in zip(some.ids.tolist(), some.rows, some.ranks.tolist(), strict=True):
                if one in rows and rows[one][2] == row.tobytes():
                    ranks[one] = rank
        self._note_ranked(some.table)

    def _note_ranked(self, table: str) -> None:
        found, rows = self._tables[table]
        self._tables[table] = replace(found, ranked=self._ranks[table] is not None), rows

    def drop(self, table: str) -> None:
        super().drop(table)
        self._ranks.pop(table, None)

    def rank(self, table: str, ranks_of: Callable[[Records], Int64]) -> None:
        self._ranks[table] = {
            one: rank
            for block in self.scan(table, 3)
            for one, rank in zip(block.ids.tolist(), ranks_of(block).tolist(), strict=True)
        }
        self._note_ranked(table)

    def lowest(self, table: str, low: int, high: int, most: int | None = None) -> tuple[Int64, Int64]:
        ranks = self._ranks[table]
        assert ranks is not None
        assert ranks.keys() == self._tables[table][1].keys()
        found = sorted(((rank, -one) for one, rank in ranks.items() if low <= rank < high))[:most]
        return np.array([-one for _, one in found], np.int64), np.array([rank for rank, _ in found], np.int64)

    def order(self, ids: Int64) -> Int64:
        order: Int64 = (ids & 3) * _STRETCH + (ids >> 2) + _STRETCH // 2
        return order

    def listed(self, table: str, start: int) -> tuple[Int64, int]:
        end = (start // _STRETCH + 1) * _STRETCH
        ids = np.array(list(self._tables[table][1]), np.int64)
        order = self.order(ids)
        return ids[(order >= start) & (order < end)], end


_STRETCH = END_OF_IDS // 4
