"""Several stores as one: each table in the one that it was placed in."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace

from elastable.embedding_store.composite.partitions.partitioned_commit import require_common_version
from elastable.embedding_store.composite.placement.placed_pin import PlacedPin
from elastable.embedding_store.composite.unfinished_commit import UnfinishedCommit
from elastable.embedding_store.contract.arrays import Float32, Int64, UInt8
from elastable.embedding_store.contract.pins import PinStatistics, joined_pins, refuse_while_pinned
from elastable.embedding_store.contract.refusals import refuse_other_version
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableStatistics
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed, TableNotFound, Unavailable
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.base_store import BaseStore

__all__ = ["PlacedStore"]


class PlacedStore(BaseStore):
    """Tables in different kinds of stores, at one version.

    A commit goes to every store, also where none of its tables is, so that all
    count the same versions: it is staged everywhere before anything changes
    anywhere. Should a store fail after that, the others are a version ahead:
    nothing is read or committed until the very same commit is repeated, which
    only the stores that lack it apply. A different commit of that version is
    refused. So is any commit where stores are found a version ahead and this
    object does not know by which commit: `recover` or `reset_version` first.
    """

    def __init__(
        self, stores: Mapping[str, EmbeddingStore], places: Mapping[str, str], default: str, timeout_s: float = 60.0
    ) -> None:
        """Joins stores, which this one then owns.

        Args:
            stores: By the name of the place.
            places: Table name -> name of its place.
            default: The place of tables that `places` does not name.
            timeout_s: Seconds that a lookup waits for a commit, or a commit for lookups.

        Raises:
            BadInput: a place without a store.
        """
        for place in {*places.values(), default}:
            if place not in stores:
                raise BadInput(f"no store for the place {place!r}; stores are given for {', '.join(sorted(stores))}")
        # What can fail is asked first: once it has agreed, memory follows.
        order = sorted(stores, key=lambda place: (place == "memory", place))
        self._stores = {place: stores[place] for place in order}
        self._places = dict(places)
        self._default = default
        self._lock = ReadersWriterLock(timeout_s, "the stores of several places")
        self._unfinished: UnfinishedCommit | None = None

    def place(self, table: str) -> str:
        """The name of the place where a table of this name is."""
        return self._places.get(table, self._default)

    def create_table(self, spec: TableSpec) -> bool:
        """As in `EmbeddingStore.create_table`."""
        with self._lock.writing():
            return self._home(spec.name).create_table(spec)

    def drop_table(self, table: str) -> None:
        """As in `EmbeddingStore.drop_table`."""
        with self._lock.writing():
            holder = self._holder(table)
            self._refuse_while_pinned(f"table {table!r} cannot be dropped")
            holder.drop_table(table)

    def specs(self) -> dict[str, TableSpec]:
        """As in `RowSource.specs`."""
        return {name: spec for store in self._stores.values() for name, spec in store.specs().items()}

    def version(self) -> int:
        """As in `RowSource.version`; while a commit is half done, the version before it."""
        return min(store.version() for store in self._stores.values())

    def wait_for_version(self, version: int, timeout_s: float) -> bool:
        """As in `RowSource.wait_for_version`."""
        return self._lock.wait_until(lambda: self.version() >= version, timeout_s)

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        """As in `RowSource.lookup`."""
        by_place: dict[str, dict[str, Int64]] = {}
        for table, wanted in ids.items():
            by_place.setdefault(self.place(table), {})[table] = wanted
        with self._lock.reading():
            current = self._whole_version()
            at = current if version is None else version
            if at != current:  # it may be pinned, which every store knows of its own
                by_place = {place: by_place.get(place, {}) for place in self._stores}
            self._require_tables(ids)
            found = {
                table: rows
                for place, asked in by_place.items()
                for table, rows in self._stores[place].lookup(asked, at).items()
            }
        return {table: found[table] for table in ids}

    def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        """As in `EmbeddingStore.pin`, in every place, or in none."""
        with self._lock.writing():
            wanted = self._whole_version() if version is None else version
            pins: dict[str, Snapshot] = {}
            try:
                for place, store in self._stores.items():
                    pins[place] = store.pin(wanted, lease_s)
            except BaseException:
                for pin in pins.values():
                    pin.close()
                raise
        return PlacedPin(pins, self.place, wanted)

    def pins(self) -> tuple[PinStatistics, ...]:
        """As in `EmbeddingStore.pins`: those that stand in every place."""
        return joined_pins([store.pins() for store in self._stores.values()])

    def commit(self, commit: Commit) -> None:
        """As in `EmbeddingStore.commit`; see the class for a store that fails.

        Raises:
            StoreFailed: also where another commit broke off, which has to be repeated first.
        """
        with self._lock.writing():
            self._apply(commit, self._staged(commit))

    def stage(self, commit: Commit) -> Callable[[], None]:
        """As in `EmbeddingStore.stage`."""
        halves = self._staged(commit)

        def apply() -> None:
            with self._lock.writing():
                self._apply(commit, halves)

        return apply

    @property
    def keeps_records(self) -> bool:
        """As in `EmbeddingStore.keeps_records`: where every place keeps them."""
        return all(store.keeps_records for store in self._stores.values())

    def record(self) -> bytes | None:
        """As in `EmbeddingStore.record`. Raises `StoreFailed` while a commit is half done."""
        with self._lock.reading():
            self._whole_version()
            return self._stores[self._record_place].record()

    def other_writer(self) -> str | None:
        """As in `EmbeddingStore.other_writer`: the first of any store."""
        return next((writer for store in self._stores.values() if (writer := store.other_writer())), None)

    def require_owner(self) -> None:
        """As in `EmbeddingStore.require_owner`, of every store."""
        for store in self._stores.values():
            store.require_owner()

    def recover(self, version: int | None = None) -> int:
        """As in `EmbeddingStore.recover`, in every place; None: to the version that stands in all of them."""
        with self._lock.writing():
            versions = [store.version() for store in self._stores.values()]
            target = min(versions) if version is None else version
            require_common_version(target, versions)
            taken_back = sum(store.recover(target) for store in self._stores.values())
            self._unfinished = None
            return taken_back

    @property
    def _record_place(self) -> str:
        """The place that keeps the records of all."""
        return next(iter(self._stores))

    def reset_version(self, version: int) -> None:
        """As in `EmbeddingStore.reset_version`."""
        with self._lock.writing():
            self._refuse_while_pinned(f"the version cannot be reset to {version}")
            for store in self._stores.values():
                store.reset_version(version)
            self._unfinished = None

    def row_count(self, table: str) -> int:
        """As in `EmbeddingStore.row_count`."""
        return self._holder(table).row_count(table)

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`."""
        return self._holder(table).scan(table, block_rows)

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`."""
        with self._lock.reading():
            return self._holder(table).read_rows(table, ids)

    def put(self, table: str, blocks: Iterable[RowBlock]) -> None:
        """As in `EmbeddingStore.put`."""
        self._holder(table).put(table, blocks)

    def clear(self, table: str) -> None:
        """As in `EmbeddingStore.clear`."""
        with self._lock.writing():
            holder = self._holder(table)
            self._refuse_while_pinned(f"table {table!r} cannot be cleared")
            holder.clear(table)

    def delete(self, table: str, ids: Int64) -> int:
        """As in `EmbeddingStore.delete`."""
        with self._lock.writing():
            return self._holder(table).delete(table, ids)

    def table_statistics(self, table: str) -> TableStatistics:
        """As in `EmbeddingStore.table_statistics`."""
        return self._holder(table).table_statistics(table)

    def sightings(self, table: str) -> UInt8 | None:
        """As in `EmbeddingStore.sightings`."""
        return self._holder(table).sightings(table)

    def put_sightings(self, table: str, counters: UInt8) -> None:
        """As in `EmbeddingStore.put_sightings`."""
        with self._lock.writing():
            self._holder(table).put_sightings(table, counters)

    def close(self) -> None:
        """Closes every store."""
        for store in self._stores.values():
            store.close()

    def _refuse_while_pinned(self, what: str) -> None:
        refuse_while_pinned(what, [pin.version for store in self._stores.values() for pin in store.pins()])

    def _staged(self, commit: Commit) -> list[Callable[[], None]]:
        """The second halves of this commit at every store that lacks it."""
        behind = self._behind(commit)
        self._require_tables(commit.updates)
        parts: dict[str, Commit] = {}
        for place in behind:
            updates = {table: update for table, update in commit.updates.items() if self.place(table) == place}
            record = commit.record if place == self._record_place else None
            parts[place] = replace(commit, updates=updates, record=record)
        return [self._stores[place].stage(part) for place, part in parts.items()]

    def _behind(self, commit: Commit) -> list[str]:
        """The places that lack this commit; those that have it, have it from an attempt that failed elsewhere."""
        versions = {place: store.version() for place, store in self._stores.items()}
        if self._unfinished is not None:
            self._unfinished.require_same(commit)
            if set(versions.values()) == {commit.version}:
                return []  # only answers were lost
        refuse_other_version(min(versions.values()), commit.version - 1)
        behind = [place for place, version in versions.items() if version == commit.version - 1]
        most = commit.version if self._unfinished is not None else commit.version - 1
        for place, version in versions.items():
            if version > most:
                raise StoreFailed(
                    f"{place} is at version {version} and {behind[0]} at {commit.version - 1}, by a commit that is "
                    "not known here: recover the store, or restore rows and reset the version, before a commit"
                )
        return behind

    def _apply(self, commit: Commit, second_halves: list[Callable[[], None]]) -> None:
        for number, second_half in enumerate(second_halves):
            try:
                second_half()
            except BaseException as error:
                # A store that is away may have applied it; any other error of the first one changed nothing.
                if number or not isinstance(error, ElastableError) or isinstance(error, (StoreFailed, Unavailable)):
                    self._unfinished = UnfinishedCommit.of(commit)
                raise
        self._unfinished = None

    def _whole_version(self) -> int:
        versions = {place: store.version() for place, store in self._stores.items()}
        if len(set(versions.values())) > 1:
            told = ", ".join(f"{place} at {version}" for place, version in versions.items())
            raise StoreFailed(f"a commit is half done ({told}): it must be repeated before anything is read")
        return next(iter(versions.values()))

    def _home(self, table: str) -> EmbeddingStore:
        return self._stores[self.place(table)]

    def _holder(self, table: str) -> EmbeddingStore:
        self._require_tables([table])
        return self._home(table)

    def _require_tables(self, tables: Iterable[str]) -> None:
        held = self.specs()
        for table in tables:
            if table not in held:
                raise TableNotFound(f"no table {table!r}; tables here: {', '.join(sorted(held)) or 'none'}")
