"""The Redis servers of a schedule, started again whenever they die: single ones, a Cluster, a primary and a replica."""

from __future__ import annotations

import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import redis

from tests.chaos.links import Link, Timers
from tests.chaos.stores import CLUSTER, PRIMARY_AND_REPLICA, SERVICE
from tests.ports import free_port
from tests.sentinels import are_complete, started_sentinels
from tests.servers import ConfiguredServer, Server, join_cluster, redis_binary, valkey_binary

_RESTART_S = 0.05


def server_binary() -> Path:
    binary = redis_binary() or valkey_binary()
    assert binary is not None, "no redis-server and no valkey-server"
    return binary


def is_server(pid: int) -> bool:
    """Whether a process runs the server program: a server, or a fork of one that writes its files."""
    try:
        return Path(f"/proc/{pid}/exe").readlink().name == server_binary().resolve().name
    except OSError:  # it has ended
        return "redis" in Path(f"/proc/{pid}/comm").read_text() or "valkey" in Path(f"/proc/{pid}/comm").read_text()


class RedisServer:
    """One server, which keeps what it confirmed; with `lines` it has a configuration file, which it may rewrite."""

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
            self.server: Server = ConfiguredServer(server_binary(), folder, lines=lines)  # the server itself
        else:
            kept = ("--appendonly", "yes", "--appendfsync", "always")
            self.server = Server(server_binary(), folder, (*kept, *options))
        self._fd = -1
        self.pause_s = _RESTART_S  # from its next death until it is started again
        self._start()

    @property
    def port(self) -> int:
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


_DOWN_MS = 500  # shorter than some stops and silences: Sentinels then take a primary for dead that is not
_READY_S = 60.0


class RedisGroup:
    """Servers by name, each behind a link, which is what it calls itself to others: all traffic passes the links.

    `line` is for the configuration of those that Sentinels watch; `sentinels` is empty where nobody watches.
    """

    def __init__(
        self,
        names: tuple[str, ...],
        line: str,
        links: Mapping[str, Link],
        home: Path,
        selector: selectors.BaseSelector,
        timers: Timers,
    ) -> None:
        self._line, self._links, self._home = line, links, home
        self._sentinels: list[ConfiguredServer] = []
        self.servers: dict[str, RedisServer] = {}  # by name
        for name in names:
            options, lines = self._settings(name)
            self.servers[name] = RedisServer(home / name, selector, timers, options, lines)
            links[name].target = self.servers[name].port
        if CLUSTER[0] in names:
            join_cluster([self.servers[name].server for name in names])

    @property
    def sentinels(self) -> dict[str, str]:
        return {f"sentinel{number}": sentinel.address for number, sentinel in enumerate(self._sentinels)}

    def watch(self, turn: Callable[[], None]) -> None:
        """Starts Sentinels where the servers need some, and turns the conductor's loop until all know each other."""
        if PRIMARY_AND_REPLICA[0] not in self.servers:
            return
        port, primary = self._links[PRIMARY_AND_REPLICA[0]].port, self.servers[PRIMARY_AND_REPLICA[0]].server
        for sentinel in started_sentinels(server_binary(), self._home, SERVICE, port, _DOWN_MS, 3000):
            self._sentinels.append(sentinel)
        end = time.monotonic() + _READY_S
        while not are_complete(primary, self._sentinels, SERVICE):
            turn()
            if time.monotonic() > end:
                raise RuntimeError(f"Sentinels are not ready after {_READY_S:g} s")

    def primary(self) -> str | None:
        """The name of the server that the first Sentinel takes for the primary."""
        with self._sentinels[0].client() as client:
            reply = client.sentinel_get_master_addr_by_name(SERVICE)
        return next((name for name in self.servers if reply and self._links[name].port == int(reply[1])), None)

    def fail_over(self) -> bool:
        """Asks for another primary, which may lack what this one has confirmed; whether there will be one."""
        try:
            with self._sentinels[0].client() as client:
                client.execute_command("SENTINEL FAILOVER", SERVICE)
        except redis.ResponseError:  # there is none that could be, or one is on its way
            return False
        return True

    def kill(self) -> None:
        for sentinel in self._sentinels:
            sentinel.kill()
        for server in self.servers.values():
            server.kill()

    def _settings(self, name: str) -> tuple[tuple[str, ...], tuple[str, ...]]:
        port = self._links[name].port
        if name in CLUSTER:
            options = ("--cluster-enabled", "yes", "--cluster-node-timeout", "5000", "--cluster-port", str(free_port()))
            return (*options, "--cluster-announce-port", str(port)), ()
        if name not in PRIMARY_AND_REPLICA:
            return (), ()
        own = f"replica-announce-port {port}"
        lines: tuple[str, ...] = ("repl-diskless-sync-delay 0", "replica-announce-ip 127.0.0.1", own, self._line)
        if name == PRIMARY_AND_REPLICA[1]:
            lines += (f"replicaof 127.0.0.1 {self._links[PRIMARY_AND_REPLICA[0]].port}",)
        return (), lines
