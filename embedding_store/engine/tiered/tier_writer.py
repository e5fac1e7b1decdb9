"""Writing behind: what has changed is captured, written to the tier, and acknowledged."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from elastable.embedding_store.contract.tier import Tier, TierTable
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.engine.tiered.tier_names import TierNames
from elastable.embedding_store.engine.tiered.tiered_table import Captured, TieredTable
from elastable.embedding_store.errors import SpecConflict, StoreFailed
from elastable.embedding_store.log.contract import Log

__all__ = ["TierWriter"]

_CHUNK_BYTES = 8 << 20
_WAIT_S = 600.0  # for a write that is under way: it has its own, shorter deadline


class TierWriter:
    """Writes the rows of a store's tables to their tier, and trims the log behind them.

    Rows are captured while the store is held with other readers, or alone, and written without holding it. One write
    is under way at a time, so that no older value of a row overwrites a newer one.

    Attributes:
        tier: Where rows are written.
        log: Where every change is appended before anybody sees it.
        names: Of tables in the tier.
        begun: How often the store has begun anew at a state of the tier: kept one, or was brought back to one.
    """

    def __init__(self, tier: Tier, log: Log) -> None:
        self.tier, self.log = tier, log
        self.names = TierNames()
        self._tables: Callable[[], Mapping[str, MemoryTable]] = dict
        self.begun = 0
        self._turn = threading.Condition()
        self._under_way = False
        self._finished: list[tuple[list[Captured], bool]] = []
        self._state: StoreState | None = None
        self._soiled = False

    @property
    def place(self) -> str:
        """Where the rows are, for messages."""
        return self.tier.place

    def tables(self) -> list[TieredTable]:
        """Those of the store."""
        return [table for table in self._tables().values() if isinstance(table, TieredTable)]

    @property
    def changed(self) -> int:
        """Rows that are not in the tier as they are."""
        return sum(table.changed for table in self.tables())

    def capture(self, cursors: dict[TieredTable, int]) -> list[Captured]:
        """Takes changed rows of tables, some megabytes, from the cursors on, which move; -1: the table is done."""
        captured, left = [], _CHUNK_BYTES
        for table, cursor in cursors.items():
            if cursor < 0 or left <= 0:
                continue
            row_bytes = table.tiered.layout.record_bytes
            some, cursors[table] = table.capture(cursor, max(64, left // row_bytes))
            left -= some.records.rows.nbytes
            if len(some.records.ids) or len(some.gone[0]):
                captured.append(some)
        return captured

    def begin_writing(self) -> None:
        """Waits until nothing is being written; the next write is the caller's, who holds the store.

        Raises:
            StoreFailed: another write does not end.
        """
        with self._turn:
            if not self._turn.wait_for(lambda: not self._under_way, _WAIT_S):
                raise StoreFailed(f"{self.place}: a write has not ended within {_WAIT_S:g} s")
            self._under_way = True
            self._acknowledge()

    def write(self, captured: list[Captured], sequence: int) -> None:
        """Writes what was captured, and ends the turn.

        Raises:
            ElastableError: as `Tier.write`; the rows count as changed again.
        """
        done = False
        try:
            if captured:
                self._soil()
                for some in captured:
                    if not some.behind.there:
                        self._create(some.described)
                        some.behind.there = True
                gone = {some.behind.name: some.gone for some in captured if len(some.gone[0])}
                self.tier.write([some.records for some in captured if len(some.records.ids)], gone, sequence)
            done = True
        finally:
            with self._turn:
                self._finished.append((captured, done))
                self._end_turn()

    def _end_turn(self) -> None:
        self._under_way = False
        self._turn.notify_all()

    def _create(self, table: TierTable) -> None:
        try:
            self.tier.create(table)
        except SpecConflict:  # an earlier call made it, and its answer was lost: names in the tier are given once
            self.tier.drop(table.name)
            self.tier.create(table)

    def acknowledge(self) -> None:
        """Takes note of what was written; the store is held."""
        with self._turn:
            self._acknowledge()

    def wait(self) -> None:
        """Returns once nothing is being written, and takes note of it; the store is held alone.

        Raises:
            StoreFailed: a write does not end.
        """
        self.begin_writing()
        with self._turn:
            self._end_turn()

    def write_all(self) -> None:
        """Writes every changed row now; the caller has the store alone.

        Raises:
            ElastableError: as `Tier.write`.
        """
        cursors = dict.fromkeys(self.tables(), 0)
        while any(cursor >= 0 for cursor in cursors.values()):
            self.begin_writing()
            self.write(self.capture(cursors), self.log.last)
        self.acknowledge()

    def _acknowledge(self) -> None:
        for captured, done in self._finished:
            for some in captured:
                some.table.written(some, done)
        self._finished.clear()

    def describe(self, version: int, record: bytes | None) -> StoreState:
        """The store as it is; it is held."""
        return StoreState(version, self.log.last, record, [table.saved() for table in self.tables()])

    def keep_behind(self, state: StoreState, retired: Sequence[str]) -> None:
        """As `keep`, in a turn that `begin_writing` has begun, and that this ends; the store need not be held."""
        try:
            self.keep(state, retired)
        finally:
            with self._turn:
                self._end_turn()

    def keep(self, state: StoreState, retired: Sequence[str]) -> None:
        """Every row as of `state` is in the tier: keeps the state, and lets go of what it makes unnecessary.

        Args:
            state: What `describe` gave before the rows were captured.
            retired: Tables of the tier that nobody needed any more then.
        """
        complete = self.log.keeps_entries or state.sequence == self.log.last
        self.log.sync()
        self.begun += 1
        self.tier.put_state(replace(state, complete=complete).to_bytes())
        self._state, self._soiled = state, not complete
        self.log.trim(state.sequence)
        for name in retired:
            self.tier.drop(name)
        self.names.forget(retired)

    @property
    def kept(self) -> StoreState | None:
        """The state in the tier."""
        return self._state

    def _soil(self) -> None:
        """Before the first write after a state, where no log says what was written since."""
        if not self.log.keeps_entries and not self._soiled:
            state = StoreState(0, 0, None, ()) if self._state is None else self._state
            self.tier.put_state(replace(state, complete=False).to_bytes())
            self._soiled = True
