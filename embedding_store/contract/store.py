"""The contract that every backend keeps: tables by name, one version at a time."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Self

from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.refusals import refuse_other_version
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableStatistics
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, FutureVersion, Unsupported

if TYPE_CHECKING:
    from elastable.embedding_store.contract.pins import Pin, PinStatistics
    from elastable.embedding_store.tables.lookup_request import LookupRequest
    from elastable.embedding_store.tables.table import EmbeddingTable

__all__ = ["EmbeddingStore", "RowSource"]


class RowSource(ABC):
    """Where a reader gets rows from: what a worker needs of a store, and no more.

    Lookups may run from many threads at once. A row that was never updated reads its initial value, a pure function of
    (seed, table, id, column), and reading it writes nothing.
    """

    @abstractmethod
    def specs(self) -> dict[str, TableSpec]:
        """All tables by name."""

    @abstractmethod
    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows of many tables in one go.

        Args:
            ids: Table name -> int64 `[n]`; duplicates allowed.
            version: When given, the version to read: the current one, or one that is pinned.

        Returns:
            Table name -> float32 `[n, dim]`, row i the row of ids[i].

        Raises:
            TableNotFound, BadIds, IdOutOfRange: naming table, id and position.
            StaleVersion, FutureVersion: another version is current, and this one is not pinned.
            StoreFailed, Unavailable: the backend failed; no value is made up.
        """

    @abstractmethod
    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        """Answers requests, each into memory of its own.

        Args:
            requests: Checked by `elastable.embedding_store.tables.lookup_request`.
            version: When given, the version to read, as of `lookup`.
            split: Whether several threads may share the rows of one request.

        Raises:
            As `lookup`; outputs may be half written then.
        """

    def lookup_in_order(
        self, requests: Sequence[LookupRequest], version: int | None, done: Callable[[int], object]
    ) -> None:
        """As `lookup_into`, where somebody waits for the first request while the others are answered.

        Args:
            requests: As of `lookup_into`, all answered at one version.
            version: As of `lookup_into`.
            done: Called with the number of each request once it is answered, in their order.

        Raises:
            As `lookup`.
        """
        self.lookup_into(requests, version)
        for number in range(len(requests)):
            done(number)

    @abstractmethod
    def version(self) -> int:
        """The current version; 0 for a store that was never committed to."""

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Whether `version` is current or past, once it is or after `timeout_s` seconds.

        A source that is not told of commits does not wait: it looks once.
        """
        return self.version() >= version

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        """As `lookup`, after waiting up to `wait_s` seconds for the version to be committed.

        Raises:
            FutureVersion: also when it was not committed in time.
        """
        if not self.wait_for_version(version, wait_s):
            raise FutureVersion(f"version {version} was not committed within {wait_s:g} s")
        return self.lookup(ids, version)

    def unpromoted(self) -> RowSource:
        """The same rows, for evaluation and the like: looking them up changes nothing of what a cache holds."""
        return self

    def forget(self) -> None:  # noqa: B027 - most sources keep nothing
        """Keeps nothing of what was read so far: another store may answer now, or this one at an earlier version."""

    @abstractmethod
    def close(self) -> None:
        """Frees connections and memory. Closing twice is harmless."""

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class EmbeddingStore(RowSource):
    """Embedding tables by name, at one version. Lookups may run beside one committer; one process at a time commits."""

    @abstractmethod
    def create_table(self, spec: TableSpec) -> bool:
        """Makes the table; True if it was not there before.

        Raises:
            SpecConflict: a table of that name has another spec.
        """

    @abstractmethod
    def table(self, of: TableSpec | str) -> EmbeddingTable:
        """A view of one table; created here when a spec is given and there is none of that name.

        Raises:
            TableNotFound: there is no table of that name.
            SpecConflict: a table of that name has another spec.
        """

    @abstractmethod
    def drop_table(self, table: str) -> None:
        """Forgets the table, its rows and its spec.

        Raises:
            TableNotFound: there is none of that name.
        """

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Applies the optimizer to the rows of every update, all or nothing.

        Raises:
            StaleVersion, FutureVersion: `commit.version` is not the current
                version + 1.
            TableNotFound, BadIds, IdOutOfRange, BadGradient: as named; the
                store is as it was.
        """

    def stage(self, commit: Commit) -> Callable[[], None]:
        """The first half of `commit`: does what of it can fail, and changes no row.

        Who commits to several stores at once stages everywhere before
        anything is changed anywhere. Between the halves nobody else may change
        the store. A store that can do nothing ahead only looks at its version.

        Returns:
            The second half, to be called once, or not at all.

        Raises:
            As `commit`.
        """
        refuse_other_version(self.version(), commit.version - 1)
        return lambda: self.commit(commit)

    @property
    def keeps_records(self) -> bool:
        """Whether the store outlives the process that commits, and `Commit.record` with it."""
        return False

    def record(self) -> bytes | None:
        """The record of the current version; None: its commit had none, or records are not kept."""
        return None

    def other_writer(self) -> str | None:
        """`<host>:<process>` of another process that is connected now to write to this store, a running job's master.

        None: there is none, or none that can be seen: a store in memory or in files has one process.
        """
        return None

    def require_owner(self) -> None:
        """Does nothing while this process may write to the store, or has never done so.

        Raises:
            TakenOver: another process has become its only writer.
        """

    def recover(self, version: int | None = None) -> int:
        """Takes back what of a commit was done, where one broke off: for who takes over from a dead committer.

        Args:
            version: To go back to: the current version (None), or the one before it. Rows, slots, the
                version and its record are those of that version then.

        Returns:
            How many rows were taken back.

        Raises:
            StaleVersion, FutureVersion: the store cannot go back to that version.
        """
        refuse_other_version(self.version(), version)
        return 0

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Pin:
        """Keeps one version readable while commits go on.

        Args:
            version: The current one, or one that is pinned already (None: the current one).
            lease_s: Seconds after which the pin is gone, unless it is renewed:
                a reader that died keeps nothing for ever.

        Raises:
            StaleVersion, FutureVersion: another version is current, and this one is not pinned.
            Unsupported: the store has no pins.
            BadInput: `lease_s` is not above 0.
        """
        raise Unsupported(f"{type(self).__name__} has no pins")

    def pins(self) -> tuple[PinStatistics, ...]:
        """What stands of pins, oldest version first."""
        return ()

    @abstractmethod
    def reset_version(self, version: int) -> None:
        """Declares the rows as they stand to be `version` (after `put`).

        Raises:
            BadInput: a negative version.
        """

    @abstractmethod
    def row_count(self, table: str) -> int:
        """Rows of the table that hold a value of their own."""

    @abstractmethod
    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Every row that holds a value of its own, in blocks of at most `block_rows`, in any order.

        Raises:
            TableNotFound: there is no table of that name.
            BadInput: `block_rows` is below 1.
        """

    @abstractmethod
    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """Rows with their slots: of `ids` int64 `[n]`, each once, those that hold a value of their own, in that order.

        Raises:
            TableNotFound, BadIds, IdOutOfRange: as `lookup`.
        """

    @abstractmethod
    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """Writes rows and their slots as they are (restore, import)."""

    @abstractmethod
    def delete(self, table: str, ids: Int64) -> int:
        """Takes the rows of `ids` int64 `[n]` away with their slots; the ids read their initial values again.

        The version stays. Ids without a row are passed over.

        Returns:
            How many rows there were.

        Raises:
            TableNotFound, BadIds, IdOutOfRange: as `lookup`; nothing is deleted.
        """

    def table_statistics(self, table: str) -> TableStatistics:
        """What the table holds. Raises `TableNotFound`."""
        return TableStatistics(self.row_count(table))

    def sightings(self, table: str) -> UInt8 | None:
        """A copy of the sketch in which a table with admission counts its ids; None where there is none.

        Raises:
            TableNotFound: there is no table of that name.
        """
        return None

    def put_sightings(self, table: str, counters: UInt8) -> None:
        """Writes the sketch of a table with admission as `sightings` gave it (restore).

        Raises:
            TableNotFound: there is no table of that name.
            BadInput: the table has no sketch, or one of another size.
        """
        raise BadInput(f"table {table!r} has no sketch of sightings here")

    @abstractmethod
    def clear(self, table: str) -> None:
        """Forgets every row of the table; they read their initial values again."""
