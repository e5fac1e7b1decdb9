"""The calls between a worker and its master, as plain data.

`MasterApi` is implemented by the master itself (in one process) and by its gRPC
client, so the same worker runs in both places.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from elastable.master.gradient import (
    AsyncPushId,
    Divisor,
    DivisorKind,
    GradientPart,
    Push,
    PushId,
    Slices,
    SyncPushId,
    Tensor,
)
from elastable.master.job_spec import JobSpec
from elastable.master.job_status import GoneWorker, JobStatus, Refusal, WorkerIdentity, WorkerStatus

__all__ = [
    "AsyncPushId",
    "DenseSnapshot",
    "Divisor",
    "DivisorKind",
    "EvaluationReport",
    "GoneWorker",
    "GradientPart",
    "JobSpec",
    "JobStatus",
    "Lease",
    "MasterApi",
    "Push",
    "PushId",
    "PushOutcome",
    "PushReply",
    "Refusal",
    "Session",
    "Slices",
    "SyncPushId",
    "Task",
    "TaskKind",
    "Tensor",
    "WorkerIdentity",
    "WorkerStatus",
]


class TaskKind(StrEnum):
    """What is to be done with a micro-batch."""

    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One micro-batch to compute.

    Attributes:
        version: The version to compute on (in async mode the version that was
            current at the lease; the worker uses whatever is current).
        kind: Train on it, or evaluate it. Evaluation tasks of version v sort
            before training tasks of version v.
        micro_batch: Number within the whole job (for EVALUATE: within the
            validation split).
        epoch: The pass over the records, counted from 0.
        start, stop: Positions in the record order of that pass.
    """

    version: int
    kind: TaskKind
    micro_batch: int
    epoch: int
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a worker that asked for tasks.

    Attributes:
        tasks: The worker's until done or its lease ends.
        finished: No task will ever come again.
        revoked: Of what it said it holds: done by now, another worker's, or of
            no version in work. It is to drop them.
    """

    tasks: tuple[Task, ...] = ()
    finished: bool = False
    revoked: tuple[Task, ...] = ()


class PushOutcome(StrEnum):
    """What became of a push."""

    ACCEPTED = "accepted"
    DUPLICATE = "duplicate"
    STALE = "stale"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class PushReply:
    """Outcome, the reason where it was not accepted, and the master's version."""

    outcome: PushOutcome
    reason: str
    version: int


@dataclass(frozen=True, slots=True)
class DenseSnapshot:
    """The dense part of one version: trainable variables and states, in model order."""

    version: int
    variables: tuple[Tensor, ...]
    states: tuple[Tensor, ...]
    variable_names: tuple[str, ...] = ()
    state_names: tuple[str, ...] = ()
    trainable: bytes = b""
    """Whether each layer, and then each weight, is trained (1) or frozen (0), in model order; empty: as it was made."""


@dataclass(frozen=True, slots=True)
class EvaluationReport:
    """Metric state of one evaluated micro-batch, computed from version `version` alone."""

    incarnation: str
    version: int
    micro_batch: int
    records: int
    metrics: tuple[Tensor, ...]


class Session(Protocol):
    """A worker's place in a job; while it is open the worker counts as alive."""

    @property
    def job(self) -> JobSpec:
        """The job joined."""

    def alive(self) -> bool:
        """False once the connection to the master is gone."""

    def close(self) -> None:
        """Leaves: the worker's leases are free for others."""


class MasterApi(Protocol):
    """The calls of a worker to its master. Every wait ends after its `wait_s`.

    Every call may raise `JobFailed`, once the job has failed; a call to another process also `Unavailable` and
    `DeadlineExceeded`, which name the address.
    """

    def join(self, worker: WorkerIdentity) -> Session:
        """Opens the worker's session; it lasts until `close`, or until the connection breaks."""

    def lease_tasks(self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None) -> Lease:
        """Up to `want` tasks, waiting up to `wait_s` seconds for the first.

        With `holding`, all tasks that the worker has not finished, the call may be repeated: leased ones that are not
        among them are returned again.

        Raises:
            NotJoined: the worker has no session.
        """

    def pull_dense(self, incarnation: str, version: int | None, wait_s: float) -> DenseSnapshot | None:
        """The dense variables of `version` (None: the current one); None if it is not committed within `wait_s`.

        Args:
            incarnation: Of the worker.
            version: Which one.
            wait_s: Seconds to wait for it.

        Raises:
            StaleVersion: the version is past, or the job has ended; the task must be dropped.
        """

    def report_gradient(self, push: Push) -> PushReply:
        """Counts a micro-batch's gradients once; safe to repeat. In async mode it returns once they are committed.

        Raises:
            BadInput and its subclasses: the push does not fit; nothing has changed.
            NotFinite: NaN or Inf, unless the job skips such pushes.
            FutureVersion: its version has not been committed.
            JobFailed: also where the push is of another job.
            DeadlineExceeded: also where an async push was not committed in time; it is safe to repeat.
        """

    def report_evaluation(self, report: EvaluationReport) -> PushOutcome:
        """Counts an evaluated micro-batch's metric state once; safe to repeat.

        Raises:
            BadGradient: the metric state is not that of the model.
            FutureVersion: its version has not been committed.
        """

    def report_failure(self, incarnation: str, error: BaseException, fatal: bool) -> None:
        """Reports why a worker fails, for the status; a fatal error, which every worker would meet, fails the job."""

    def status(self) -> JobStatus:
        """How far the job is, with the metrics of the running epoch, or of the last one."""

    def stop(self, reason: str) -> None:
        """Ends the job cleanly at the current version, or the one that is being committed."""
