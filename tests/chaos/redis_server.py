"""A Redis of a cluster: started again whenever it has died, until the schedule is over."""

from __future__ import annotations

import os
import resource
import selectors
import signal
from pathlib import Path

from tests.chaos.links import Timers
from tests.servers import Server, redis_binary, valkey_binary

__all__ = ["RedisServer"]

_RESTART_S = 0.05


class RedisServer:
    """One server, which keeps what it confirmed.

    Args:
        folder: For its files; made here.
        selector, timers: The conductor's.

    Attributes:
        pause_s: From its next death until it is started again.
    """

    def __init__(self, folder: Path, selector: selectors.BaseSelector, timers: Timers) -> None:
        binary = redis_binary() or valkey_binary()
        assert binary is not None, "no redis-server and no valkey-server"
        folder.mkdir()
        self._folder, self._selector, self._timers = folder, selector, timers
        self._server = Server(binary, folder, ("--appendonly", "yes", "--appendfsync", "always"))
        self._fd = -1
        self.pause_s = _RESTART_S
        self._start()

    @property
    def port(self) -> int:
        """The same in all its lives."""
        return self._server.port

    @property
    def pid(self) -> int | None:
        """Of the process; None between two lives."""
        return None if self._server.process is None else self._server.process.pid

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
        self._server.kill()

    def _start(self) -> None:
        self._server.start()
        assert self.pid is not None
        self._fd = os.pidfd_open(self.pid)
        self._selector.register(self._fd, selectors.EVENT_READ, lambda _: self._died())

    def _died(self) -> None:
        self._selector.unregister(self._fd)
        os.close(self._fd)
        self._server.kill()
        self._timers.after(self.pause_s, self._start)
