"""How much is kept of before-images, by the change that left them, and what of it nobody needs any more."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Self

from elastable.embedding_store.errors import StoreFailed
from elastable.embedding_store.tiers.redis.before_images import Moment
from elastable.embedding_store.tiers.redis.reply_shapes import Command

__all__ = ["Kept", "Ledger"]


@dataclass(frozen=True, slots=True)
class Kept:
    """What one change left.

    Attributes:
        rows: Before-images.
        bytes: That they take.
        serial: Of the store when it was made.
    """

    rows: int
    bytes: int
    serial: int


class Ledger:
    """Before-images by the change that left them: of the newest commit, and of those that a pin needs.

    Attributes:
        entries: Name of the change -> what it left.
    """

    def __init__(self, entries: dict[Moment, Kept]) -> None:
        self.entries = entries

    @classmethod
    def of(cls, answer: list[bytes]) -> Self:
        """From the answer to HGETALL. Raises `StoreFailed` where it is something else."""
        try:
            return cls(
                {
                    _name(name): Kept(*map(int, kept.split()))
                    for name, kept in zip(answer[::2], answer[1::2], strict=True)
                }
            )
        except (ValueError, TypeError) as error:
            raise StoreFailed(f"the ledger of before-images is none: {error}") from error

    def beyond(self, moment: Moment) -> tuple[int, int]:
        """(rows, bytes) of what lies beyond a moment."""
        kept = [kept for name, kept in self.entries.items() if name > moment]
        return sum(one.rows for one in kept), sum(one.bytes for one in kept)

    def obsolete(self, oldest_pin: Moment, version: int) -> list[Moment]:
        """Names that no pin needs, and that are not needed to take the current version back."""
        return sorted(name for name in self.entries if name <= oldest_pin and name != Moment(version))

    def written(self, key: bytes, name: Moment, kept: Kept) -> list[Command]:
        """Commands that note what a change left."""
        return [("HSET", key, _field(name), f"{kept.rows} {kept.bytes} {kept.serial}")]

    def removed(self, key: bytes, names: Iterable[Moment]) -> list[Command]:
        """Commands that take names out; none for no names."""
        fields = [_field(name) for name in names]
        return [("HDEL", key, *fields)] if fields else []


def _field(name: Moment) -> str:
    return f"{name.version}.{name.serial}" if name.serial else str(name.version)


def _name(field: bytes) -> Moment:
    version, _, serial = field.decode().partition(".")
    return Moment(int(version), int(serial or 0))
