"""The server to which the members of a replica group report; it runs in the `elastable replicas` that started them."""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress

from elastable.launch.control_client import ADDRESS, TOKEN, Message, read_line
from elastable.replicas.processes.hosts import own_addresses

__all__ = ["ControlServer"]

_HELLO_S = 5.0


class ControlServer:
    """A listening socket; connections without the token are closed.

    Args:
        one_host: All members are on this host: only local connections are accepted.
    """

    def __init__(self, one_host: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=1024)
        self.listener.setblocking(False)
        self._hosts = ("127.0.0.1",) if one_host else own_addresses()
        self._token = secrets.token_hex(16)

    @property
    def environment(self) -> dict[str, str]:
        """Variables that a member needs to connect."""
        return {ADDRESS: json.dumps([self._hosts, self.listener.getsockname()[1]]), TOKEN: self._token}

    def accept(self) -> tuple[socket.socket, Message] | None:
        """The next connection and its first message; None: there is none, or it has no valid token."""
        try:
            connection, _ = self.listener.accept()
        except BlockingIOError:
            return None
        connection.settimeout(_HELLO_S)
        with suppress(OSError, ValueError):
            hello = json.loads(read_line(connection))
            if isinstance(hello, dict) and hello.get("token") == self._token:
                connection.setblocking(False)
                return connection, hello
        connection.close()
        return None
