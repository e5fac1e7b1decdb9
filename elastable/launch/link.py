"""The connections from a member of a replica group to the `elastable replicas` that started it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import Any

from elastable.replicas.processes.hosts import this_host

__all__ = ["PLACE", "TOKEN", "Link", "read_line"]

PLACE, TOKEN = "ELASTABLE_REPLICAS", "ELASTABLE_REPLICAS_TOKEN"
"""Of the environment: where to report to, and what shows that one belongs there."""

_CONNECT_S = 20.0


class Link:
    """One member's; what is said over it are lines of JSON.

    Raises:
        OSError: whoever started this member cannot be reached.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._hosts, self._port = json.loads(environment[PLACE])
        self._hello = {
            "token": environment[TOKEN],
            "rank": int(environment["PMI_RANK"]),
            "pid": os.getpid(),
            "host": this_host(),
            "name": socket.gethostname(),
        }
        self._control = self._connect("control")

    def take_output(self) -> None:
        """What this process and its children write from now on goes there."""
        for channel, stream in (("out", sys.stdout), ("err", sys.stderr)):
            with self._connect(channel) as connection:
                os.dup2(connection.fileno(), stream.fileno())

    def tell(self, message: dict[str, Any]) -> None:
        """Says something; where nobody hears it, `heard` ends."""
        with suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def heard(self) -> Iterator[dict[str, Any]]:
        """What is said to this member, until the other end is gone."""
        with suppress(OSError, ValueError):
            while line := read_line(self._control):
                yield json.loads(line)

    def _connect(self, channel: str) -> socket.socket:
        failure = OSError("there is no address to connect to")
        for host in self._hosts:
            try:
                connection = socket.create_connection((host, self._port), timeout=_CONNECT_S)
            except OSError as error:
                failure = error
                continue
            connection.settimeout(None)
            connection.sendall(json.dumps({**self._hello, "channel": channel}).encode() + b"\n")
            return connection
        raise failure


def read_line(connection: socket.socket) -> bytes:
    """Up to the next line break, without it; empty: the connection has ended."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        line += piece
    return line[:-1]
