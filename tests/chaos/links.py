"""A TCP proxy for one link of a cluster, driven by the conductor's loop: passes bytes, cuts, delays, falls silent."""

import contextlib
import heapq
import itertools
import selectors
import socket
import struct
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

_CHUNK = 1 << 16
_MOST_WAITING = 1 << 22
_EXEC = b"*1\r\n$4\r\nEXEC\r\n"
_SETTLE_S = 0.02


class Timers:
    def __init__(self) -> None:
        self._due: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()

    def after(self, seconds: float, do: Callable[[], None]) -> None:
        self.at(time.monotonic() + seconds, do)

    def at(self, moment: float, do: Callable[[], None]) -> None:
        """Calls `do` at a moment of `time.monotonic`; of several at one moment the first given comes first."""
        heapq.heappush(self._due, (moment, next(self._numbers), do))

    def run(self) -> float:
        """Does what is due; the seconds until the next one, at most a quarter."""
        while self._due and self._due[0][0] <= time.monotonic():
            heapq.heappop(self._due)[2]()
        return min(0.25, max(0.0, self._due[0][0] - time.monotonic())) if self._due else 0.25


@dataclass(eq=False)
class _End:
    socket: socket.socket
    waiting: deque[bytes] = field(default_factory=deque)
    size: int = 0
    held: bool = False
    stopped: bool = False
    due: float = 0.0
    tail: bytes = b""
    peer: "_End | None" = None


class Link:
    """Forwards 127.0.0.1:`port` to a `target` port here that may change; without one it refuses.

    `on_transaction` is called with the number of one that is awaited, after it took effect and before the next one.
    """

    def __init__(self, selector: selectors.BaseSelector, timers: Timers, target: int | None = None) -> None:
        self._selector, self._timers = selector, timers
        self.target = target  # where it leads
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]  # where it listens
        self._ends: set[_End] = set()
        self._delay_s = 0.0
        self.transactions = 0  # how many EXEC of clients have passed since one was awaited
        self.awaited: set[int] = set()  # numbers of transactions behind which something is to strike
        self.on_transaction: Callable[[int], None] = lambda number: None
        selector.register(self._listener, selectors.EVENT_READ, lambda _: self._accept())

    def cut(self) -> int:
        """Resets every connection; how many there were."""
        ends = list(self._ends)
        for end in ends:
            self._close(end, reset=True)
        return len(ends) // 2

    def delay(self, each_s: float, for_s: float) -> None:
        """Whatever comes within `for_s` seconds is passed on `each_s` seconds later."""
        self._delay_s = each_s
        self._timers.after(for_s, lambda: setattr(self, "_delay_s", 0.0))

    def silence(self, for_s: float) -> None:
        """Connections that stand pass nothing more and stay open, until they are reset after `for_s` seconds."""
        ends = list(self._ends)
        for end in ends:
            end.held = True
            self._watch(end)

        def reset() -> None:
            for end in ends:
                self._close(end, reset=True)

        self._timers.after(for_s, reset)

    def close(self) -> None:
        self._selector.unregister(self._listener)
        self._listener.close()
        self.cut()

    def _accept(self) -> None:
        with contextlib.suppress(BlockingIOError):
            client, _ = self._listener.accept()
            server = None
            if self.target is not None:
                with contextlib.suppress(OSError):
                    server = socket.create_connection(("127.0.0.1", self.target), timeout=5)
            if server is None:
                _reset(client)
                return
            pair = _End(client), _End(server)
            for end, peer in (pair, pair[::-1]):
                end.peer = peer
                end.socket.setblocking(False)
                end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends.add(end)
            for end in pair:
                self._selector.register(end.socket, selectors.EVENT_READ, self._moves(end))

    def _moves(self, end: _End) -> Callable[[int], None]:
        def move(events: int) -> None:
            if events & selectors.EVENT_WRITE and end in self._ends:
                self._flush(end)
            if events & selectors.EVENT_READ and end in self._ends:
                self._receive(end)

        return move

    def _receive(self, end: _End) -> None:
        try:
            received = end.socket.recv(_CHUNK)
        except BlockingIOError:
            return
        except OSError:
            received = b""
        if not received:
            self._close(end)
            return
        self._take(end, received)

    def _take(self, end: _End, received: bytes) -> None:
        """Passes on what came, up to the transaction at which something is to strike."""
        stop, number = self._strike_at(end, received) if self.awaited else (len(received), 0)
        now = time.monotonic()
        # What comes behind something that is delayed stays behind it.
        end.due = max(end.due, now + self._delay_s)
        if end.due > now:
            self._timers.at(end.due, lambda: self._pass(end, received[:stop]))
        else:
            self._pass(end, received[:stop])
        if number:
            end.stopped = True
            self._watch(end)
            # What was passed on takes effect first.
            self._timers.after(_SETTLE_S, lambda: self._strike(end, received[stop:], number))

    def _strike_at(self, end: _End, received: bytes) -> tuple[int, int]:
        """(bytes up to the end of an awaited transaction, its number), or (all bytes, 0)."""
        seen, at = end.tail + received, 0
        while (found := seen.find(_EXEC, at)) >= 0:
            at = found + len(_EXEC)
            self.transactions += 1
            if self.transactions in self.awaited:
                stop, end.tail = at - len(end.tail), b""
                return stop, self.transactions
        end.tail = seen[max(at, len(seen) - len(_EXEC) + 1) :]
        return len(received), 0

    def _strike(self, end: _End, rest: bytes, number: int) -> None:
        self.awaited.discard(number)
        self.on_transaction(number)
        if end in self._ends:
            end.stopped = False
            if rest:
                self._take(end, rest)
            self._watch(end)

    def _pass(self, end: _End, received: bytes) -> None:
        peer = end.peer
        if end not in self._ends or peer is None:
            return
        peer.waiting.append(received)
        peer.size += len(received)
        self._flush(peer)

    def _flush(self, end: _End) -> None:
        try:
            while end.waiting and not end.held:
                sent = end.socket.send(end.waiting[0])
                end.size -= sent
                if sent < len(end.waiting[0]):
                    end.waiting[0] = end.waiting[0][sent:]
                    break
                end.waiting.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._close(end)
            return
        self._watch(end)
        if end.peer is not None:
            self._watch(end.peer)

    def _watch(self, end: _End) -> None:
        if end not in self._ends or end.peer is None:
            return
        wanted = 0
        if not end.held and not end.stopped and end.peer.size < _MOST_WAITING:
            wanted |= selectors.EVENT_READ
        if end.waiting and not end.held:
            wanted |= selectors.EVENT_WRITE
        known = end.socket.fileno() in self._selector.get_map()
        if known and not wanted:
            self._selector.unregister(end.socket)
        elif known:
            self._selector.modify(end.socket, wanted, self._moves(end))
        elif wanted:
            self._selector.register(end.socket, wanted, self._moves(end))

    def _close(self, end: _End, reset: bool = False) -> None:
        for one in (end, end.peer):
            if one is not None and one in self._ends:
                self._ends.discard(one)
                with contextlib.suppress(KeyError):
                    self._selector.unregister(one.socket)
                _reset(one.socket) if reset else one.socket.close()


def _reset(broken: socket.socket) -> None:
    """Closes with RST instead of FIN, as a crash or a firewall does."""
    broken.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    broken.close()
