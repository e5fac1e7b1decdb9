"""The contract of one version of a store, readable, and of the pins that keep it."""

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import BadInput, FutureVersion, StaleVersion, VersionError


class Snapshot(RowSource):
    """One version of a store. Checkpoints, evaluations and exports read from here and from nowhere else.

    `EmbeddingStore.pin` returns one that stays exactly as it is until it is closed or its lease ends, whatever is
    committed meanwhile. A store is itself the snapshot of its current version, valid until the next change.

    A pinned version can also be looked up at the store, or at any reader of it, by its number. While it is the current
    version, such a lookup sees rows that were put or deleted by hand since the pin; the pin does not.

    Every read of a pin raises `StaleVersion` once it is gone: closed, not renewed within its lease, or given up because
    its before-images would take more memory than the store allows.
    """

    @property
    def pinned(self) -> bool:
        """Whether the version stays readable while commits continue; False for a store."""
        return True

    @abstractmethod
    def renew(self, lease_s: float | None = None) -> None:
        """Restarts the lease, for `lease_s` seconds (None: as long as before). A store has no lease and does nothing.

        Raises:
            StaleVersion: the pin is gone.
        """

    @abstractmethod
    def row_count(self, table: str) -> int:
        """Rows of the table that hold a value. Raises `TableNotFound`."""

    @abstractmethod
    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """Every row that holds a value, once, in blocks of at most `block_rows`, in any order.

        A store that changes during the scan shows the change in later blocks; a pin does not.

        Raises:
            TableNotFound: there is no table of that name.
            BadInput: `block_rows` is below 1.
        """

    @abstractmethod
    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """Rows with their slots: of `ids` int64 `[n]`, each once, those that hold a value, in that order.

        Raises:
            TableNotFound, BadIds, IdOutOfRange: as `lookup`.
        """

    def table_state(self, table: str) -> TableState:
        """What the table keeps besides its rows; arrays are copies.

        Raises:
            TableNotFound: there is no table of that name.
        """
        return TableState()


# Pins: what they cost, how long they last, and what is refused because of them


@dataclass(frozen=True, slots=True)
class PinStatistics:
    """What a pin costs now. Pins of one version share its before-images.

    Attributes:
        version: The pinned version.
        lease_left_s: Seconds until the pin expires unless it is renewed.
        rows: Before-images kept for the version.
        bytes: Memory used by them.
    """

    version: int
    lease_left_s: float
    rows: int
    bytes: int


def require_lease(lease_s: float) -> float:
    """`lease_s` itself. Raises `BadInput` unless it is a number of seconds above 0."""
    if not math.isfinite(lease_s) or lease_s <= 0:
        raise BadInput(f"lease_s must be a number of seconds above 0, got {lease_s!r}")
    return float(lease_s)


def not_pinned(wanted: int, current: int, pinned: Collection[int], why: str | None = None) -> VersionError:
    """The error for a version that is neither current nor pinned.

    Args:
        wanted: That version.
        current: The current version.
        pinned: All pinned versions.
        why: What happened to the version's pin, if it had one.
    """
    if wanted > current:
        return FutureVersion(f"version {wanted} is not committed yet; the current version is {current}")
    found = f"pinned are {', '.join(map(str, sorted(pinned)))}" if pinned else "no version is pinned"
    reason = "" if why is None else f" (its pin is gone: {why})"
    return StaleVersion(f"version {wanted} is past{reason}; the current version is {current}, {found}")


def refuse_while_pinned(what: str, pinned: Iterable[int]) -> None:
    """Raises `BadInput` if any version is pinned: `what` would break it."""
    if versions := sorted(set(pinned)):
        numbers = ", ".join(map(str, versions))
        raise BadInput(f"{what} while versions are pinned ({numbers}): release the pins first, or let them run out")


def joined_pins(reported: Sequence[Sequence[PinStatistics]]) -> tuple[PinStatistics, ...]:
    """The pins that exist on all of several stores, from what each of them reports.

    Rows and bytes are sums; a lease is as long as the shortest. Pins of one version are matched by the time they have
    left: their leases begin on all stores together, so a pin that one store has already dropped is the one that ends
    first on the others.
    """
    found: list[PinStatistics] = []
    by_store = [_by_version(pins) for pins in reported]
    for version in sorted(set.intersection(*(set(held) for held in by_store))):
        for of_each in zip(*(held[version] for held in by_store), strict=False):
            found.append(
                PinStatistics(
                    version,
                    min(pin.lease_left_s for pin in of_each),
                    sum(pin.rows for pin in of_each),
                    sum(pin.bytes for pin in of_each),
                )
            )
    return tuple(found)


def _by_version(pins: Sequence[PinStatistics]) -> dict[int, list[PinStatistics]]:
    """The pins of each version, the longest lease first."""
    held: dict[int, list[PinStatistics]] = {}
    for pin in sorted(pins, key=lambda pin: -pin.lease_left_s):
        held.setdefault(pin.version, []).append(pin)
    return held
