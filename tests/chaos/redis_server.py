"""A Redis of a cluster: started again whenever it has died, until the schedule is over."""

from __future__ import annotations

import os
import resource
import selectors
import signal
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tests.chaos.links import Timers
from tests.servers import Server, redis_binary, valkey_binary

__all__ = ["ConfiguredServer", "RedisServer", "is_server", "server_binary"]

_RESTART_S = 0.05


def server_binary() -> Path:
    """The server program of this machine."""
    binary = redis_binary() or valkey_binary()
    assert binary is not None, "no redis-server and no valkey-server"
    return binary


def is_server(pid: int) -> bool:
    """Whether a process runs the server program: a server, or a fork of one that writes its files."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name == server_binary().resolve().name
    except OSError:  # it has ended
        return "redis" in Path(f"/proc/{pid}/comm").read_text() or "valkey" in Path(f"/proc/{pid}/comm").read_text()


@dataclass
class ConfiguredServer(Server):
    """A server with a file of its settings, which it rewrites when it becomes a primary, a replica, a Sentinel."""

    lines: Sequence[str] = field(default=())
    words: Sequence[str] = field(default=())

    def launch(self, port: int = 0) -> None:
        self.port = port or self.port
        file = self.directory / "server.conf"
        if not file.exists():
            given = (f"port {self.port}", "bind 127.0.0.1", f"dir {self.directory}", 'save ""', *self.lines, "")
            file.write_text("\n".join(given))
        self._spawn([str(self.binary), str(file), *self.words, "--logfile", str(self.directory / "log")])


class RedisServer:
    """One server, which keeps what it confirmed.

    Args:
        folder: For its files; made here.
        selector, timers: The conductor's.
        options: Besides those of a file that keeps what is confirmed.
        lines: Of its configuration, which the server may rewrite; none: it has no such file.

    Attributes:
        server: The server itself.
        pause_s: From its next death until it is started again.
    """

    def __init__(
        self,
        folder: Path,
        selector: selectors.BaseSelector,
        timers: Timers,
        options: Sequence[str] = (),
        lines: Sequence[str] = (),
    ) -> None:
        folder.mkdir()
        self._folder, self._selector, self._timers = folder, selector, timers
        if lines:
            lines = ("appendonly yes", "appendfsync always", *lines)
            self.server: Server = ConfiguredServer(server_binary(), folder, lines=lines)
        else:
            kept = ("--appendonly", "yes", "--appendfsync", "always")
            self.server = Server(server_binary(), folder, (*kept, *options))
        self._fd = -1
        self.pause_s = _RESTART_S
        self._start()

    @property
    def port(self) -> int:
        """The same in all its lives."""
        return self.server.port

    @property
    def pid(self) -> int | None:
        """Of the process; None between two lives."""
        return None if self.server.process is None else self.server.process.pid

    def signal(self, number: signal.Signals) -> int | None:
        """Sends it a signal; its process id, None where it is not there."""
        if self.pid is not None:
            os.kill(self.pid, number)
        return self.pid

    def fill(self, few: int) -> bool:
        """Lets its append-only file grow by a few bytes and no more, until it dies of that; whether it is there."""
        if self.pid is None:
            return False
        sizes = [file.stat().st_size for file in self._folder.rglob("*.incr.aof")]
        limit = max(sizes, default=0) + few
        resource.prlimit(self.pid, resource.RLIMIT_FSIZE, (limit, resource.RLIM_INFINITY))
        return True

    def kill(self) -> None:
        """For good, once nobody turns the selector any more."""
        self.server.kill()

    def _start(self) -> None:
        self.server.start()
        assert self.pid is not None
        self._fd = os.pidfd_open(self.pid)
        self._selector.register(self._fd, selectors.EVENT_READ, lambda _: self._died())

    def _died(self) -> None:
        self._selector.unregister(self._fd)
        os.close(self._fd)
        self.server.kill()
        self._timers.after(self.pause_s, self._start)
