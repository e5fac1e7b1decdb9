"""The pins of a store in memory: who holds which version until when, and what may be kept for them."""

import logging
import threading
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import LookupRequest, refuse_other_version
from elastable.embedding_store.contract.snapshot import (
    PinStatistics,
    Snapshot,
    not_pinned,
    refuse_while_pinned,
    require_lease,
)
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.before_images import MAX_BYTES, PinnedTable
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.errors import ElastableError, StaleVersion
from elastable.embedding_store.native.range_pool import SERIAL, RangePool
from elastable.embedding_store.support.readers_writer_lock import ReadersWriterLock
from elastable.embedding_store.tables.checks import require_block_rows, require_ids
from elastable.embedding_store.tables.table_reader import answer_in_order, answer_requests, look_up

_SPARE_S = 300.0  # for which memory of a pin is kept for the next one: pages cost more than what is written to them
_REMEMBERED = 256  # versions whose pins are gone, for messages


@dataclass(slots=True, eq=False)
class PinLease:
    """What one pin has of a version.

    Attributes:
        version: That is pinned.
        seconds: Of the lease.
        ends: When it runs out, by the store's clock.
        gone: Why it is no more; None: it holds.
    """

    version: int
    seconds: float
    ends: float
    gone: str | None = None


class StorePins:
    """The leases of one store. Callers hold the store's lock: alone where anything may change, else with others.

    Args:
        tables: Of the store, as they come and go.
        most_bytes: That before-images of all tables may take together.
        clock: Seconds that never go back.
    """

    def __init__(
        self, tables: Mapping[str, MemoryTable], most_bytes: int, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._tables, self._most_bytes, self._clock = tables, most_bytes, clock
        self._leases: dict[int, list[PinLease]] = {}  # oldest version first
        self.idle = True  # nothing is pinned, and no memory is kept for the next pin
        self._ended: dict[int, str] = {}  # why, of versions that were pinned
        self._freed_at: float | None = None  # since when memory is kept for the next pin
        self._estimate = 0  # of bytes taken: at least so many, but for what was freed since

    @property
    def overdue(self) -> bool:
        """Whether leases have run out of which nothing was freed yet."""
        return any(self._late(lease) for held in self._leases.values() for lease in held)

    def take(self, current: int, version: int | None, seconds: float) -> PinLease:
        """A lease of the current version, or of one that is pinned. Alone.

        Raises:
            StaleVersion, FutureVersion: neither.
        """
        self.sweep()
        self.idle = False
        wanted = current if version is None else version
        if wanted not in self._leases:
            if wanted != current:
                raise self._refusal(wanted, current)
            for table in self._tables.values():
                table.versions.begin(wanted, table.count, self._make_room)
            self._leases[wanted] = []
        lease = PinLease(wanted, seconds, self._clock() + seconds)
        self._leases[wanted].append(lease)
        return lease

    def welcome(self, table: MemoryTable) -> None:
        """A new table: at every pinned version it is empty. Alone."""
        for version in self._leases:
            table.versions.begin(version, 0, self._make_room)

    def renew(self, lease: PinLease, seconds: float | None) -> None:
        """The lease begins anew. Raises `StaleVersion`."""
        self.require_lease(lease)
        lease.seconds = lease.seconds if seconds is None else seconds
        lease.ends = self._clock() + lease.seconds

    def release(self, lease: PinLease, why: str = "it was released") -> None:
        """The lease ends; what nobody needs any more is freed. Alone."""
        if lease.gone is None:
            lease.gone = why
            held = self._leases[lease.version]
            held.remove(lease)
            if not held:
                self._end(lease.version, why)

    def give_up_all(self, why: str) -> None:
        """Every lease ends: what was kept for them goes. Alone."""
        for version in list(self._leases):
            if version in self._leases:
                self._give_up(version, why)

    def close(self) -> None:
        """Every lease ends with the store. Alone."""
        for held in self._leases.values():
            for lease in held:
                lease.gone = "its store was closed"
        self._leases.clear()

    def sweep(self) -> None:
        """Ends leases that have run out. Alone."""
        if not self._leases:
            if self._freed_at is not None and self._clock() - self._freed_at > _SPARE_S:
                self._drop_spares()
            return
        for lease in [lease for held in self._leases.values() for lease in held if self._late(lease)]:
            self.release(lease, _not_renewed(lease))

    def require_lease(self, lease: PinLease) -> None:
        """Raises `StaleVersion` unless the lease holds."""
        gone = lease.gone
        if gone is None and self._late(lease):
            gone = _not_renewed(lease)
        if gone is not None:
            raise StaleVersion(f"the pin of version {lease.version} is gone: {gone}")

    def require(self, version: int, current: int) -> None:
        """Raises `StaleVersion` or `FutureVersion` unless a lease of the version holds."""
        if all(self._late(lease) for lease in self._leases.get(version, ())):
            raise self._refusal(version, current)

    def refuse_change(self, what: str) -> None:
        """Raises `BadInput` for a change that no version that is pinned would survive. Alone."""
        self.sweep()
        if self._leases:
            refuse_while_pinned(what, self._leases)

    def statistics(self) -> tuple[PinStatistics, ...]:
        now, found = self._clock(), []
        for version, held in self._leases.items():
            rows, size = self._size(version)
            found += [PinStatistics(version, lease.ends - now, rows, size) for lease in held if not self._late(lease)]
        return tuple(found)

    def _late(self, lease: PinLease) -> bool:
        return self._clock() >= lease.ends

    def _refusal(self, version: int, current: int) -> Exception:
        pinned = [v for v, held in self._leases.items() if not all(map(self._late, held))]
        why = self._ended.get(version)
        late = self._leases.get(version)
        return not_pinned(version, current, pinned, _not_renewed(late[0]) if late else why)

    def _size(self, version: int) -> tuple[int, int]:
        sizes = [table.versions.size(version) for table in self._tables.values()]
        return sum(rows for rows, _ in sizes), sum(size for _, size in sizes)

    def _make_room(self, size: int) -> None:
        if self._estimate + size > self._most_bytes:
            self._drop_spares()
            while self._leases and self._estimate + size > self._most_bytes:
                self._give_up(next(iter(self._leases)), self._too_much(size))
                self._drop_spares()
        self._estimate += size

    def _too_much(self, size: int) -> str:
        if size == MAX_BYTES:
            return "it was given up, as the system has no memory for before-images"
        return (
            f"it was given up, as before-images of what is pinned would take {self._estimate + size} bytes, and "
            f"before_image_bytes allows {self._most_bytes}"
        )

    def _drop_spares(self) -> None:
        """Gives memory back that is kept for the next pin, and counts anew what is taken."""
        self._freed_at, self.idle = None, not self._leases
        for table in self._tables.values():
            table.versions.drop_spare()
        self._estimate = sum(self._size(version)[1] for version in self._leases)

    def _give_up(self, version: int, why: str) -> None:
        for lease in list(self._leases[version]):
            self.release(lease, why)

    def _end(self, version: int, why: str) -> None:
        del self._leases[version]
        self._remember(version, why)
        self._freed_at = self._clock()
        try:
            for table in self._tables.values():
                table.versions.end(version)
        except MemoryError:  # versions before it need what it kept
            for table in self._tables.values():
                table.versions.forget()
            for older, held in self._leases.items():
                for lease in held:
                    lease.gone = self._too_much(MAX_BYTES)
                self._remember(older, self._too_much(MAX_BYTES))
            self._leases.clear()

    def _remember(self, version: int, why: str) -> None:
        self._ended[version] = why
        while len(self._ended) > _REMEMBERED:
            del self._ended[next(iter(self._ended))]


def _not_renewed(lease: PinLease) -> str:
    return f"it was not renewed within its lease of {lease.seconds:g} s"


@dataclass(eq=False)
class MemoryPin(Snapshot):
    """A read shares the store with lookups, and so waits for a commit that is being made, and no longer.

    Args:
        lock, pool: Of the store.
        table: Finds a table of the store by its name, or raises.
        store_specs: `specs` of the store.
        pins: Of the store.
        lease: Of this pin.
    """

    _lock: ReadersWriterLock
    _pool: RangePool
    _table: Callable[[str], MemoryTable]
    _store_specs: Callable[[], dict[str, TableSpec]]
    _pins: StorePins
    _lease: PinLease

    def lookup(self, ids: Mapping[str, Int64], version: int | None = None) -> dict[str, Float32]:
        with self._lock.reading():
            return look_up(self._readers(ids, version), ids, self._pool)

    def lookup_into(self, requests: Sequence[LookupRequest], version: int | None = None, split: bool = True) -> None:
        with self._lock.reading():
            tables = self._readers([request.table for request in requests], version)
            answer_requests(tables, requests, self._pool if split else SERIAL)

    def lookup_in_order(self, requests: Iterable[LookupRequest], version: int | None) -> Generator[None, None, None]:
        return answer_in_order(self._lock, partial(self._readers, version=version), requests)

    def specs(self) -> dict[str, TableSpec]:
        """Those of the store: tables that were made later are there, and empty."""
        return self._store_specs()

    def version(self) -> int:
        """The version that is pinned."""
        return self._lease.version

    def renew(self, lease_s: float | None = None) -> None:
        seconds = None if lease_s is None else require_lease(lease_s)
        with self._lock.reading():
            self._pins.renew(self._lease, seconds)

    def row_count(self, table: str) -> int:
        with self._lock.reading():
            return self._at(table).count

    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """The rows that have not changed since first, then the others."""
        with self._lock.reading():
            self._at(table)
        return self._blocks(table, require_block_rows(block_rows))

    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        with self._lock.reading():
            found = self._at(table)
            return found.stored(require_ids(found.spec, ids))

    def table_state(self, table: str) -> TableState:
        with self._lock.reading():
            return self._at(table).state()

    def close(self) -> None:
        if self._lease.gone is None:
            with self._lock.writing():
                self._pins.release(self._lease)

    def _blocks(self, table: str, block_rows: int) -> Iterator[RowBlock]:
        cursor, ends, sequences = 0, list[int](), list[int]()
        while True:
            with self._lock.reading():
                found = self._at(table)
                block, cursor = found.unchanged(cursor, block_rows)
                if block is None:
                    ids = found.changed(ends, sequences)
                    break
                ends.append(cursor)
                sequences.append(found.sequence)
            if len(block.ids):
                yield block
        for start in range(0, len(ids), block_rows):
            with self._lock.reading():
                block = self._at(table).stored(ids[start : start + block_rows])
            yield block

    def _readers(self, tables: Iterable[str], version: int | None) -> Sequence[PinnedTable]:
        refuse_other_version(self._lease.version, version)
        return [self._at(table) for table in tables]

    def _at(self, table: str) -> PinnedTable:
        """The table at the pinned version; the lock is held."""
        found = self._table(table)
        self._pins.require_lease(self._lease)
        return found.at(self._lease.version)


_log = logging.getLogger(__name__)


class PinKeeper(Closing):
    """Renews a pin on a separate thread until it is closed, and releases it then.

    A pin that is gone nevertheless is noticed by whoever reads there next, or asks here.

    Attributes:
        gone: Why the version is not readable any more, as a renewal was answered; None while it is, as far as is known.

    Args:
        pin: Taken over.
        every_s: A fraction of its lease, in seconds.
        what: It is for, in the log.
    """

    def __init__(self, pin: Snapshot, every_s: float, what: str) -> None:
        self.pin = pin
        self._every_s = every_s
        self._what = what
        self.gone: StaleVersion | None = None
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._renew, name="elastable-pin-keeper", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Ends the thread and releases the pin. Closing twice is harmless."""
        if self._over.is_set():
            return
        self._over.set()
        self._thread.join()
        try:
            self.pin.close()
        except ElastableError as error:
            _log.warning("the pin for %s ends with its lease: %s", self._what, error)

    def _renew(self) -> None:
        while not self._over.wait(self._every_s):
            try:
                self.pin.renew()
            except StaleVersion as gone:
                self.gone = gone
                return
            except ElastableError as error:
                # The store may answer again before the lease ends.
                _log.warning("the pin for %s was not renewed: %s", self._what, error)
