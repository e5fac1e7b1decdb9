"""Pins: what they cost, how long they last, and what is refused because of them."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from elastable.embedding_store.errors import BadInput, FutureVersion, StaleVersion, VersionError

__all__ = ["PinStatistics", "joined_pins", "not_pinned", "refuse_while_pinned", "require_lease"]


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
    told = f"pinned are {', '.join(map(str, sorted(pinned)))}" if pinned else "no version is pinned"
    reason = "" if why is None else f" (its pin is gone: {why})"
    return StaleVersion(f"version {wanted} is past{reason}; the current version is {current}, {told}")


def refuse_while_pinned(what: str, pinned: Iterable[int]) -> None:
    """Raises `BadInput` if any version is pinned: `what` would break it."""
    if versions := sorted(set(pinned)):
        told = ", ".join(map(str, versions))
        raise BadInput(f"{what} while versions are pinned ({told}): release the pins first, or let them run out")


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
