"""A TCP proxy before a Redis server that breaks off in the middle of a commit."""

from __future__ import annotations

import contextlib
import select
import socket
import threading
from collections.abc import Callable, Iterator

from tests.redis_done import until_done

__all__ = ["CuttingProxy", "cutting_proxy"]

_EXEC = b"*1\r\n$4\r\nEXEC\r\n"
_WAIT_S = 0.05


class CuttingProxy:
    """Forwards bytes until a set number of transactions went through.

    Attributes:
        port: Where it listens, on 127.0.0.1.
        transactions: How many more may pass before all connections are cut; None: all.
        when_cut: Called once they have been forwarded, before the cut.
    """

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.transactions: int | None = None
        self.when_cut: Callable[[], None] = lambda: None
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._accept, daemon=True)]
        self._threads[0].start()

    def _accept(self) -> None:
        while not self._stopped.is_set():
            if not select.select([self._listener], [], [], _WAIT_S)[0]:
                continue
            client, _ = self._listener.accept()
            thread = threading.Thread(target=self._forward, args=(client,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _forward(self, client: socket.socket) -> None:
        with (
            client,
            contextlib.suppress(ConnectionError),
            socket.create_connection(("127.0.0.1", self._server_port), timeout=60) as server,
        ):
            tail = b""
            while not self._stopped.is_set():
                for ready in select.select([client, server], [], [], _WAIT_S)[0]:
                    moved = ready.recv(4096)
                    if not moved:
                        return
                    if ready is server:
                        client.sendall(moved)
                        continue
                    passed, tail, cut = self._let_pass(tail, moved)
                    server.sendall(passed)
                    if cut:
                        until_done(server)
                        self.when_cut()
                        return

    def _let_pass(self, tail: bytes, moved: bytes) -> tuple[bytes, bytes, bool]:
        """(bytes to forward, end of the stream so far, whether to cut after them)."""
        seen = tail + moved
        at = 0
        while self.transactions is not None and (found := seen.find(_EXEC, at)) >= 0:
            at = found + len(_EXEC)
            self.transactions -= 1
            if self.transactions == 0:
                self.transactions = None
                return seen[len(tail) : at], b"", True
        return moved, seen[max(at, len(seen) - len(_EXEC) + 1) :], False

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(60)
        self._listener.close()


@contextlib.contextmanager
def cutting_proxy(server_port: int) -> Iterator[CuttingProxy]:
    """A proxy, closed at the end."""
    proxy = CuttingProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
