"""Pins: one version of a store, readable while commits go on."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.store import RowSource
from elastable.embedding_store.errors import BadInput, FutureVersion, StaleVersion, VersionError

__all__ = ["Pin", "PinStatistics", "joined_pins", "not_pinned", "refuse_while_pinned", "require_lease"]


@dataclass(frozen=True, slots=True)
class PinStatistics:
    """What a pin costs now. Pins of one version share what is kept for it.

    Attributes:
        version: That is pinned.
        lease_left_s: Seconds until it is gone, unless it is renewed.
        rows: Before-images that are kept for it.
        bytes: Of memory that they take.
    """

    version: int
    lease_left_s: float
    rows: int
    bytes: int


class Pin(RowSource):
    """One version of a store, exactly as it was, until it is released or its lease ends.

    Later commits keep the before-image of each row that they change. What is
    read here waits for a commit that is being made at most, as any lookup does.
    A lookup at the store itself, or at any reader of it, that names the version
    of a standing pin is answered like one made here; but while the version is
    the current one, the store reads rows as they stand, also where they were
    put or deleted by hand since.

    Every read raises `StaleVersion` once the pin is gone: released, not renewed
    within its lease, or given up as its before-images came to take more memory
    than the store allows them.
    """

    @abstractmethod
    def renew(self, lease_s: float | None = None) -> None:
        """The lease begins anew, for `lease_s` seconds (None: as long as at first).

        Raises:
            StaleVersion: the pin is gone.
        """

    @abstractmethod
    def row_count(self, table: str) -> int:
        """As in `EmbeddingStore.row_count`."""

    @abstractmethod
    def scan(self, table: str, block_rows: int = 65_536) -> Iterator[RowBlock]:
        """As in `EmbeddingStore.scan`; each row of the version once, whatever is changed between two blocks."""

    @abstractmethod
    def read_rows(self, table: str, ids: Int64) -> RowBlock:
        """As in `EmbeddingStore.read_rows`."""

    def sightings(self, table: str) -> UInt8 | None:
        """As in `EmbeddingStore.sightings`."""
        return None

    def close(self) -> None:
        """Releases the version: before-images that no other pin needs are freed. Twice is harmless."""
        self.release()

    @abstractmethod
    def release(self) -> None:
        """As `close`."""


def require_lease(lease_s: float) -> float:
    """`lease_s` itself. Raises `BadInput` unless it is a number of seconds above 0."""
    if not math.isfinite(lease_s) or lease_s <= 0:
        raise BadInput(f"lease_s must be a number of seconds above 0, got {lease_s!r}")
    return float(lease_s)


def not_pinned(wanted: int, current: int, pinned: Collection[int], why: str | None = None) -> VersionError:
    """The error for a version that is neither current nor pinned.

    Args:
        wanted: That version.
        current: The one that stands.
        pinned: Those that are pinned.
        why: What became of its pin, where it had one.
    """
    if wanted > current:
        return FutureVersion(f"version {wanted} is not committed yet; the current version is {current}")
    told = f"pinned are {', '.join(map(str, sorted(pinned)))}" if pinned else "no version is pinned"
    reason = "" if why is None else f" (its pin is gone: {why})"
    return StaleVersion(f"version {wanted} is past{reason}; the current version is {current}, {told}")


def refuse_while_pinned(what: str, pinned: Iterable[int]) -> None:
    """Raises `BadInput` for `what` would break versions that are pinned, where there are any."""
    if versions := sorted(set(pinned)):
        told = ", ".join(map(str, versions))
        raise BadInput(f"{what} while versions are pinned ({told}): release the pins first, or let them run out")


def joined_pins(told: Sequence[Sequence[PinStatistics]]) -> tuple[PinStatistics, ...]:
    """The pins that stand on all of several stores, from what each of them tells.

    Rows and bytes are those of all stores; a lease lasts as long as the shortest.
    Pins of one version are told apart by the time they have left: leases begin on
    all stores together, so the one that some store has let go of already is, on
    the others, the one that ends first.
    """
    found: list[PinStatistics] = []
    by_store = [_by_version(pins) for pins in told]
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
    """The pins of each version, the one that lasts longest first."""
    held: dict[int, list[PinStatistics]] = {}
    for pin in sorted(pins, key=lambda pin: -pin.lease_left_s):
        held.setdefault(pin.version, []).append(pin)
    return held
