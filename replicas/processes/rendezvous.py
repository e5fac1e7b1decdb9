"""How members connect to each other: one TCP connection for every pair."""

from __future__ import annotations

import json
import secrets
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

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
        port: TCP port.
        token: A secret that callers must send, so that strangers are not taken for members.
    """

    hosts: tuple[str, ...]
    port: int
    token: str

    def to_bytes(self) -> bytes:
        return json.dumps([self.hosts, self.port, self.token]).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> MemberAddress:
        hosts, port, token = json.loads(text)
        return cls(tuple(hosts), port, token)


class Rendezvous:
    """Where one member accepts the others; on 127.0.0.1 alone if all are on this host (`one_host`)."""

    def __init__(self, one_host: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=1024)
        hosts = ("127.0.0.1",) if one_host else own_addresses()
        self.address = MemberAddress(hosts, self._listener.getsockname()[1], secrets.token_hex(16))

    def connect(self, rank: int, members: Sequence[MemberAddress], deadline_s: float) -> dict[int, socket.socket]:
        """A connection to every other member; all call it.

        Args:
            rank: Rank of this member.
            members: Addresses of all, by rank.
            deadline_s: Seconds to wait for the others.

        Raises:
            Unavailable: a member cannot be reached; names its rank.
            DeadlineExceeded: a member has not connected; names its rank.
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
        """Stops listening."""
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
        match _parsed(line):
            case [self.address.token, int(rank)]:
                return rank
        return None


def _reach(rank: int, address: MemberAddress, deadline_s: float) -> socket.socket:
    failures = []
    for host in address.hosts:
        try:
            return socket.create_connection((host, address.port), timeout=deadline_s)
        except OSError as error:
            failures.append(f"{host}:{address.port}: {error.strerror or error}")
    raise Unavailable(f"rank {rank} cannot be reached: {'; '.join(failures)}")


def _parsed(line: bytes) -> object:
    try:
        parsed: object = json.loads(line)
    except ValueError:
        return None
    return parsed


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()
