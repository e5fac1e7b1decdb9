"""Store servers in Redis: each holds a number under a lease and says where it is, so that masters find all of them."""

import secrets
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from urllib.parse import parse_qsl, quote

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.errors import BadInput, ElastableError, StoreFailed, TakenOver, Unavailable
from elastable.embedding_store.support.address import Address
from elastable.embedding_store.tiers.redis.connection import Deadline
from elastable.embedding_store.tiers.redis.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.topology import Topology, change_if_unchanged
from elastable.embedding_store.tiers.redis.url import SCHEMES, RedisUrl
from elastable.process.repeating import repeating

LEASE_S = 10.0
"""Seconds for which a server that is not heard of keeps its number."""

MOST_SERVERS = 1024
_POLL_S = 0.2


def is_registry(url: str) -> bool:
    """Whether this is the URL of a registry, and not a list of addresses."""
    return url.partition("://")[0] in SCHEMES


class StoreRegistry(Closing):
    """The store servers of one namespace of a Redis. For many threads at once.

    Args:
        url: `redis://host:port[?namespace=...&count=N]`; `count` is the number of servers that `addresses` waits for.

    Raises:
        BadInput: no such URL can be.
        StoreFailed, Unavailable, DeadlineExceeded: Redis does not answer as it should.
    """

    def __init__(self, url: str) -> None:
        place, _, query = url.partition("?")
        options = dict(parse_qsl(query, keep_blank_values=True))
        count = options.pop("count", None)
        if count is not None and not (count.isdecimal() and 1 <= int(count) <= MOST_SERVERS):
            raise BadInput(f"count={count}: write the number of store servers, 1 to {MOST_SERVERS:,}")
        rest = "&".join(f"{name}={quote(value)}" for name, value in options.items())
        self.count = None if count is None else int(count)
        self.url = RedisUrl.parse(f"{place}?{rest}" if rest else place)
        self._topology = Topology(self.url)
        self._known = f"{{{self.url.namespace}}}:stores".encode()

    def take(self, number: int | None, host: str, lease_s: float = LEASE_S) -> "Registration":
        """Takes a number.

        Args:
            number: Which; None: the one that this host had last if nobody holds it, else the lowest that is free, below
                the URL's `count` where it has one.
            lease_s: Seconds for which the number stays taken after the server was last heard of.

        Raises:
            TakenOver: another server holds that number, or all are held.
        """
        secret, began = secrets.token_hex(16), time.monotonic()
        while True:
            # A server that was killed and started again waits for the lease of the process before, and has its number.
            waiting = time.monotonic() - began < 1.5 * lease_s
            for wanted in self._wanted(number, host, waiting):
                if self._taken(wanted, secret, lease_s, host):
                    return Registration(self, wanted, secret, lease_s)
            if not waiting:
                raise TakenOver(self._nothing_free(number))
            time.sleep(_POLL_S)

    def _taken(self, number: int, secret: str, lease_s: float, host: str) -> bool:
        taken = False

        def take(held: bytes | None) -> Sequence[Command]:
            nonlocal taken
            taken = held is None
            return [("SET", self.key(number), f"{secret} ", "PX", str(int(lease_s * 1000)))] if taken else []

        self.change(self.key(number), take)
        if taken:  # now, so that a job that begins before the server is ready waits for it
            self._call([self.known(number, str(Address(host, 0)))])
        return taken

    def _wanted(self, number: int | None, host: str, waiting: bool) -> Sequence[int]:
        if number is not None:
            return [number]
        before = [known for known, address in self._before().items() if Address.parse(address).host == host]
        rest = [free for free in range(self.count or MOST_SERVERS) if free not in before]
        return before if before and waiting else [*before, *rest]

    def _nothing_free(self, number: int | None) -> str:
        if number is None:
            return (
                f"every number of the {self.count or MOST_SERVERS} store servers at {self.url} is held by another one"
            )
        return (
            f"store server {number} of {self.url} is {_shown(self.found().get(number))}: end it first, or start this "
            "one with another --number"
        )

    def found(self) -> dict[int, str | None]:
        """Every number that was ever taken -> where its server is; None: it has not been heard of."""
        numbers = sorted(self._before())
        if not numbers:
            return {}
        answers = self._call([("GET", self.key(number)) for number in numbers])
        return {number: _address(held) for number, held in zip(numbers, answers, strict=True)}

    def addresses(self, deadline_s: float) -> list[str]:
        """Where the servers are, by number, once all of them are there.

        All are numbers 0 to `count - 1`; without a count, those that have ever been registered.

        Raises:
            Unavailable: some are not there by the deadline; names them.
        """
        give_up = time.monotonic() + deadline_s
        while True:
            found = self.found()
            numbers = range(self.count if self.count is not None else max(found, default=-1) + 1)
            there = [address for number in numbers if (address := found.get(number))]
            if there and len(there) == len(numbers):
                return there
            if time.monotonic() >= give_up:
                raise Unavailable(self._who_is_missing(numbers, found, deadline_s))
            time.sleep(_POLL_S)

    def _who_is_missing(self, numbers: Sequence[int], found: dict[int, str | None], deadline_s: float) -> str:
        if not numbers:
            return f"no store server has registered at {self.url} within {deadline_s:g} s: start some with --register"
        before = self._before()
        missing = [f"{n} (last at {before[n]})" if n in before else str(n) for n in numbers if not found.get(n)]
        return (
            f"of {len(numbers)} store servers, number {', '.join(missing)} did not register at {self.url} within "
            f"{deadline_s:g} s: start them, or, for another number of servers, write count= in the URL of --stores"
        )

    def key(self, number: int) -> bytes:
        """The key that the server of a number holds."""
        return self._known + f":{number}".encode()

    def change(self, key: bytes, change: Callable[[bytes | None], Sequence[Command]]) -> None:
        """Changes a server's key as it is now, and nobody else in between."""
        deadline = Deadline(self.url.deadline)
        change_if_unchanged(self._topology, [key], [("GET", key)], lambda answers: change(answers[0]), deadline)

    def known(self, number: int, address: str) -> Command:
        """The command that remembers where a server is."""
        return ("HSET", self._known, str(number), address)

    def _before(self) -> dict[int, str]:
        (reply,) = self._call([("HGETALL", self._known)])
        pairs = zip(reply[::2], reply[1::2], strict=True)
        found = {int(number): address.decode("ascii", "replace") for number, address in pairs if number.isdigit()}
        try:
            return {number: str(Address.parse(found[number])) for number in found if number < MOST_SERVERS}
        except BadInput as error:
            raise StoreFailed(f"the registry at {self.url} holds what is no address: {error}") from error

    def _call(self, commands: Sequence[Command]) -> list[Reply]:
        return self._topology.call([(self._known, command) for command in commands], Deadline(self.url.deadline))

    def close(self) -> None:
        """Closes the connections. Closing twice is harmless."""
        self._topology.close()


class Registration(Closing):
    """A number that is held until `close`, and until its lease ends where this process dies."""

    def __init__(self, registry: StoreRegistry, number: int, secret: str, lease_s: float) -> None:
        self.number = number
        self._registry, self._secret, self._lease_s = registry, secret, lease_s
        self._value = f"{secret} "
        self._lost: Callable[[str], None] = lambda reason: None
        self._kept = ExitStack()
        self._kept.enter_context(repeating(self._keep, lease_s / 4, "registration"))

    def announce(self, address: str, lost: Callable[[str], None]) -> None:
        """Says where the server is.

        Args:
            address: `host:port` that masters and workers call.
            lost: Is called where another server has taken the number, as this one was not heard of.
        """
        self._lost, self._value = lost, f"{self._secret} {Address.parse(address)}"
        self._renew()

    def _keep(self) -> bool:
        try:
            self._renew()
        except TakenOver as error:
            self._lost(str(error))
            return True
        except ElastableError:
            pass  # Redis is away: the next try renews the lease, or takes the number again
        return False

    def _renew(self) -> None:
        key, value = self._registry.key(self.number), self._value

        def renewed(held: bytes | None) -> Sequence[Command]:
            if held is not None and held.partition(b" ")[0].decode("ascii", "replace") != self._secret:
                raise TakenOver(f"another process is store server {self.number} now, {_shown(_address(held))}")
            kept: list[Command] = [("SET", key, value, "PX", str(int(self._lease_s * 1000)))]
            address = value.partition(" ")[2]
            return [*kept, self._registry.known(self.number, address)] if address else kept

        self._registry.change(key, renewed)

    def close(self) -> None:
        """Gives the number back. Closing twice is harmless."""
        self._kept.close()
        key = self._registry.key(self.number)

        def given_back(held: bytes | None) -> Sequence[Command]:
            return [("DEL", key)] if held is not None and held.startswith(self._secret.encode()) else []

        with suppress(ElastableError):  # else its lease ends it
            self._registry.change(key, given_back)


def _address(held: bytes | None) -> str | None:
    """The address in what a server's key holds; None: it is nowhere yet."""
    if not held:
        return None
    try:
        return str(Address.parse(held.decode("ascii", "replace").partition(" ")[2]))
    except BadInput:
        return None


def _shown(address: str | None) -> str:
    return "about to start elsewhere" if address is None else f"at {address}"
