"""The part of a memory store that keeps a history: every change is logged, and an empty store replays them."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import cache

from elastable.embedding_store.contract.row_data import Commit, StayingRows
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.history.kept_changes import KeptChanges
from elastable.embedding_store.engine.history.replaying import ReplayedTables
from elastable.embedding_store.engine.membership.shared_budgets import budgets_due
from elastable.embedding_store.engine.memory_table import MemoryTable, StagedUpdate
from elastable.embedding_store.engine.pins.memory_pin import MemoryPin
from elastable.embedding_store.engine.pins.store_pins import PinLease, StorePins
from elastable.embedding_store.errors import BadInput, StoreBroken, TakenOver, Unavailable
from elastable.embedding_store.log.changes import Change, CommitImages, TableImages
from elastable.embedding_store.measures.counters import Durations
from elastable.embedding_store.native.range_pool import RangePool
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

__all__ = ["LoggedStore"]

_BASE_LEASE_S = 600.0


class LoggedStore(EmbeddingStore):
    """What `MemoryStore` does besides where it has a history; without one, nothing.

    A change is applied in memory first, and logged before the lock that it was
    made under is released: nobody sees what is not logged. Where logging fails,
    the store is closed to everybody, and comes back at its last logged version
    when it is opened again.
    """

    _tables: dict[str, MemoryTable]
    _gone: dict[str, int]  # name -> `MemoryTable.written_once_gone` of a table that was dropped
    _version: int
    _changes: int
    _failure: BaseException | None
    _lock: ReadersWriterLock
    _pins: StorePins
    _pool: RangePool
    _phases: Durations
    _table: Callable[[str], MemoryTable]
    _new_table: Callable[[TableSpec], MemoryTable]
    _require_open: Callable[[], None]
    _history: KeptChanges | None = None
    _record: bytes | None = None
    _base_of: tuple[PinLease, int] | None = None  # of the last base, and `_changes` when it began
    _unlogged: tuple[Commit, Callable[[], CommitImages]] | None = None

    def keep_history(self, history: KeptChanges) -> None:
        """Brings the empty store to the last version of a history, and adds every later change to it.

        The store closes the history.

        Raises:
            BadInput: the store is not empty.
            StoreBroken: the history is corrupt.
        """
        with self._lock.writing():
            self._require_open()
            if self._tables or self._version or self._history is not None:
                raise BadInput("only an empty memory store can be brought to the version of a history")
            self._replay(history)
            self._history = history
            self._changes += 1

    @property
    def keeps_records(self) -> bool:
        return self._history is not None

    def record(self) -> bytes | None:
        return self._record

    def staying_rows(self, commit: Commit) -> dict[str, StayingRows]:
        with self._lock.reading():
            self._require_open()
            refuse_other_version(self._version, commit.version - 1)
            due = budgets_due((table.spec for table in self._tables.values()), commit)
            time = self._time_of(commit) or 0.0  # which no other table asks for
            return {name: self._tables[name].staying(commit, time) for name in due}

    def recover(self, version: int | None = None) -> int:
        history = self._history
        with self._lock.writing():
            self._drop_unlogged()
        if history is None or version is None or version != self._version - 1:
            return super().recover(version)
        history.abandon_base()
        with self._lock.writing():
            rows = history.take_back(version)
            self._replay_anew(history, f"the store went back to version {version}")
            return rows

    def _time_of(self, commit: Commit) -> float | None:
        """The time of a commit, decided now where it says none; None: no table asks for it."""
        if not any(table.spec.timed for table in self._tables.values()):
            return None
        return float(time.time() if commit.time is None else commit.time)

    def _note_applied(self, commit: Commit, updates: Mapping[MemoryTable, StagedUpdate], time: float | None) -> None:
        """A commit was applied: `updates`, of the tables that it names. Until `_log_noted`, nobody changes a row.

        `time`: what `_time_of` gave.
        """
        if self._history is not None:
            kept = self._history.keeps_entries

            # Copied by whoever logs, who may be another thread: whoever commits need not wait for it.
            @cache
            def images() -> CommitImages:
                return self._images(commit, updates, time) if kept else CommitImages(commit.step, ())

            self._unlogged = commit, images

    def _log_noted(self, commit: Commit) -> None:
        """Logs the commit that was applied.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: it is not logged; the same commit may be made again.
        """
        with self._phases.timing("append"):
            if self._history is None:
                self._commit_logged(commit)
            else:
                self._log_again(commit)

    def _log_again(self, commit: Commit) -> bool:
        """Logs a commit that was applied, and could not be logged before; whether there was such a one."""
        if self._unlogged is None:
            return False
        earlier, images = self._unlogged
        if commit is not earlier:
            self._drop_unlogged()
            return False
        assert self._history is not None
        try:
            self._history.append(images(), commit.version)
        except (StoreBroken, TakenOver) as error:
            self._failure, self._unlogged = error, None
            raise
        self._unlogged = None
        self._commit_logged(commit)
        self._begin_base(self._history, commit.ends_chapter)
        return True

    def _commit_logged(self, commit: Commit) -> None:
        self._version, self._record = commit.version, commit.record
        self._changes += 1

    @contextmanager
    def _whole_or_broken(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self._failure = error  # rows of two versions: nobody may read them, or change them again
            raise

    def _drop_unlogged(self) -> None:
        """Takes a commit back that was applied and could not be logged."""
        if self._history is not None and self._unlogged is not None:
            self._history.refresh()  # where it was logged after all, it is not any more
            self._replay_anew(
                self._history, f"version {self._unlogged[0].version} could not be logged and was taken back"
            )

    def _refuse_unlogged(self) -> None:
        """Raises `Unavailable` while a commit is applied and not logged."""
        if self._unlogged is not None:
            raise Unavailable(
                f"version {self._unlogged[0].version} could not be logged yet, and nobody may see it before: commit it "
                "again"
            )

    def _log(self, change: Change, version: int | None = None) -> None:
        """Appends a change that is about to be made.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: it is not logged, and must not be made.
        """
        if self._history is not None:
            try:
                self._history.append(change, self._version if version is None else version)
            except (StoreBroken, TakenOver) as error:
                self._failure = error
                raise

    @property
    def _base_differs(self) -> bool:
        """Whether a base is being written of the current version, whose rows were changed by hand since.

        Whoever pins the version now would read the rows of the base.
        """
        if self._base_of is None:
            return False
        lease, changes = self._base_of
        return lease.gone is None and lease.version == self._version and changes != self._changes

    def _abandon_base(self) -> None:
        """Before the lock is taken: whoever writes a base needs it to release its pin."""
        if self._history is not None:
            self._history.abandon_base()

    def _close_history(self) -> None:
        if self._history is not None:
            self._history.close()

    def _images(self, commit: Commit, updates: Mapping[MemoryTable, StagedUpdate], time: float | None) -> CommitImages:
        changed = [table for table in self._tables.values() if table in updates or table.evicted_now]
        rates = {
            name: self._rate(table, commit)
            for name, table in self._tables.items()
            if table.replay is not None and name not in commit.frozen
        }
        images = [
            self._images_of(table, updates.get(table)) for table in changed if table.spec.name not in commit.frozen
        ]
        return CommitImages(commit.step, images, rates, commit.frozen, commit.ends_chapter, commit.record, time)

    def _images_of(self, table: MemoryTable, update: StagedUpdate | None) -> TableImages:
        if update is None:
            return table.images(None, None, self._pool)
        return table.images(update.batch, update.sighted, self._pool)

    def _begin_base(self, history: KeptChanges, ends_chapter: bool) -> None:
        # A base brings the rows of `lazy=False` tables up to date, which changes no bit only where a chapter ends.
        if history.wants_base and (ends_chapter or all(table.replay is None for table in self._tables.values())):
            lease = self._pins.take(self._version, None, _BASE_LEASE_S)
            self._base_of = lease, self._changes
            pin = MemoryPin(self._lock, self._pool, self._table, self.specs, self._pins, lease)
            history.begin_base(pin, [table.spec for table in self._tables.values()], self._record)

    def _rate(self, table: MemoryTable, commit: Commit) -> float:
        return commit.learning_rates.get(table.spec.name, table.optimizer.default_learning_rate)

    def _replay_anew(self, history: KeptChanges, why: str) -> None:
        """`why`: for the holders of pins, whose before-images go."""
        self._pins.give_up_all(why)
        for name, table in self._tables.items():
            self._gone[name] = table.written_once_gone
            table.close()
        self._tables.clear()
        self._unlogged = None
        self._replay(history)
        for name, table in self._tables.items():  # its statistics have begun anew, and its rows may be others
            table.follow_gone(self._gone.pop(name, 0))
        self._changes += 1

    def _replay(self, history: KeptChanges) -> None:
        replayed = ReplayedTables(self._tables, self._new_table)
        try:
            history.replay(replayed)
        except Exception as error:
            self._failure = error
            raise
        self._version, self._record = replayed.version, replayed.record
