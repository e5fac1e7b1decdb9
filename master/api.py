"""What a worker and a master say to each other, as plain data.

`MasterApi` is kept by the master itself (in one process) and by its gRPC
client, so a worker is written once and runs in both places.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Protocol

from elastable.embedding_store.errors import BadSpec
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

__all__ = [
    "AsyncPushId",
    "DenseSnapshot",
    "Divisor",
    "DivisorKind",
    "EvaluationReport",
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

_KNOWN = {
    "mode": ("sync", "async"),
    "average": ("mean", "records", "batches", "sum"),
    "not_finite": ("refuse", "skip"),
    "staleness_modulation": ("none", "inverse"),
}


@dataclass(frozen=True, slots=True)
class JobSpec:
    """What a job computes; the same on every process that takes part.

    Attributes:
        job: Unique id of the run.
        mode: "sync" or "async".
        micro_batch_size: Records in a micro-batch.
        grads_to_wait: Micro-batches that make one version.
        epochs: Passes over the training records, or, with `steps_per_epoch`,
            parts of them; the epoch to end at, counted from 0.
        seed: Of the record order, dropout and initial values.
        intra_op_threads: TensorFlow's, on every worker: it changes roundings,
            so it belongs to the job and not to the host.
        store_url: "master": rows are looked up at the master; or redis://...
        model_file: Path of the model file as the master knows it; "" in process.
        model_sha256: Of that file's bytes.
        offload_above: Keras embeddings of more than this many elements move to
            the store; 0 leaves them alone.
        on_worker: Tables that are Keras variables of the workers and in no store.
        train_records, validation_records: Sizes of the splits.
        shuffle: Whether the record order is a seeded permutation.
        average: How the micro-batches of a version are combined. "mean": as Keras would divide the loss of one batch
            of all their records; a loss of which that cannot be seen is refused where there are several. "records":
            each weighs its records, whatever its loss was divided by. "batches": all weigh the same, as in Keras'
            gradient_accumulation_steps. "sum": each weighs 1.
        not_finite: "refuse" a push with NaN or Inf (an error), or "skip" it.
        staleness_bound: Async: by how many versions a push may be behind when
            it is committed; one that is older is refused, and its micro-batch
            computed again. None: any number.
        staleness_modulation: Async: "none", or "inverse": the learning rate of
            a push that is s versions behind is divided by 1 + s.
        steps_per_epoch: Sync: steps in an epoch, where it is not a whole pass
            over the records (`elastable.master.tasks.schedule.Schedule`); 0: it is.
        initial_epoch: The epoch that the job begins at.
        evaluation_batch_size: Records evaluated together; 0: `micro_batch_size`.
        versions_per_step: Sync: versions that a step makes, one after the other, of the same micro-batches: more than
            one where the model's own `train_step` applies gradients in turn (`elastable.worker.step.traced.step_plan`).
    """

    job: str = ""
    mode: str = "sync"
    micro_batch_size: int = 256
    grads_to_wait: int = 1
    epochs: int = 1
    seed: int = 0
    intra_op_threads: int = 1
    store_url: str = "master"
    model_file: str = ""
    model_sha256: str = ""
    offload_above: int = 0
    on_worker: tuple[str, ...] = ()
    train_records: int = 0
    validation_records: int = 0
    shuffle: bool = True
    average: str = "mean"
    not_finite: str = "refuse"
    staleness_bound: int | None = None
    staleness_modulation: str = "none"
    steps_per_epoch: int = 0
    initial_epoch: int = 0
    evaluation_batch_size: int = 0
    versions_per_step: int = 1

    def __post_init__(self) -> None:
        object.__setattr__(self, "on_worker", tuple(self.on_worker))
        for name, known in _KNOWN.items():
            if getattr(self, name) not in known:
                raise BadSpec(f"job {name} {getattr(self, name)!r}: use {' or '.join(known)}")
        if self.mode == "sync" and (self.staleness_bound is not None or self.staleness_modulation != "none"):
            raise BadSpec(
                "job staleness_bound and staleness_modulation are for mode async: in sync mode nothing is stale"
            )
        if self.staleness_bound is not None and self.staleness_bound < 0:
            raise BadSpec(f"job staleness_bound must not be negative, got {self.staleness_bound}")
        for name in ("micro_batch_size", "grads_to_wait", "epochs", "intra_op_threads", "versions_per_step"):
            if getattr(self, name) < 1:
                raise BadSpec(f"job {name} must be at least 1, got {getattr(self, name)}")
        if self.mode == "async" and self.steps_per_epoch:
            raise BadSpec("job steps_per_epoch is for mode sync: in async mode an epoch is a pass over the records")
        if self.mode == "async" and self.versions_per_step > 1:
            raise BadSpec("job versions_per_step is for mode sync: in async mode every micro-batch is one version")
        for name in (
            "train_records", "validation_records", "offload_above", "steps_per_epoch", "initial_epoch",
            "evaluation_batch_size",
        ):  # fmt: skip
            if getattr(self, name) < 0:
                raise BadSpec(f"job {name} must not be negative, got {getattr(self, name)}")


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
    """What a worker that asked for tasks is told.

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


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One start of a worker process."""

    incarnation: str
    host: str = ""
    pid: int = 0


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker that is there now."""

    identity: WorkerIdentity
    leases: int
    micro_batches: int


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

    `state` is waiting, training, evaluating, stopping, finished or failed.
    `refusals` are of workers that could not take part, the latest last.
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
    """What a worker asks of a master. Every wait ends after its `wait_s`."""

    def join(self, worker: WorkerIdentity) -> Session:
        """Opens the worker's session."""

    def lease_tasks(self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None) -> Lease:
        """Up to `want` tasks, waiting up to `wait_s` seconds for the first.

        With `holding`, all tasks that the worker has not finished, the call may
        be repeated: what was leased to it and is not among them comes again.
        """

    def pull_dense(self, incarnation: str, version: int | None, wait_s: float) -> DenseSnapshot | None:
        """The dense variables of `version` (None: the current one).

        Returns None where the version is not committed within `wait_s`.

        Raises:
            StaleVersion: the version is past; the task must be dropped.
        """

    def report_gradient(self, push: Push) -> PushReply:
        """Hands a micro-batch's gradients in; safe to repeat."""

    def report_evaluation(self, report: EvaluationReport) -> PushOutcome:
        """Hands an evaluated micro-batch's metric state in; safe to repeat."""

    def report_failure(self, incarnation: str, error: BaseException, fatal: bool) -> None:
        """Tells why a worker fails; `fatal` where every worker would."""

    def status(self) -> JobStatus:
        """How far the job is."""

    def stop(self, reason: str) -> None:
        """Ends the job cleanly after the version in work."""
