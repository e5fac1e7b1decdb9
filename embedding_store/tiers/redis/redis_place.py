"""One Redis, as the tier and the log of a store share it: its servers, and who may write there."""

import itertools
import logging
import os
import secrets
import socket
import threading
from collections.abc import Callable, Sequence
from functools import partial

import hiredis

from elastable.embedding_store.errors import DeadlineExceeded, NotReady, StoreFailed, TakenOver, Unavailable
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tiers.redis.connection import (
    Connection,
    ConnectionLost,
    Deadline,
    end_clients,
    named_clients,
)
from elastable.embedding_store.tiers.redis.reply_shapes import Command, Reply, refuse_errors
from elastable.embedding_store.tiers.redis.schema import owner_key
from elastable.embedding_store.tiers.redis.topology import (
    Topology,
    change_if_unchanged,
    server_facts,
    until_deadline,
)
from elastable.embedding_store.tiers.redis.url import RedisUrl

_LOG = logging.getLogger(__name__)

_KEEPS = "noeviction"
_ATTEMPTS = 6  # to connect, against others who take over meanwhile


class RedisPlace:
    """The servers of one store and who may write to them. For many threads at once.

    Opening it takes nothing over: `writing` does, the first time, and `take_over`. The owner's key holds
    `<host>:<process>:<random>:0`; what watches it is refused by Redis once another process has taken over.

    Attributes:
        url: Of the store.
        topology: The servers, with connections to read: they bear no name, and change nothing but the owner.
        owner: What this writer has written into the owner's key, without the `:0`; None: it never took over.
    """

    def __init__(self, url: str | RedisUrl) -> None:
        """Connects, and waits for servers that do not have all of their data yet, until the deadline.

        Raises:
            NotReady: a server is still loading, or a replica that is not in step with its master; names it.
            What `RedisUrl.parse` and `Topology` raise.
        """
        self.url = url if isinstance(url, RedisUrl) else RedisUrl.parse(url)
        self.topology = Topology(self.url)
        self.owner: str | None = None
        self._owner_key = owner_key(self.url.namespace)
        self._writing: Topology | None = None
        self._numbers = itertools.count(1)
        self._taking = threading.Lock()
        try:
            self._wait_for_data()
        except BaseException:
            self.close()
            raise

    def _wait_for_data(self) -> None:
        deadline, lacking = self.deadline(), list[NotReady]()

        def lacks(error: Exception) -> bool:
            lacking.extend([error] if isinstance(error, NotReady) else [])
            return isinstance(error, NotReady)

        try:
            Retry(deadline.left(self.url), lacks).call(lambda: require_data(self.topology, deadline))
        except DeadlineExceeded:
            if lacking:
                raise lacking[-1] from None
            raise

    def require_fit_to_write(self) -> None:
        """Raises `StoreFailed` where a server takes no writes, or may evict what is written; names it."""
        deadline = self.deadline()
        for node in self.topology.nodes():
            found = server_facts(self.topology, node, deadline, "replication", "memory")
            if found.get("role", "master") != "master":
                raise StoreFailed(
                    f"redis at {node} is a replica of {found.get('master_host')}:{found.get('master_port')} and takes "
                    "no writes: name its master, or the Sentinels that know it (redis+sentinel://)"
                )
            policy = found.get("maxmemory_policy", _KEEPS)
            if policy != _KEEPS:
                raise StoreFailed(
                    f"redis at {node} has maxmemory-policy {policy}, by which it may evict rows without a word: set "
                    f"maxmemory-policy {_KEEPS} there (maxmemory is {found.get('maxmemory', 'unknown')} now)"
                )

    def deadline(self) -> Deadline:
        """That of one operation which begins now."""
        return Deadline(self.url.deadline)

    def writing(self, deadline: Deadline) -> Topology:
        """The servers, with connections that may write; the first call takes over.

        Raises:
            TakenOver: a connection is new, and another process has taken over; from the calls that use it.
            StoreFailed, Unavailable, DeadlineExceeded: as `take_over`.
        """
        with self._taking:
            if self.owner is None:
                self._take_over(deadline)
            if self._writing is None:
                raise StoreFailed(f"this process may not write to the store at {self.url}: it has not taken it over")
            return self._writing

    def take_over(self) -> None:
        """Makes this process the only one that can write, also against one that does not know of it.

        Taken again, it keeps even this process' own earlier connections from writing.

        Raises:
            TakenOver: another process has taken over since this call began.
            StoreFailed, Unavailable, DeadlineExceeded: it may own the store, and others may still write.
        """
        with self._taking:
            self._take_over(self.deadline())

    def _take_over(self, deadline: Deadline) -> None:
        owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self.topology.call([(self._owner_key, ("SET", self._owner_key, f"{owner}:0"))], deadline)
        self.owner = owner
        self.topology.refresh(deadline)
        if self._writing is not None:
            self._writing.close()
        forbidden = {node: line for node in self.topology.nodes() if (line := self._end_others(node, deadline))}
        # One who takes over at the same moment closes what was admitted; for the next, `admit` asks whose the store is.
        admitted = Retry(deadline.left(self.url), lambda error: isinstance(error, ConnectionLost), attempts=_ATTEMPTS)
        self._writing = admitted.call(lambda: Topology(self.url, self._admit))
        if forbidden:
            server, line = next(iter(forbidden.items()))
            _LOG.warning(
                "redis at %s does not let this user end the connections of other writers (%s): a writer that is "
                "stopped in the middle of a commit and wakes up can still write the rest of it. Allow CLIENT LIST "
                "and CLIENT KILL, or make sure that no other writer is left",
                server, line,
            )  # fmt: skip

    def require_owner(self) -> None:
        """Raises `TakenOver` where another process has taken over since; nothing happens where this one never did."""
        if self.owner is not None:
            self.require(self._found_owner(self.deadline()))

    def require(self, owner: bytes | None) -> None:
        """Raises `TakenOver` unless the owner that was read is this process."""
        found = (owner or b"").decode(errors="replace")
        if found.rpartition(":")[0] == self.owner:
            return
        host, _, rest = found.partition(":")
        who = f"process {rest.partition(':')[0]} on {host}" if found else "nobody any more (the server lost its keys?)"
        raise TakenOver(
            f"the store at {self.url} (namespace {self.url.namespace!r}) was taken over, its owner is now {who}: "
            "this process may not write to it any more"
        )

    def other_writer(self) -> str | None:
        """`<host>:<process>` of another writer that is connected now; None: there is none that this user may see."""
        deadline = self.deadline()
        self.topology.refresh(deadline)
        for server in self.topology.nodes():
            (clients,) = self.topology.call_at(server, [("CLIENT", "LIST")], deadline)
            if isinstance(clients, hiredis.ReplyError):
                continue
            if any(self._is_anothers(name) for name, _ in named_clients(clients)):
                found = self._found_owner(deadline) or b"another process"
                return ":".join(str(found, errors="replace").split(":")[:2])
        return None

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
            change: From their answers to the commands that write; none: nothing is to be done. It is asked again, and
                may be done twice, where a connection breaks.
            deadline: Of everything together.
            watched: Keys that nobody may change meanwhile, besides the owner's.

        Raises:
            TakenOver: another process owns the store.
            StoreFailed, Unavailable, DeadlineExceeded: it may have been done.
        """
        owner = self._owner_key

        def owned(answers: list[Reply]) -> Sequence[Command]:
            self.require(answers[0])
            return change(answers[1:])

        def attempt() -> None:
            servers, asked = self.writing(deadline), [("GET", owner), *questions]
            change_if_unchanged(servers, [owner, *watched], asked, owned, deadline)

        until_deadline(attempt, lambda error: isinstance(error, Unavailable), deadline, self.url)

    def close(self) -> None:
        """Closes all connections. Closing twice is harmless."""
        if self._writing is not None:
            self._writing.close()
        self.topology.close()

    def _found_owner(self, deadline: Deadline) -> bytes | None:
        found: bytes | None = self.topology.call([(self._owner_key, ("GET", self._owner_key))], deadline)[0]
        return found

    def _admit(self, connection: Connection, deadline: Deadline) -> None:
        """Names a new connection, and makes sure that the owner is still this process. Raises `TakenOver`."""
        name = f"{self._name(self.owner or '')}:{next(self._numbers)}"
        named = connection.call([("CLIENT", "SETNAME", name)], deadline)
        refuse_errors(named, f"redis at {connection.address} does not let this user name connections", self.url)
        connection.name = name
        self.require(self._found_owner(deadline))

    def _end_others(self, server: Address, deadline: Deadline) -> str | None:
        """Closes the connections of other writers at one server; the error line where that is forbidden."""
        return end_clients(partial(self.topology.call_at, server, deadline=deadline), self._is_anothers)

    def _is_anothers(self, name: str) -> bool:
        """Whether a connection of this name is another writer's."""
        return name.startswith(self._name("")) and name.rpartition(":")[0] != self._name(self.owner or "")

    def _name(self, owner: str) -> str:
        """Of a connection, without spaces and without its number."""
        return f"elastable:{self.url.db}:{self.url.namespace}:{owner.rpartition(':')[2]}"


def require_data(topology: Topology, deadline: Deadline) -> None:
    """Raises `NotReady` where a server lacks data that it is about to have: rows in it would be taken for none."""
    for server in topology.nodes():
        found = server_facts(topology, server, deadline, "persistence", "replication")
        if found.get("loading", "0") != "0" or found.get("async_loading", "0") != "0":
            raise NotReady(f"redis at {server} is still loading its data")
        synced = found.get("master_link_status", "up") == "up" and found.get("master_sync_in_progress", "0") == "0"
        if found.get("role") == "slave" and not synced:
            raise NotReady(
                f"redis at {server} is a replica that is not in step with its master "
                f"{found.get('master_host')}:{found.get('master_port')}: its rows may be missing or old"
            )
