"""The part of a store that has a tier behind it: reading ahead, writing behind, and owning what is written."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Mapping, Sequence

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import FlushStatus, TableUpdate
from elastable.embedding_store.engine.history.logged_store import LoggedStore
from elastable.embedding_store.engine.history.store_history import DEFAULT_LOG_BYTES
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.table_lookups import StoreReads
from elastable.embedding_store.engine.tiered.flusher import Flusher
from elastable.embedding_store.engine.tiered.store_state import StoreState
from elastable.embedding_store.engine.tiered.store_tier import StoreTier
from elastable.embedding_store.engine.tiered.tiered_table import TieredTable
from elastable.embedding_store.errors import DeadlineExceeded, Unavailable
from elastable.embedding_store.measures.counters import Counts, Durations
from elastable.embedding_store.measures.values import StoreMeasures
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tables.lookup_request import LookupRequest

__all__ = ["DEFAULT_EVERY_S", "WrittenBehind"]

_NEAR_ROWS = 1 << 14  # rows that lookups have read, until they are given frames

# A server that is started again is back within seconds; a node of a Cluster takes no writes for two more.
_CLOSING_S = 10.0

DEFAULT_EVERY_S = 5.0
"""Seconds between two times that changed rows are written."""


class WrittenBehind(LoggedStore, StoreReads):
    """What `MemoryStore` does besides where it has a tier; without one, nothing."""

    _closed: bool
    _phases: Durations
    _wanted: Counts
    _store_tier: StoreTier | None = None
    _flusher: Flusher | None = None
    _undecided = False
    _closing_s = 0.0

    def keep_tier(
        self,
        tier: StoreTier,
        *,
        log_bytes: int = DEFAULT_LOG_BYTES,
        every_s: float = DEFAULT_EVERY_S,
        timeout_s: float = 60.0,
        closing_s: float = _CLOSING_S,
    ) -> None:
        """Brings the empty store to the last version of a tier and its log, and keeps them up to date.

        The store closes them.

        Args:
            tier: The tier, and its log.
            log_bytes: Of changes that are not in the tier; beyond it, commits wait.
            every_s: Seconds between two times that changed rows are written.
            timeout_s: Seconds that a commit waits for the tier.
            closing_s: Seconds for which `close` tries again where the tier is away.

        Raises:
            BadInput: the store is not empty.
            StoreBroken: tier or log are corrupt, or one has lost what the other needs.
        """
        self._store_tier, self._closing_s = tier, closing_s
        self.keep_history(tier)
        self._flusher = Flusher(
            tier,
            self._lock,
            self._described,
            self._may_flush,
            every_s=every_s,
            log_bytes=log_bytes,
            timeout_s=timeout_s,
        )

    def flush_status(self) -> FlushStatus | None:
        if self._flusher is None:
            return None
        with self._lock.reading():
            return self._flusher.status(self._version)

    def measures(self) -> StoreMeasures:
        tables = {name: table for name, table in list(self._tables.items()) if isinstance(table, TieredTable)}
        read = {name: table.behind.reads.value for name, table in tables.items()}
        return StoreMeasures(self._phases.histograms(), self._wanted.by_name(), read)

    def flush(self, timeout_s: float = 600.0) -> None:
        """Returns once everything that was committed before is in the tier, and as durable as that makes it.

        Where there is anything to write, this process is the one that writes to the store from then on.

        Raises:
            ElastableError: it cannot be written; nothing is lost while the store is open.
            DeadlineExceeded: not within `timeout_s` seconds.
        """
        flusher, tier = self._flusher, self._store_tier
        if flusher is None or tier is None:
            return
        with self._lock.writing():
            self._require_open()
            if tier.behind:
                self._own()
            if not tier.owned:
                return
        flusher.flush(timeout_s)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        if self._store_tier is not None:
            self._read_ahead(list(ids.items()))
        return super().lookup(ids, version)

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        if self._store_tier is not None:
            self._read_ahead([(request.table, request.ids) for request in requests])
        super().lookup_into(requests, version, split)

    def lookup_in_order(self, requests: Iterable[LookupRequest], version: int | None) -> Generator[None, None, None]:
        """As in `RowSource.lookup_in_order`; where rows may be cold, all requests are taken first, and read at once."""
        if self._store_tier is not None:
            requests = list(requests)
            self._read_ahead([(request.table, request.ids) for request in requests])
        return super().lookup_in_order(requests, version)

    def other_writer(self) -> str | None:
        return None if self._store_tier is None else self._store_tier.tier.other_writer()

    def require_owner(self) -> None:
        if self._store_tier is not None:
            self._store_tier.tier.require_owner()

    def recover(self, version: int | None = None) -> int:
        if self._store_tier is None:
            return super().recover(version)
        with self._lock.writing():
            self._own()
        try:
            return super().recover(version)  # until then, nothing is written of a version that it takes back
        finally:
            self._undecided = False

    def _read_ahead(self, wanted: Sequence[tuple[str, Int64]]) -> None:
        """Before a lookup: reads cold rows of all its tables at once."""
        tier = self._store_tier
        assert tier is not None
        for name, ids in wanted:
            if name in self._tables:
                self._wanted.add(name, by=len(ids))
        tables = [table for table in list(self._tables.values()) if isinstance(table, TieredTable)]
        if all(table.tiered.whole for table in tables):
            return
        swollen = [(table, table.tiered) for table in tables if table.tiered.swollen]
        if swollen:
            with self._lock.writing():
                for table, rows in swollen:
                    if table.tiered is rows:
                        rows.shrink()
        if not tier.tier.far:
            again = [(table, rows, rows.read_again()) for table in tables if (rows := table.tiered).unsettled]
            if again:
                with self._lock.writing():
                    for table, rows, positions in again:
                        if table.tiered is rows:  # the table was not cleared since
                            rows.settle(positions)
            return
        if sum(table.tiered.near_rows for table in tables) > _NEAR_ROWS:
            with self._lock.writing():
                for table in tables:
                    table.tiered.admit_near()
        with self._lock.reading():
            found = [(self._tables.get(name), ids) for name, ids in wanted]
            tier.read_ahead([(table, ids) for table, ids in found if isinstance(table, TieredTable)])

    def _bring(self, changed: Sequence[tuple[MemoryTable, TableUpdate]]) -> None:
        """Before a commit, the store being held alone: reads cold rows of all its tables at once, where that pays."""
        if self._store_tier is None:
            return
        for table, update in changed:
            self._wanted.add(table.spec.name, by=len(update.ids))
        if self._store_tier.tier.far:
            found = [(table, update.ids) for table, update in changed if isinstance(table, TieredTable)]
            self._store_tier.read_ahead(found)

    def _make_way(self) -> None:
        """Before a change, the store not being held: waits until the log may grow."""
        tier = self._store_tier
        if self._flusher is not None and tier is not None:
            if not tier.owned:  # nothing is written until then, and the log may be full
                with self._lock.writing():
                    self._require_open()
                    self._own()
            tables = [table for table in list(self._tables.values()) if isinstance(table, TieredTable)]
            self._flusher.wait_for_room(lambda: any(table.tiered.pressed for table in tables))

    def _own(self) -> None:
        """Before a change, the store being held alone: nobody else writes from now on."""
        tier = self._store_tier
        if tier is not None and tier.own():
            self._replay_anew(tier, "another process has changed the store")

    def _decide(self) -> None:
        """Before another version is staged, the store being held alone: the current one is not taken back any more."""
        if self._undecided:
            self._undecided = False
            flusher, tier = self._flusher, self._store_tier
            if flusher is not None and tier is not None and flusher.wanted:
                self._flush_alone(tier)

    def _wait_for_decision(self) -> None:
        """The version that was finished may be taken back, until the next one is staged."""
        self._undecided = True

    def _may_flush(self) -> bool:
        # Rows of a commit that could not be logged must not get to the tier: the store may come back without it. And
        # a process that has changed nothing leaves writing to the one that does: it would take the store from it.
        owned = self._store_tier is not None and self._store_tier.owned
        decided = not self._undecided and self._unlogged is None
        return owned and decided and self._failure is None and not self._closed

    def _described(self) -> StoreState:
        assert self._store_tier is not None
        return self._store_tier.describe(self._version, self._record)

    def _flush_alone(self, tier: StoreTier) -> None:
        """Writes everything; the store is held alone."""
        tier.wait()
        if tier.behind:
            state, retired = self._described(), tier.names.retired()
            tier.log.sync()
            tier.write_all()
            tier.keep(state, retired)

    def _flush_last(self) -> None:
        """Before the store is closed. Raises `ElastableError` where what is not in a log cannot be written."""
        flusher, tier = self._flusher, self._store_tier
        if flusher is None or tier is None or self._closed:
            return
        flusher.stop()
        # One that does not answer has been waited for already.
        away = Retry(self._closing_s, _is_away)
        away.call(lambda: self._flush_what_is_decided(tier))

    def _flush_what_is_decided(self, tier: StoreTier) -> None:
        with self._lock.writing():
            undecided = self._undecided and tier.log.keeps_entries
            if self._failure is None and self._unlogged is None and tier.owned and not undecided:
                self._flush_alone(tier)


def _is_away(error: Exception) -> bool:
    return isinstance(error, Unavailable) and not isinstance(error, DeadlineExceeded)
