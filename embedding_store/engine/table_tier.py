"""One table's part of the tier: its name and records there, and what was deleted since the last write."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import TableSpec, spec_to_json
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.engine.membership import RowMembership
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.engine.tiered.tier_records import (
    TOUCH_BYTES,
    StoredTouches,
    TierRecords,
    filled_positions,
)
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.measures import Total
from elastable.embedding_store.native.row_directory import RowDirectory
from elastable.embedding_store.support.memory_budget import RowBudget


class TierNames:
    """Names in use. A table that is cleared or dropped stays in the tier until the engine's state is without it."""

    def __init__(self, used: Iterable[str] = ()) -> None:
        """`used`: names of tables that are in the tier."""
        self._used = set(used)
        self._retired: list[str] = []

    def new(self, table: str) -> str:
        """A name for a table that nothing in the tier has."""
        name, number = table, 1
        while name in self._used:
            number += 1
            name = f"{table}~{number}"
        self._used.add(name)
        return name

    def retire(self, name: str) -> None:
        """Nobody needs this table of the tier any more, once the next state is there."""
        self._retired.append(name)

    def retired(self) -> list[str]:
        """Names of tables to delete; `forget` them once they are gone."""
        return list(self._retired)

    def forget(self, names: Iterable[str]) -> None:
        """These tables are gone from the tier."""
        for name in names:
            self._retired.remove(name)
            self._used.discard(name)


_NONE: Int64 = np.empty(0, np.int64)
_NAMED = 5  # ids in a message


@dataclass(frozen=True, slots=True)
class Captured:
    """Changed rows of a table as they were at one moment, and rows that are gone.

    Attributes:
        table: The table's part of the tier.
        rows: What it had in memory then.
        behind: And in the tier.
        described: The table as the tier should know it.
        records: Its changed rows.
        gone: ids and positions, int64 `[n]` each, of rows that were deleted.
    """

    table: "TableTier"
    rows: TableRows
    behind: TierRecords
    described: TierTable
    records: Records
    gone: tuple[Int64, Int64]


class TableTier:
    """What a table holds of the tier behind its rows. Callers do the locking.

    Attributes:
        behind: The table in the tier; one that is cleared gets another one.
        touched: How to read what records say of touches.
    """

    def __init__(
        self,
        spec: TableSpec,
        tier: Tier,
        names: TierNames,
        budget: RowBudget,
        row_ids: Callable[[], Int64],
        make_clean: Callable[[], None],
        stored: str | None,
    ) -> None:
        """An empty table.

        Args:
            spec: The table.
            tier, budget, row_ids, make_clean: As of `TierRecords`.
            names: Of tables in the tier.
            stored: Its name there; None: a new one.
        """
        self._spec, self._names = spec, names
        name = names.new(spec.name) if stored is None else stored
        self.behind = TierRecords(tier, name, spec.name, budget, row_ids, make_clean)
        self._gone: list[tuple[Int64, Int64]] = []
        self.touched = StoredTouches()

    @property
    def gone(self) -> int:
        """Rows that were deleted, and that the tier may have."""
        return sum(len(ids) for ids, _ in self._gone)

    def begin_anew(self) -> None:
        """The table was cleared: another one takes its place in the tier."""
        self.retire()
        self.behind = replace(self.behind, name=self._names.new(self._spec.name), there=False, reads=Total())
        self._gone, self.touched = [], StoredTouches()

    def retire(self) -> None:
        """Nobody needs the table in the tier any more."""
        self._names.retire(self.behind.name)

    def take_away(self, ids: Int64, directory: RowDirectory, rows: TableRows) -> None:
        """The rows of `ids` int64 `[n]`, which may repeat or have none, are about to go."""
        once = np.unique(ids)
        positions = directory.positions_of(once)
        once, positions = once[positions >= 0], positions[positions >= 0]
        if len(once):
            rows.forget(positions)
            self._gone.append((once, positions))

    def capture(self, rows: TableRows, members: RowMembership, cursor: int, most: int) -> tuple[Captured, int]:
        """Takes up to `most` changed rows, from `cursor` on (first 0), and all that are gone; -1 ends it."""
        positions, records, cursor = rows.capture(cursor, most)
        touches = members.touches(positions)
        if touches is not None:
            records[:, -TOUCH_BYTES:] = self.touched.encode(touches)
        gone = _joined(self._gone)
        self._gone = []
        described = TierTable(
            self.behind.name, rows.layout.record_bytes, self._description(rows), first_bytes=rows.layout.slots_at
        )
        captured = Records(self.behind.name, self.behind.ids_at(positions), positions, records)
        return Captured(self, rows, self.behind, described, captured, gone), cursor

    def written(self, captured: Captured, done: bool) -> None:
        """What was captured is in the tier now, or (`done` False) may not be."""
        if captured.behind is not self.behind:
            return  # the table was cleared since
        captured.rows.written(captured.records.positions, done)
        if not done and len(captured.gone[0]):
            self._gone.insert(0, captured.gone)

    def load(
        self, known: TierTable, directory: RowDirectory, rows: TableRows, members: RowMembership, direct: bool
    ) -> None:
        """Takes the rows of the tier into an empty table.

        Raises:
            StoreBroken: it has other records, or ids twice.
        """
        tier = self.behind.tier
        if known.record_bytes != rows.layout.record_bytes:
            raise StoreBroken(
                f"{tier.place}: records of table {self._spec.name!r} have {known.record_bytes} bytes, and not "
                f"{rows.layout.record_bytes}"
            )
        self.behind.there = True
        width = 0 if self._spec.eviction is None else None
        blocks = list(tier.scan(self.behind.name, width=width))
        ids = np.concatenate([_NONE, *(block.ids for block in blocks)])
        places = np.concatenate([_NONE, *(block.positions for block in blocks)])
        everywhere, gaps = filled_positions(ids, places) if tier.keeps_positions and not direct else (ids, _NONE)
        directory.reserve(len(everywhere))
        rows.grow(directory.capacity)
        members.grow(directory.capacity)
        directory.claim(everywhere, np.empty(len(everywhere), np.int64))
        members.forget(gaps, directory)  # nothing is touched there
        directory.remove(gaps)
        positions = directory.positions_of(ids)
        missing = int(np.count_nonzero(positions < 0))
        moved = tier.keeps_positions and not np.array_equal(positions, places)
        if missing or directory.count != len(ids) or moved:
            raise StoreBroken(
                f"{tier.place}: of {len(ids)} ids of table {self._spec.name!r} (there {self.behind.name!r}) only "
                f"{directory.count} differ, and {missing} cannot be found: they are there twice, or are corrupt"
            )
        start = 0
        for block in blocks if width is None else ():
            at = positions[start : start + len(block.ids)]
            start += len(block.ids)
            members.put(at, self.touched.decode(block.rows[:, -TOUCH_BYTES:]))
        if rows.whole:
            for block in tier.scan(self.behind.name):
                rows.load(block.rows, np.arange(len(block.ids)), directory.positions_of(block.ids))

    def require_replaced(self, rows: TableRows, directory: RowDirectory) -> None:
        """Raises `StoreBroken` where a record that `load` found damaged is still what a row is made of."""
        ids = self.behind.tier.doubtful(self.behind.name) if self.behind.there else _NONE
        positions = directory.positions_of(ids)
        ids, positions = ids[positions >= 0], positions[positions >= 0]
        left = ids[~rows.differ(positions)]
        if len(left):
            raise StoreBroken(
                f"{self.behind.tier.place}: {len(left)} records of table {self._spec.name!r} are damaged, those of ids "
                f"{', '.join(map(str, left[:_NAMED]))}{', ...' if len(left) > _NAMED else ''}, and the log does not "
                "hold these rows any more. Go back to a checkpoint"
            )

    def _description(self, rows: TableRows) -> bytes:
        """JSON: the spec, and the parts of a record with their bytes."""
        fields = {"spec": json.loads(spec_to_json(self._spec)), "record": rows.layout.described()}
        return json.dumps(fields, sort_keys=True).encode()


def _joined(pairs: list[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    ids, positions = zip(*[(_NONE, _NONE), *pairs], strict=True)
    return np.concatenate(ids), np.concatenate(positions)
