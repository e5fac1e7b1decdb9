"""Who owns a store server: the process that claimed it last, known by a secret, for as long as it is heard of."""

from __future__ import annotations

import hmac
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from elastable.embedding_store.errors import BadInput, NotReady, TakenOver

__all__ = ["LEASE_S", "LONGEST_NAME", "Claim", "ShardOwnership"]

LEASE_S = 4.0
"""Seconds after which an owner that has not been heard of counts as gone; a job's master is heard of every second."""

LONGEST_NAME = 256
"""Characters of the name of a job, an owner or a sender."""

_SECRET_BYTES = range(16, 65)


@dataclass(frozen=True, slots=True)
class Claim:
    """What an owner says of itself.

    Attributes:
        owner: host:process, for messages.
        job: Whose pushes are taken; "": nobody's yet.
        may_overflow: Whether pushes may hold NaN or Inf.
        number: Of the server among those of the job, from 0.
        servers: How many these are; 0: neither is said.
    """

    owner: str
    job: str = ""
    may_overflow: bool = False
    number: int = 0
    servers: int = 0


class ShardOwnership:
    """Safe to use from many threads.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        self._now = now
        self._lock = threading.Lock()
        self._secret: bytes | None = None
        self._claim = Claim("")
        self._heard = 0.0

    @property
    def claim(self) -> Claim | None:
        """Of the current owner; None: nobody has claimed the server since it started."""
        return self._claim if self._secret is not None else None

    def take(self, secret: bytes, claim: Claim, first: bool) -> bool:
        """Makes the process that shows the secret the owner.

        Args:
            secret: 16 to 64 bytes.
            claim: What it says of itself.
            first: Whether it may replace another owner; else it has been the owner, and says so again.

        Returns:
            Whether another one, or nobody, was the owner before.

        Raises:
            TakenOver: it is not the first claim, and another process has become the owner.
            BadInput: a secret or a name that cannot be.
        """
        if len(secret) not in _SECRET_BYTES or not 0 < len(claim.owner) <= LONGEST_NAME:
            raise BadInput("a claim shows a secret of 16 to 64 bytes and names its owner, as host:process")
        if len(claim.job) > LONGEST_NAME:
            raise BadInput(f"a job's name has at most {LONGEST_NAME} characters")
        with self._lock:
            changes = self._secret is None or not hmac.compare_digest(self._secret, secret)
            if self._secret is not None and changes and not first:
                raise TakenOver(f"the store server belongs to {self._claim.owner} now")
            self._secret, self._claim, self._heard = secret, claim, self._now()
        return changes

    def require(self, secret: bytes) -> None:
        """Returns where the caller is the owner, who is heard of so.

        Raises:
            NotReady: nobody has claimed the server since it started; claim it (again).
            TakenOver: another process is the owner.
        """
        with self._lock:
            if self._secret is None:
                raise NotReady("no job has claimed the store server since it was started")
            if not hmac.compare_digest(self._secret, secret):
                raise TakenOver(f"the store server belongs to {self._claim.owner} now")
            self._heard = self._now()

    def live_owner(self, but: bytes = b"") -> str:
        """The owner, if it has been heard of lately and is not the one with the secret `but`; else ""."""
        with self._lock:
            if self._secret is None or hmac.compare_digest(self._secret, but):
                return ""
            return self._claim.owner if self._now() - self._heard < LEASE_S else ""
