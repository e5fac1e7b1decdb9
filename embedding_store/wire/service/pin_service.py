"""The calls of the Store service that are about pins, and what other calls read of a pin."""

import threading
import time
from dataclasses import dataclass, replace

from elastable.embedding_store.contract.snapshot import Snapshot, require_lease
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, StaleVersion
from elastable.embedding_store.v1 import store_pb2

LONGEST_LEASE_S = 3600.0
"""For how long a client that may be gone by then may have a version kept, without renewing it."""

TOKEN_BYTES = 16
MOST_PINS = 1024
"""Pins of all clients."""

MOST_PINS_OF_A_CLIENT = 256
"""Of one connection."""

_NAMED_S = 600.0  # after its lease a pin is known for so long, to say what became of it


@dataclass(frozen=True, slots=True)
class _HeldPin:
    """A pin of a client: until when its token is known, and the address it was asked for from."""

    pin: Snapshot
    until: float
    client: str
    version: int


class ServedPins:
    """The pins that clients have of a store, by their tokens.

    Args:
        store: What is pinned.
    """

    def __init__(self, store: EmbeddingStore) -> None:
        self._store = store
        self._changing = threading.Lock()
        self._pins: dict[bytes, _HeldPin] = {}

    def source(self, token: bytes) -> Snapshot:
        """The store for an empty token, else the pin of that token.

        Raises:
            StaleVersion: there is none.
        """
        if not token:
            return self._store
        known = self._pins.get(token)
        if known is None:
            raise StaleVersion(
                "there is no such pin here: it was released, its lease ended, an administrator gave it up, or the "
                "server was started anew"
            )
        return known.pin

    def close(self) -> None:
        """Releases them all."""
        with self._changing:
            held, self._pins = list(self._pins.values()), {}
        for each in held:
            each.pin.close()

    def make_way(self, what: str, force: bool) -> None:
        """For `what`, which cannot be while versions are pinned: gives the pins of clients up where it is forced.

        Raises:
            BadInput: not forced, and clients hold pins; says who they are.
        """
        self._forget_old()
        if force:
            self.close()
            return
        with self._changing:
            pinned = [held for held in self._pins.values() if held.until - _NAMED_S > time.monotonic()]
        if pinned:
            holders = ", ".join(sorted({f"{held.client} (version {held.version})" for held in pinned}))
            raise BadInput(
                f"{what} while versions are pinned, by {holders}: let them be released or run out, or force it, which "
                "gives these pins up"
            )

    def pin(self, request: store_pb2.PinRequest, client: str) -> store_pb2.PinReply:
        """Pins a version, or says which one a pin of that token has; renews or releases a pin."""
        if len(request.token) != TOKEN_BYTES:
            raise BadInput(f"PinRequest: a token has {TOKEN_BYTES} bytes, got {len(request.token)}")
        if request.lease_s == 0:
            return self._release(request.token)
        if require_lease(lease_s := request.lease_s) > LONGEST_LEASE_S:
            raise BadInput(f"PinRequest: lease_s {lease_s:g}: ask for {LONGEST_LEASE_S:g} s at most, and renew")
        if request.renew:
            return self._renew(request.token, lease_s)
        self._forget_old()
        known = self._pins.get(request.token)
        if known is None and len(self._pins) >= MOST_PINS:
            raise BadInput(f"PinRequest: {MOST_PINS} pins are held here, as many as there may be; release some")
        if known is None and self._held_by(client) >= MOST_PINS_OF_A_CLIENT:
            raise BadInput(f"PinRequest: this client holds {MOST_PINS_OF_A_CLIENT} pins, the most of one; release some")
        if known is None:
            pin = self._store.pin(request.version if request.HasField("version") else None, lease_s)
            with self._changing:
                held = _HeldPin(pin, _known_until(lease_s), client, pin.version())
                known = self._pins.setdefault(request.token, held)
            if known.pin is not pin:  # the same call has come twice at the same time
                pin.close()
        return store_pb2.PinReply(version=known.version)

    def _held_by(self, client: str) -> int:
        with self._changing:
            return sum(held.client == client for held in self._pins.values())

    def _renew(self, token: bytes, lease_s: float) -> store_pb2.PinReply:
        (pin := self.source(token)).renew(lease_s)
        with self._changing:
            if (held := self._pins.get(token)) is not None:
                self._pins[token] = replace(held, until=_known_until(lease_s))
        return store_pb2.PinReply(version=pin.version())

    def _release(self, token: bytes) -> store_pb2.PinReply:
        """Harmless where there is none."""
        with self._changing:
            known = self._pins.pop(token, None)
        if known is not None:
            known.pin.close()
        return store_pb2.PinReply()

    def _forget_old(self) -> None:
        """Pins of clients that are gone have ended by themselves; their tokens are forgotten here."""
        now = time.monotonic()
        with self._changing:
            old = [token for token, held in self._pins.items() if held.until < now]
            gone = [self._pins.pop(token).pin for token in old]
        for pin in gone:
            pin.close()


def _known_until(lease_s: float) -> float:
    return time.monotonic() + lease_s + _NAMED_S
