"""What a job's master knows of its store servers: what they said last, and which of them it is waiting for."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import TypeVar

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards.shard_store import ServerStatus, ShardStore

__all__ = ["ServerWatch"]

T = TypeVar("T")


class ServerWatch:
    """Safe to use from many threads.

    Args:
        servers: In order.
        now: Monotonic clock, in seconds.
    """

    def __init__(self, servers: Sequence[ShardStore], now: Callable[[], float] = time.monotonic) -> None:
        self._servers, self._now = tuple(servers), now
        self._seen = tuple(ServerStatus(each.address) for each in servers)
        self._looking = threading.Lock()
        self._waiting: dict[int, float] = {}  # server -> since when a call that makes a version waits for it

    def timed(self, server: int, call: Callable[[], T]) -> Callable[[], T]:
        """The call; while it is under way the job waits for that server."""

        def waiting() -> T:
            self._waiting[server] = self._now()
            try:
                return call()
            finally:
                self._waiting.pop(server, None)

        return waiting

    def look(self) -> None:
        """Asks all servers at once; one that does not answer keeps what it said before, with the reason."""
        # Threads of its own: those of the store may all be waiting for a server that is away.
        with self._looking, ThreadPoolExecutor(len(self._servers), "elastable-server-watch") as threads:
            self._seen = tuple(threads.map(self._asked, self._servers, self._seen))

    def statuses(self) -> tuple[ServerStatus, ...]:
        """What the servers said at the last look, and how long each has been waited for by now."""
        now, waiting = self._now(), dict(self._waiting)
        return tuple(
            replace(seen, waited_s=max(0.0, now - waiting[number])) if number in waiting else seen
            for number, seen in enumerate(self._seen)
        )

    @staticmethod
    def _asked(server: ShardStore, before: ServerStatus) -> ServerStatus:
        try:
            return replace(before, address=server.address, shard=server.shard_status(), failure="")
        except ElastableError as error:
            return replace(before, address=server.address, failure=f"{type(error).__name__}: {error}")
