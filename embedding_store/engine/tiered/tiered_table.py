"""One table with a tier behind: what is brought into memory before a change, and what is written behind after it."""

import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import EvictionCut, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import TableSpec, spec_to_json
from elastable.embedding_store.contract.tier import Records, Tier, TierTable
from elastable.embedding_store.engine.dense_replay import DenseReplay
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.engine.tiered.store_state import FlushedTable
from elastable.embedding_store.engine.tiered.tier_records import (
    TOUCH_BYTES,
    StoredTouches,
    TierRecords,
    filled_positions,
)
from elastable.embedding_store.engine.tiered.tiered_rows import TieredRows
from elastable.embedding_store.errors import StoreBroken
from elastable.embedding_store.log.changes import TableImages
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.slab import SlabMaker
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.support.memory_budget import RowBudget
from elastable.embedding_store.tables.checks import require_ids


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


@dataclass(frozen=True, slots=True)
class Captured:
    """Changed rows of a table as they were at one moment, and rows that are gone.

    Attributes:
        table: The table.
        behind: What it had in the tier then.
        described: The table as the tier should know it.
        records: Its changed rows.
        gone: ids and positions, int64 `[n]` each, of rows that were deleted.
    """

    table: "TieredTable"
    behind: TierRecords
    described: TierTable
    records: Records
    gone: tuple[Int64, Int64]


class TieredTable(MemoryTable):
    """As `MemoryTable`, whose rows are `TieredRows`.

    Where rows follow steps, cold ones come into memory while a commit may still fail; where all rows are in memory,
    they follow once the step is taken, as in `MemoryTable`.
    """

    tiered: TieredRows

    def __init__(
        self,
        spec: TableSpec,
        direct_bytes: int,
        new_slab: SlabMaker,
        tier: Tier,
        names: TierNames,
        budget: RowBudget,
        make_clean: Callable[[], None],
        stored: str | None = None,
    ) -> None:
        """An empty table.

        Args:
            spec, direct_bytes, new_slab: As of `MemoryTable`.
            tier, budget, make_clean: As of `TierRecords`.
            names: Of tables in the tier.
            stored: Its name there; None: a new one.

        Raises:
            BadSpec: an optimizer that is not known here.
        """
        self._tier, self._names = tier, names

        def new_behind(name: str) -> TierRecords:
            return TierRecords(tier, name, spec.name, budget, self._row_ids, make_clean)

        def tiered_rows(spec: TableSpec, optimizer: RowOptimizer, rows: int) -> TableRows:
            self.tiered = TieredRows(spec, optimizer, rows, self.behind, new_slab)
            return self.tiered

        self._new_behind = new_behind
        self.behind = new_behind(names.new(spec.name) if stored is None else stored)
        self._gone: list[tuple[Int64, Int64]] = []
        self._touched = StoredTouches()
        super().__init__(spec, direct_bytes, new_slab, make_rows=tiered_rows)

    @property
    def changed(self) -> int:
        """Rows that are not in the tier as they are, deleted ones included."""
        return self.tiered.changed + sum(len(ids) for ids, _ in self._gone)

    def stage(self, update: TableUpdate, step: int, rate: float) -> StagedUpdate:
        self.tiered.release()
        return super().stage(update, step, rate)

    def make_ready_to_follow(self) -> None:
        if self.replay is not None and not self.tiered.whole:
            try:
                self.replay.sweep(self.directory, self.rows, self.members, self.versions, self.tiered.bring)
            finally:
                self.tiered.release()

    def replay_step(self, step: int, rate: float, ends_replay_epoch: bool) -> None:
        self.make_ready_to_follow()
        super().replay_step(step, rate, ends_replay_epoch)

    def _sweep(self, replay: DenseReplay) -> None:
        if self.tiered.whole:
            super()._sweep(replay)

    def bring(self, ids: Int64) -> Records | None:
        """What to ask the tier for, so that the rows of `ids` int64 `[n]`, unchecked, are near; None: nothing."""
        if self.tiered.whole:
            return None
        cold = self.tiered.cold(self._found(require_ids(self.spec, ids)))
        return self.behind.wanted(cold, self.tiered.layout.record_bytes) if len(cold) else None

    def brought(self, wanted: Records, missing: Int64) -> None:
        """Is handed what `bring` asked for."""
        self.behind.require_all(wanted, missing)
        self.tiered.prefetched.add(wanted.positions, wanted.rows)

    def read_together(self, ids: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        framed = self.rows is self.tiered and self.tiered.framed
        own = self.directory.marks is not None and self.directory.count == self.spec.vocabulary_size
        positions = ids if own else np.empty(len(ids), np.int64)  # each id at its own, or where the directory says
        if not framed or (not own and self.find(require_ids(self.spec, ids), positions, pool)):
            return False
        if not self.tiered.read_together(positions, out, stream, pool):
            require_ids(self.spec, ids)
        return True

    def put(self, block: RowBlock) -> None:
        super().put(block)
        self.tiered.release()

    def make_ready_to_delete(self, ids: Int64) -> None:
        if self.versions.pinned:  # which keep the rows as they are
            self._bring(ids)

    def delete(self, ids: Int64) -> int:
        deleted = super().delete(ids)
        self.tiered.release()
        return deleted

    def clear(self) -> None:
        self._names.retire(self.behind.name)
        self.behind = self._new_behind(self._names.new(self.spec.name))
        self._gone, self._touched = [], StoredTouches()
        super().clear()

    def drop(self) -> None:
        self._names.retire(self.behind.name)
        super().drop()

    def evict(self, version: int, time: float | None = None, cut: EvictionCut | None = None) -> None:
        self._note_settling(version)
        super().evict(version, time, cut)
        self._note_counting(version)
        self.tiered.release()

    def put_images(self, images: TableImages, version: int) -> None:
        super().put_images(images, version)
        self.tiered.release()

    def replay_eviction(self, version: int, removed: Int64 | None, time: float | None = None) -> None:
        self._note_settling(version)
        super().replay_eviction(version, removed, time)
        self._note_counting(version)
        self.tiered.release()

    def capture(self, cursor: int, most: int) -> tuple[Captured, int]:
        """Takes up to `most` changed rows, from `cursor` on (first 0), and all that are gone; -1 ends it."""
        positions, records, cursor = self.tiered.capture(cursor, most)
        touches = self.members.touches(positions)
        if touches is not None:
            records[:, -TOUCH_BYTES:] = self._touched.encode(touches)
        gone = _joined(self._gone)
        self._gone = []
        layout, stored = self.tiered.layout, self.behind.name
        described = TierTable(stored, layout.record_bytes, self._description(), first_bytes=layout.slots_at)
        captured = Records(stored, self.behind.ids_at(positions), positions, records)
        return Captured(self, self.behind, described, captured, gone), cursor

    def written(self, captured: Captured, done: bool) -> None:
        """What was captured is in the tier now, or (`done` False) may not be."""
        if captured.behind is not self.behind:
            return  # the table was cleared since
        self.tiered.written(captured.records.positions, done)
        if not done and len(captured.gone[0]):
            self._gone.insert(0, captured.gone)

    def saved(self) -> FlushedTable:
        """What to keep besides the rows."""
        steps = None if self.replay is None else self.replay.steps.save()
        name, touched = self.behind.name, self._touched.copy(self.members.has_unsettled)
        return FlushedTable(self.spec, name, self.direct, self.state(), steps, touched, self.count)

    def load(self, saved: FlushedTable, known: TierTable | None) -> None:
        """Takes the rows of the tier, which are as of the saved state or newer; the table is empty.

        Raises:
            StoreBroken: the tier has no such table, or it has other records.
        """
        self._touched = saved.touched.copy()
        if known is not None:
            if known.record_bytes != self.tiered.layout.record_bytes:
                raise StoreBroken(
                    f"{self._tier.place}: records of table {self.spec.name!r} have {known.record_bytes} bytes, and not "
                    f"{self.tiered.layout.record_bytes}"
                )
            self.behind.there = True
            self._load_rows()
        self.put_state(saved.state)
        if saved.steps is not None and self.replay is not None:
            self.replay.steps.restore(saved.steps)

    def _load_rows(self) -> None:
        width = 0 if self.spec.eviction is None else None
        blocks = [(block.ids, block.positions, block.rows) for block in self._tier.scan(self.behind.name, width=width)]
        ids = np.concatenate([block[0] for block in blocks]) if blocks else np.empty(0, np.int64)
        places = np.concatenate([block[1] for block in blocks]) if blocks else ids
        keeps = self._tier.keeps_positions
        everywhere, gaps = filled_positions(ids, places) if keeps and not self.direct else (ids, ids[:0])
        self.directory.reserve(len(everywhere))
        self.rows.grow(self.directory.capacity)
        self.members.grow(self.directory.capacity)
        self.directory.claim(everywhere, np.empty(len(everywhere), np.int64))
        self.members.forget(gaps, self.directory)  # nothing is touched there
        self.directory.remove(gaps)
        positions = np.empty(len(ids), np.int64)
        missing = self.directory.find(ids, positions)
        if missing or self.directory.count != len(ids) or (keeps and not np.array_equal(positions, places)):
            raise StoreBroken(
                f"{self._tier.place}: of {len(ids)} ids of table {self.spec.name!r} (there {self.behind.name!r}) only "
                f"{self.directory.count} differ, and {missing} cannot be found: they are there twice, or are corrupt"
            )
        start = 0
        for some, _, rows in blocks if width is None else ():
            at = positions[start : start + len(some)]
            start += len(some)
            self.members.put(at, self._touched.decode(rows[:, -TOUCH_BYTES:]))
        if self.tiered.whole:
            for block in self._tier.scan(self.behind.name):
                self.tiered.load(self._found(block.ids), block.rows)

    def _note_settling(self, version: int) -> None:
        if self.members.has_unsettled:
            self._touched.settled.append(version)

    def _note_counting(self, version: int) -> None:
        self._touched.counted += self.members.counts_anew(version) and not self.direct

    def _take_away(self, ids: Int64) -> int:
        once = np.unique(ids)
        positions = self._found(once)
        once, positions = once[positions >= 0], positions[positions >= 0]
        if len(once):
            self.tiered.forget(positions)
            self._gone.append((once, positions))
        return super()._take_away(ids)

    def _reserve(self, ids: Int64, loaded: bool = True) -> None:
        self.make_room(ids)
        if not self.tiered.whole:
            strangers = self._bring(ids, loaded or bool(self.versions.pinned))
            self.tiered.allocate(self.directory.places(strangers))

    def _bring(self, ids: Int64, loaded: bool = True) -> Int64:
        """Brings the rows of `ids` int64 `[n]` into memory; returns the ids that have none."""
        positions = self._found(ids)
        self.tiered.bring(positions[positions >= 0], loaded)
        return ids[positions < 0]

    def _found(self, ids: Int64) -> Int64:
        positions = np.empty(len(ids), np.int64)
        self.directory.find(ids, positions)
        return positions

    def _row_ids(self) -> Int64:
        """The ids of positions 0, 1, ...: int64; empty where an id is its position."""
        return self.directory.row_ids if isinstance(self.directory, IdIndex) else _NONE

    def _description(self) -> bytes:
        """JSON: the spec, and the parts of a record with their bytes."""
        fields = {"spec": json.loads(spec_to_json(self.spec)), "record": self.tiered.layout.described()}
        return json.dumps(fields, sort_keys=True).encode()


def _joined(pairs: list[tuple[Int64, Int64]]) -> tuple[Int64, Int64]:
    ids, positions = zip(*[(_NONE, _NONE), *pairs], strict=True)
    return np.concatenate(ids), np.concatenate(positions)
