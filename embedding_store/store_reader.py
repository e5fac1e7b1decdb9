"""Read-only views of stores whose tier and log other processes can read."""

import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np

from elastable.embedding_store.composite.partitioned_store import PartitionedSnapshot
from elastable.embedding_store.composite.store_servers import stand_in
from elastable.embedding_store.contract.arrays import Bools, Float32, Int64, UInt8
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.tier import Records, Tier
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.store_history import FollowedChange, ReplayedTables
from elastable.embedding_store.engine.tiered.store_state import FlushedTable, StoreState
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    ElastableError,
    FutureVersion,
    StaleVersion,
    StoreBroken,
    StoreFailed,
    TableNotFound,
    Unavailable,
    Unsupported,
    VersionError,
)
from elastable.embedding_store.log.changes import Change, CommitImages, ResetVersion, TableImages, decode_change
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.inspection import LogTail
from elastable.embedding_store.log.segment import find_base
from elastable.embedding_store.native.id_index import IdIndex
from elastable.embedding_store.tables.checks import require_ids
from elastable.embedding_store.tables.table import BaseSource
from elastable.embedding_store.v1 import store_pb2
from elastable.embedding_store.wire.channels.server_connection import ServerConnection
from elastable.embedding_store.wire.channels.status_codes import raising
from elastable.embedding_store.wire.messages.store_messages import STORE_SERVICE, followed_from_frames


class FollowedTable(MemoryTable):
    """Changes of the log are applied to it as to any table in memory.

    It holds the rows that they have written, and knows which ones they have deleted. Callers do the locking.

    Attributes:
        tier_name: Of the table in the tier; None: none of its rows are there.
    """

    def __init__(self, spec: TableSpec, tier_name: str | None = None) -> None:
        """A table without changes. Raises `BadSpec` for an optimizer that is not known here."""
        self.tier_name = tier_name
        self._gone = IdIndex()
        super().__init__(spec, direct_bytes=0)

    @classmethod
    def of(cls, saved: FlushedTable, in_tier: bool) -> Self:
        """The table that a store describes; `in_tier`: it has rows there. Raises `StoreFailed` where it is corrupt."""
        table = cls(saved.spec, saved.stored if in_tier else None)
        table.put_state(saved.state)
        if saved.steps is not None and table.replay is not None:
            table.replay.steps.restore(saved.steps)
        return table

    @property
    def changes(self) -> int:
        """Rows that are in memory, and rows that are known to be deleted."""
        return self.count + self._gone.count

    @property
    def moves(self) -> bool:
        """Whether steps move rows that they do not update, or shrink rows that were never updated."""
        form = None if self.replay is None else self.replay.steps.form
        return form is not None and bool(form.moves_weights or form.decay)

    def wanted(self, ids: Int64) -> Records | None:
        """What to ask the tier for, to read the rows of `ids` int64 `[n]`, which may repeat; None: nothing."""
        if self.tier_name is None:
            return None
        once = np.unique(ids)
        once = once[~self._changed(once)]
        if not len(once):
            return None
        width = self.spec.weight_bytes + (4 * (self.slot_width + 1) if self.replay is not None else 0)
        return Records(self.tier_name, once, np.arange(len(once)), np.empty((len(once), width), np.uint8))

    def complete(self, ids: Int64, wanted: Records | None, missing: Int64 | None) -> Float32:
        """The rows of `ids` int64 `[n]`: float32 `[n, dim]`.

        Args:
            ids: Checked.
            wanted: What `wanted` gave of them earlier, read.
            missing: Indices of those that the tier has no record of.
        """
        out = np.empty((len(ids), self.spec.dim), np.float32)
        self.read(ids, out)
        if wanted is None or missing is None or wanted.table != self.tier_name:
            return out
        there = np.ones(len(wanted.ids), np.bool_)
        there[missing] = False
        places = np.minimum(np.searchsorted(wanted.ids, ids), len(wanted.ids) - 1)
        stored = (wanted.ids[places] == ids) & there[places] & ~self._changed(ids)
        if stored.any():
            out[stored] = self._numbers(wanted.rows)[places[stored]]
        return out

    def take(self, records: Records) -> None:
        """Takes rows of the tier into memory."""
        self.make_ready_to_put(records.ids, loaded=False)
        positions = np.empty(len(records.ids), np.int64)
        self.directory.claim(records.ids, positions)
        self.rows.load(records.rows, np.arange(len(positions)), positions)

    def put(self, block: RowBlock) -> None:
        self._gone.remove(block.ids)
        super().put(block)

    def put_images(self, images: TableImages, version: int) -> None:
        super().put_images(images, version)
        self._gone.remove(images.ids)

    def clear(self) -> None:
        self.tier_name = None
        self._gone.clear()
        super().clear()

    def follow(self, step: int, learning_rate: float, ends_replay_epoch: bool) -> None:
        """No step is forgotten: rows in the tier may be far behind."""
        if self.replay is not None:
            self.replay.steps.take(step, learning_rate, ends_replay_epoch)

    def _take_away(self, ids: Int64) -> int:
        once = np.unique(ids)
        self._gone.reserve(len(once))
        self._gone.claim(once, np.empty(len(once), np.int64))
        return super()._take_away(ids)

    def _changed(self, ids: Int64) -> Bools:
        """Whether each id is in memory, or known to be deleted: its record in the tier does not count."""
        changed: Bools = (self.directory.positions_of(ids) >= 0) | (self._gone.positions_of(ids) >= 0)
        return changed

    def _numbers(self, records: UInt8) -> Float32:
        """What the first bytes of records say: float32 `[n, dim]`."""
        if self.spec.dtype == "float32" and self.replay is None:
            return records.view(np.float32)
        rows, order = self.new_rows(self.spec, len(records)), np.arange(len(records))
        rows.load(records, order, order)
        out = np.empty((len(records), self.spec.dim), np.float32)
        rows.read(order, out)
        return out


def _table(replayed: ReplayedTables, name: str) -> FollowedTable:
    table = replayed.tables.get(name)
    if not isinstance(table, FollowedTable):
        raise TableNotFound(f"no table {name!r} (tables: {', '.join(sorted(replayed.tables)) or 'none'})")
    return table


def _rows_of(replayed: ReplayedTables, ids: Mapping[str, Int64]) -> dict[str, Float32]:
    """Rows of tables that are all in memory."""
    found = {}
    for name, some in ids.items():
        table = _table(replayed, name)
        found[name] = table.complete(require_ids(table.spec, some), None, None)
    return found


def _require_version(wanted: int | None, now: int, place: object) -> None:
    if wanted is not None and wanted != now:
        error = StaleVersion if wanted < now else FutureVersion
        raise error(f"version {wanted} of {place}: readers that follow its log read version {now} now")


def _require_later(newest: int, now: int, place: object) -> None:
    if newest < now:
        raise StoreBroken(
            f"{place} is at version {newest}, and was at version {now}: it has lost what it held, or another job began "
            "there"
        )


_MOST_CHANGES = 1 << 16  # rows in memory from which on the last flush is asked for
_POLL_S = 0.02

_Read = dict[str, tuple[Records | None, Int64 | None]]


@dataclass(frozen=True, slots=True)
class ReaderStatus:
    """How current a reader is.

    Attributes:
        version: All of whose rows a lookup sees: without following the version of the last flush, else the newest.
        newest: The store's version.
        changed_rows: Rows that the reader holds in memory, as they are not flushed.
    """

    version: int
    newest: int
    changed_rows: int

    @property
    def lag(self) -> int:
        """Versions that the reader is behind."""
        return self.newest - self.version


class StoreReader(BaseSource):
    """Rows of a store that another process writes. Reading disturbs nobody and takes nothing over.

    Without `follow` a lookup reads flushed rows: each is whole, and of the version of the last flush (`version`) or of
    a later one. With `follow` it reads exactly the newest version: the log says which rows have changed since the last
    flush, and these are kept in memory.

    Args:
        tier: Where rows are; closed with the reader.
        log: Where changes are; closed with the reader.
        follow: Whether to read exactly the newest version.
        timeout_s: Seconds that a lookup may take while the store is flushed again and again.

    Raises:
        StoreBroken: rows or changes are lost, or corrupt; says what.
        StoreFailed, Unavailable, DeadlineExceeded: they cannot be read.
    """

    def __init__(self, tier: Tier, log: Log, follow: bool = False, timeout_s: float = 10.0) -> None:
        self._tier, self._log, self._follow, self._timeout_s = tier, log, follow, timeout_s
        self._lock = threading.RLock()
        self._loads = 0
        self._applied = 0
        self._replayed = ReplayedTables({}, FollowedTable)
        with self._lock:
            self._there = frozenset(self._tier.tables())  # finds out whether anything is lost
            self._load()

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name, as of now."""
        with self._lock:
            self._refresh()
            return {name: table.spec for name, table in self._replayed.tables.items()}

    def version(self) -> int:
        """The version that lookups read: of the last flush, or with `follow` the newest one."""
        with self._lock:
            self._refresh()
            return self._replayed.version

    def status(self) -> ReaderStatus:
        """How current the reader is."""
        with self._lock:
            self._refresh()
            version = self._replayed.version
            newest = version if self._follow else max(version, self._newest())
            return ReaderStatus(version, newest, sum(table.changes for table in self._tables().values()))

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Asks again and again, up to `timeout_s` seconds."""
        end = time.monotonic() + timeout_s
        while self.version() < version:
            left = end - time.monotonic()
            if left <= 0:
                return False
            time.sleep(min(left, _POLL_S))
        return True

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Reads all tables in one round trip, and with `follow` in one more to the log.

        Raises:
            StoreBroken: rows are lost.
            StaleVersion, FutureVersion: with `follow`: the version is not the newest one.
            Unsupported: without `follow`: a version is given, or a table's rows follow every step (`lazy=False`).
        """
        if version is not None and not self._follow:
            raise Unsupported(
                f"version {version} of {self._tier.place}: flushed rows are of no single version; look rows up at the "
                "job's master, or open the reader with follow=True"
            )
        give_up = time.monotonic() + self._timeout_s
        while True:
            loads, checked, read = self._read(ids)
            with self._lock:
                if self._follow:
                    self._refresh()
                if loads == self._loads:
                    _require_version(version, self._replayed.version, self._tier.place)
                    return {name: self._table(name).complete(checked[name], *read[name]) for name in ids}
            if time.monotonic() > give_up:
                raise DeadlineExceeded(
                    f"{self._tier.place} was flushed during every attempt to read it within {self._timeout_s:g} s"
                )

    def forget(self) -> None:
        with self._lock:
            self._there = frozenset()
            self._load()

    def close(self) -> None:
        """Closes tier and log. Closing twice is harmless."""
        try:
            self._log.close()
        finally:
            self._tier.close()

    def _read(self, ids: Mapping[str, Int64]) -> tuple[int, dict[str, Int64], _Read]:
        """Reads what the tier has of some ids; with the number of the state by which it was asked."""
        for attempt in range(2):
            with self._lock:
                if attempt or self._may_be_older(ids):
                    self._there = frozenset()
                    self._load()
                tables, loads = {name: self._table(name) for name in ids}, self._loads
                checked = {name: require_ids(tables[name].spec, some) for name, some in ids.items()}
                wanted = {name: tables[name].wanted(checked[name]) for name in ids}
            asked = {name: records for name, records in wanted.items() if records is not None}
            try:
                missing = dict(zip(asked, self._tier.read(list(asked.values())), strict=True)) if asked else {}
            except (BadInput, StoreFailed):
                if attempt:
                    raise
                continue  # the table may have been dropped, or cleared, since the state was read
            return loads, checked, {name: (wanted[name], missing.get(name)) for name in ids}
        raise AssertionError("unreachable")

    def _may_be_older(self, names: Iterable[str]) -> bool:
        """Whether a table is not known, or its first rows may have been flushed since the state was read."""
        tables = self._tables()
        return any(name not in tables or (tables[name].tier_name is None and not self._follow) for name in names)

    def _refresh(self) -> None:
        """Reads what has happened since; the lock is held."""
        self._log.refresh()
        if not self._follow:
            self._load()
            return
        changes = sum(table.changes for table in self._tables().values())
        trimmed = self._log.first > self._applied + 1
        if trimmed or self._log.last < self._applied or (changes > _MOST_CHANGES and self._log.first > self._begin):
            self._load()
        else:
            self._apply()

    def _load(self) -> None:
        """Begins anew with the state of the last flush; the lock is held."""
        self._begin_with(*self._flushed())

    def _begin_with(self, replayed: ReplayedTables, sequence: int) -> None:
        self._replayed, self._begin, self._applied = replayed, sequence, sequence
        self._loads += 1
        if self._follow:
            self._apply()

    def _flushed(self) -> tuple[ReplayedTables, int]:
        """The tables as of the last flush, and the number of the last entry of the log that these include."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            content = self._tier.state()
            state = StoreState(0, 0, None, ()) if content is None else StoreState.from_bytes(content, self._tier.place)
            self._log.refresh()
            if self._log.first <= state.sequence + 1 or not self._follow:
                break
            if time.monotonic() > give_up:  # it was flushed meanwhile, again and again
                raise StoreBroken(
                    f"{self._tier.place} includes log entries up to {state.sequence}, but the log begins with "
                    f"{self._log.first}: changes are lost; go on from a checkpoint"
                )
        if self._log.keeps_entries and self._log.last < state.sequence:
            raise StoreBroken(
                f"{self._tier.place} includes log entries up to {state.sequence}, but the log ends with "
                f"{self._log.last}: the end of the log is lost; go on from a checkpoint"
            )
        if not self._there.issuperset(table.stored for table in state.tables):
            self._there = frozenset(self._tier.tables())
        tables: dict[str, MemoryTable] = {
            table.spec.name: FollowedTable.of(table, in_tier=table.stored in self._there) for table in state.tables
        }
        return ReplayedTables(tables, FollowedTable, state.version, state.record), state.sequence

    def _apply(self) -> None:
        """Applies the entries after the last one; begins anew where they have been trimmed meanwhile."""
        entries = self._log.entries(after=self._applied)
        while True:
            try:
                entry = next(entries, None)
            except BadInput:  # trimmed: what they changed is flushed
                self._load()
                return
            if entry is None:
                return
            try:
                self._replayed.apply(decode_change(entry.payload), entry.version)
            except (BadInput, VersionError) as error:
                raise StoreBroken(f"{self._tier.place}: entry {entry.sequence} cannot be applied: {error}") from error
            self._applied = entry.sequence

    def _newest(self) -> int:
        """The version of the newest entry of the log."""
        last = self._log.last
        if self._log.first > last or not self._log.keeps_entries:
            return 0
        return next(iter(self._log.entries(after=last - 1))).version

    def _tables(self) -> dict[str, FollowedTable]:
        return {name: table for name, table in self._replayed.tables.items() if isinstance(table, FollowedTable)}

    def _table(self, name: str) -> FollowedTable:
        table = _table(self._replayed, name)
        if table.moves and not self._follow:
            raise Unsupported(
                f"table {name!r}: its rows follow every step (lazy=False), which flushed rows do not show; look them "
                "up at the job's master, or open the reader with follow=True"
            )
        return table


class _Held(BaseSource):
    """Rows of a store that are all in memory, at one version."""

    _replayed: ReplayedTables

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """All rows of a table in blocks, as of `EmbeddingStore.scan`; the version stays meanwhile."""
        found, cursor = _table(self._replayed, table), 0
        while True:
            block, cursor = found.scan(cursor, block_rows)
            if not len(block.ids):
                return
            yield block

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As of `EmbeddingStore.read_rows`."""
        return _table(self._replayed, table).stored(ids)

    def table_state(self, table: str) -> TableState:
        """As of `EmbeddingStore.table_state`."""
        return _table(self._replayed, table).state()


class HeldReader(StoreReader, _Held):
    """Exactly one version of a store that another process writes; `advance` goes on to the newest.

    All rows are in memory, with their slots, as the store has them. Where the log behind its version was trimmed, it
    reads the rows anew, and answers from the version that it has until it has the newest one.

    Args:
        tier, log, timeout_s: As of `StoreReader`.
    """

    def __init__(self, tier: Tier, log: Log, timeout_s: float = 10.0) -> None:
        self._moving = threading.Lock()  # the log is read by one thread at a time; lookups do not wait for that
        super().__init__(tier, log, follow=True, timeout_s=timeout_s)

    @contextmanager
    def at_one_version(self) -> Iterator[tuple[int, bytes | None]]:
        """The version, and its record; within the block lookups in this thread are of it."""
        with self._lock:
            yield self._replayed.version, self._replayed.record

    def advance(self) -> int:
        """Goes on to the newest version, and returns it.

        Raises:
            StoreBroken, StoreFailed, Unavailable, DeadlineExceeded: as of `StoreReader`; the version is as before.
        """
        with self._moving:
            self._advance()
            return self._replayed.version

    def _advance(self) -> None:
        self._log.refresh()
        if self._log.first > self._applied + 1 or self._log.last < self._applied:
            begun = self._flushed()
            now, newest = self._replayed.version, max(begun[0].version, self._newest())
            _require_later(newest, now, self._tier.place)
            with self._lock:
                self._begin_with(*begun)
        else:
            with self._lock:
                self._apply()

    def newest(self) -> int:
        """The store's version."""
        with self._moving:
            self._log.refresh()
            return max(self._replayed.version, self._newest())

    def _refresh(self) -> None:
        """Lookups stay at their version."""

    def _flushed(self) -> tuple[ReplayedTables, int]:
        """All rows, and the changes since: kept while rows are read, as the log is trimmed when these are flushed."""
        give_up = time.monotonic() + self._timeout_s
        while True:
            replayed, sequence = super()._flushed()
            try:
                changes = list(self._log.entries(after=sequence))
                for table in replayed.tables.values():
                    assert isinstance(table, FollowedTable)
                    for block in () if table.tier_name is None else self._tier.scan(table.tier_name):
                        table.take(block)
                        self._log.refresh()
                        changes += self._log.entries(after=changes[-1].sequence if changes else sequence)
                    table.tier_name = None
                for entry in changes:  # which rows that were read late have already
                    replayed.apply_encoded(entry.payload, entry.version, self._tier.place)
                return replayed, changes[-1].sequence if changes else sequence
            except BadInput as error:  # trimmed within one block: anew
                if time.monotonic() > give_up:
                    raise DeadlineExceeded(
                        f"{self._tier.place} was flushed whenever its rows were read; give it more time"
                    ) from error


class HeldLog(_Held):
    """Exactly one version of a store in memory whose log is in a folder here; `advance` goes on to the newest.

    Another process has the store open. All rows are in memory, with their slots. Where the log behind its version was
    trimmed, it begins anew with the log's base, and answers from the version that it has until it has the newest one.

    Raises:
        BadInput: the folder holds no log.
        StoreBroken, StoreFailed: it is corrupt, or cannot be read.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._lock, self._moving = threading.RLock(), threading.Lock()
        self._anew = False
        self._replayed, self._tail = self._begun()

    def _begun(self) -> tuple[ReplayedTables, LogTail]:
        base, replayed = find_base(self._folder), ReplayedTables({}, FollowedTable)
        for version, payload in () if base is None else base.payloads():
            replayed.apply_encoded(payload, version, f"{self._folder}: {base.path.name if base else ''}")
        tail = LogTail(self._folder, 0 if base is None else base.sequence)
        try:
            self._follow(replayed, tail)
        except BaseException:
            tail.close()
            raise
        return replayed, tail

    def _follow(self, replayed: ReplayedTables, tail: LogTail) -> None:
        for entry in tail.entries():
            with self._lock:
                replayed.apply_encoded(entry.payload, entry.version, f"{self._folder}: entry {entry.sequence}")

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name, at its version."""
        with self._lock:
            return {name: table.spec for name, table in self._replayed.tables.items()}

    def version(self) -> int:
        return self._replayed.version

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows at its version. Raises `StaleVersion` or `FutureVersion` where another one is given."""
        with self._lock:
            _require_version(version, self._replayed.version, self._folder)
            return _rows_of(self._replayed, ids)

    @contextmanager
    def at_one_version(self) -> Iterator[tuple[int, bytes | None]]:
        """As of `HeldReader`."""
        with self._lock:
            yield self._replayed.version, self._replayed.record

    def advance(self) -> int:
        """Goes on to the newest version, and returns it.

        Raises:
            StoreBroken, StoreFailed: it cannot be read; the version is one that was there.
        """
        with self._moving:
            if not self._anew:
                self._anew = True  # until all is applied: what was applied in part is not gone on with
                with suppress(BadInput, StoreBroken):  # trimmed: the base includes them; taken back, or of another log
                    self._follow(self._replayed, self._tail)
                    self._anew = False
            if self._anew:
                replayed, tail = self._begun()
                try:
                    _require_later(replayed.version, self._replayed.version, self._folder)
                    with self._lock:
                        self._replayed, self._tail, tail, self._anew = replayed, tail, self._tail, False
                finally:
                    tail.close()  # whichever is not read from
            return self._replayed.version

    def newest(self) -> int:
        """The store's version."""
        with self._moving:
            return max(self._replayed.version, self._tail.newest() or 0)

    def forget(self) -> None:
        """It holds its version."""

    def close(self) -> None:
        """Closes the log. Closing twice is harmless."""
        with self._moving:
            self._tail.close()


# Stores that servers hold: what a server says of its log, and the version that all of them have


_MOST_AHEAD = 256 << 20  # bytes of changes that are not applied; the server waits, and then gives the follower up


class _ServerLog:
    """The log of one server, which a thread reads from now on, until the call ends.

    Args:
        connection: To the server.
        news: Guards everything, and is notified of what comes.

    Attributes:
        there: What the server's store held at first, and the changes that were applied since; None: it is not there.
        why: Why there will be no more; None: there may.
    """

    def __init__(self, connection: ServerConnection, news: threading.Condition) -> None:
        self._connection, self._news = connection, news
        self.there: ReplayedTables | None = None
        self.why: ElastableError | None = None
        self._changes: deque[tuple[int, Change, int]] = deque()
        self._bytes = 0
        follow = connection.channel.unary_stream(f"/{STORE_SERVICE}/Follow", None, None)
        self._call = follow(store_pb2.FollowRequest().SerializeToString())
        self._thread = threading.Thread(target=self._read, name="elastable-server-log", daemon=True)
        self._thread.start()

    def _read(self) -> None:
        address, begun = self._connection.address, ReplayedTables({}, FollowedTable)
        try:
            with raising(address, self._connection.deadline_s):
                said = followed_from_frames(self._call)
                while (change := self._connection.decoded(next, said, None)) is not None:
                    self._take(change, begun, f"the log of {address}, version {change.version},")
            raise Unavailable(f"{address} has ended the call")
        except ElastableError as error:
            why = error
        except Exception as error:  # noqa: BLE001 - whoever asks for the version is told
            why = StoreFailed(f"the log of {address} cannot be read: {error!r}")
        with self._news:
            self.why = why
            self._news.notify_all()

    def _take(self, said: FollowedChange, begun: ReplayedTables, where: str) -> None:
        if said.begin:
            begun.apply_encoded(said.payload or b"", said.version, where)
            return
        change = None if said.payload is None else decode_change(memoryview(said.payload))
        with self._news:
            if change is None:
                self.there = self.there or begun
                while self._changes and self._changes[-1][0] > said.version:
                    self._bytes -= self._changes.pop()[2]
                if self.newest() > said.version:
                    raise StoreBroken(f"{where} is the newest now: version {self.newest()}, which was there, is not")
            else:
                size = len(said.payload or b"")
                while self._bytes and self._bytes + size > _MOST_AHEAD and self._call.is_active():
                    self._news.wait(_POLL_S)
                self._changes.append((said.version, change, size))
                self._bytes += size
            self._news.notify_all()

    def newest(self) -> int:
        """The version after the last change; -1: nothing is there."""
        if self.there is None:
            return -1
        return self._changes[-1][0] if self._changes else self.there.version

    def leading_to(self, version: int) -> tuple[int, bytes | None] | None:
        """How many changes make the version, and its record; None: none do."""
        if self.there is None:
            return None
        record = self.there.record
        found = (0, record) if self.there.version == version else None
        for number, (made, change, _) in enumerate(self._changes, 1):
            record = change.record if isinstance(change, CommitImages | ResetVersion) else record
            found = (number, record) if made == version else found
        return found

    def apply(self, count: int) -> ReplayedTables:
        """Makes so many changes. Raises `StoreBroken`: one does not fit."""
        assert self.there is not None
        for _ in range(count):
            version, change, size = self._changes.popleft()
            self._bytes -= size
            try:
                self.there.apply(change, version)
            except (BadInput, VersionError) as error:
                raise StoreBroken(
                    f"{self._connection.address}: version {version} cannot be applied: {error}"
                ) from error
        return self.there

    def close(self) -> None:
        """Ends the call and the thread."""
        self._call.cancel()  # type: ignore[no-untyped-call]
        self._thread.join()


class _Shard(_Held, Snapshot):
    """What one server's store holds, at the version of all of them; `HeldServers` does the locking."""

    def __init__(self, address: str, deadline_s: float, news: threading.Condition) -> None:
        self.connection, self._news = ServerConnection(address, deadline_s), news
        self._replayed = ReplayedTables({}, FollowedTable)
        self.log = _ServerLog(self.connection, news)
        self.because: ElastableError | None = None  # why it is read anew, until it is there

    def again(self) -> None:
        """Reads everything anew where nothing more will come; raises why, until it is there."""
        if self.log.why is not None:
            self.because = self.log.why
            self.log.close()
            self.log = _ServerLog(self.connection, self._news)
        if self.because is not None and self.log.there is None:
            raise self.because
        self.because = None

    @property
    def anew(self) -> bool:
        """Whether it was read anew, and is not answered from yet."""
        return self.log.there is not self._replayed

    def apply(self, count: int) -> bool:
        """Goes on by so many changes of its log; whether there are other tables then."""
        before = list(self._replayed.tables.values())
        self._replayed = self.log.apply(count)
        return before != list(self._replayed.tables.values())

    def record(self) -> bytes | None:
        """Of its version."""
        return self._replayed.record

    def specs(self) -> dict[str, TableSpec]:
        return {name: table.spec for name, table in self._replayed.tables.items()}

    def version(self) -> int:
        return self._replayed.version

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        return _rows_of(self._replayed, ids)

    def row_count(self, table: str) -> int:
        return _table(self._replayed, table).count

    def renew(self, lease_s: float | None = None) -> None:
        """It ends when it is closed."""

    def close(self) -> None:
        self.connection.close()
        self.log.close()


class HeldServers(BaseSource):
    """Exactly one version of a job's rows that servers hold; `advance` goes on to the newest that all of them have.

    All rows are in memory, with their slots. Each server sends every change once it is logged (the Follow call). A
    version counts once all have sent it, with the record of one commit. Where a server is lost, its rows are read anew
    once it is back, and the version that is there is answered from until then.

    Args:
        addresses: `host:port` of a job's master, or of its store servers in their order.
        deadline_s: Seconds that the first version may take to begin with, while nothing comes.

    Raises:
        Unsupported: a store there has no log.
        Unavailable, DeadlineExceeded: a server is not reached.
        StoreBroken: what it sends is no log of a store.
    """

    def __init__(self, addresses: Sequence[str], deadline_s: float = 30.0) -> None:
        self._place = ", ".join(addresses)
        self._lock, self._moving, self._news = threading.RLock(), threading.Lock(), threading.Condition()
        self._mixed: ElastableError | None = None  # why versions are mixed: some servers' rows were applied alone
        self._closed = False
        self._shards = [_Shard(address, deadline_s, self._news) for address in addresses]
        whole = len(self._shards) == 1
        self._rows: Snapshot = self._shards[0] if whole else PartitionedSnapshot(self._shards, 0)
        try:
            while not self._advance():
                with self._news:
                    if not self._news.wait(deadline_s):
                        raise DeadlineExceeded(f"{self._place} sent no version within {deadline_s:g} s")
        except BaseException:
            self.close()
            raise

    @contextmanager
    def at_one_version(self) -> Iterator[tuple[int, bytes | None]]:
        """As of `HeldReader`. Raises `StoreBroken` where there is none, as changes did not fit."""
        with self._lock:
            if self._mixed is not None:
                raise StoreBroken(f"{self._place}: rows are read anew, as {self._mixed}") from self._mixed
            yield self.version(), self._shards[0].record()

    def advance(self) -> int:
        """Goes on to the newest version that all servers have, and returns it.

        Raises:
            StoreBroken, Unavailable, DeadlineExceeded: a server is lost, or away; the version is as before.
        """
        with self._moving:
            self._advance()
            return self.version()

    def _advance(self) -> bool:
        """Goes on; False: there is no version that all servers have, yet."""
        for shard in self._shards:
            shard.again()
        with self._news:
            counts = self._leading_on()
            if counts is None or not (any(counts) or self._anew()):
                return counts is not None
        with self._lock, self._news:
            if (counts := self._leading_on()) is None:  # taken back meanwhile
                return False
            if self._anew() and self._mixed is None:
                _require_later(self._newest(), self.version(), self._place)
            try:
                others = [shard.apply(count) for shard, count in zip(self._shards, counts, strict=True)]
                self._mixed = None
            except StoreBroken as error:
                self._mixed = error
                for shard in self._shards:
                    shard.log.why = shard.log.why or error
                raise
            if any(others):
                self._rows.forget()
        return True

    def _anew(self) -> bool:
        return any(shard.anew for shard in self._shards)

    def _newest(self) -> int:
        return min(shard.log.newest() for shard in self._shards)

    def _leading_on(self) -> list[int] | None:
        """How many changes of each log make the newest version that all servers have; None: there is none."""
        newest = self._newest()
        leading = [found for shard in self._shards if (found := shard.log.leading_to(newest)) is not None]
        if len(leading) < len(self._shards):
            return None
        (_, record), *others = leading
        same = all(kept in (None, stand_in(record)) for _, kept in others)
        return [count for count, _ in leading] if same else None

    def specs(self) -> dict[str, TableSpec]:
        """All tables by name, at its version."""
        with self._lock:
            return self._rows.specs()

    def version(self) -> int:
        return self._shards[0].version()

    def newest(self) -> int:
        """The newest version that all servers have."""
        with self._news:
            return max(self.version(), self._newest())

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows at its version. Raises `StaleVersion` or `FutureVersion` where another one is given."""
        with self._lock:
            _require_version(version, self.version(), self._place)
            return self._rows.lookup(ids)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As of `EmbeddingStore.scan`; the version stays meanwhile."""
        return self._rows.scan(table, block_rows)

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As of `EmbeddingStore.read_rows`."""
        return self._rows.read_rows(table, ids)

    def table_state(self, table: str) -> TableState:
        """As of `EmbeddingStore.table_state`."""
        return self._rows.table_state(table)

    def forget(self) -> None:
        """It holds its version."""

    def close(self) -> None:
        """Ends the calls. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            self._rows.close()
