"""Connects the members of a group by TCP, and detects those that leave or die; which processes share a host."""

import errno
import json
import os
import secrets
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

from elastable.embedding_store.contract.malformed import DocumentFields
from elastable.embedding_store.errors import DeadlineExceeded, Unavailable

_DIED = "its process has ended without a word"
_SEND_S = 1.0
_PROBE_S, _MOST_PROBES = 5, 127
_LONGEST_MS = 2**31 - 1


class PeerMonitor:
    """What one member knows of the others; updated by its own thread.

    Messages are lines of JSON: `{"left": why, "rounds": {channel: rounds}, "gone": [[rank, why, rounds]]}`, `{"ask":
    1}` and its answer `{"at": text, "for": [ranks]}`. A connection that ends without a "left" message belongs to a
    process that was killed, crashed, or called `os._exit`. If the machine is gone or the link is cut, the connection
    breaks after the deadline. A stopped process keeps its connections: others notice when it misses a deadline and does
    not answer.

    A "left" message lists who had left before, so that all members blame the
    first one to leave, whichever message arrives first.

    Args:
        connections: To every other member.
        deadline_s: How long members wait for each other; a link may be cut for as long.

    Attributes:
        gone: Rank -> reason, in the order in which members left.
        at: The collective that this member waits in, and for which ranks; None: in none.
        rounds: Channel -> number of exchanges that this member has completed.
    """

    def __init__(self, rank: int, connections: Mapping[int, socket.socket], deadline_s: float) -> None:
        self.rank = rank
        self.gone: dict[int, str] = {}
        self.at: tuple[str, tuple[int, ...]] | None = None
        self.rounds: dict[int, int] = {}
        self._connections = dict(connections)
        self._deadline_s = deadline_s
        self._rounds_of: dict[int, dict[int, int]] = {}
        self._answers: dict[int, tuple[str | None, tuple[int, ...]]] = {}
        self._sending = threading.Lock()
        self._changed = threading.Condition()
        self._left = self._closed = False
        self._heard = dict.fromkeys(self._connections, b"")
        self._thread = threading.Thread(target=self._listen, name=f"replica-monitor-{rank}", daemon=True)
        for connection in self._connections.values():
            _break_when_silent(connection, deadline_s)
        _ALL.add(self)
        self._thread.start()

    def first_lost(self, ranks: Sequence[int], channel: int, needed: int) -> tuple[int, str] | None:
        """The first of these members to leave before completing an exchange, and why; None: all can complete it.

        Args:
            needed: Rounds of it that a member has completed once the exchange is done.
        """
        for rank, why in list(self.gone.items()):
            # Messages that a member sent before it left still arrive.
            if rank in ranks and self._rounds_of.get(rank, {}).get(channel, 0) < needed:
                return rank, why
        return None

    def ask_all(self) -> None:
        """Asks all others which collective they are in; `story` reports the answers."""
        self._answers.clear()
        for rank in self._connections:
            if rank not in self.gone:
                self._say(rank, {"ask": 1})

    def story(self, ranks: Sequence[int]) -> str:
        """Why members do not join a collective, as far as they have answered; follows who waits for whom."""
        reports = []
        ranks = list(ranks)
        for rank in ranks:
            if rank in self.gone:
                reports.append(f"rank {rank} has left: {self.gone[rank]}")
            elif rank not in self._answers:
                reports.append(f"rank {rank} does not answer: its process or machine is stopped, or the link is cut")
            else:
                what, others = self._answers[rank]
                reports.append(f"rank {rank} is in {_waiting(what, others)}" if what else f"rank {rank} is elsewhere")
                ranks += [other for other in others if other not in ranks and other != self.rank]
        return "".join(f"; {one}" for one in reports)

    def leave(self, why: str) -> None:
        """Tells all others that this member leaves. Leaving twice is harmless."""
        with self._changed:
            if self._left:
                return
            self._left = True
            gone = [[rank, reason, self._rounds_of.get(rank)] for rank, reason in self.gone.items()]
        for rank in self._connections:
            self._say(rank, {"left": why, "rounds": dict(self.rounds), "gone": gone})

    def all_done(self, within_s: float) -> bool:
        """Waits until every other member has left or died; returns whether none died."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.gone) == len(self._connections), within_s):
                return False
            return all(rank in self._rounds_of for rank in self.gone)

    def close(self) -> None:
        """Closes the connections; members that got no message of its leaving take it for dead."""
        self._closed = True
        for connection in self._connections.values():
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)
        if threading.current_thread() is not self._thread:
            self._thread.join(5.0)

    # -- the thread

    def _listen(self) -> None:
        with selectors.DefaultSelector() as selector:
            for rank, connection in self._connections.items():
                selector.register(connection, selectors.EVENT_READ, rank)
            while selector.get_map() and not self._closed:
                for key, _ in selector.select(1.0):
                    if not self._hear(key.data):
                        selector.unregister(key.fileobj)
        for connection in self._connections.values():
            connection.close()

    def _hear(self, rank: int) -> bool:
        """Reads a member's messages; returns whether more can come."""
        try:
            piece = self._connections[rank].recv(1 << 16)
        except TimeoutError as error:
            if error.errno != errno.ETIMEDOUT:  # our own send timeout, not the system's
                return True
            silent = f"nothing has come from it for {self._deadline_s:g} s"
            self._mark_gone(rank, f"{silent}: its machine is gone, or the link to it is cut")
            return False
        except OSError as error:
            self._mark_gone(rank, f"its connection broke ({error.strerror or error})")
            return False
        if not piece:
            self._mark_gone(rank, _DIED)
            return False
        *lines, self._heard[rank] = (self._heard[rank] + piece).split(b"\n")
        for line in lines:
            self._take(rank, json.loads(line))
        return True

    def _take(self, rank: int, message: DocumentFields) -> None:
        if "left" in message:
            for other, why, rounds in message["gone"]:
                if other != self.rank:
                    self._mark_gone(other, why, rounds)
            self._mark_gone(rank, message["left"], message["rounds"])
        elif "ask" in message:
            what, ranks = self.at or (None, ())
            self._say(rank, {"at": what, "for": ranks})
        elif "at" in message:
            self._answers[rank] = message["at"], tuple(message["for"])

    def _mark_gone(self, rank: int, why: str, rounds: Mapping[str, int] | None = None) -> None:
        """`rounds`: those of every channel, if the member has sent "left"."""
        with self._changed:
            if rank not in self.gone and rounds is not None:
                self._rounds_of[rank] = {int(channel): number for channel, number in rounds.items()}
            self.gone.setdefault(rank, why)
            self._changed.notify_all()

    def _say(self, rank: int, message: Mapping[str, object]) -> None:
        # If a member cannot be reached, its connection is about to end.
        with self._sending, suppress(OSError):
            self._connections[rank].sendall(json.dumps(message).encode() + b"\n")

    def _forget_in_child(self) -> None:
        """A forked child must not keep its parent's connections open: others would not see them end."""
        for connection in self._connections.values():
            with suppress(OSError):
                os.close(connection.detach())


_ALL: weakref.WeakSet[PeerMonitor] = weakref.WeakSet()


def _after_fork_in_child() -> None:
    for monitor in list(_ALL):
        monitor._forget_in_child()


os.register_at_fork(after_in_child=_after_fork_in_child)


def _waiting(what: str, ranks: Sequence[int]) -> str:
    return f"{what}, waiting for rank {', '.join(map(str, ranks))}"


def _break_when_silent(connection: socket.socket, seconds: float) -> None:
    """Has the system break the connection if the other machine is silent for this long."""
    connection.settimeout(_SEND_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, min(_PROBE_S, round(seconds / 4)))
    probes = max(1, min(_MOST_PROBES, round(seconds / every) - 1))
    limit_ms = max(1, min(_LONGEST_MS, round(1000 * seconds)))
    for option, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", limit_ms),  # where supported, it replaces the probes
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)


_HELLO_BYTES = 256
_HELLO_S = 5.0


@dataclass(frozen=True, slots=True)
class MemberAddress:
    """Where a member listens.

    Attributes:
        hosts: Addresses to try, in this order.
        token: A secret that callers must send, so that strangers are not taken for members.
    """

    hosts: tuple[str, ...]
    port: int
    token: str

    def to_bytes(self) -> bytes:
        return json.dumps([self.hosts, self.port, self.token]).encode()

    @classmethod
    def from_bytes(cls, text: bytes) -> "MemberAddress":
        hosts, port, token = json.loads(text)
        return cls(tuple(hosts), port, token)


class Rendezvous:
    """Where one member accepts the others; on 127.0.0.1 alone if all are on this host (`one_host`)."""

    def __init__(self, one_host: bool) -> None:
        self._listener = socket.create_server(("127.0.0.1" if one_host else "", 0), backlog=1024)
        hosts = ("127.0.0.1",) if one_host else own_addresses()
        self.address = MemberAddress(hosts, self._listener.getsockname()[1], secrets.token_hex(16))

    def connect(self, rank: int, members: Sequence[MemberAddress], deadline_s: float) -> dict[int, socket.socket]:
        """A connection to every other member; all call it.

        Args:
            members: Addresses of all, by rank.
            deadline_s: Seconds to wait for the others.

        Raises:
            Unavailable: a member cannot be reached; names its rank.
            DeadlineExceeded: a member has not connected; names its rank.
        """
        give_up = time.monotonic() + deadline_s
        found: dict[int, socket.socket] = {}
        try:
            for other in range(rank):
                found[other] = _reach(other, members[other], deadline_s)
                found[other].sendall(json.dumps([members[other].token, rank]).encode() + b"\n")
            while len(found) < len(members) - 1:
                self._listener.settimeout(max(0.01, give_up - time.monotonic()))
                connection, _ = self._listener.accept()
                caller = self._caller(connection)
                if caller is None or not rank < caller < len(members):
                    connection.close()
                    continue
                found[caller] = connection
        except TimeoutError:
            _close(found)
            missing = [str(other) for other in range(len(members)) if other != rank and other not in found]
            raise DeadlineExceeded(
                f"rank {', '.join(missing)} has not connected to rank {rank} within {deadline_s:g} s"
            ) from None
        except Unavailable:
            _close(found)
            raise
        return found

    def close(self) -> None:
        """Stops listening."""
        self._listener.close()

    def _caller(self, connection: socket.socket) -> int | None:
        connection.settimeout(_HELLO_S)
        line = b""
        with suppress(OSError):
            while len(line) < _HELLO_BYTES and not line.endswith(b"\n"):
                piece = connection.recv(1)
                if not piece:
                    return None
                line += piece
        match _parsed(line):
            case [self.address.token, int(rank)]:
                return rank
        return None


def _reach(rank: int, address: MemberAddress, deadline_s: float) -> socket.socket:
    failures = []
    for host in address.hosts:
        try:
            return socket.create_connection((host, address.port), timeout=deadline_s)
        except OSError as error:
            failures.append(f"{host}:{address.port}: {error.strerror or error}")
    raise Unavailable(f"rank {rank} cannot be reached: {'; '.join(failures)}")


def _parsed(line: bytes) -> object:
    try:
        parsed: object = json.loads(line)
    except ValueError:
        return None
    return parsed


def _close(connections: dict[int, socket.socket]) -> None:
    for connection in connections.values():
        connection.close()


# Which processes share a host, and the addresses of this host


def this_host() -> str:
    """Identifies the machine's boot and network namespace: equal for processes that can connect over 127.0.0.1."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as boot:
            return f"{boot.read().strip()}/{os.readlink('/proc/self/ns/net')}"
    except OSError:
        return socket.gethostname()


def own_addresses() -> tuple[str, ...]:
    """This host's addresses for other machines: its name's, and that of its default route."""
    found: dict[str, None] = {}
    with suppress(OSError):
        for entry in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET, socket.SOCK_STREAM):
            found[str(entry[4][0])] = None
    with suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as way_out:
        way_out.connect(("192.0.2.1", 9))  # reserved by RFC 5737; nothing is sent
        found[way_out.getsockname()[0]] = None
    # Loopback addresses are useless to others: they come last.
    return tuple(sorted(found or {socket.gethostname(): None}, key=lambda host: host.startswith("127.")))
