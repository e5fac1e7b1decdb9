"""Where the members of a replica group report to the `elastable replicas` that started them."""

from __future__ import annotations

import json
import secrets
import socket
from contextlib import suppress
from typing import Any

from elastable.launch.link import PLACE, TOKEN, read_line
from elastable.replicas.processes.hosts import own_addresses

__all__ = ["Door"]

_HELLO_S = 5.0


class Door:
    """A listening socket; who does not know the token is sent away.

    Args:
        one_host: All members are on this host: none can come from elsewhere.
    """

    def __init__(self, one_host: bool) -> None:
        self.listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=1024)
        self.listener.setblocking(False)
        self._hosts = ("127.0.0.1",) if one_host else own_addresses()
        self._token = secrets.token_hex(16)

    @property
    def environment(self) -> dict[str, str]:
        """What a member has to know."""
        return {PLACE: json.dumps([self._hosts, self.listener.getsockname()[1]]), TOKEN: self._token}

    def admit(self) -> tuple[socket.socket, dict[str, Any]] | None:
        """The next connection and what it says of itself; None: a stranger, or nobody."""
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
