"""What a master and workers ask of store servers: to keep, sum and commit pushes, to save rows, to say how they are."""

import heapq
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import EvictionCut, StayingRows, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.measures import Histogram

# Row gradients that workers push to store servers, how a master has them summed and clipped, and which rows go


@dataclass(frozen=True, slots=True)
class Slices:
    """Gradient of a table: int64 `indices[n]`, float32 `values[n, dim]`; duplicates are summed.

    Attributes:
        row_squares: As of `TableUpdate`, where `PushTerms.summed` says that each id comes once.
    """

    indices: Int64
    values: Float32
    row_squares: Float32 | None = None


@dataclass(frozen=True, slots=True)
class PushTerms:
    """How a parameter server makes a version of a push.

    Attributes:
        version: That it makes; None: the next one.
        step: Optimizer steps taken before this one; None: the version before.
        learning_rates, ends_replay_epoch, frozen, time: As of `Commit`.
        summed: Whether each id comes once.
        stage: Whether only that is done which can fail; a push of the same name that is `staged`, without parts, does
            the rest.
    """

    version: int | None = None
    step: int | None = None
    learning_rates: Mapping[str, float] = field(default_factory=dict)
    ends_replay_epoch: bool = False
    frozen: tuple[str, ...] = ()
    time: float | None = None
    summed: bool = False
    stage: bool = False
    staged: bool = False


@dataclass(frozen=True, slots=True)
class RowPush:
    """The rows' part of the gradient of one micro-batch, or as much of it as one store server holds.

    Attributes:
        job: The job it was computed for; "": of none, but of a client of a parameter server.
        version: Computed on.
        micro_batch: Number within the job. The same name stands for the same bits, whoever computed them. Of an
            asynchronous job: the sequence of its sender.
        parts: Of each part of the loss that is divided alike: table name -> gradient, by the ids of the
            store that it goes to.
        sender: Incarnation of the worker that made it, in an asynchronous job, or of a client: it sends one push after
            the other, and each in place of the one before. "": the job is synchronous.
        terms: Of a client's.
    """

    job: str
    version: int
    micro_batch: int
    parts: tuple[Mapping[str, Slices], ...]
    sender: str = ""
    terms: PushTerms = PushTerms()


class RowPushOutcome(StrEnum):
    """What a server did with a push; a parameter server alone skips those that are not finite."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class RowPushReply:
    """What became of a push.

    Attributes:
        version: Of a parameter server: the one that the push made, or the current one.
        reason: Why it is skipped.
    """

    outcome: RowPushOutcome
    version: int = 0
    reason: str = ""


@dataclass(frozen=True, slots=True)
class SumTerm:
    """One part of one push in the sum of a version, and the share that its gradient is multiplied by."""

    micro_batch: int
    part: int
    share: float


@dataclass(frozen=True, slots=True)
class RowSums:
    """Which pushes make the row gradient of a version.

    Attributes:
        version: That is updated; synchronous pushes were computed on it.
        terms: In the order in which they are summed.
        rows_once: Parts of which each row counts once, in the first push that has it.
        frozen: Tables that take no step.
        sender: As of `RowPush`, of all of them.
    """

    version: int
    terms: tuple[SumTerm, ...] = ()
    rows_once: tuple[int, ...] = ()
    frozen: tuple[str, ...] = ()
    sender: str = ""


@dataclass(frozen=True, slots=True)
class Measured:
    """What a master needs of row gradients that it does not see, to clip them.

    Attributes:
        squares: Table name -> the exact sum of all squares of its gradient, as a multiple of
            `elastable.embedding_store.shards.version_sums.UNIT`.
        not_finite: Tables whose gradient holds NaN or Inf.
        missing: Micro-batches whose pushes are not there; then nothing else is set.
    """

    squares: Mapping[str, int] = field(default_factory=dict)
    not_finite: tuple[str, ...] = ()
    missing: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class TableClip:
    """How the summed gradient of a table is clipped: multiplied by `scale`, then cut to [-bound, bound]."""

    scale: float = 1.0
    bound: float | None = None


@dataclass(frozen=True, slots=True)
class PushedCommit:
    """The step from version `sums.version` to the one after it. Fields that are not listed are those of `Commit`.

    Attributes:
        sums: What the gradient is made of.
        clips: Table name -> how its gradient is clipped; absent: not at all.
        dropped: Whether the gradient overflowed, and is left out for that.
        cuts: As of `Commit`; `StoreServers` decides them.
    """

    sums: RowSums
    step: int
    learning_rates: Mapping[str, float]
    clips: Mapping[str, TableClip] = field(default_factory=dict)
    record: bytes | None = None
    ends_replay_epoch: bool = False
    dropped: bool = False
    time: float | None = None
    cuts: Mapping[str, EvictionCut] = field(default_factory=dict)

    @property
    def version(self) -> int:
        """The version that this makes."""
        return self.sums.version + 1


@dataclass(frozen=True, slots=True)
class Committed:
    """What came of a commit of pushes.

    Attributes:
        missing: Micro-batches whose pushes are not there; none: the version is committed, else nothing has changed.
        tables: That had a gradient; none where the version was made before.
        repeated: Whether it was.
    """

    missing: tuple[int, ...] = ()
    tables: tuple[str, ...] = ()
    repeated: bool = False


@dataclass(frozen=True, slots=True)
class RowOffer:
    """What a store server has of a table whose `max_rows` is for the rows of all servers, were a version committed.

    Attributes:
        rows: That would stay but for `max_rows`.
        touched: The versions that last touched them, the oldest first and no more than asked for, and how many rows
            each touched.
        ids: Of the whole table: those asked for.
    """

    rows: int
    touched: tuple[tuple[int, int], ...] = ()
    ids: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class RowOffers:
    """The offers of a store server by table; `missing`: as of `Measured`."""

    tables: Mapping[str, RowOffer] = field(default_factory=dict)
    missing: tuple[int, ...] = ()


# A budget of rows (`max_rows`) over store servers: what each of them offers, and which rows of all of them go


FEW_VERSIONS = 4096
"""Of how many versions servers are asked at first."""

_MORE = 16  # times as many, where those were not enough
_MOST_VERSIONS = 1 << 30
_NEVER = 1 << 63

Ask = Callable[[int, tuple[int, int] | None], Sequence[RowOffer]]
"""(most versions, which ids) -> the offers of all servers; as of `ShardServer.offer_rows`."""


def offer_of(rows: StayingRows, most: int, ids: tuple[int, int] | None) -> RowOffer:
    """What a server offers of its rows; `most`, `ids`: as of `ShardServer.offer_rows`."""
    versions, counts = np.unique(rows.versions, return_counts=True)
    touched = tuple(zip(versions[:most].tolist(), counts[:most].tolist(), strict=True))
    greatest: tuple[int, ...] = ()
    if ids is not None:
        version, n = ids
        greatest = tuple(heapq.nlargest(n, rows.ids[rows.versions == version].tolist()))
    return RowOffer(len(rows.ids), touched, greatest)


def cut_of(max_rows: int, offers: Sequence[RowOffer], ask: Ask) -> EvictionCut:
    """Which rows go so that `max_rows` of all servers' stay: those touched last, and of equal ones the smaller ids.

    Args:
        max_rows: Of the table.
        offers: Of all servers, with `FEW_VERSIONS` versions.
        ask: Asks all servers again.

    Raises:
        StoreFailed: a server does not say what it has.
    """
    most = FEW_VERSIONS
    goes = sum(offer.rows for offer in offers) - max_rows
    if goes <= 0:
        return EvictionCut(0)
    while (found := _nth_oldest(offers, goes)) is None:
        most *= _MORE
        if most > _MOST_VERSIONS:
            raise StoreFailed(f"{goes} rows go for max_rows={max_rows}, and store servers do not list that many")
        offers = ask(most, None)
    version, of_it, all_of_it = found
    if of_it == all_of_it:
        return EvictionCut(version + 1)
    ids = heapq.nlargest(of_it, (number for offer in ask(0, (version, of_it)) for number in offer.ids))
    if len(ids) < of_it:
        raise StoreFailed(f"store servers list {len(ids)} of {of_it} rows that were last touched at version {version}")
    return EvictionCut(version, ids[-1])


def _nth_oldest(offers: Sequence[RowOffer], n: int) -> tuple[int, int, int] | None:
    """The version of the n-th oldest row, how many rows of it are among the n oldest, and how many there are.

    None: the servers have listed too few versions to tell.
    """
    counts: dict[int, int] = {}
    for offer in offers:
        for version, count in offer.touched:
            counts[version] = counts.get(version, 0) + count
    cut_short = [offer for offer in offers if sum(count for _, count in offer.touched) < offer.rows]
    limit = min((offer.touched[-1][0] if offer.touched else -1 for offer in cut_short), default=_NEVER)
    for version in sorted(counts):
        if version > limit:
            return None
        if counts[version] >= n:
            return version, n, counts[version]
        n -= counts[version]
    return None


# What a store server says of itself, and what a job's master knows of each of its store servers


@dataclass(frozen=True, slots=True)
class ShardStatus:
    """One shard, as its store server describes it.

    Attributes:
        version: Of its rows.
        rows: Of all its tables.
        bytes: Memory of these rows, where the store knows.
        wanted_rows: Rows that lookups asked a store with a tier for.
        read_rows: Of these, rows that were not in memory and came from the tier.
        flush_lag: Versions that the tier is behind.
        log_bytes: Bytes of the log that the tier does not make superfluous.
        pushed_bytes: Gradients that it keeps for the next version.
        failure: Why the last write to the tier failed; "": it did not.
        store: Where its rows are: a URL without a login; "": it does not say.
        commits: Seconds of its commits by phase, as of `StoreMeasures`.
    """

    version: int = 0
    rows: int = 0
    bytes: int = 0
    wanted_rows: int = 0
    read_rows: int = 0
    flush_lag: int = 0
    log_bytes: int = 0
    pushed_bytes: int = 0
    failure: str = ""
    store: str = ""
    commits: Mapping[str, Histogram] = field(default_factory=dict)

    @property
    def hit_rate(self) -> float | None:
        """Part of the wanted rows that were in memory; None: none was asked for."""
        return max(0.0, 1.0 - self.read_rows / self.wanted_rows) if self.wanted_rows else None


@dataclass(frozen=True, slots=True)
class ServerStatus:
    """One store server of a job, as its master sees it.

    Attributes:
        address: host:port.
        shard: What it said last; None: nothing yet.
        waited_s: Seconds that the job has been waiting for it now; 0: nobody waits for it.
        failure: Why it gave no answer when it was asked last; "": it did.
    """

    address: str
    shard: ShardStatus | None = None
    waited_s: float = 0.0
    failure: str = ""


# Rows of store servers saved where their job keeps its checkpoints, by the servers themselves and all at once


@dataclass(frozen=True, slots=True)
class ChangedTable:
    """What changed of one table since a checkpoint.

    Attributes:
        rows: That hold another value than their initial one.
        changed: How many of them may have changed; None: any may have.
        shrunk: Whether rows were given up.
    """

    rows: int
    changed: int | None = None
    shrunk: bool = False


@dataclass(frozen=True, slots=True)
class TakenChanges:
    """What changed up to `version`, by table."""

    version: int
    tables: Mapping[str, ChangedTable]


@dataclass(frozen=True, slots=True)
class TableSave:
    """What is saved of a table.

    Attributes:
        table: Its name.
        prefix: The names of its files begin so.
        whole: Whether all rows are saved; else those that changed.
        live: Whether the ids of all rows are saved, too.
    """

    table: str
    prefix: str
    whole: bool = True
    live: bool = False


@dataclass(frozen=True, slots=True)
class RowSave:
    """One attempt to save rows.

    Attributes:
        save: 16 bytes that name it.
        place: The folder or URL where checkpoints lie side by side.
        draft: The folder in there that is to become one.
        known: A file that the caller has written into the draft, by which a server knows that it reaches the very same.
        known_bytes: Its size.
        tables: What is saved; none: only what an earlier attempt began is given up.
        mark: Of the changes (`ShardStore.take_changes`), where a table is not saved whole.
        note: Goes into every file.
        probe: Where it is set, a small file whose name begins so is written, too.
    """

    save: bytes
    place: str = ""
    draft: str = ""
    known: str = ""
    known_bytes: int = 0
    tables: tuple[TableSave, ...] = ()
    mark: bytes = b""
    note: Mapping[str, str] = field(default_factory=dict)
    probe: str = ""


@dataclass(frozen=True, slots=True)
class SavedFile:
    """One file as it was written: its sha256 in hexadecimal, and its bytes."""

    sha256: str
    bytes: int


@dataclass(frozen=True, slots=True)
class SavedTable:
    """What was saved of a table: its rows, those in `files`, and files of the ids of all rows."""

    rows: int
    written: int
    files: tuple[str, ...]
    live: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class SavedRows:
    """What was saved, by table, and the files by name."""

    tables: Mapping[str, SavedTable] = field(default_factory=dict)
    files: Mapping[str, SavedFile] = field(default_factory=dict)


class ServedRows(ABC):
    """Rows that store servers save: of their current version, or of one that is pinned on each of them."""

    def saves(self, table: str) -> bool:
        """Whether each server saves its rows of a table; else they have only parts of each row."""
        return True

    @abstractmethod
    def save_rows(self, save: RowSave) -> SavedRows:
        """Has every server save its rows, and waits for all of them.

        Raises:
            CheckpointError: a server cannot write there; names the server and the place.
            StaleVersion: the pin is gone.
            StoreFailed, Unavailable: a server does not answer.
        """


class RowSaver(ABC):
    """What a store server saves its rows with. Safe to use from many threads."""

    @abstractmethod
    def rows_changed(self, updates: Mapping[str, TableUpdate]) -> None:
        """Notes the rows of a commit that is about to be made."""

    @abstractmethod
    def take(self, mark: bytes, base: bytes) -> TakenChanges:
        """What changed since the checkpoint of mark `base`, up to now; of no commit that is under way.

        Args:
            mark: 16 bytes: of the checkpoint that is about to be written.
            base: Of the last one that was written; b"": there is none.
        """

    @abstractmethod
    def save(self, save: RowSave, source: Snapshot, wait_s: float) -> SavedRows | None:
        """Begins to save, or goes on waiting for what this call began before; None: it is not done yet.

        Raises:
            BadInput: a place, a name or a table that cannot be.
            CheckpointError: the rows cannot be written.
        """

    @abstractmethod
    def abandon(self) -> None:
        """Gives up what is being saved, and returns once nothing is written any more."""


class ShardStore(EmbeddingStore, ServedRows, ABC):
    """A store that workers push row gradients to, and whose owner, a job's master, says when they are committed.

    A version counts once every shard of a job has it. Until the next one begins a shard can go back from it
    (`recover`), and keeps the pushes that it was made of.
    """

    @property
    @abstractmethod
    def address(self) -> str:
        """`host:port` of the server; of several servers with commas between."""

    @abstractmethod
    def begin_job(self, job: str, may_overflow: bool, session_key: bytes) -> None:
        """Takes pushes of this job's workers from now on.

        Args:
            job: Its id.
            may_overflow: Whether pushes may hold NaN or Inf.
            session_key: As of `Claim`.

        Raises:
            TakenOver: another process has become the owner.
        """

    @abstractmethod
    def show_session(self, session: bytes) -> None:
        """From now on pushes show what their worker got as it joined (`Session.store_session`)."""

    @abstractmethod
    def push_rows(self, push: RowPush) -> RowPushOutcome:
        """Keeps a push until its version is committed, or its sender sends another. Repeating it is harmless.

        Raises:
            NotJoined: the worker has not joined the job of the server's owner, or not since that owner began.
            PermissionDenied: the sender is another worker.
            NotReady: there is no room for it now, or no job has claimed the server since it started.
            FutureVersion: the version that it was computed on has not been committed here.
            JobFailed: another job owns the server.
            BadGradient, BadIds, IdOutOfRange, TableNotFound, NotFinite: it cannot be used; nothing is kept of it.
        """

    @abstractmethod
    def shard_status(self) -> ShardStatus:
        """What the server says of itself, in a single attempt of a few seconds.

        Raises:
            ElastableError: it does not answer.
        """

    @abstractmethod
    def measure(self, sums: RowSums) -> Measured:
        """Sums the gradient of a version, and measures it. Changes nothing.

        Raises:
            StaleVersion, FutureVersion: the store is at another version than `sums.version`.
        """

    @abstractmethod
    def commit_pushed(self, commit: PushedCommit) -> Committed:
        """Makes a version of pushes; one that was made before is not made again.

        Raises:
            StaleVersion, FutureVersion: the store is neither at `sums.version` nor at the version after it.
            StoreFailed, Unavailable: it is not committed; the same commit may be made again.
        """

    @abstractmethod
    def take_changes(self, mark: bytes, base: bytes) -> TakenChanges:
        """What changed since the checkpoint of mark `base`, for the one of mark `mark`: 16 bytes each.

        Call it between two commits. Rows are written down with the mark by `save_rows`; the changes are kept until the
        next call says, as its `base`, whether that succeeded.
        """


class ShardServer(ShardStore):
    """One of the store servers of a job."""

    @abstractmethod
    def take_position(self, number: int, servers: int) -> None:
        """From now on claims say which of how many servers this is; one whose tables say otherwise is not claimed.

        Args:
            number: Counted from 0.
            servers: How many there are.
        """

    @abstractmethod
    def follow(self, find: Callable[[], str | None]) -> None:
        """From now on the server is looked for elsewhere where it is not reached.

        Args:
            find: Gives its `host:port` as it is now, within a few seconds; None, or an `ElastableError`: nobody knows.
        """

    @abstractmethod
    def offer_rows(self, commit: PushedCommit, most: int, ids: Mapping[str, tuple[int, int]]) -> RowOffers:
        """What this server has of tables that share a budget of rows, for whoever decides which go; changes nothing.

        Args:
            commit: That is to be made; without `cuts`.
            most: How many versions are listed, of each table.
            ids: Table name -> (version, n): the n greatest ids of rows that were last touched at that version.

        Raises:
            StaleVersion, FutureVersion: as `measure`.
        """
