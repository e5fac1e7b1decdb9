"""The connections from a member of a replica group to the `elastable replicas` that started it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import suppress
from typing import TypeAlias

from elastable.embedding_store.contract.malformed import Document
from elastable.replicas.processes.hosts import this_host

__all__ = ["ADDRESS", "TOKEN", "ControlClient", "Message", "read_line"]

ADDRESS, TOKEN = "ELASTABLE_REPLICAS", "ELASTABLE_REPLICAS_TOKEN"
"""Environment variables: the address of the control server, and the token that it asks for."""

Message: TypeAlias = Document
"""One line of JSON."""

_CONNECT_S = 20.0


class ControlClient:
    """One member's connections; messages are lines of JSON.

    Raises:
        OSError: the control server cannot be reached.
    """

    def __init__(self, environment: Mapping[str, str] = os.environ) -> None:
        self._hosts, self._port = json.loads(environment[ADDRESS])
        self._hello = {
            "token": environment[TOKEN],
            "rank": int(environment["PMI_RANK"]),
            "pid": os.getpid(),
            "host": this_host(),
            "name": socket.gethostname(),
        }
        self._control = self._connect("control")

    def redirect_output(self) -> None:
        """Sends what this process and its children write from now on to the control server."""
        for channel, stream in (("out", sys.stdout), ("err", sys.stderr)):
            with self._connect(channel) as connection:
                os.dup2(connection.fileno(), stream.fileno())

    def send(self, message: Message) -> None:
        """Sends a message; if the server is gone, `messages` ends."""
        with suppress(OSError):
            self._control.sendall(json.dumps(message).encode() + b"\n")

    def messages(self) -> Iterator[Message]:
        """Messages to this member, until the connection ends."""
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
    """The bytes up to the next line break; empty: the connection has ended."""
    line = b""
    while not line.endswith(b"\n"):
        piece = connection.recv(1)
        if not piece:
            return b""
        line += piece
    return line[:-1]
