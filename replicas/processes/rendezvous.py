"""How members find each other: one connection between every two of them."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from elastable.embedding_store.errors import DeadlineExceeded, Unavailable
from elastable.replicas.processes.hosts import own_addresses

__all__ = ["MemberAddress", "Rendezvous"]

_HELLO_BYTES = 256
_HELLO_S = 5.0


@dataclass(frozen=True, slots=True)
class MemberAddress:
    """Where a member listens.

    Attributes:
        hosts: Addresses to try, in this order.
        port: Of TCP.
        token: What a caller has to know, so that a stranger is not taken for a member.
    """

    hosts: tuple[str, ...]
    port: int
    token: str

    def to_bytes(self) -> bytes:
        """As JSON."""
        return json.dumps([self.hosts, self.port, self.token]).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> MemberAddress:
        """Of what `to_bytes` gave."""
        hosts, port, token = json.loads(text)
        return cls(tuple(hosts), port, token)


class Rendezvous:
    """Where one member waits for the others.

    Args:
        one_host: All members are on this host: none can come from elsewhere.
    """

    def __init__(self, one_host: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=1024)
        hosts = ("127.0.0.1",) if one_host else own_addresses()
        self.address = MemberAddress(hosts, self._listener.getsockname()[1], secrets.token_hex(16))

    def connect(self, rank: int, members: Sequence[MemberAddress], deadline_s: float) -> dict[int, socket.socket]:
        """A connection to every other member; all call it.

        Args:
            rank: Of this member.
            members: Where all listen, by rank.
            deadline_s: Seconds that others may take.

        Raises:
            Unavailable: a member cannot be reached, or has not come; names its rank.
        """
        give_up = time.monotonic() + deadline_s
        found: dict[int, socket.socket] = {}
        try:
            for other in range(rank):
                found[other] = _reach(other, members[other], deadline_s)
                found[other].sendall(json.dumps([members[other].token, rank]).encode() + b"\n")
            while len(found) < len(members) - 1:
                self._listener.settimeout(max(0.01, give_up - time.monotonic()))
                connection, _ = self._listener.accept()
                caller = self._caller(connection)
                if caller is None or not rank < caller < len(members):
                    connection.close()
                    continue
                found[caller] = connection
        except TimeoutError:
            _close(found)
            missing = [str(other) for other in range(len(members)) if other != rank and other not in found]
            raise DeadlineExceeded(
                f"rank {', '.join(missing)} has not connected to rank {rank} within {deadline_s:g} s"
            ) from None
        except Unavailable:
            _close(found)
            raise
        return found

    def close(self) -> None:
        """Nobody else can come."""
        self._listener.close()

    def _caller(self, connection: socket.socket) -> int | None:
        connection.settimeout(_HELLO_S)
        line = b""
        with suppress(OSError):
            while len(line) < _HELLO_BYTES and not line.endswith(b"\n"):
                piece = connection.recv(1)
                if not piece:
                    return None
                line += piece
        said = _parsed(line)
        known = isinstance(said, list) and len(said) == 2 and said[0] == self.address.token
        return said[1] if known and isinstance(said[1], int) else None


def _reach(rank: int, address: MemberAddress, deadline_s: float) -> socket.socket:
    told = []
    for host in address.hosts:
        try:
            return socket.create_connection((host, address.port), timeout=deadline_s)
        except OSError as error:
            told.append(f"{host}:{address.port}: {error.strerror or error}")
    raise Unavailable(f"rank {rank} cannot be reached: {'; '.join(told)}")


def _parsed(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
