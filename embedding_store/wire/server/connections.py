"""Connections to the ports of this process: counted, and ended where there are too many (how: docs/decisions.md).

Those who accept connections, gRPC among them, say nothing of them until a request comes. But each is a descriptor of
this process: a thread looks through these some times a second, and shuts down what is beyond the bounds.
"""

import logging
import os
import resource
import socket
import stat
import threading
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass, replace
from enum import IntEnum
from functools import lru_cache
from urllib.parse import unquote

from elastable.embedding_store.closing import Closing

_LOG = logging.getLogger(__name__)

WANTED_DESCRIPTORS = 1 << 16
"""The limit of descriptors that a process with a port sets itself, where it is lower and the system allows it."""

_PART = 3 / 8  # of all descriptors, for connections; shared memory takes half of them, and some are a reserve
_CALM = 0.2, 50  # until the next look: seconds, or so many times what this one took; whichever is longer
_HURRY = 0.01, 4  # the same where connections were ended: others come for their place
_YOUNG_S, _YOUNG = 0.5, 1 / 8  # so long, and up to that part of `cap`, who has just come is not counted
_SAID_S = 60.0  # between two lines in the log


class Standing(IntEnum):
    """What is known of who is at the other end. Connections of a lower standing make way for those of a higher one."""

    SILENT = 0
    """It has asked for nothing yet, or for nothing but health, or for what it may not have."""
    CALLER = 1
    """It has been answered, without a token or a certificate that has a role."""
    KNOWN = 2
    """It has shown one; at a port that asks for neither, it has been answered."""


@dataclass(frozen=True, slots=True)
class Bound:
    """Connections at once: in all, and of one address."""

    in_all: int
    of_an_address: int


@dataclass(frozen=True, slots=True)
class Bounds:
    """Of the connections to one port.

    Attributes:
        cap: Above it, connections are closed as they come. It leaves room for those that come between two looks.
        of: By standing: of connections of at most that standing.
        silent_s: Seconds that one may stay `SILENT` without a request.
    """

    cap: int
    of: Mapping[Standing, Bound]
    silent_s: float = 20.0

    def within(self, descriptors: int) -> "Bounds":
        """The same, or as much less as these descriptors demand."""
        share = min(1.0, _PART * descriptors / self.cap)
        fitting = {
            standing: Bound(max(4, int(bound.in_all * share)), max(3, int(bound.of_an_address * share)))
            for standing, bound in self.of.items()
        }
        return replace(self, cap=max(8, int(self.cap * share)), of=fitting)


LISTENERS: Mapping[str, Bounds] = {
    # Masters, store servers, `elastable serve` and `serve-model`: calls, health checks. A worker has two or three.
    "gRPC": Bounds(
        16_000,
        {Standing.SILENT: Bound(512, 128), Standing.CALLER: Bound(2_048, 512), Standing.KNOWN: Bound(10_000, 5_000)},
    ),
    # The live page, metrics, probes, predictions.
    "HTTP": Bounds(
        1_024, {Standing.SILENT: Bound(24, 16), Standing.CALLER: Bound(64, 48), Standing.KNOWN: Bound(64, 48)}
    ),
}
"""What listens on a port, by kind: every listener that takes TCP connections of clients is one of these."""


def bounds_here(kind: str) -> Bounds:
    """Those of a kind of listener in this process, whose limit of descriptors is raised where it is low."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = WANTED_DESCRIPTORS if hard == resource.RLIM_INFINITY else min(WANTED_DESCRIPTORS, hard)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))
            soft = wanted
    return LISTENERS[kind].within(WANTED_DESCRIPTORS if soft == resource.RLIM_INFINITY else soft)


Peer = tuple[str, int]
"""Address and port of the other end."""


@dataclass(slots=True, eq=False)
class CountedConnection:
    """One connection, as the last look saw it.

    Attributes:
        descriptor: Its number.
        inode: Tells its socket from another one that has the number by now.
        since: When it was first seen.
        heard: When something was asked for on it, or it was first seen.
        ended: Whether it was shut down.
    """

    descriptor: int
    inode: int
    port: "CountedPort"
    peer: Peer
    since: float
    heard: float
    standing: Standing = Standing.SILENT
    ended: bool = False


class CountedPort(Closing):
    """The connections to one port of this process are counted from `begin` to `close`.

    Args:
        kind: Of listener, of `LISTENERS`.

    Attributes:
        bounds: Of its connections.
        number: Of the port; 0: not listened on yet.
        counted: Connections at the last look, by standing.
        ended: Connections that were ended so far.
    """

    def __init__(self, kind: str) -> None:
        self.bounds = bounds_here(kind)
        self.number = 0
        self._heard: dict[str, tuple[Standing, float]] = {}
        self.counted: Mapping[Standing, int] = Counter()
        self.ended = self._said_of = 0
        self._said = -_SAID_S

    def begin(self, number: int) -> None:
        """The port is listened on."""
        self.number = number
        _WATCH.add(self)

    def close(self) -> None:
        """Its connections are not counted any more. Closing twice is harmless."""
        _WATCH.remove(self)

    def heard(self, peer: str, standing: Standing) -> None:
        """A client, by gRPC's name of it (`ipv4:127.0.0.1:50051`), asks for something, and has that standing by it."""
        before = self._heard.get(peer)
        self._heard[peer] = (standing if before is None else max(standing, before[0]), time.monotonic())

    def bring_within(self, connections: Sequence[CountedConnection], now: float) -> int:
        """Ends what is too much of all `connections`, which were looked for since `now`; how many that were."""
        peers = {connection.peer: connection for connection in connections}
        for name, (standing, heard) in dict(self._heard).items():
            if (connection := peers.get(_peer_of(name))) is not None:
                connection.standing, connection.heard = standing, heard
            elif heard < now:  # it is gone
                self._heard.pop(name, None)
        ended = beyond(connections, self.bounds, now)
        for connection in ended:
            _shut_down(connection)
        self.ended += len(ended)
        self.counted = Counter(one.standing for one in connections if not one.ended)
        if ended and now - self._said >= _SAID_S:
            said, self._said_of, self._said = self.ended - self._said_of, self.ended, now
            hosts = ", ".join(sorted({connection.peer[0] for connection in ended})[:8])
            _LOG.warning(
                "%d connections to port %d were ended: too many, or silent for too long (%s)", said, self.number, hosts
            )
        return len(ended)


def beyond(connections: Sequence[CountedConnection], bounds: Bounds, now: float) -> list[CountedConnection]:
    """Those that are to end, so that the rest is within the bounds.

    Silent ones end that have said nothing for longest, so that whoever comes has time to show who it is, and the last
    few that came are not counted yet. Of clients that were answered those end that came last.
    """
    silent = sorted((one for one in connections if one.standing is Standing.SILENT), key=lambda one: -one.heard)
    ended = [one for one in silent if now - one.heard > bounds.silent_s]
    young = [one for one in silent[: int(_YOUNG * bounds.cap)] if now - one.heard < _YOUNG_S]
    gone, left_out = set(ended), {*ended, *young}
    ranked = sorted(
        (one for one in connections if one not in left_out),
        key=lambda one: (one.standing, -one.since if one.standing else one.heard),
    )
    for standing, bound in bounds.of.items():
        members = [one for one in ranked if one.standing <= standing and one not in gone]
        of_address = Counter(one.peer[0] for one in members)
        left = len(members)
        for one in members:
            host = one.peer[0]
            if left > bound.in_all or of_address[host] > bound.of_an_address:
                ended.append(one)
                gone.add(one)
                of_address[host] -= 1
                left -= 1
    return ended


@lru_cache(maxsize=1 << 14)
def _peer_of(name: str) -> Peer:
    """`ipv4:127.0.0.1:50051` or `ipv6:%5B::1%5D:50051`; a client that has no such name is none."""
    host, _, port = unquote(name).partition(":")[2].rpartition(":")
    return (_plain(host.strip("[]")), int(port)) if port.isdecimal() else ("", 0)


def _plain(host: str) -> str:
    return host.partition("%")[0].removeprefix("::ffff:")


def _shut_down(connection: CountedConnection) -> None:
    """Ends a connection, unless its number is another one's by now. Whose descriptor it is closes it then."""
    with suppress(OSError):
        copy = os.dup(connection.descriptor)
        with closing(socket.socket(fileno=copy)) as its:
            if os.fstat(copy).st_ino == connection.inode:
                its.shutdown(socket.SHUT_RDWR)
                connection.ended = True


class _Watch:
    """Looks at the connections of all counted ports of this process, in one thread, while there are any."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._ports: dict[int, CountedPort] = {}
        self._running = False
        self._sockets: dict[int, CountedConnection | None] = {}  # by inode; None: no connection of such a port

    def add(self, port: CountedPort) -> None:
        with self._lock:
            self._ports[port.number] = port
            self._sockets = {}
            start, self._running = not self._running, True
        if start:
            threading.Thread(target=self._run, name="elastable-connections", daemon=True).start()

    def remove(self, port: CountedPort) -> None:
        with self._lock:
            if self._ports.get(port.number) is port:
                del self._ports[port.number]

    def _run(self) -> None:
        while True:
            began = time.monotonic()
            with self._lock:
                if not self._ports:
                    self._running = False
                    return
                pause = _CALM
                try:
                    pause = _HURRY if self._look(began) else _CALM
                except OSError as error:  # no descriptor is left to look with
                    _LOG.warning("the connections of this process cannot be counted: %s", error)
            time.sleep(max(pause[0], pause[1] * (time.monotonic() - began)))

    def _look(self, now: float) -> int:
        """How many connections were ended."""
        found: dict[int, CountedConnection | None] = {}
        for name in os.listdir("/proc/self/fd"):
            with suppress(OSError):  # it is closed by now
                descriptor, status = int(name), os.fstat(int(name))
                if stat.S_ISSOCK(status.st_mode):
                    inode = status.st_ino
                    found[inode] = (
                        self._sockets[inode] if inode in self._sockets else self._connection(descriptor, inode, now)
                    )
        self._sockets = found
        ended = 0
        for port in self._ports.values():
            there = [one for one in found.values() if one is not None and one.port is port and not one.ended]
            ended += port.bring_within(there, now)
        return ended

    def _connection(self, descriptor: int, inode: int, now: float) -> CountedConnection | None:
        """The connection of a socket that was not seen before; None: it is none of a counted port."""
        with closing(socket.socket(fileno=os.dup(descriptor))) as its:
            if its.family not in (socket.AF_INET, socket.AF_INET6):
                return None
            port = self._ports.get(its.getsockname()[1])
            if port is None or its.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):
                return None
            try:
                host, number = its.getpeername()[:2]
            except OSError:  # gone, and not closed yet
                return None
        return CountedConnection(descriptor, inode, port, (_plain(host), number), now, now)


_WATCH = _Watch()
