"""Who of a group's members is still there: a connection to every other one, whose end tells of a death."""

from __future__ import annotations

import errno
import json
import os
import selectors
import socket
import threading
import weakref
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

__all__ = ["PeerMonitor"]

_DIED = "its process has ended without a word"
_SEND_S = 1.0
_PROBE_S, _MOST_PROBES = 5, 127
_LONGEST_MS = 2**31 - 1


class PeerMonitor:
    """What one member knows of the others, kept by a thread of its own.

    Messages are lines of JSON: `{"left": why, "rounds": {channel: rounds}, "gone":
    [[rank, why, rounds]]}`, `{"ask": 1}` and its answer `{"at": text, "for":
    [ranks]}`. A connection that ends without a farewell is a process that was
    killed, crashed, or left by `os._exit`; one whose machine is gone, or to
    which the link is cut, breaks after as long a silence as members wait for
    each other. A process that is stopped keeps its
    connections: others learn of it as it does not come to a collective within
    the deadline, nor answers.

    A farewell says who had gone before, so that every member knows the first
    one to go before those that went because of it, whoever is heard first.

    Args:
        rank: Of this member.
        connections: To every other one.
        deadline_s: How long members wait for each other; a link may be cut for as long.

    Attributes:
        gone: Rank -> why it is not there any more; in the order in which they went.
        at: What this member is waiting for, and for which ranks; None: it is not in a collective.
        rounds: Channel -> how many of its exchanges this member has completed.
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
        """The first to go of some members, of those that will not complete an exchange any more, and why; None: none.

        Args:
            ranks: The members.
            channel: Of which channel.
            needed: Rounds of it that a member has completed once this exchange is done.
        """
        for rank, why in list(self.gone.items()):
            # What a member sent before it left is on its way.
            if rank in ranks and self._rounds_of.get(rank, {}).get(channel, 0) < needed:
                return rank, why
        return None

    def ask_all(self) -> None:
        """Asks all others where they are; `story` tells what is known by then."""
        self._answers.clear()
        for rank in self._connections:
            if rank not in self.gone:
                self._say(rank, {"ask": 1})

    def story(self, ranks: Sequence[int]) -> str:
        """Why members do not come, as far as those that were asked have answered; follows who waits for whom."""
        told = []
        ranks = list(ranks)
        for rank in ranks:
            if rank in self.gone:
                told.append(f"rank {rank} has left: {self.gone[rank]}")
            elif rank not in self._answers:
                told.append(f"rank {rank} does not answer: its process or machine is stopped, or the link is cut")
            else:
                what, others = self._answers[rank]
                told.append(f"rank {rank} is in {_waiting(what, others)}" if what else f"rank {rank} is elsewhere")
                ranks += [other for other in others if other not in ranks and other != self.rank]
        return "".join(f"; {one}" for one in told)

    def leave(self, why: str) -> None:
        """Tells all others that this member does not go on. Leaving twice is harmless."""
        with self._changed:
            if self._left:
                return
            self._left = True
            gone = [[rank, reason, self._rounds_of.get(rank)] for rank, reason in self.gone.items()]
        for rank in self._connections:
            self._say(rank, {"left": why, "rounds": dict(self.rounds), "gone": gone})

    def all_done(self, within_s: float) -> bool:
        """Waits until every other member has left or died; whether none died."""
        with self._changed:
            if not self._changed.wait_for(lambda: len(self.gone) == len(self._connections), within_s):
                return False
            return all(rank in self._rounds_of for rank in self.gone)

    def close(self) -> None:
        """Ends the connections; whoever has not been told otherwise takes this member for dead."""
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
        """Takes what has come from a member; whether more can come."""
        try:
            piece = self._connections[rank].recv(1 << 16)
        except TimeoutError as error:
            if error.errno != errno.ETIMEDOUT:  # our own limit, and not the system's
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

    def _take(self, rank: int, message: dict[str, Any]) -> None:
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
        """`rounds`: of every channel, where the member has said farewell."""
        with self._changed:
            if rank not in self.gone and rounds is not None:
                self._rounds_of[rank] = {int(channel): number for channel, number in rounds.items()}
            self.gone.setdefault(rank, why)
            self._changed.notify_all()

    def _say(self, rank: int, message: dict[str, Any]) -> None:
        # A member that cannot be told is one whose end will be heard.
        with self._sending, suppress(OSError):
            self._connections[rank].sendall(json.dumps(message).encode() + b"\n")

    def _forget_in_child(self) -> None:
        """A forked child must not keep its parent's connections open: their end would not be seen."""
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
    """The system breaks it after so many seconds in which the other machine answers nothing."""
    connection.settimeout(_SEND_S)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    every = max(1, min(_PROBE_S, round(seconds / 4)))
    probes = max(1, min(_MOST_PROBES, round(seconds / every) - 1))
    limit_ms = max(1, min(_LONGEST_MS, round(1000 * seconds)))
    for option, value in (
        ("TCP_KEEPIDLE", every),
        ("TCP_KEEPINTVL", every),
        ("TCP_KEEPCNT", probes),
        ("TCP_USER_TIMEOUT", limit_ms),  # where the system has it, it counts instead of the probes
    ):
        if hasattr(socket, option):
            connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)
