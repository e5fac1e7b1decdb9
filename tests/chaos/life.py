"""One life of one process of a cluster."""

from __future__ import annotations

import socket
from dataclasses import dataclass

__all__ = ["Failed", "Process"]


class Failed(Exception):
    """The schedule cannot go on; says why."""


@dataclass
class Process:
    """One life of one process of the cluster.

    Attributes:
        role: "master", "worker", "store" or "shard", a store server.
        number: Which one of its role.
        pid: Its process id.
        control: To its gates; None: it has closed its end.
        pidfd: Becomes readable when it ends.
        saved: The newest version in a whole checkpoint when it was started.
        killed: Whether it was, by a fault, or has been given up for another in its place.
        at_work: Of a master: whether its job has begun.
    """

    role: str
    number: int
    pid: int
    control: socket.socket | None
    pidfd: int
    saved: int
    killed: bool = False
    superseded: bool = False
    at_work: bool = False

    @property
    def name(self) -> str:
        """As faults call it."""
        return f"shard{self.number}" if self.role == "shard" else self.role
