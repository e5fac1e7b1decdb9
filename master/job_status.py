"""How far a job is, and who works on it: what a master tells whoever asks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.shards import ServerStatus

__all__ = ["GoneWorker", "JobStatus", "Refusal", "WorkerIdentity", "WorkerStatus"]


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One start of a worker process."""

    incarnation: str
    host: str = ""
    pid: int = 0

    def __str__(self) -> str:
        """For logs: the incarnation, and where it is if that is known."""
        return f"{self.incarnation} (host {self.host}, pid {self.pid})" if self.host else self.incarnation


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker that has joined.

    Attributes:
        identity: Who it is.
        leases: Micro-batches that it holds.
        micro_batches, records_per_s: Of it that counted; of the last minute, 0 where that is not known.
        silent_s: Seconds since a micro-batch of it counted last, or since it joined.
    """

    identity: WorkerIdentity
    leases: int
    micro_batches: int
    records_per_s: float = 0.0
    silent_s: float = 0.0


@dataclass(frozen=True, slots=True)
class GoneWorker:
    """A worker that left while there was work, or died.

    Attributes:
        leases, micro_batches: Those that it held then, and that others get; those of it that counted.
        seconds_ago: When it left.
    """

    identity: WorkerIdentity
    leases: int
    micro_batches: int
    seconds_ago: float


@dataclass(frozen=True, slots=True)
class Refusal:
    """A worker that failed or did not fit, and left: who, why, and how many said the same."""

    worker: WorkerIdentity
    error: str
    message: str
    count: int = 1


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is.

    `state` is waiting, training, evaluating, stopping, finished or failed. `refusals`: of workers that could not take
    part, the latest last. `flush`: how far the tier of the store is behind, if it has one. `records_total`: of all
    epochs; 0: the job has no end. `records_per_s`: trained over the last minute. `gone`: workers that left while there
    was work and have not come back, the latest last. `servers`: the job's store servers, in order. `stopped`: the
    reason given to `stop`, where it was called before the job's end; it stays when the state becomes finished.
    """

    job: str
    state: str
    mode: str
    version: int
    versions_total: int
    epoch: int
    epochs: int
    records_trained: int
    metrics: Mapping[str, float]
    workers: tuple[WorkerStatus, ...]
    store: str
    refusals: tuple[Refusal, ...] = ()
    flush: FlushStatus | None = None
    records_total: int = 0
    records_per_s: float = 0.0
    gone: tuple[GoneWorker, ...] = ()
    servers: tuple[ServerStatus, ...] = ()
    stopped: str = ""

    @property
    def seconds_left(self) -> float | None:
        """Seconds of training that are left at this rate; None: that is not known."""
        if not (self.records_total and self.records_per_s > 0 and self.state in ("training", "evaluating", "waiting")):
            return None
        return max(0, self.records_total - self.records_trained) / self.records_per_s
