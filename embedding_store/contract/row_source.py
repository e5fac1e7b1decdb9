"""The contract of whatever rows are looked up in: a store, a reader of one, a pinned version."""

from abc import abstractmethod
from collections.abc import Generator, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import FutureVersion, StaleVersion

Weight = TypeVar("Weight")


@dataclass(frozen=True, slots=True, eq=False)
class LookupRequest:
    """A checked lookup of one table; only that ids lie in a fixed vocabulary is left to the store.

    Attributes:
        table: Its name.
        ids: int64 `[m]`, contiguous.
        out: float32 `[n, dim]` to write into, without bags n = m. Rows may lie apart, columns may not.
        offsets: int64 `[n + 1]`, contiguous; None: a row for each id.
        weights: float32 `[m]`, contiguous, or None.
        combiner: "sum", "mean" or "sqrtn", where there are bags.
        places: int64 `[m]`, contiguous, without bags: which row of `out` each
            id's row is written to, each once; other rows are left alone. None: its own.
    """

    table: str
    ids: Int64
    out: Float32
    offsets: Int64 | None = None
    weights: Float32 | None = None
    combiner: str = "sum"
    places: Int64 | None = None


class RowSource(Closing):
    """Where rows are looked up: all that a worker needs of a store.

    Lookups may run on many threads at once. A row that was never updated reads its initial value, a pure function of
    (seed, table, id, column); reading it writes nothing.
    """

    @abstractmethod
    def specs(self) -> dict[str, TableSpec]:
        """All tables by name."""

    @abstractmethod
    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """Rows of several tables at once.

        Args:
            ids: Table name -> int64 `[n]`; duplicates allowed.
            version: The version to read: the current one (None) or a pinned one.

        Returns:
            Table name -> float32 `[n, dim]`, row i the row of ids[i].

        Raises:
            TableNotFound, BadIds, IdOutOfRange: with the table, id and position.
            StaleVersion, FutureVersion: the version is neither current nor pinned.
            StoreFailed, Unavailable: the backend failed; no values are substituted.
        """

    @abstractmethod
    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        """Answers each request into its own memory.

        Args:
            requests: Checked by `elastable.embedding_store.tables.lookups`.
            version: As of `lookup`.
            split: Whether several threads may share the rows of one request.

        Raises:
            As `lookup`; outputs may be partly written.
        """

    def lookup_in_order(self, requests: Iterable[LookupRequest], version: int | None) -> Generator[None, None, None]:
        """Answers requests in their order, and yields after each.

        A store that answers one request at a time takes each only when it is asked for the next answer, and may refuse
        commits until the last one is answered or the generator is closed. Other stores take and answer all at once.

        Args:
            requests: As of `lookup_into`, all answered at one version.
            version: As of `lookup_into`.

        Raises:
            As `lookup`.
        """
        taken = list(requests)
        self.lookup_into(taken, version)
        for _ in taken:
            yield

    @abstractmethod
    def version(self) -> int:
        """The current version; 0 before the first commit."""

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """Waits up to `timeout_s` seconds until `version` is committed; returns whether it is.

        A source that is not notified of commits does not wait but checks once.
        """
        return self.version() >= version

    def lookup_when(self, ids: Mapping[str, Int64], version: int, wait_s: float) -> dict[str, Float32]:
        """Waits up to `wait_s` seconds for the version to be committed, then looks up.

        Raises:
            FutureVersion: the version was not committed in time. Otherwise as `lookup`.
        """
        if not self.wait_for_version(version, wait_s):
            raise FutureVersion(f"version {version} was not committed within {wait_s:g} s")
        return self.lookup(ids, version)

    def forget(self) -> None:
        """Drops everything cached: another store may answer now, or this one at an earlier version."""


def refuse_other_version(current: int, wanted: int | None) -> None:
    """Raises unless `wanted` is None or the current version."""
    if wanted is None or wanted == current:
        return
    if wanted < current:
        raise StaleVersion(f"version {wanted} is past; the current version is {current}")
    raise FutureVersion(f"version {wanted} is not committed yet; the current version is {current}")


def variables_of(weights: Iterable[Weight]) -> list[Weight]:
    """Of a Keras model's weights those that are variables: one that stands for the rows of a table has a table's name.

    Args:
        weights: What Keras lists, as `model.weights` or `model.trainable_weights`.
    """
    return [weight for weight in weights if not hasattr(weight, "table_name")]
