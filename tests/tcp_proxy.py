"""A TCP proxy that passes bytes on until its connections are cut."""

from __future__ import annotations

import contextlib
import socket
import threading
from collections.abc import Iterator

__all__ = ["TcpProxy", "tcp_proxy"]


class TcpProxy:
    """Forwards 127.0.0.1:`port` to another port here; new connections work after a cut."""

    def __init__(self, server_port: int) -> None:
        self._server_port = server_port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def cut(self) -> int:
        """Breaks off every connection; how many there were."""
        with self._lock:
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            for end in pair:
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
        return len(pairs)

    def close(self) -> None:
        """Takes no more connections and cuts those there are."""
        # A close alone leaves the thread in accept(), and the port open with it.
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
                server = socket.create_connection(("127.0.0.1", self._server_port), timeout=10)
            except OSError:
                return
            server.settimeout(None)
            with self._lock:
                self._pairs.append((client, server))
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=_forward, args=(source, target), daemon=True).start()


def _forward(source: socket.socket, target: socket.socket) -> None:
    try:
        while received := source.recv(1 << 16):
            target.sendall(received)
    except OSError:
        return
    finally:
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


@contextlib.contextmanager
def tcp_proxy(server_port: int) -> Iterator[TcpProxy]:
    """A proxy that is closed at the end."""
    proxy = TcpProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
