"""Which server owns which hash slot, and how a redirected command finds its way."""

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Self

import hiredis
import numpy as np
import redis
from redis import retry
from redis.backoff import NoBackoff
from redis.crc import REDIS_CLUSTER_HASH_SLOTS, key_slot
from redis.sentinel import MasterNotFoundError, Sentinel

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import (
    BadInput,
    DeadlineExceeded,
    ElastableError,
    NotReady,
    StoreFailed,
    Unavailable,
)
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.support.retry import Retry
from elastable.embedding_store.tiers.redis.connection import (
    Admit,
    Connection,
    ConnectionPool,
    Deadline,
)
from elastable.embedding_store.tiers.redis.reply_shapes import (
    Command,
    Reply,
    first_error,
    is_transient,
    refuse_errors,
    reply_error,
)
from elastable.embedding_store.tiers.redis.url import RedisUrl

# Long enough for a failover or a moving slot, and not for a server that is gone.
_ROUNDS = 6
_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 0.03, 0.4
_REDIRECTIONS = ("MOVED", "ASK")
_DEMOTED = ("READONLY",)  # a master that has become a replica: the Sentinels know the new one


def until_deadline(
    attempt: Callable[[], object],
    again: Callable[[Exception], bool],
    deadline: Deadline,
    waiting_for: object,
    attempts: int | None = None,
) -> None:
    """Repeats an attempt with growing pauses, as long as its errors are those of which `again` says so.

    Raises:
        DeadlineExceeded: the deadline has passed, which is stopped while kernels are compiled.
        Exception: the last error.
    """
    Retry(
        math.inf,
        again,
        attempts=attempts,
        first_pause_s=_FIRST_PAUSE_S,
        longest_pause_s=_LONGEST_PAUSE_S,
        pause=lambda seconds: time.sleep(min(seconds, deadline.left(waiting_for))),
    ).call(attempt)


@dataclass(frozen=True, slots=True)
class Route:
    """Where some commands go in one round.

    Attributes:
        address: The server.
        asking: It owns the slot only for commands that ASKING precedes.
        items: int64, the commands.
    """

    address: Address
    asking: bool
    items: Int64


class Topology:
    """The servers of one store, with connections to them. For many threads at once.

    One server and a Cluster look alike from here: one server owns every slot. So does the master that Sentinels watch;
    which server that is, they are asked again whenever a connection fails.
    """

    def __init__(self, url: RedisUrl, admit: Admit | None = None) -> None:
        """Asks the seeds who they are.

        Args:
            url: Of the store.
            admit: As of `ConnectionPool`.

        Raises:
            What `refresh` and `admit` raise.
        """
        self.url = url
        self.pool = ConnectionPool(url, admit)
        self._map = SlotMap((), np.full(REDIS_CLUSTER_HASH_SLOTS, -1, np.int64))
        self._doubtful = False  # the last operation lost its server
        try:
            deadline = Deadline(url.deadline)
            # Sentinels may soon name another server for the one that is away.
            again = lambda error: bool(url.service) and isinstance(error, Unavailable)  # noqa: E731
            self._repeated(lambda: self.refresh(deadline), again, deadline)
        except BaseException:
            self.pool.close()
            raise

    def refresh(self, deadline: Deadline) -> None:
        """Learns anew which server owns which slot, from the first that answers.

        Raises:
            Unavailable, DeadlineExceeded: none does; names the last asked.
            StoreFailed: a server refused the login or the question.
            BadInput: the URL asks of the servers what they are not.
        """
        if self.url.service:
            self._map = self._ask_master(master_address(self.url, deadline), deadline)
            return
        candidates = list(dict.fromkeys((*self._map.nodes, *self.url.seeds)))
        for tried, address in enumerate(candidates, start=1):
            # Each gets its share of the time, so that one that swallows packets leaves some to the rest.
            share = Deadline(deadline.left(address) / (len(candidates) - tried + 1))
            try:
                self._map = self._ask(address, deadline if tried == len(candidates) else share)
                return
            except Unavailable:
                if tried == len(candidates):
                    raise

    def _ask_master(self, address: Address, deadline: Deadline) -> "SlotMap":
        """Makes sure that the server which the Sentinels name is a master by now; it may not know yet."""
        if server_facts(self, address, deadline, "replication").get("role") != "master":
            raise NotReady(f"redis at {address}, which the Sentinels of {self.url} name, is no master (yet)")
        return SlotMap.of_one(address)

    def _ask(self, address: Address, deadline: Deadline) -> "SlotMap":
        answer, ranges = self.call_at(address, [("INFO", "cluster"), ("CLUSTER", "SLOTS")], deadline)
        refuse_errors([answer], f"redis at {address} does not say what it is", self.url)
        if b"cluster_enabled:1" not in answer:
            if len(self.url.seeds) > 1:
                raise BadInput(f"{self.url} names several servers, but {address} is no node of a Cluster: name one")
            return SlotMap.of_one(address)
        refuse_errors([ranges], f"redis at {address} does not tell its slots", self.url)
        return SlotMap.of_ranges(ranges, address)

    def call(self, commands: Sequence[tuple[bytes, Command]], deadline: Deadline) -> list[Reply]:
        """Runs control commands, (key, words), each at the owner of its key.

        Those of one owner run in order on one connection.

        Returns:
            The replies, in the order of the commands.

        Raises:
            StoreFailed: a server answered with an error.
            Unavailable, DeadlineExceeded: as `complete`.
        """
        replies: list[Reply] = [None] * len(commands)

        def attempt(routes: list[Route]) -> dict[int, str]:
            failures: dict[int, str] = {}
            for route in routes:
                items = route.items.tolist()
                for item, reply in zip(
                    items, self._call_at(route, [commands[i][1] for i in items], deadline), strict=True
                ):
                    replies[item] = reply
                    if isinstance(reply, hiredis.ReplyError):
                        failures[item] = str(reply)
            return failures

        slots = np.array([key_slot(key) for key, _ in commands], np.int64)
        self.complete(slots, attempt, deadline)
        return replies

    def _call_at(self, route: Route, commands: list[Command], deadline: Deadline) -> list[Reply]:
        if not route.asking:
            return self.call_at(route.address, commands, deadline)
        pairs = [word for command in commands for word in (("ASKING",), command)]
        return self.call_at(route.address, pairs, deadline)[1::2]

    def call_at(self, address: Address, commands: Sequence[Command], deadline: Deadline) -> list[Reply]:
        """Runs commands in order on one connection to one server; errors are among the replies."""
        with self.connection_to(address, deadline) as connection:
            return connection.call(commands, deadline)

    @contextmanager
    def connection_to(self, address: Address, deadline: Deadline) -> Iterator[Connection]:
        """A connection to one server, closed where its use fails."""
        connection = self.pool.take(address, deadline)
        try:
            yield connection
        except BaseException:
            self.pool.abandon(connection)
            raise
        self.pool.give_back(connection)

    def address_of(self, key: bytes) -> Address:
        """The server that owns a key, as far as that is known. Raises `Unavailable` where none does."""
        return self._routes(np.array([key_slot(key)]), np.zeros(1, np.int64), {})[0].address

    def nodes(self) -> tuple[Address, ...]:
        """All servers that own slots."""
        return self._map.nodes

    def passes(self, line: str) -> bool:
        """Whether an error line tells of a moving slot, a failover or a restart, and not of something that lasts."""
        word = line.split(" ", 1)[0]
        return word in _REDIRECTIONS or is_transient(line) or (bool(self.url.service) and word in _DEMOTED)

    def complete(self, slots: Int64, attempt: Callable[[list[Route]], Mapping[int, str]], deadline: Deadline) -> None:
        """Runs commands until none is redirected any more, a bounded number of rounds.

        Args:
            slots: int64, the hash slot of each command.
            attempt: Runs the commands of the routes; command -> error line of those that failed.
            deadline: Of all rounds together.

        Raises:
            StoreFailed: a command failed for good.
            NotReady: a server went on answering that it is not ready yet.
            Unavailable, DeadlineExceeded: naming address and deadline.
        """
        todo, asked, redirected = np.arange(len(slots)), dict[int, Address](), list[ElastableError]()

        def attempt_round() -> None:
            nonlocal todo, asked
            if redirected or self._doubtful:
                self.refresh(deadline)
                self._doubtful = False
            failures = attempt(self._routes(slots, todo, asked))
            if failures:
                for line in failures.values():
                    if not self.passes(line):
                        raise reply_error(f"redis at {self.url} answered with an error", line, self.url)
                asked = {item: address_in(line) for item, line in failures.items() if line.startswith("ASK ")}
                todo = np.array(sorted(failures), np.int64)
                line = next(iter(failures.values()))
                redirected.append(reply_error(f"redis at {self.url} answered {_ROUNDS} times", line, self.url))
                raise redirected[-1]

        def again(error: Exception) -> bool:
            if isinstance(error, Unavailable):
                self._doubtful = True
                self.pool.drop_idle()
                return True
            return error in redirected

        self._repeated(attempt_round, again, deadline)

    def _repeated(self, attempt: Callable[[], None], again: Callable[[Exception], bool], deadline: Deadline) -> None:
        """Repeats some rounds; where Sentinels watch, until the deadline: a failover takes them seconds."""
        causes: list[Exception] = []

        def noted(error: Exception) -> bool:
            causes.extend([error] * (not isinstance(error, DeadlineExceeded)))
            return again(error)

        try:
            until_deadline(attempt, noted, deadline, self.url, None if self.url.service else _ROUNDS)
        except DeadlineExceeded as error:
            if self.url.service and causes:
                raise DeadlineExceeded(f"{error}; before that: {causes[-1]}") from causes[-1]
            raise

    def _routes(self, slots: Int64, todo: Int64, asked: Mapping[int, Address]) -> list[Route]:
        """The owners of the slots of `todo`, or the servers to ask instead."""
        current = self._map
        rest = np.setdiff1d(todo, list(asked)) if asked else todo
        owners = current.owners[slots[rest]]
        if len(owners) and owners.min() < 0:
            slot = slots[rest[owners.argmin()]]
            raise Unavailable(f"hash slot {slot} is served by no node of the Cluster at {self.url}")
        routes = [Route(current.nodes[node], False, rest[owners == node]) for node in np.unique(owners)]
        for address in dict.fromkeys(asked.values()):
            routes.append(Route(address, True, np.array([item for item, at in asked.items() if at == address])))
        return routes

    def close(self) -> None:
        """Closes all connections. Closing twice is harmless."""
        self.pool.close()


def server_facts(topology: Topology, server: Address, deadline: Deadline, *sections: str) -> dict[str, str]:
    """The fields of some sections of INFO. Raises `NotReady` and `StoreFailed` where the server refuses."""
    answers = topology.call_at(server, [("INFO", section) for section in sections], deadline)
    refuse_errors(answers, f"redis at {server} does not say what it is", topology.url)
    lines = (line.partition(":") for line in b"\r\n".join(answers).decode("utf-8", "replace").splitlines())
    return {name: value for name, _, value in lines}


# Sentinels asked for the master that they watch, through redis-py


def master_address(url: RedisUrl, deadline: Deadline) -> Address:
    """Where the master is, as the first Sentinel says that knows one which is up.

    Args:
        url: With a service.
        deadline: Each Sentinel gets its share of what is left.

    Raises:
        Unavailable: none knows one now; says of each why.
        DeadlineExceeded: the deadline has passed.
    """
    why: list[str] = []
    for tried, seed in enumerate(url.seeds):
        share = deadline.left(seed) / (len(url.seeds) - tried)
        try:
            return _asked(url, seed, share)
        except MasterNotFoundError as error:
            _, _, cause = str(error).rpartition(" - ")
            unknown = f"it knows no master {url.service!r} that is up"
            why.append(f"{seed}: {cause if ' - ' in str(error) else unknown}")
        except redis.RedisError as error:
            why.append(f"{seed}: {error}")
    raise Unavailable(
        f"no Sentinel of {url} names a master (a login of Sentinels is given by ELASTABLE_SENTINEL_USER and "
        f"ELASTABLE_SENTINEL_PASSWORD_FILE): {'; '.join(why)}"
    )


def _asked(url: RedisUrl, seed: Address, seconds: float) -> Address:
    user, password = url.sentinel_login
    options: dict[str, object] = {
        "username": user or None,
        "password": password or None,
        "socket_timeout": seconds,
        "socket_connect_timeout": seconds,
        "retry": retry.Retry(NoBackoff(), 0),
        "ssl": url.tls,
        **({"ssl_ca_certs": url.ca} if url.tls and url.ca else {}),
    }
    watching = Sentinel([(seed.host, seed.port)], sentinel_kwargs=options)  # type: ignore[no-untyped-call]
    try:
        host, port = watching.discover_master(url.service)  # type: ignore[no-untyped-call]
    finally:
        for sentinel in watching.sentinels:
            sentinel.close()
    return Address(str(host), int(port))


# Which server owns which hash slot, as the servers say it


@dataclass(frozen=True, slots=True)
class SlotMap:
    """`owners[slot]` counts in `nodes`; -1: no server owns the slot."""

    nodes: tuple[Address, ...]
    owners: Int64

    @classmethod
    def of_one(cls, address: Address) -> Self:
        """One server owns every slot."""
        return cls((address,), np.zeros(REDIS_CLUSTER_HASH_SLOTS, np.int64))

    @classmethod
    def of_ranges(cls, ranges: Reply, asked: Address) -> Self:
        """Reads the reply to CLUSTER SLOTS; a node that does not know its own host is the one asked."""
        nodes: dict[Address, int] = {}
        owners = np.full(REDIS_CLUSTER_HASH_SLOTS, -1, np.int64)
        for first, last, (host, port, *_), *_ in ranges:
            name = (host or b"").decode(errors="replace")
            address = Address(name if name not in ("", "?") else asked.host, int(port))
            owners[first : last + 1] = nodes.setdefault(address, len(nodes))
        return cls(tuple(nodes), owners)


def address_in(line: str) -> Address:
    """The address in `ASK <slot> <host:port>`. Raises `StoreFailed` where there is none."""
    words = line.split(" ")
    host, _, port = words[2].rpartition(":") if len(words) == 3 else ("", "", "")
    if not (port.isascii() and port.isdigit() and len(port) <= 5):
        raise StoreFailed(f"a redis server refers to another one by {line[:80]!r}, which names none")
    return Address(host, int(port))


# A transaction of control commands, repeated until nobody else has changed its keys in between


_PAUSE_S = 0.002


def change_if_unchanged(
    topology: Topology,
    watched: Sequence[bytes],
    questions: Sequence[Command],
    change: Callable[[list[Reply]], Sequence[Command]],
    deadline: Deadline,
) -> None:
    """Reads, decides, and writes, again and again until nobody else wrote in between.

    Args:
        topology: The servers.
        watched: Keys that nobody may change meanwhile, all in one hash slot.
        questions: Commands that read.
        change: From their answers to the commands that write; none: nothing is left to do. What it raises is passed on.
        deadline: Of everything together.

    Raises:
        StoreFailed: a server answered with an error.
        Unavailable, DeadlineExceeded: naming address and deadline; also where others never stopped writing.
    """
    while True:
        topology.call([(watched[0], ("TYPE", watched[0]))], deadline)  # whoever owns the slot now is known
        with topology.connection_to(topology.address_of(watched[0]), deadline) as connection:
            answers = connection.call([("WATCH", *watched), *questions], deadline)
            error = first_error(answers)
            if error is None:
                commands = change(answers[1:])
                if not commands:
                    connection.call([("UNWATCH",)], deadline)
                    return
                answers = connection.call([("MULTI",), *commands, ("EXEC",)], deadline)
                if answers[-1] is not None:
                    error = first_error(answers)
                    if error is None:
                        return
        if error is not None and not topology.passes(error):
            raise reply_error(f"redis at {topology.url} answered with an error", error, topology.url)
        time.sleep(min(_PAUSE_S, deadline.left(topology.url)))
