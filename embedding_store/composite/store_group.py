"""Several stores at one version: which tables lie on them, whether they agree, and calls to all of them at once."""

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from functools import partial
from typing import Generic, NoReturn, TypeVar

from elastable.embedding_store.composite.partitions import Partition, TableSplits
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.pins import MemoryPin
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    ElastableError,
    NotReady,
    ShardAway,
    ShardLost,
    StoreBroken,
    StoreFailed,
    TableNotFound,
    TakenOver,
    Unavailable,
    VersionError,
)
from elastable.embedding_store.measures import carried
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock

T = TypeVar("T")
Source = TypeVar("Source", bound=RowSource)

_DEADLINE_S = 600.0  # every store has its own deadline; this only keeps a dead thread from hanging its caller
_CALLERS = 4  # at once, without waiting for each other's threads


class StoreGroup(Generic[Source]):
    """All of them are asked at the same time, and errors name the one they come from. Safe to use from many threads.

    Attributes:
        sources: All of them.
        splits: Which of them holds which part of a table, in the same order.
        timeout_s: Seconds that a lookup waits for a commit of this process, or a change for lookups and other changes,
            before `DeadlineExceeded`.
        lock: Held for reading by whoever needs all of them at one version, for writing by whoever changes them.
        in_memory: Whether all are in memory, where a small call is done sooner without threads.
        tables: Those that are known to be whole.
        apart: Why rows of different stores may be of different versions; None: they are not.
        reached: A version that every one has been seen to hold.
        closed: Whether nobody may call them any more.

    Args:
        refusal: Makes the error for whoever calls them once they are closed.

    Raises:
        BadInput: there are no sources, or one is given twice.
    """

    def __init__(
        self,
        sources: Sequence[Source],
        splits: TableSplits,
        timeout_s: float,
        refusal: Callable[[], ElastableError] = lambda: StoreFailed("the store is closed"),
    ) -> None:
        if not sources:
            raise BadInput("a store of several stores needs at least one")
        if len({id(source) for source in sources}) < len(sources):
            raise BadInput("a store of several stores needs different ones: one is given twice")
        self.sources, self.splits, self.timeout_s = tuple(sources), splits, timeout_s
        # The calling thread makes one of the calls. The executor starts threads when they are first needed.
        others = _CALLERS * (len(sources) - 1)
        self._threads = ThreadPoolExecutor(others, thread_name_prefix="shard") if others else None
        self.lock = ReadersWriterLock(timeout_s, "the stores")
        self.in_memory = all(isinstance(source, MemoryStore | MemoryPin) for source in sources)
        self.tables: dict[str, Partition] = {}
        self.apart: str | None = None
        self.reached = 0
        self.closed = False
        self._refusal = refusal
        self._reloading = threading.Lock()
        self._changing = threading.Lock()

    def require_open(self) -> None:
        """Raises the error of whoever calls them once they are closed."""
        if self.closed:
            raise self._refusal()

    def end_threads(self) -> None:
        """Afterwards calls are made one after the other."""
        executor, self._threads = self._threads, None
        if executor is not None:
            executor.shutdown(wait=True)

    @contextmanager
    def alone(self) -> Iterator[None]:
        """Around a change: one at a time."""
        if not self._changing.acquire(timeout=self.timeout_s):
            raise DeadlineExceeded(f"another change of the stores has not ended within {self.timeout_s:g} s")
        try:
            self.require_open()
            yield
        finally:
            self._changing.release()

    def each(
        self, call: Callable[[Source], T], stores: Iterable[int] | None = None, together: bool = True
    ) -> dict[int, T]:
        """Calls some stores (None: all), and returns their answers by store."""
        numbers = range(len(self.sources)) if stores is None else stores
        return self.run({number: partial(call, self.sources[number]) for number in numbers}, together)

    def versions(self) -> dict[int, int]:
        """The version of every store. Raises `ShardLost` where one is behind what all have been seen to hold."""
        self.require_open()
        reached = self.reached  # before they are asked: a commit may come between
        versions = self.each(lambda source: source.version(), together=not self.in_memory)
        for store, version in sorted(versions.items()):
            if version < reached:
                raise ShardLost(f"{self.splits.stores[store]} is lost: {_fell_back(version, reached)}")
        return versions

    def require_one_version(self) -> int:
        """The version of all stores; raises `StoreFailed` if they are at different ones."""
        versions = self.versions()
        by_version: dict[int, list[str]] = {}
        for store, version in versions.items():
            by_version.setdefault(version, []).append(self.splits.stores[store])
        if len(by_version) > 1:
            found = "; ".join(f"version {version} on {', '.join(on)}" for version, on in sorted(by_version.items()))
            raise StoreFailed(f"the stores are at different versions ({found}): {self.apart or 'repeat the commit'}")
        self.apart = None
        return min(by_version)

    def now_at(self, version: int) -> None:
        """A change has brought every store to that version."""
        self.apart, self.reached = None, version

    def partition(self, name: str) -> Partition:
        """How a table is divided over the stores. Raises `TableNotFound`."""
        found = self.tables.get(name)
        if found is None:
            self.require_open()
            self.reload()
            found = self.tables.get(name)
        if found is None:
            raise self.no_table(name)
        return found

    def no_table(self, name: str) -> TableNotFound:
        """The error that names the tables which there are."""
        return TableNotFound(f"no table {name!r}; tables here: {', '.join(sorted(self.tables)) or 'none'}")

    def reload(self) -> None:
        """Reads from the stores which tables there are; one of which a store lacks its part is left out."""
        found = {name: self.splits.read(name, held) for name, held in self.held().items()}
        whole = {name: table for name, (table, lacking) in found.items() if not lacking}
        with self._reloading:
            self.tables = whole

    def forget(self) -> None:
        """The tables are read again when they are next needed."""
        with self._reloading:
            self.tables = {}

    def held(self) -> dict[str, list[TableSpec | None]]:
        """What each store holds of each table."""
        self.require_open()
        return self._by_table(self.each(lambda source: source.specs(), together=not self.in_memory))

    def _by_table(self, specs: Mapping[int, Mapping[str, TableSpec]]) -> dict[str, list[TableSpec | None]]:
        found: dict[str, list[TableSpec | None]] = {}
        for name in sorted({name for of in specs.values() for name in of}):
            stores = range(len(self.sources))
            held = [specs.get(store, {}).get(name) if self.splits.owns(store, name) else None for store in stores]
            if any(spec is not None for spec in held):
                found[name] = held
        return found

    def outcomes(
        self, calls: Mapping[int, Callable[[], T]], together: bool = True
    ) -> tuple[dict[int, T], dict[int, Exception]]:
        """Makes all calls; by store, what they returned and what they raised.

        Args:
            calls: Store -> what to call.
            together: Whether to use threads; else one after the other.

        Raises:
            StoreFailed: a call did not end.
        """
        started: dict[int, Future[T]] = {}
        results: dict[int, T] = {}
        errors: dict[int, Exception] = {}
        executor = self._threads if together else None
        try:
            if executor is not None:
                for store, call in list(calls.items())[1:]:
                    started[store] = executor.submit(carried(call))
            for store, call in calls.items():
                if store not in started:
                    _keep(store, call, results, errors)
        except RuntimeError as error:  # of the executor alone: whatever a call raises is kept
            raise StoreFailed("the store is closed") from error
        finally:
            unfinished = wait(started.values(), timeout=_DEADLINE_S).not_done
        if unfinished:
            raise StoreFailed(f"{len(unfinished)} of {len(calls)} stores did not answer within {_DEADLINE_S:.0f} s")
        for store, future in started.items():
            _keep(store, future.result, results, errors)
        return results, errors

    def run(self, calls: Mapping[int, Callable[[], T]], together: bool = True) -> dict[int, T]:
        """What all calls returned, by store.

        Raises:
            StoreFailed: a call did not end.
            Exception: what the first store that failed raised, naming the store; every call has ended.
        """
        results, errors = self.outcomes(calls, together)
        if errors:
            self.raise_first(errors)
        return results

    def raise_first(self, errors: Mapping[int, Exception]) -> NoReturn:
        """Raises the error of the first store that has one, naming the store; a lost store comes before all others.

        Raises:
            ShardLost: a store has lost its rows.
            ShardAway: a store cannot be reached.
        """
        named = {store: self._named(store, error) for store, error in sorted(errors.items())}
        store = min(named, key=lambda store: (_rank(named[store]), store))
        if named[store] is errors[store]:
            raise errors[store]
        raise named[store] from errors[store]

    def _named(self, store: int, error: Exception) -> Exception:
        """The error, naming the store that raised it."""
        where = self.splits.stores[store]
        if not isinstance(error, ElastableError):
            error.add_note(f"on {where}")
            return error
        if isinstance(error, StoreBroken):
            return ShardLost(f"{where} is lost: {error}")
        if isinstance(error, Unavailable) and not isinstance(error, NotReady):
            return ShardAway(f"{where}: {error}")
        if not isinstance(error, TakenOver) and (why := self._why_lost(store, error)):
            return ShardLost(f"{where} is lost: {why}")
        return type(error)(f"{where}: {error}")

    def _why_lost(self, store: int, error: ElastableError) -> str:
        """The sign that a store has lost its rows; "" if there is none: a table may have been dropped everywhere.

        Such a store may answer that it never had a version or a table.
        """
        if self.reached and isinstance(error, VersionError | TableNotFound):
            found, _ = self.outcomes({store: self.sources[store].version})
            if found.get(store, reached := self.reached) < reached:
                return _fell_back(found[store], reached)
        if not isinstance(error, TableNotFound):
            return ""
        specs, _ = self.outcomes({number: source.specs for number, source in enumerate(self.sources)})
        if store not in specs:
            return ""
        lost = [name for name, held in self._by_table(specs).items() if store in self.splits.read(name, held)[1]]
        return f"it lacks tables that others hold ({', '.join(lost)})" if lost else ""


def _fell_back(version: int, reached: int) -> str:
    return f"it is at version {version}, and was at {reached}: it was started again without its rows"


def _rank(error: Exception) -> int:
    """Orders errors by how much they explain: the lowest explains most."""
    kinds = TakenOver, ShardLost, ShardAway
    return next((number for number, kind in enumerate(kinds) if isinstance(error, kind)), len(kinds))


def _keep(store: int, call: Callable[[], T], results: dict[int, T], errors: dict[int, Exception]) -> None:
    try:
        results[store] = call()
    except Exception as error:  # noqa: BLE001 - raised once all calls have ended
        errors[store] = error
