"""The limits of one gRPC server: calls at once, and how long clients may take."""

from __future__ import annotations

from dataclasses import dataclass

from elastable.embedding_store.support.memory_budget import memory_limit

__all__ = ["CallLimits"]

_LEAST_BYTES = 1 << 30
_PART = 8  # one part in so many of the memory here


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Of one server.

    A client is one connection. A call beyond a limit is refused as RESOURCE_EXHAUSTED, with the limit; clients repeat
    it with growing pauses until their deadline.

    Attributes:
        threads: Calls under way at once, but for health checks and those that wait.
        sessions: Workers whose sessions are open at once. They hold no threads.
        parked: Calls that wait for something to happen here: a task, a version, a commit. They hold no threads.
        calls_of_a_client: Calls of one client under way or waiting, sessions apart.
        calls_a_second_of_a_client: Begun by one client, sessions and health checks apart; as many may come at once.
            None: any number.
        upload_bytes: Of all requests that are being received or worked on, together; the oldest one may be larger.
            None: an eighth of the memory here, at least 1 GiB.
        upload_bytes_of_a_client: The same of one client. None: half of `upload_bytes`.
        first_message_s: Seconds that a client may take for its first message.
        next_message_s: And for each one after it.
        least_rate: Bytes a second that a stream of messages must bring on average, once `next_message_s` have passed.
        unread_s: Seconds that a client may take to make room for one more message of the answer.
    """

    threads: int = 256
    sessions: int = 4_096
    parked: int = 16_384
    calls_of_a_client: int = 128
    calls_a_second_of_a_client: float | None = None
    upload_bytes: int | None = None
    upload_bytes_of_a_client: int | None = None
    first_message_s: float = 10.0
    next_message_s: float = 30.0
    least_rate: int = 64 << 10
    unread_s: float = 60.0

    @property
    def waiting(self) -> int:
        """Calls that may wait for their clients at once."""
        return max(1, self.threads * 3 // 8)

    @property
    def of_a_host(self) -> int:
        """Calls of one host that may be under way at once, sessions and waiting calls apart."""
        return max(1, self.threads * 3 // 4)

    @property
    def answering(self) -> int:
        """Threads that answer calls which have waited."""
        return max(4, self.threads // 8)

    @property
    def most_upload_bytes(self) -> int:
        """`upload_bytes` in effect."""
        return max(_LEAST_BYTES, memory_limit() // _PART) if self.upload_bytes is None else self.upload_bytes

    @property
    def most_upload_bytes_of_a_client(self) -> int:
        """`upload_bytes_of_a_client` in effect."""
        given = self.upload_bytes_of_a_client
        return self.most_upload_bytes // 2 if given is None else given
