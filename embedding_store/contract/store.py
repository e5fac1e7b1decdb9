"""The contract that every backend keeps: tables by name, one version at a time."""

from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from typing import Any

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import (
    Commit,
    FlushStatus,
    RowBlock,
    StayingRows,
    TableState,
    TableStatistics,
    TableUpdate,
)
from elastable.embedding_store.contract.row_source import refuse_other_version
from elastable.embedding_store.contract.snapshot import PinStatistics, Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.measures import StoreMeasures


class EmbeddingStore(Snapshot):
    """Embedding tables by name, at one version.

    Lookups may run during a commit, from any number of threads. One process at a time commits.
    """

    @property
    def pinned(self) -> bool:
        return False

    @property
    def closed(self) -> bool:
        """Whether `close` was called."""
        return False

    def renew(self, lease_s: float | None = None) -> None:
        pass

    @abstractmethod
    def create_table(self, spec: TableSpec) -> bool:
        """Creates the table; False if it exists already.

        Raises:
            SpecConflict: a table of that name exists with another spec.
        """

    @abstractmethod
    def table(self, of: TableSpec | str) -> Any:
        """An `EmbeddingTable`: a view of one table. When a spec is given and there is no such table, it is created.

        Raises:
            TableNotFound: there is no table of that name.
            SpecConflict: a table of that name exists with another spec.
        """

    @abstractmethod
    def drop_table(self, table: str) -> None:
        """Deletes the table, its rows and its spec.

        Raises:
            TableNotFound: there is none of that name.
        """

    @abstractmethod
    def commit(self, commit: Commit) -> None:
        """Applies the optimizer to the rows of every update, all or nothing.

        Raises:
            StaleVersion, FutureVersion: `commit.version` is not the current version + 1.
            TableNotFound, BadIds, IdOutOfRange, BadGradient: the commit is invalid; the store is unchanged.
        """

    @abstractmethod
    def update(
        self, updates: Mapping[str, TableUpdate], learning_rates: Mapping[str, float], step: int | None = None
    ) -> int:
        """Commits the next version, whichever that is; returns it.

        Args:
            updates, learning_rates: As of `Commit`.
            step: Optimizer steps taken before this one; None: as many as there are versions.

        Raises:
            StaleVersion, FutureVersion: others committed to the store without an end.
            Whatever else `commit` raises; no row has changed then.
        """

    def begin_commit(self, commit: Commit) -> Future[None]:
        """As `commit`, but a store that logs its commits may return before this one is logged.

        Until it is logged, every other call waits, and nobody sees the version but who reads the store's shared memory
        and asks for versions ahead of the log (`SharedSource`). The default commits.

        Returns:
            Is done once the commit is logged, or cannot be: it then raises as `commit`, and the same commit may be made
            again. Until it is, no other change may be made.

        Raises:
            As `commit`.
        """
        self.commit(commit)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def stage(self, commit: Commit) -> Callable[[], None]:
        """The first half of `commit`: does everything that can fail, and changes no row.

        A commit to several stores stages on all of them before it changes any. Nothing else may change the store
        between the halves. The default only checks the version.

        Returns:
            The second half; call it once or not at all.

        Raises:
            As `commit`.
        """
        refuse_other_version(self.version(), commit.version - 1)
        return lambda: self.commit(commit)

    def staying_rows(self, commit: Commit) -> Mapping[str, StayingRows]:
        """What a commit would leave of the tables that share a budget of rows at its version; changes nothing.

        Args:
            commit: As of `commit`; only ids of its updates matter, and its `cuts` do not.

        Raises:
            Unsupported: the store holds no shards of such tables.
        """
        raise Unsupported(f"a {type(self).__name__} holds no shards that share a budget of rows (max_rows)")

    @property
    def keeps_records(self) -> bool:
        """Whether rows and `Commit.record` outlive the process that commits."""
        return False

    def record(self) -> bytes | None:
        """The record of the current version; None: its commit had none, or records are not kept."""
        return None

    def other_writer(self) -> str | None:
        """`<host>:<process>` of another process connected as the writer of this store, such as a running job's master.

        None if there is none. A store in memory or in files belongs to one process and always returns None.
        """
        return None

    def require_owner(self) -> None:
        """Checks that this process is still the store's writer, if it ever was.

        Raises:
            TakenOver: another process has become its writer.
        """

    def recover(self, version: int | None = None) -> int:
        """Undoes a commit that was interrupted. Called by the process that takes over from one that died.

        Args:
            version: The version to return to: the current one (None) or the one before it. Rows, slots, version and
                record are then those of that version. Pins of a store that goes back are given up, so that no reader
                can keep a job from going on.

        Returns:
            How many rows were restored.

        Raises:
            StaleVersion, FutureVersion: the store cannot go back to that version.
        """
        refuse_other_version(self.version(), version)
        return 0

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """Keeps one version readable while commits continue.

        Args:
            version: The current one, or one that is pinned already (None: the current one).
            lease_s: Seconds until the pin expires unless it is renewed, so that a reader that died keeps nothing.

        Raises:
            StaleVersion, FutureVersion: the version is neither current nor pinned.
            Unsupported: the store has no pins.
            BadInput: `lease_s` is not above 0.
        """
        raise Unsupported(f"{type(self).__name__} has no pins")

    def pins(self) -> tuple[PinStatistics, ...]:
        """All pins that have not expired, oldest version first."""
        return ()

    def read_ahead(self, ids: Mapping[str, Int64]) -> None:
        """Brings rows near that a lookup is going to ask for, where they are kept at some distance; no value changes.

        Raises:
            ElastableError: the lookup would raise it, too.
        """

    def flush_status(self) -> FlushStatus | None:
        """How far the tier that the store writes its rows to is behind; None: there is no such tier."""
        return None

    def measures(self) -> StoreMeasures:
        """What it has done since it was opened; empty where a store measures nothing."""
        return StoreMeasures()

    @abstractmethod
    def reset_version(self, version: int, record: bytes | None = None) -> None:
        """Declares the rows as they are now to be `version` (after `put`), with this `Commit.record`.

        Raises:
            BadInput: `version` is negative.
        """

    @abstractmethod
    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """Writes rows and their slots (restore, import).

        Raises:
            TableNotFound, BadIds, IdOutOfRange: as `lookup`, and for an id that appears twice in a block.
            BadInput: arrays that do not fit the table, or a negative sum of squares among the slots.
            NotFinite: a weight or slot that is NaN or infinite.
        """

    @abstractmethod
    def delete(self, table: str, ids: Int64) -> int:
        """Deletes the rows of `ids` int64 `[n]` and their slots; the ids read their initial values again.

        The version does not change. Ids without a row are skipped.

        Returns:
            How many rows were deleted.

        Raises:
            TableNotFound, BadIds, IdOutOfRange: as `lookup`; nothing is deleted.
        """

    def table_statistics(self, table: str) -> TableStatistics:
        """What the table holds. Raises `TableNotFound`."""
        return TableStatistics(self.row_count(table))

    def put_table_state(self, table: str, state: TableState) -> None:
        """Restores what `table_state` returned; parts that are None are left as they are.

        Raises:
            TableNotFound: there is no table of that name.
            BadInput: the table keeps no such state, or counts of another size, or its decay is to be restored while
                a version is pinned; nothing has changed.
        """
        raise BadInput(f"table {table!r} keeps no state besides its rows here")

    @abstractmethod
    def clear(self, table: str) -> None:
        """Deletes every row of the table; all ids read their initial values again."""
