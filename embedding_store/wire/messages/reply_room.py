"""How many bytes of replies a server holds at once: those that are gathered, and those that nobody reads."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from elastable.embedding_store.errors import DeadlineExceeded
from elastable.embedding_store.support.memory_budget import memory_limit

__all__ = ["ReplyRoom"]

_LEAST_BYTES = 1 << 30
_PART = 8  # one part in so many of the memory here
_FREE_BYTES = 1 << 20  # of a reply that counts as nothing
_WAIT_S = 30.0


class ReplyRoom:
    """Room for replies, which larger ones wait for.

    Args:
        most: Bytes of all replies at once; a larger one has the room alone. None: an eighth of the memory here, at
            least 1 GiB.
        wait_s: Seconds that a reply waits.
    """

    def __init__(self, most: int | None = None, wait_s: float = _WAIT_S) -> None:
        self._most = max(_LEAST_BYTES, memory_limit() // _PART) if most is None else most
        self._wait_s = wait_s
        self._held = 0
        self._changed = threading.Condition()

    @contextmanager
    def taken(self, size: int) -> Iterator[None]:
        """Around the making and sending of a reply.

        Raises:
            DeadlineExceeded: others have taken the room for too long.
        """
        if size <= _FREE_BYTES:
            yield
            return
        with self._changed:
            free = self._changed.wait_for(lambda: not self._held or self._held + size <= self._most, self._wait_s)
            if not free:
                raise DeadlineExceeded(
                    f"a reply of {size} bytes waited {self._wait_s:g} s: others of {self._held} bytes are still being "
                    "sent; ask for less at a time"
                )
            self._held += size
        try:
            yield
        finally:
            with self._changed:
                self._held -= size
                self._changed.notify_all()
