"""One Redis, as the tier and the log of a store share it: its servers, and this process' right to write to them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from elastable.embedding_store.tiers.redis.connections.redis_connection import Deadline
from elastable.embedding_store.tiers.redis.connections.reply_shapes import Command, Reply
from elastable.embedding_store.tiers.redis.connections.topology import Topology
from elastable.embedding_store.tiers.redis.connections.transactions import change_if_unchanged
from elastable.embedding_store.tiers.redis.ownership import Ownership
from elastable.embedding_store.tiers.redis.schema import owner_key
from elastable.embedding_store.tiers.redis.url import RedisUrl

__all__ = ["RedisPlace"]


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
