"""Pins as they stand in Redis, where every process sees them: taken, renewed, released, given up."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping

from elastable.embedding_store.contract.pins import not_pinned, require_lease
from elastable.embedding_store.errors import DeadlineExceeded
from elastable.embedding_store.tiers.redis.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.registry import PinEntry, Registry, registry_questions
from elastable.embedding_store.tiers.redis.reply_shapes import Command
from elastable.embedding_store.tiers.redis.schema_1 import pins_key, serial_key, version_key
from elastable.embedding_store.tiers.redis.topology import Topology
from elastable.embedding_store.tiers.redis.transactions import change_if_unchanged, run_transactions

__all__ = ["PinRegistry", "given_up_pin"]

_PAUSE_S = 0.01

_Change = Callable[[Registry], Mapping[bytes, PinEntry | None]]
"""From what is registered to what is to be: None takes a pin out."""


class PinRegistry:
    """The pins of one store. For many threads at once."""

    def __init__(self, topology: Topology, namespace: str) -> None:
        self._topology, self._namespace = topology, namespace

    def take(self, version: int | None, lease_s: float, deadline: Deadline) -> tuple[bytes, PinEntry]:
        """Pins a version: its token, and what was registered.

        Raises:
            StaleVersion, FutureVersion: it is neither current nor pinned.
            DeadlineExceeded: rows were put or deleted all the time.
            BadInput: `lease_s`.
        """
        token, lease_s, taken = secrets.token_hex(8).encode(), require_lease(lease_s), list[PinEntry]()
        waiting = False

        def change(now: Registry) -> Mapping[bytes, PinEntry | None]:
            if version is None or version == now.version:
                if now.serial % 2:
                    return {}  # what this version is has not been decided yet
                wanted, serial = now.version, now.serial
            else:
                pinned = {pin.version for pin in now.standing().values()}
                if version not in pinned:
                    raise not_pinned(version, now.version, pinned, now.why_gone(version))
                wanted, serial = now.pinned(version)
            taken.append(PinEntry(wanted, serial, now.now_ms + round(1000 * lease_s), lease_s))
            return {token: taken[-1]}

        try:
            while not self._change(change, deadline):
                waiting = True
                time.sleep(min(_PAUSE_S, deadline.left(self._topology.url)))
        except DeadlineExceeded as error:
            if waiting:
                raise deadline.exceeded(f"{self._topology.url}, where rows are being put or deleted") from error
            raise
        return token, taken[-1]

    def renew(self, token: bytes, version: int, lease_s: float, deadline: Deadline) -> None:
        """Begins a lease anew.

        Raises:
            StaleVersion: the pin is gone.
            BadInput: `lease_s`.
        """
        require_lease(lease_s)

        def change(now: Registry) -> Mapping[bytes, PinEntry | None]:
            moment = now.pinned(version, token)
            return {token: PinEntry(version, moment.serial, now.now_ms + round(1000 * lease_s), lease_s)}

        self._change(change, deadline)

    def release(self, token: bytes, deadline: Deadline) -> None:
        """Takes a pin out, if it is there."""
        key = pins_key(self._namespace)
        self._topology.call([(key, ("HDEL", key, token))], deadline)

    def settle(self, gone: Mapping[bytes, PinEntry | None], deadline: Deadline) -> None:
        """Takes pins out, or notes why they were given up: before anything is dropped that they needed."""
        if gone:
            run_transactions(self._topology, [(pins_key(self._namespace), self._commands(gone))], deadline)

    def _change(self, change: _Change, deadline: Deadline) -> bool:
        """Whether something was changed."""
        done = False

        def commands(answers: list[object]) -> list[Command]:
            nonlocal done
            pins = change(Registry.of(answers))
            done = bool(pins)
            return self._commands(pins)

        of = self._namespace
        watched = [pins_key(of), version_key(of), serial_key(of)]
        questions = [words for _, words in registry_questions(of)]
        change_if_unchanged(self._topology, watched, questions, commands, deadline)
        return done

    def _commands(self, pins: Mapping[bytes, PinEntry | None]) -> list[Command]:
        key = pins_key(self._namespace)
        return [
            ("HDEL", key, token) if pin is None else ("HSET", key, token, pin.to_json()) for token, pin in pins.items()
        ]


def given_up_pin(pin: PinEntry, why: str) -> PinEntry:
    """The pin as it is registered once it is given up."""
    return PinEntry(pin.version, pin.serial, pin.ends_ms, pin.lease_s, why)
