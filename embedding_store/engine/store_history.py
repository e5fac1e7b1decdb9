"""What a store in memory keeps in files, so that it comes back at its last version however its process ended."""

import logging
import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from pathlib import Path

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import (
    BadInput,
    ElastableError,
    StaleVersion,
    StoreBroken,
    Unsupported,
    VersionError,
)
from elastable.embedding_store.log.acknowledged import AcknowledgedFile, Noted, acknowledged_beside
from elastable.embedding_store.log.changes import (
    Change,
    ClearTable,
    CommitImages,
    CreateTable,
    DeleteRows,
    DropTable,
    PutRows,
    PutTableState,
    ResetVersion,
    decode_change,
    encode_change,
)
from elastable.embedding_store.log.contract import Buffer, Log
from elastable.embedding_store.log.file_log import FileLog
from elastable.embedding_store.log.inspection import entry_of_version
from elastable.embedding_store.log.segment import newest_base, write_base
from elastable.embedding_store.support.futures import settle, settle_error
from elastable.embedding_store.tables.checks import require_block, require_ids


@dataclass(slots=True)
class ReplayedTables:
    """Tables to which changes are applied as they were made once.

    Attributes:
        tables: By name.
        new_table: Makes an empty one.
        version: After the last change.
        record: `Commit.record` of that version.
    """

    tables: dict[str, MemoryTable]
    new_table: Callable[[TableSpec], MemoryTable]
    version: int = 0
    record: bytes | None = field(default=None, repr=False)

    def apply(self, change: Change, version: int) -> None:
        """Applies one change, after which the store has this version.

        Raises:
            BadInput: the change does not fit the tables.
        """
        match change:
            case CommitImages():
                self._commit(change, version)
                self.record = change.record
            case CreateTable(spec):
                if spec.name in self.tables:
                    raise BadInput(f"table {spec.name!r} is created twice")
                self.tables[spec.name] = self.new_table(spec)
            case DropTable(name):
                del self.tables[self._table(name).spec.name]
            case ClearTable(name):
                self._table(name).clear()
            case PutRows(name, block):
                table = self._table(name)
                table.put(require_block(table.spec, table.optimizer, block))
            case DeleteRows(name, ids):
                table = self._table(name)
                table.delete(require_ids(table.spec, ids))
            case PutTableState(name, state):
                self._table(name).put_state(state)
            case ResetVersion(record):
                self.record = record
        self.version = version

    def apply_encoded(self, payload: Buffer, version: int, where: str) -> Change:
        """As `apply`, of a change as the log keeps it. Raises `StoreBroken`, which says `where` it was."""
        try:
            change = decode_change(memoryview(payload))
            self.apply(change, version)
        except (BadInput, VersionError, StoreBroken) as error:
            raise StoreBroken(f"{where} cannot be applied: {error}") from error
        return change

    def _commit(self, commit: CommitImages, version: int) -> None:
        if version != self.version + 1:
            raise BadInput(f"a commit of version {version} comes after version {self.version}")
        images = {of_table.table: of_table for of_table in commit.tables}
        for name in images:
            self._table(name)
        for name, table in self.tables.items():
            frozen = name in commit.frozen
            if frozen:
                table.stay(commit.ends_replay_epoch)
            elif name in commit.rates:
                table.replay_step(commit.step, commit.rates[name], commit.ends_replay_epoch)
            elif table.replay is not None:
                raise BadInput(f"table {name!r}: version {version} has no learning rate for it")
            if name in images:
                table.put_images(images[name], version)
            if not frozen:
                table.replay_eviction(version, images[name].removed if name in images else None, commit.time)

    def _table(self, name: str) -> MemoryTable:
        table = self.tables.get(name)
        if table is None:
            raise BadInput(f"there is no table {name!r} yet")
        return table


_log = logging.getLogger(__name__)

DEFAULT_LOG_BYTES = 1 << 30
_BLOCK_ROWS = 65_536
_MOST_UNSENT = 256 << 20  # bytes


@dataclass(frozen=True, slots=True)
class FollowedChange:
    """What a follower is told of.

    Attributes:
        version: Of the store once the change is made.
        payload: The change, as the log keeps it; None: the changes after `version`, if any, were taken back.
        begin: Whether it is one of those that make an empty store what it was when following began, and come first.
    """

    version: int
    payload: bytes | None
    begin: bool = False


class Following:
    """What one follower has not been sent yet; at most 256 MiB: one that does not keep up begins anew."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._unsent: list[FollowedChange] = []
        self._bytes = 0
        self._asked: Future[list[FollowedChange]] | None = None
        self._over: ElastableError | None = None

    def take(self) -> Future[list[FollowedChange]]:
        """What comes next, once there is anything; whoever cancels it follows no more.

        Raises (its result):
            StaleVersion: too much was not taken; or the store is another one now.
        """
        taken: Future[list[FollowedChange]] = Future()
        with self._lock:
            if not self._unsent and self._over is None:
                self._asked = taken
                return taken
            unsent, self._unsent, self._bytes = self._unsent, [], 0
        if unsent:
            settle(taken, unsent)
        elif self._over is not None:
            settle_error(taken, self._over)
        return taken

    def tell(self, change: FollowedChange) -> bool:
        """Adds a change; False: nobody follows any more."""
        with self._lock:
            asked, self._asked = self._asked, None
            if self._over is not None or (asked is not None and asked.cancelled()):
                return False
            self._unsent.append(change)
            self._bytes += len(change.payload or b"")
            unsent = self._unsent
            if asked is not None:
                self._unsent, self._bytes = [], 0
            if self._bytes > _MOST_UNSENT:
                self._over = StaleVersion(f"{self._bytes:,} bytes of changes were not taken: follow anew")
                self._unsent, self._bytes = [], 0
        if asked is not None:
            settle(asked, unsent)
        return self._over is None

    def end(self, why: str) -> None:
        """The follower is told that there is no more."""
        with self._lock:
            self._over, self._unsent = StaleVersion(f"{why}: follow anew"), []
            asked, self._asked = self._asked, None
        if asked is not None:
            settle_error(asked, self._over)


def beginning(
    snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None, stopping: Callable[[], bool] = lambda: False
) -> Iterator[Sequence[Buffer]]:
    """The changes that make an empty store what a snapshot shows, as a log keeps them.

    Args:
        snapshot: Renewed on the way.
        specs: Of its tables.
        record: `Commit.record` of its version.
        stopping: Whether nobody wants the rest.
    """
    yield encode_change(ResetVersion(record))
    for spec in specs:
        yield encode_change(CreateTable(spec))
        for block in snapshot.scan(spec.name, _BLOCK_ROWS):
            snapshot.renew()
            if stopping():
                raise _Stopped
            yield encode_change(PutRows(spec.name, block))
        if state := snapshot.table_state(spec.name):
            yield encode_change(PutTableState(spec.name, state))


class ChangeLog(Closing):
    """The log of a store's changes, kept outside its process, and what the log begins with.

    Attributes:
        log: Where changes are appended.
        acknowledged: Where it is noted, outside of the store, what was appended.
    """

    def __init__(self, log: Log, acknowledged: AcknowledgedFile) -> None:
        self.log, self.acknowledged = log, acknowledged
        self._followers: list[Following] = []

    @property
    @abstractmethod
    def place(self) -> str:
        """Where everything is, for messages."""

    @property
    def identity(self) -> str:
        """Random text of the store; "": it has none (yet), and the entries of its log tell it from others."""
        return ""

    @property
    def wants_base(self) -> bool:
        """Whether a new base should be written."""
        return False

    def append(self, change: Change, version: int) -> None:
        """Appends a change, after which the store has this version.

        Raises:
            StoreFailed: it could not be written; nothing has changed.
            StoreBroken: nothing can be written any more.
            TakenOver: another process owns the store now.
        """
        parts = encode_change(change) if self.log.keeps_entries else ()
        self.log.append(self.log.last + 1, version, parts)
        if self.log.keeps_entries:
            self.acknowledged.put(Noted.of(self.log, version, self.identity))
        if self._followers:
            # A copy: what a commit logs lies in memory that the next one writes to.
            self._tell(FollowedChange(version, b"".join(parts)))

    def follow(
        self, snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None
    ) -> tuple[Iterator[FollowedChange], Following]:
        """What makes an empty store what it is now, and every change from now on; nothing is appended meanwhile.

        Args:
            snapshot: As of the last change; closed with the iterator.
            specs, record: As of `beginning`.

        Raises:
            Unsupported: the log keeps nothing.
        """
        if not self.log.keeps_entries:
            raise Unsupported(f"{self.place} cannot be followed: it has no log (log=none)")
        following = Following()
        self._followers.append(following)

        def begin() -> Iterator[FollowedChange]:
            with snapshot:
                version = snapshot.version()
                for parts in beginning(snapshot, specs, record):
                    yield FollowedChange(version, b"".join(parts), begin=True)
            yield FollowedChange(version, None)

        return begin(), following

    def end_following(self, why: str) -> None:
        """Followers begin anew: what they were told is not what the store holds."""
        for following in self._followers:
            following.end(why)
        self._followers = []

    def _tell(self, change: FollowedChange) -> None:
        self._followers = [following for following in self._followers if following.tell(change)]

    @abstractmethod
    def replay(self, tables: ReplayedTables) -> None:
        """Brings empty tables to the last version.

        Raises:
            StoreBroken: something is corrupt or lost.
        """

    @abstractmethod
    def take_back(self, version: int) -> int:
        """Takes the changes after a version back: `replay` brings empty tables to that version then.

        Returns:
            How many rows these changes had written.

        Raises:
            StaleVersion: that is not possible any more.
        """

    def take_back_to(self, keep: int, version: int) -> None:
        """Truncates the log after entry `keep`, which leads to a version: none after it counts as acknowledged."""
        self.acknowledged.put(Noted(version, keep, self.log.check_at(keep) or 0, self.identity))
        self.log.truncate(keep)
        self._tell(FollowedChange(version, None))

    def begin_base(self, snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None) -> None:
        """Writes a base from a pinned version, on a separate thread, and closes the snapshot.

        Args:
            snapshot: As of the last change.
            specs: Of its tables.
            record: `Commit.record` of its version.
        """

    def abandon_base(self) -> None:
        """Stops writing a base, if one is being written, and waits until its pin is released."""


class StoreHistory(ChangeLog):
    """A log of a store's changes in a folder, and a base: the whole store as of one entry of the log.

    When the log has grown beyond `log_bytes`, and beyond the last base, a new
    base is written while commits continue, and the log is trimmed behind it.
    """

    log: FileLog

    def __init__(
        self,
        folder: str | Path,
        *,
        fsync: str = "interval",
        log_bytes: int = DEFAULT_LOG_BYTES,
        accept_version: int | None = None,
    ) -> None:
        """Opens the folder, and makes it where there is none.

        Args:
            folder: Holds the log and its base, and nothing else. Next to it is its `AcknowledgedFile`.
            fsync: As `FileLog` takes it.
            log_bytes: The log's size after which a new base is written.
            accept_version: As of `AcknowledgedFile`.

        Raises:
            BadInput: an unknown policy, or `log_bytes` is not above 0.
            StoreFailed: another process has the folder open, or it cannot be used.
            StoreBroken: the log is corrupt.
        """
        if log_bytes <= 0:
            raise BadInput(f"log_bytes={log_bytes!r}: it is above 0")
        log = FileLog(folder, fsync=fsync, segment_bytes=max(1, min(64 << 20, log_bytes // 4)))
        super().__init__(log, AcknowledgedFile(acknowledged_beside(Path(folder)), accept_version))
        self._log_bytes = log_bytes
        try:
            self._base = newest_base(self.folder)
        except BaseException:
            self.log.close()
            raise
        self._writing: threading.Thread | None = None
        self._stopping = threading.Event()

    @property
    def folder(self) -> Path:
        """Where everything is."""
        return self.log.folder

    @property
    def place(self) -> str:
        return str(self.folder)

    def replay(self, tables: ReplayedTables) -> None:
        begin = 0
        if self._base is not None:
            begin = self._base.sequence
            for version, payload in self._base.payloads():
                tables.apply_encoded(payload, version, f"{self.folder}: {self._base.path.name}")
        if begin > self.log.last or self.log.first > begin + 1:
            raise StoreBroken(
                f"{self.folder} is incomplete: its base includes entries up to {begin}, and its log holds "
                f"{self.log.first} to {self.log.last}; restore a checkpoint into a new folder"
            )
        for entry in self.log.entries(after=begin):
            tables.apply_encoded(entry.payload, entry.version, f"{self.folder}: entry {entry.sequence}")
        self.acknowledged.require(self.log, Noted.of(self.log, tables.version), self.place)

    def take_back(self, version: int) -> int:
        self.abandon_base()
        begin = 0 if self._base is None else self._base.sequence
        keep, rows = entry_of_version(self.log, begin, version)
        if keep == begin and self._base is not None and next(self._base.payloads())[0] > version:
            raise StaleVersion(f"{self.folder} holds no version {version}: its base is newer")
        self.take_back_to(keep, version)
        return rows

    @property
    def wants_base(self) -> bool:
        size = 0 if self._base is None else self._base.bytes
        idle = self._writing is None or not self._writing.is_alive()
        return idle and self.log.bytes > max(self._log_bytes, size)

    def begin_base(self, snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None) -> None:
        self._writing = threading.Thread(
            target=self._write_base, args=(snapshot, specs, record, self.log.last), name="log-base", daemon=True
        )
        self._writing.start()

    def abandon_base(self) -> None:
        if self._writing is not None:
            self._stopping.set()
            self._writing.join()
            self._writing = None
            self._stopping.clear()

    def close(self) -> None:
        self.abandon_base()
        self.log.close()
        self.acknowledged.close()

    def _write_base(self, snapshot: Snapshot, specs: Sequence[TableSpec], record: bytes | None, sequence: int) -> None:
        try:
            with snapshot:
                # A loss of power must not leave a base of entries that the log has lost.
                self.log.sync()
                payloads = beginning(snapshot, specs, record, self._stopping.is_set)
                base = write_base(self.folder, sequence, snapshot.version(), payloads)
            self.log.trim(base.sequence)
            self._base = base
        except _Stopped:
            pass
        except ElastableError as error:
            _log.warning("%s: no new base was written, and the log goes on growing: %s", self.folder, error)


class _Stopped(Exception):
    """The base that is being written is not wanted any more."""
