"""What a store says of itself in one place: its version, its owner, what is pinned, and the time of its server."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Self

from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.contract.pins import not_pinned, refuse_while_pinned
from elastable.embedding_store.errors import StaleVersion, StoreFailed
from elastable.embedding_store.tiers.redis.before_images import NO_PIN, Moment
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.schema import owner_key
from elastable.embedding_store.tiers.redis.schema_1 import pins_key, serial_key, version_key
from elastable.embedding_store.tiers.redis.topology import Topology

__all__ = ["PinEntry", "Registry", "read_registry", "registry_questions", "version_of"]


@dataclass(frozen=True, slots=True)
class PinEntry:
    """One pin, as it is registered.

    Attributes:
        version: That is pinned.
        serial: Of the last change outside commits when it was pinned.
        ends_ms: When its lease ends, by the server's clock, Unix milliseconds.
        lease_s: Seconds that the lease was given for.
        gone: Why it was given up; None: it was not.
    """

    version: int
    serial: int
    ends_ms: int
    lease_s: float
    gone: str | None = None

    @property
    def moment(self) -> Moment:
        """What is pinned, exactly."""
        return Moment(self.version, self.serial)

    def to_json(self) -> str:
        """The registry's value."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, text: bytes) -> Self:
        """Reads what `to_json` wrote. Raises `StoreFailed` where it is something else."""
        try:
            fields: dict[str, Any] = json.loads(text)
            gone = fields["gone"]
            return cls(int(fields["version"]), int(fields["serial"]), int(fields["ends_ms"]),
                       float(fields["lease_s"]), None if gone is None else str(gone))  # fmt: skip
        except MALFORMED as error:
            raise StoreFailed(f"the registry of pins holds {text[:200]!r}, no pin: {error}") from error


@dataclass(frozen=True, slots=True)
class Registry:
    """What was read of it at one moment.

    Attributes:
        version: The current one; 0 where none was ever set.
        owner: Who may write; None: nobody ever did.
        serial: Of changes outside commits: one more when such a change begins, and one more when it ends.
        pins: Token -> pin, those that are gone or over among them.
        now_ms: Of the server's clock, Unix milliseconds.
    """

    version: int
    owner: bytes | None
    serial: int
    pins: Mapping[bytes, PinEntry]
    now_ms: int

    @classmethod
    def of(cls, answers: Sequence[Any]) -> Self:
        """From the answers to `registry_questions`. Raises `StoreFailed` where they are something else."""
        try:
            version, owner, serial, pins, (seconds, micros) = answers
            entries = {token: PinEntry.from_json(text) for token, text in zip(pins[::2], pins[1::2], strict=True)}
            now_ms = 1000 * int(seconds) + int(micros) // 1000
            return cls(version_of(version), None if owner is None else bytes(owner), int(serial or 0), entries, now_ms)
        except MALFORMED as error:
            raise StoreFailed(f"the answers about the store's version and pins are none: {error}") from error

    def standing(self) -> dict[bytes, PinEntry]:
        """The pins that hold, by token."""
        return {token: pin for token, pin in self.pins.items() if pin.gone is None and pin.ends_ms > self.now_ms}

    def oldest_pin(self) -> Moment:
        """The oldest pinned moment, or `NO_PIN`."""
        return min((pin.moment for pin in self.standing().values()), default=NO_PIN)

    def pinned(self, version: int, token: bytes | None = None) -> Moment:
        """What is pinned of a version.

        Args:
            version: The version.
            token: Of the pin that must stand; None: the oldest of that version.

        Raises:
            StaleVersion, FutureVersion: nothing is; says why, where that is known.
        """
        standing = self.standing()
        if token is not None:
            if token not in standing:
                raise StaleVersion(f"the pin of version {version} is gone: {self._why(token)}")
            return standing[token].moment
        moments = [pin.moment for pin in standing.values() if pin.version == version]
        if not moments and version == self.version:
            raise StaleVersion(f"version {version} is past; version {version + 1} is being committed")
        if not moments:
            raise not_pinned(version, self.version, {pin.version for pin in standing.values()}, self.why_gone(version))
        return min(moments)

    def why_gone(self, version: int) -> str | None:
        """Why pins of a version are no more, where that is known."""
        return next((pin.gone for pin in self.pins.values() if pin.version == version and pin.gone), None)

    def refuse_pins(self, what: str) -> None:
        """Raises `BadInput` where a pin stands that `what` would break."""
        refuse_while_pinned(what, {pin.version for pin in self.standing().values()})

    def _why(self, token: bytes) -> str:
        pin = self.pins.get(token)
        if pin is None:
            return "it was released, or its lease ended long ago"
        return pin.gone or f"its lease of {pin.lease_s:g} s ended"


def registry_questions(namespace: str) -> list[tuple[bytes, Command]]:
    """Commands that read all of it, the version first."""
    version = version_key(namespace)
    questions = ("GET", version), ("GET", owner_key(namespace)), ("GET", serial_key(namespace))
    return [(version, words) for words in (*questions, ("HGETALL", pins_key(namespace)), ("TIME",))]


def read_registry(topology: Topology, namespace: str, deadline: Deadline) -> Registry:
    """Asks for all of it. Raises as `Topology.call`."""
    return Registry.of(topology.call(registry_questions(namespace), deadline))


def version_of(answer: object) -> int:
    """The version in a server's answer, 0 for None. Raises `StoreFailed` where there is none."""
    try:
        if answer is None or isinstance(answer, bytes):
            return 0 if answer is None else int(answer)
    except ValueError:
        pass
    raise StoreFailed(f"the version key holds {repr(answer)[:60]}, which is no version")
