"""The pins of a store in memory: who holds which version until when, and what may be kept for them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from elastable.embedding_store.contract.snapshot import PinStatistics, not_pinned, refuse_while_pinned
from elastable.embedding_store.engine.memory_table import MemoryTable
from elastable.embedding_store.engine.table_versions import MAX_BYTES
from elastable.embedding_store.errors import StaleVersion

__all__ = ["PinLease", "StorePins"]

_SPARE_S = 300.0  # for which memory of a pin is kept for the next one: pages cost more than what is written to them
_REMEMBERED = 256  # versions whose pins are gone, for messages


class PinLease:
    """What one pin has of a version.

    Attributes:
        version: That is pinned.
        seconds: Of the lease.
        ends: When it runs out, by the store's clock.
        gone: Why it is no more; None: it stands.
    """

    __slots__ = ("ends", "gone", "seconds", "version")

    def __init__(self, version: int, seconds: float, ends: float) -> None:
        self.version, self.seconds, self.ends = version, seconds, ends
        self.gone: str | None = None


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
        """Is told of a new table: at every pinned version it is empty. Alone."""
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
        """Raises `StaleVersion` unless the lease stands."""
        gone = lease.gone
        if gone is None and self._late(lease):
            gone = _not_renewed(lease)
        if gone is not None:
            raise StaleVersion(f"the pin of version {lease.version} is gone: {gone}")

    def require(self, version: int, current: int) -> None:
        """Raises `StaleVersion` or `FutureVersion` unless a lease of the version stands."""
        if all(self._late(lease) for lease in self._leases.get(version, ())):
            raise self._refusal(version, current)

    def refuse_change(self, what: str) -> None:
        """Raises `BadInput` for a change that no version that is pinned would survive. Alone."""
        self.sweep()
        refuse_while_pinned(what, self._leases)

    def statistics(self) -> tuple[PinStatistics, ...]:
        now, told = self._clock(), []
        for version, held in self._leases.items():
            rows, size = self._size(version)
            told += [PinStatistics(version, lease.ends - now, rows, size) for lease in held if not self._late(lease)]
        return tuple(told)

    def _late(self, lease: PinLease) -> bool:
        return self._clock() >= lease.ends

    def _refusal(self, version: int, current: int) -> Exception:
        standing = [v for v, held in self._leases.items() if not all(map(self._late, held))]
        why = self._ended.get(version)
        late = self._leases.get(version)
        return not_pinned(version, current, standing, _not_renewed(late[0]) if late else why)

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
        self._freed_at = None
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
