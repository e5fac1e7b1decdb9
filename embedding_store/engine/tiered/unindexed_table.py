"""One table whose ids are found in its tier: a row that is not in memory takes no memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import IndexedTier, Records
from elastable.embedding_store.engine.dense_replay.table_replay import DenseReplay
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.engine.table_rows import TableRows
from elastable.embedding_store.engine.tiered.tier_names import TierNames
from elastable.embedding_store.engine.tiered.tiered_table import Captured, TieredTable
from elastable.embedding_store.engine.unindexed.near_records import NEAR
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.engine.unindexed.unindexed_rows import UnindexedRows
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.native.ids.row_directory import RowDirectory
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.native.slab import SlabMaker, anonymous_slab
from elastable.embedding_store.optimizers.base import RowOptimizer
from elastable.embedding_store.rows.checks import require_ids
from elastable.embedding_store.support.memory.row_budget import RowBudget

__all__ = ["UnindexedTable"]

_NONE: Int64 = np.empty(0, np.int64)
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
            BadSpec: an optimizer that is not known here, or a table that needs to know all of its rows.
        """
        if spec.eviction is not None:
            raise BadSpec(
                f"table {spec.name!r} has eviction, which needs to know of every row when it was touched last, and a "
                "store with index=redis does not keep that: open the store with index=memory, or leave eviction out"
            )
        self._indexed = tier
        self._swept = _NONE
        super().__init__(spec, 0, anonymous_slab, tier, names, budget, make_clean, stored)
        self.versions.order = tier.order

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

    def make_ready_to_follow(self) -> None:
        if self.replay is not None:
            try:
                self.replay.sweep(self._directory, self._rows, self._members, self.versions, self._into_memory)
            finally:
                self.tiered.release()
                self.tiered.cool(self._swept)
                self._swept = _NONE

    def replay_step(self, step: int, rate: float, ends_chapter: bool) -> None:
        self.make_ready_to_follow()
        super().replay_step(step, rate, ends_chapter)

    def make_ready_to_delete(self, ids: Int64) -> None:
        self._learn(ids)

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

    def _sweep(self, replay: DenseReplay) -> None:
        """`make_ready_to_follow` has, while it could fail."""

    def _into_memory(self, ids: Int64, positions: Int64) -> Int64:
        """Brings the rows of `ids` int64 `[n]`, each once, that `positions` were found for; returns where they are."""
        self._directory.keep(ids, positions)
        self._reserve(ids)
        found = np.empty(len(ids), np.int64)
        self._directory.find_here(ids, found)
        self._swept = np.concatenate((self._swept, found[positions >= NEAR]))
        return found

    def _find(self, ids: Int64, positions: Int64, pool: RangePool) -> int:
        """Every row that there is is in memory, since `_reserve`."""
        return self._directory.find_here(ids, positions)

    def _ids_at(self, positions: Int64) -> Int64:
        return self._directory.row_ids[positions]
