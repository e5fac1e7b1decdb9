"""One Redis, as the tier and the log of a store share it: its servers, and who may write there."""

from __future__ import annotations

import itertools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Iterator, Sequence

import hiredis

from elastable.embedding_store.errors import StoreFailed, TakenOver
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tiers.redis.connections.redis_connection import (
    Connection,
    ConnectionLost,
    Deadline,
    named_clients,
)
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, Reply, reply_error
from elastable.embedding_store.tiers.redis.connections.topology import Topology, change_if_unchanged
from elastable.embedding_store.tiers.redis.schema import owner_key
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["Ownership", "RedisPlace"]


class RedisPlace:
    """The servers of one store and who may write to them. For many threads at once.

    Opening it takes nothing over: `writing` does, the first time, and `take_over`.

    Attributes:
        url: Of the store.
        topology: The servers, with connections to read.
        ownership: Who may write.
    """

    def __init__(self, url: str | RedisUrl) -> None:
        """Connects. Raises what `RedisUrl.parse` and `Topology` raise."""
        self.url = url if isinstance(url, RedisUrl) else RedisUrl.parse(url)
        self.topology = Topology(self.url)
        self.ownership = Ownership(self.url, self.topology)
        self._taking = threading.Lock()

    def deadline(self) -> Deadline:
        """That of one operation which begins now."""
        return Deadline(self.url.deadline)

    def writing(self, deadline: Deadline) -> Topology:
        """The servers, with connections that may write; the first call takes over.

        Raises:
            TakenOver: a connection is new, and another process has taken over; from the calls that use it.
            StoreFailed, Unavailable, DeadlineExceeded: as `Ownership.take_over`.
        """
        with self._taking:
            if self.ownership.owner is None:
                self.ownership.take_over(deadline)
            return self.ownership.writing

    def take_over(self) -> None:
        """Makes this process the only one that can write; taken again, it closes its own earlier connections.

        Raises:
            StoreFailed, Unavailable, DeadlineExceeded: it may own the store, and others may still write.
        """
        with self._taking:
            self.ownership.take_over(self.deadline())

    def require_owner(self) -> None:
        """Raises `TakenOver` where another process has taken over since; nothing happens where this one never did."""
        if self.ownership.owner is not None:
            key = owner_key(self.url.namespace)
            self.ownership.require(self.topology.call([(key, ("GET", key))], self.deadline())[0])

    def other_writer(self) -> str | None:
        """`<host>:<process>` of another writer that is connected now; None: there is none that this user may see."""
        return self.ownership.other_writer(self.deadline())

    def change(
        self,
        questions: Sequence[Command],
        change: Callable[[list[Reply]], Sequence[Command]],
        deadline: Deadline,
        watched: Sequence[bytes] = (),
    ) -> None:
        """Changes keys of the namespace's slot in one transaction, which Redis refuses to a superseded writer.

        Args:
            questions: Commands that read.
            change: From their answers to the commands that write; none: nothing is to be done.
            deadline: Of everything together.
            watched: Keys that nobody may change meanwhile, besides the owner's.

        Raises:
            TakenOver: another process owns the store.
            StoreFailed, Unavailable, DeadlineExceeded: it may have been done where the connection broke.
        """
        owner = owner_key(self.url.namespace)

        def owned(answers: list[Reply]) -> Sequence[Command]:
            self.ownership.require(answers[0])
            return change(answers[1:])

        change_if_unchanged(self.writing(deadline), [owner, *watched], [("GET", owner), *questions], owned, deadline)

    def close(self) -> None:
        """Closes all connections. Closing twice is harmless."""
        self.ownership.close()
        self.topology.close()


# Who may write to a store, and how a writer that was stopped and wakes up is kept from it


_LOG = logging.getLogger(__name__)

_ATTEMPTS = 6  # to connect, against others who take over meanwhile


class Ownership:
    """Whether this process may write. Used by one thread at a time, but for `admit`.

    The owner's key holds `<host>:<process>:<random>:<phase>`: phase 0 while what
    the writer before left is taken back, 1 from then on. Readers of pins compare
    all of it: whatever is taken back changes it before and after.

    Attributes:
        owner: What this writer has written into the owner's key, without the
            phase; None: it never took over.
    """

    def __init__(self, url: RedisUrl, reading: Topology) -> None:
        """`reading`: the servers; its connections bear no name, and change nothing but the owner."""
        self.owner: str | None = None
        self._url = url
        self._reading = reading
        self._writing: Topology | None = None
        self._numbers = itertools.count(1)

    @property
    def writing(self) -> Topology:
        """The servers, with connections that may write. Raises `StoreFailed` where this process never took over."""
        if self._writing is None:
            raise StoreFailed(f"this process may not write to the store at {self._url}: it has not taken it over")
        return self._writing

    def take_over(self, deadline: Deadline) -> None:
        """Makes this process the only one that can write, also against one that does not know of it.

        Taken again, it keeps even this process' own earlier connections from writing.

        Raises:
            TakenOver: another process has taken over since this call began.
            StoreFailed, Unavailable, DeadlineExceeded: it may own the store, and others may still write.
        """
        reading, key = self._reading, owner_key(self._url.namespace)
        owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        reading.call([(key, ("SET", key, f"{owner}:0"))], deadline)
        self.owner = owner
        reading.refresh(deadline)
        if self._writing is not None:
            self._writing.close()
        forbidden = {node: line for node in reading.nodes() if (line := self._end_others(node, deadline))}
        # One who takes over at the same moment closes what was admitted; for the next, `admit` asks whose the store is.
        admitted = Retry(deadline.left(self._url), lambda error: isinstance(error, ConnectionLost), attempts=_ATTEMPTS)
        self._writing = admitted.call(lambda: Topology(self._url, self.admit))
        if forbidden:
            server, line = next(iter(forbidden.items()))
            _LOG.warning(
                "redis at %s does not let this user end the connections of other writers (%s): a writer that is "
                "stopped in the middle of a commit and wakes up can still write the rest of it. Allow CLIENT LIST "
                "and CLIENT KILL, or make sure that no other writer is left",
                server, line,
            )  # fmt: skip

    def declare(self, deadline: Deadline) -> None:
        """Lets it be known that nothing is taken back any more.

        Raises:
            TakenOver: another process has taken over.
        """
        key = owner_key(self._url.namespace)
        self.writing.call([(key, ("SET", key, f"{self.owner}:1"))], deadline)

    def other_writer(self, deadline: Deadline) -> str | None:
        """`<host>:<process>` of another writer that is connected now; None: there is none that this user may see."""
        self._reading.refresh(deadline)
        for server in self._reading.nodes():
            (told,) = self._reading.call_at(server, [("CLIENT", "LIST")], deadline)
            if not isinstance(told, hiredis.ReplyError) and any(self._others(told)):
                key = owner_key(self._url.namespace)
                found = self._reading.call([(key, ("GET", key))], deadline)[0] or b"another process"
                return ":".join(str(found, errors="replace").split(":")[:2])
        return None

    def require(self, owner: bytes | None) -> None:
        """Raises `TakenOver` unless the owner that was read is this process."""
        found = (owner or b"").decode(errors="replace")
        if found.rpartition(":")[0] != self.owner:
            raise refused(self._url, found)

    def admit(self, connection: Connection, deadline: Deadline) -> None:
        """Names a new connection, and makes sure that the owner is still this process.

        Raises:
            TakenOver: another process has taken over.
        """
        name = f"{self._name(self.owner or '')}:{next(self._numbers)}"
        (named,) = connection.call([("CLIENT", "SETNAME", name)], deadline)
        if isinstance(named, hiredis.ReplyError):
            told = f"redis at {connection.address} does not let this user name connections"
            raise reply_error(told, str(named), self._url)
        connection.name = name
        key = owner_key(self._url.namespace)
        self.require(self._reading.call([(key, ("GET", key))], deadline)[0])

    def close(self) -> None:
        """Closes the connections. Closing twice is harmless."""
        if self._writing is not None:
            self._writing.close()

    def _end_others(self, server: Address, deadline: Deadline) -> str | None:
        """Closes the connections of other writers at one server; the error line where that is forbidden."""
        (told,) = self._reading.call_at(server, [("CLIENT", "LIST")], deadline)
        if isinstance(told, hiredis.ReplyError):
            return str(told)
        kills = [("CLIENT", "KILL", "ID", number) for number in self._others(told)]
        answers = self._reading.call_at(server, kills, deadline) if kills else []
        # 0: it was gone already.
        return next((str(answer) for answer in answers if isinstance(answer, hiredis.ReplyError)), None)

    def _others(self, clients: bytes) -> Iterator[str]:
        """Numbers of the connections of other writers, from what CLIENT LIST tells."""
        ours, prefix = self._name(self.owner or ""), self._name("")
        for name, number in named_clients(clients):
            if name.startswith(prefix) and name.rpartition(":")[0] != ours:
                yield number

    def _name(self, owner: str) -> str:
        """Of a connection, without spaces and without its number."""
        return f"elastable:{self._url.db}:{self._url.namespace}:{owner.rpartition(':')[2]}"


def refused(url: RedisUrl, owner: str) -> TakenOver:
    """The error of a writer that finds `owner` in its place."""
    host, _, rest = owner.partition(":")
    who = f"process {rest.partition(':')[0]} on {host}" if owner else "nobody any more (the server lost its keys?)"
    return TakenOver(
        f"the store at {url} (namespace {url.namespace!r}) was taken over, its owner is now {who}: "
        "this process may not write to it any more"
    )
