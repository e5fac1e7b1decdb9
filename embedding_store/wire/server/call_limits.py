"""The limits of one gRPC server: calls at once, and how long clients may take."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["CallLimits"]


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Of one server.

    Attributes:
        threads: Calls under way at once, but for health checks.
        first_message_s: Seconds that a client may take for its first message.
        next_message_s: And for each one after it.
        least_rate: Bytes a second that a stream of messages must bring on average, once `next_message_s` have passed.
        unread_s: Seconds that a client may take to make room for one more message of the answer.
    """

    threads: int = 256
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
        """Calls of one host that may be under way at once, sessions apart."""
        return max(1, self.threads * 3 // 4)

    @property
    def sessions(self) -> int:
        """Sessions that may be open at once."""
        return max(1, self.threads * 5 // 8)
