"""One table whose ids are found in its tier: a row that is not in memory takes no memory."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import Commit, EvictionCut, StayingRows, TableUpdate
from elastable.embedding_store.contract.spec import EvictionSpec, TableSpec
from elastable.embedding_store.contract.tier import IndexedTier, Records, TierTable
from elastable.embedding_store.engine.membership.row_membership import RowMembership
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.engine.tiered.kept_table import KeptTable
from elastable.embedding_store.engine.tiered.tier_names import TierNames
from elastable.embedding_store.engine.tiered.tiered_table import Captured, TieredTable
from elastable.embedding_store.engine.unindexed.near_records import NEAR
from elastable.embedding_store.engine.unindexed.planned_eviction import PlannedEviction
from elastable.embedding_store.engine.unindexed.ranked_rows import RankedRows, is_ranked, ranks_of
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.engine.unindexed.unindexed_membership import UnindexedMembership
from elastable.embedding_store.engine.unindexed.unindexed_rows import UnindexedRows
from elastable.embedding_store.native.ids.row_directory import RowDirectory
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.support.memory.row_budget import RowBudget

__all__ = ["UnindexedTable"]

_NONE: Int64 = np.empty(0, np.int64)
_AT_ONCE = 1 << 15  # rows that are read together
_MOST_NEAR = 1 << 14  # answers of the tier that are kept: rows that changes need are in memory by then


class UnindexedTable(TieredTable):
    """As `TieredTable`, without an index of the rows in the tier.

    Whatever changes rows learns first, while it may still fail, which of them the tier has, and brings those into
    memory. What only reads may ask the tier at any moment.
    """

    tiered: UnindexedRows
    _directory: TierDirectory

    def __init__(
        self,
        spec: TableSpec,
        tier: IndexedTier,
        names: TierNames,
        budget: RowBudget,
        make_clean: Callable[[], None],
        stored: str | None = None,
    ) -> None:
        """As `TieredTable`.

        Raises:
            BadSpec: an optimizer that is not known here.
        """
        self._indexed = tier
        self._swept, self._without_ranks = _NONE, False
        super().__init__(spec, 0, anonymous_slab, tier, names, budget, make_clean, stored)
        self.versions.order = tier.order
        if spec.eviction is not None:
            self.versions.touched = lambda: self._touched.copy()

    def stage(self, update: TableUpdate, step: int, rate: float) -> StagedUpdate:
        self.tiered.release()
        self._learn(update.ids)
        return MemoryTable.stage(self, update, step, rate)

    def bring(self, ids: Int64) -> Records | None:
        return self._directory.unknown(require_ids(self.spec, ids))

    def brought(self, wanted: Records, missing: Int64) -> None:
        self._directory.near.add(wanted.ids, wanted.rows, missing)

    def read_together(self, ids: Int64, out: Float32, stream: bool, pool: RangePool) -> bool:
        return False

    def make_ready_to_delete(self, ids: Int64) -> None:
        self._learn(ids)

    def plan_eviction(self, commit: Commit, update: StagedUpdate | None, time: float) -> Int64 | None:
        rule = self.spec.eviction
        if rule is None or commit.version % rule.every:
            return _NONE
        touched = _NONE if update is None else update.batch.ids
        planned = self._planned(rule, commit.version, touched).goes(time, commit.cuts.get(self.spec.name))
        for start in range(0, len(planned) if self.versions else 0, _AT_ONCE):
            self._save_of(planned[start : start + _AT_ONCE])  # which reads cold rows
        return planned

    def evict(
        self, version: int, time: float | None = None, cut: EvictionCut | None = None, planned: Int64 | None = None
    ) -> None:
        planned = _NONE if planned is None else planned  # the table was created once the commit was staged
        self._note_settling(version)
        self._removed.clear()
        if self.versions:
            self.versions.save_touch_times(self._members)
        self._members.end_eviction(version, self._directory, time)
        if len(planned):
            self._removed.append(planned)
            self._members.evicted += len(planned)
            self._let_go_of(planned)
        self._note_counting(version)
        self.tiered.release()

    def staying(self, commit: Commit, time: float) -> StayingRows:
        """As of `MemoryTable`; it holds the ids of all rows meanwhile."""
        update = None if self.spec.name in commit.frozen else commit.updates.get(self.spec.name)
        ids = _NONE if update is None else self._members.screen(update, self._directory)[0].ids
        rule = self.spec.eviction
        assert rule is not None
        by_rank = not self._without_ranks and not rule.min_frequency
        ranked = self._ranked_rows(commit.version) if by_rank else None
        stays, versions = self._planned(rule, commit.version, ids).stays(time, ranked)
        assert isinstance(self._members, UnindexedMembership)
        return StayingRows(versions, self._members.whole_ids(stays))

    def _planned(self, rule: EvictionSpec, version: int, touched: Int64) -> PlannedEviction:
        assert isinstance(self._members, UnindexedMembership)
        return PlannedEviction(
            rule, self._directory, self._members, version, touched, lambda: self._ranked_rows(version)
        )

    def _ranked_rows(self, version: int) -> RankedRows | None:
        """Cold rows by rank, where there are any."""
        if self._directory.all_here:
            return None
        if self._without_ranks:  # the table was written by a store that knew all of its rows
            self.behind.make_clean()
            self._indexed.rank(self.behind.name, ranks_of)
            self._without_ranks = False
        return RankedRows(self._indexed, self.behind.name, self._touched, version, self._directory.cold)

    def _let_go_of(self, ids: Int64) -> None:
        """As `_take_away`, of `ids` int64 `[n]`, each once, all of which have rows: nobody is asked."""
        positions = np.empty(len(ids), np.int64)
        self._directory.find_here(ids, positions)
        self.tiered.forget(positions[positions >= 0])
        self._gone.append((ids, positions))
        self._directory.remove_all(ids)

    def _take_away(self, ids: Int64) -> int:
        once = np.unique(ids)
        take = super()._take_away
        return sum(take(once[start : start + _AT_ONCE]) for start in range(0, len(once), _AT_ONCE))

    def load(self, saved: KeptTable, known: TierTable | None) -> None:
        self._without_ranks = known is not None and not known.ranked
        super().load(saved, known)

    def clear(self) -> None:
        self._without_ranks = False
        super().clear()

    def capture(self, cursor: int, most: int) -> tuple[Captured, int]:
        captured, cursor = super().capture(cursor, most)
        if is_ranked(self.spec.eviction):
            records = replace(captured.records, ranks=ranks_of(captured.records))
            captured = replace(captured, described=replace(captured.described, ranked=True), records=records)
        return captured, cursor

    def written(self, captured: Captured, done: bool) -> None:
        super().written(captured, done)
        if captured.behind is self.behind:
            self._directory.deleted_are(np.concatenate([np.empty(0, np.int64), *(ids for ids, _ in self._gone)]))

    def _tiered_rows(self, new_slab: SlabMaker) -> Callable[[TableSpec, RowOptimizer, int], TableRows]:
        def make(spec: TableSpec, optimizer: RowOptimizer, rows: int) -> TableRows:
            self.tiered = UnindexedRows(spec, optimizer, rows, self.behind, self._made)
            return self.tiered

        return make

    def _empty(self, spec: TableSpec) -> tuple[RowDirectory, TableRows]:
        self._made = TierDirectory(self._indexed, self.behind, lambda: self.tiered.layout.record_bytes)
        return self._made, self._make_rows(spec, self.optimizer, self._made.capacity)

    def _new_members(self) -> RowMembership:
        if self.spec.eviction is None:
            return super()._new_members()
        return UnindexedMembership(self.spec, self.tiered, lambda: self._touched)

    def _load_rows(self) -> None:
        self._directory.start(self._indexed.count(self.behind.name))

    def _learn(self, ids: Int64) -> None:
        """Everything is known afterwards of `ids` int64 `[n]`. Raises as `Tier.read`, and nothing has changed."""
        wanted = self._directory.unknown(ids)
        if wanted is not None:
            self.brought(wanted, self.behind.ask(wanted))

    def _reserve(self, ids: Int64, loaded: bool = True) -> None:
        self._learn(ids)
        once = np.unique(ids)
        self.tiered.make_room(once)
        positions = np.empty(len(once), np.int64)
        self._directory.find_here(once, positions)
        self._room(once[positions < 0])
        self.tiered.bring_near(once[positions < 0])
        if self.tiered.near_rows > _MOST_NEAR:
            self.tiered.admit_near()

    def _into_memory(self, ids: Int64, positions: Int64) -> Int64:
        self._directory.keep(ids, positions)
        self._reserve(ids)
        found = np.empty(len(ids), np.int64)
        self._directory.find_here(ids, found)
        self._swept = np.concatenate((self._swept, found[positions >= NEAR]))
        return found

    def _end_sweep(self) -> None:
        super()._end_sweep()
        self.tiered.cool(self._swept)
        self._swept = _NONE

    def _find(self, ids: Int64, positions: Int64, pool: RangePool) -> int:
        """Every row that there is is in memory, since `_reserve`."""
        return self._directory.find_here(ids, positions)

    def _row_ids(self) -> Int64:
        return self._directory.row_ids
