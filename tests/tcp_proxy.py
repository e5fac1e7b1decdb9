"""A TCP proxy that cuts connections, or loses what they carry, as networks do."""

import contextlib
import socket
import threading
from collections.abc import Iterator


class TcpProxy:
    """Forwards 127.0.0.1:`port` to `server_port`, which may be changed for new connections.

    What it loses it loses in silence: neither end hears that the connection is no more.

    Attributes:
        port: Where it listens.
        server_port: Where new connections lead.
        refused: Connections that found nobody there.
    """

    def __init__(self, server_port: int) -> None:
        self.server_port = server_port
        self.refused = 0
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self._clients: list[socket.socket] = []
        self._servers: list[socket.socket] = []
        self._deaf: set[socket.socket] = set()
        self._lock = threading.Lock()
        threading.Thread(target=self._accept, daemon=True).start()

    def lose_answers(self) -> None:
        """From now on nothing that servers say gets through, on the connections there are."""
        with self._lock:
            self._deaf.update(self._servers)

    def lose_everything(self) -> None:
        """From now on nothing gets through in either direction, on the connections there are."""
        with self._lock:
            self._deaf.update(self._servers, self._clients)

    def hang_up_on_clients(self) -> int:
        """Clients see their connections end, the server does not; how many there were."""
        with self._lock:
            clients, self._clients = self._clients, []
            self._deaf.update(self._servers, clients)
        for client in clients:
            _end(client)
        return len(clients)

    def cut(self) -> int:
        """Both ends see all connections end; how many there were."""
        with self._lock:
            ends, self._clients, self._servers = self._clients + self._servers, [], []
        for end in ends:
            _end(end)
        return len(ends)

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
            except OSError:
                return
            try:
                server = socket.create_connection(("127.0.0.1", self.server_port), timeout=60)
            except OSError:
                _end(client)  # nobody there, now
                self.refused += 1
                continue
            server.settimeout(None)
            with self._lock:
                self._clients.append(client)
                self._servers.append(server)
            for source, target in ((client, server), (server, client)):
                threading.Thread(target=self._forward, args=(source, target, source is server), daemon=True).start()

    def answer(self, said: bytes) -> bytes:
        """What clients get of what a server said."""
        return said

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while received := source.recv(1 << 16):
                if source not in self._deaf:
                    self._pass_on(self.answer(received) if answers else received, target)
        if source in self._deaf:
            return  # its end is lost, too
        _end(source)
        _end(target)

    def _pass_on(self, received: bytes, target: socket.socket) -> None:
        target.sendall(received)


def _end(one: socket.socket) -> None:
    with contextlib.suppress(OSError):
        one.shutdown(socket.SHUT_RDWR)
    one.close()


@contextlib.contextmanager
def tcp_proxy(server_port: int) -> Iterator[TcpProxy]:
    proxy = TcpProxy(server_port)
    try:
        yield proxy
    finally:
        proxy.close()
