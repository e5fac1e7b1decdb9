"""A TCP proxy before a Redis server that breaks off in the middle of a commit."""

import contextlib
import socket
from collections.abc import Callable, Iterator

from tests.redis_done import until_done
from tests.tcp_proxy import TcpProxy

_EXEC = b"*1\r\n$4\r\nEXEC\r\n"


class CuttingProxy(TcpProxy):
    """Forwards bytes until a set number of transactions went through.

    Attributes:
        transactions: How many more may pass before all connections are cut; None: all.
        when_cut: Called once they have been forwarded, before the cut.
    """

    def __init__(self, server_port: int) -> None:
        self.transactions: int | None = None
        self.when_cut: Callable[[], None] = lambda: None
        self._ends: dict[socket.socket, bytes] = {}  # what each server was sent last
        super().__init__(server_port)

    def _pass_on(self, received: bytes, target: socket.socket) -> None:
        tail = self._ends.get(target, b"")
        seen, at = tail + received, 0
        while self.transactions is not None and target in self._servers and (found := seen.find(_EXEC, at)) >= 0:
            at = found + len(_EXEC)
            self.transactions -= 1
            if self.transactions == 0:
                self.transactions = None
                target.sendall(seen[len(tail) : at])
                until_done(target)
                self.when_cut()
                raise ConnectionAbortedError("cut")
        self._ends[target] = seen[max(at, len(seen) - len(_EXEC) + 1) :]
        target.sendall(received)


@contextlib.contextmanager
def cutting_proxy(server_port: int) -> Iterator[CuttingProxy]:
    proxy = CuttingProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
