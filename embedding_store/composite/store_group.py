"""Several stores at one version: which tables lie on them, whether they agree, calls to all of them, and commits."""

import hashlib
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Generic, NamedTuple, NoReturn, TypeVar

import numpy as np

from elastable.embedding_store.composite.partitions import Part, Partition, TableSplits
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.row_source import RowSource, refuse_other_version
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
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
from elastable.embedding_store.measures import CLOCK, carried
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.checks import require_numbers, require_update

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

    def of_parts(self, parts: Iterable[Part], call: Callable[[Source, Part], T]) -> dict[int, T]:
        """Calls the stores of some parts with them."""
        return self.run({part.shard: partial(call, self.sources[part.shard], part) for part in parts})

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
        self.tables = {name: table for name, (table, lacking) in found.items() if not lacking}

    def forget(self) -> None:
        """The tables are read again when they are next needed."""
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


# Commits to several stores: staged on all of them, then applied on all of them, or repaired by repeating them


RECORD_STORE = 0
"""Keeps the record of each commit for all stores."""

_FEW_VALUES = 1 << 13  # stores in memory apply fewer before a thread has started

_Share = list[tuple[Partition, Part, TableUpdate, Float32 | None]]
"""One store's part of every table's update, and the squares of whole rows."""


class UnfinishedCommit(NamedTuple):
    """A commit that only some stores may have applied; no other one is accepted until all of them have."""

    version: int
    digest: bytes  # of everything in it but its time
    time: float | None  # which it keeps when it is repeated


class CommitCoordinator:
    """Splits commits over stores. Not thread-safe: one commit at a time.

    Args:
        group: The stores.
        repairs_unknown: Whether a commit may complete one that another process began. Nobody can check that it is the
            same commit.
    """

    def __init__(self, group: StoreGroup[EmbeddingStore], repairs_unknown: bool) -> None:
        self._group, self._names = group, group.splits.stores
        self._repairs_unknown = repairs_unknown
        self._unfinished: UnfinishedCommit | None = None

    def forget(self) -> None:
        """All stores are at one version again."""
        self._unfinished = None

    def stage(self, commit: Commit, tables: Sequence[Partition], versions: Mapping[int, int]) -> Callable[[], None]:
        """Stages a commit on every store that does not have it yet; see `EmbeddingStore.stage`.

        Args:
            commit: Updates of whole tables.
            tables: The tables that are updated, in the commit's order.
            versions: The current version of every store.

        Raises:
            StoreFailed: the stores are at different versions, and this commit does not repair that.
        """
        require_numbers(commit)
        behind = self._behind(commit, versions)
        commit = replace(commit, time=self._time_of(commit))  # one for all stores, also where it is repeated
        shares: dict[int, _Share] = {store: [] for store in versions}
        for table, given in zip(tables, commit.updates.values(), strict=True):
            update = require_update(table.spec, given)
            squares = table.row_squares(update)
            for part in table.parts(update.ids):
                shares[part.shard].append((table, part, update, squares))
        together = (
            not self._group.in_memory or sum(update.gradients.size for update in commit.updates.values()) > _FEW_VALUES
        )
        staged = self._group.run(
            {store: partial(self._stage, store, commit, shares[store]) for store in behind}, together
        )
        # Stores without rows follow: if all that have rows fail, nothing has changed anywhere.
        touched = [store for store in behind if any(len(part.ids) for _, part, _, _ in shares[store])]
        untouched = [store for store in behind if store not in touched]
        waves = [{store: staged[store] for store in wave} for wave in (touched, untouched) if wave]
        return partial(self._finish, commit, waves, together)

    def _time_of(self, commit: Commit) -> float:
        if self._unfinished is not None and self._unfinished.time is not None:
            return self._unfinished.time
        return CLOCK.now() if commit.time is None else commit.time

    def _behind(self, commit: Commit, versions: Mapping[int, int]) -> list[int]:
        """The stores that do not have the commit yet."""
        oldest = min(versions.values())
        if self._unfinished is not None:
            if (commit.version, _digest(commit)) != self._unfinished[:2]:
                raise StoreFailed(
                    f"the commit of version {self._unfinished.version} broke off: repeat that very commit, with the "
                    "same gradients, before another one, or restore rows and reset the version"
                )
            if oldest == max(versions.values()) == commit.version:
                return []  # only answers were lost
        refuse_other_version(oldest, commit.version - 1)
        newest = commit.version if self._repairs_unknown or self._unfinished is not None else commit.version - 1
        behind = [store for store, version in sorted(versions.items()) if version < commit.version]
        for store, version in sorted(versions.items()):
            if version > newest:
                raise StoreFailed(
                    f"{self._names[store]} is at version {version} and {self._names[behind[0]]} at "
                    f"{oldest}, by a commit that is not known here: recover the store, or restore rows and reset the "
                    "version, before a commit"
                )
        return behind

    def _stage(self, store: int, commit: Commit, share: _Share) -> Callable[[], None]:
        updates = {table.spec.name: table.update(part, update, squares) for table, part, update, squares in share}
        # Learning rates of all its tables: rows of a table without an update may follow the step too.
        rates = {table: rate for table, rate in commit.learning_rates.items() if self._group.splits.owns(store, table)}
        frozen = tuple(table for table in commit.frozen if self._group.splits.owns(store, table))
        record = commit.record if store == RECORD_STORE else None
        part = replace(commit, updates=updates, learning_rates=rates, frozen=frozen, record=record)
        return self._group.sources[store].stage(part)

    def _finish(self, commit: Commit, waves: Sequence[Mapping[int, Callable[[], None]]], together: bool) -> None:
        for wave in waves:
            done, errors = self._group.outcomes(wave, together)
            if errors:
                self._break_off(commit, errors, applied=bool(done) or wave is not waves[0])
        self._unfinished = None

    def _break_off(self, commit: Commit, errors: Mapping[int, Exception], applied: bool) -> None:
        changed = any(isinstance(error, (StoreFailed, Unavailable)) for error in errors.values())
        if not applied and not changed and self._unfinished is None:
            self._group.raise_first(errors)
        self._unfinished = UnfinishedCommit(commit.version, _digest(commit), commit.time)
        failed = {self._names[store]: error for store, error in sorted(errors.items())}
        kind: type[StoreFailed] = StoreFailed
        if any(isinstance(error, StoreBroken) for error in errors.values()):
            kind = ShardLost
        elif all(isinstance(error, Unavailable) for error in errors.values()):
            kind = ShardAway
        raise kind(
            f"the commit of version {commit.version} did not end on {', '.join(failed)}, and other stores may have "
            "applied it; repeat the same commit to finish it: "
            + "; ".join(f"{name}: {error}" for name, error in failed.items())
        ) from next(iter(failed.values()))


def recovery_version(versions: Mapping[int, int], version: int | None, names: Sequence[str]) -> int:
    """The version that all stores can go back to.

    Args:
        versions: The current version of every store.
        version: The one that is asked for; None: the newest that all stores have reached.
        names: What errors call each store.

    Raises:
        ShardLost: stores are further apart than a commit that broke off leaves them.
        StaleVersion, FutureVersion: a store is neither at that version nor one later.
    """
    newest = max(versions.values())
    for store, current in sorted(versions.items()):
        if current < newest - 1:
            raise ShardLost(f"{names[store]} is lost: it is at version {current}, and others at {newest}")
    target = min(versions.values()) if version is None else version
    for current in versions.values():
        if current != target + 1:
            refuse_other_version(current, target)
    return target


def _digest(commit: Commit) -> bytes:
    fields = (
        commit.version,
        commit.step,
        sorted(commit.learning_rates.items()),
        commit.ends_replay_epoch,
        commit.frozen,
    )
    digest = hashlib.blake2b(repr(fields).encode())
    for name, update in commit.updates.items():
        digest.update(f"{name} {update.gradients.shape}".encode())
        for part in (update.ids, update.gradients, update.row_squares):
            if part is not None:
                digest.update(np.ascontiguousarray(part).data)
    if commit.record is not None:
        digest.update(commit.record)
    return digest.digest()
