"""The calls between a worker and its master, as plain data."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field, fields
from enum import StrEnum
from typing import Protocol, Self

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.errors import BadSpec
from elastable.embedding_store.shards.server_contract import ServerStatus, Slices
from elastable.embedding_store.support.futures import at_once


class TaskKind(StrEnum):
    """What is to be done with a micro-batch."""

    TRAIN = "train"
    EVALUATE = "evaluate"


@dataclass(frozen=True, slots=True, order=True)
class Span:
    """Events of a stream that follow each other in one of its partitions.

    Attributes:
        partition: Its name.
        start, stop: Positions, as the reader of the stream writes them: that before the first event, and that of the
            last one.
        events: How many there are, those that cannot be read among them.
    """

    partition: str
    start: str
    stop: str
    events: int


@dataclass(frozen=True, slots=True)
class Waiting:
    """Events of a partition behind a position.

    Attributes:
        start: That position; of a partition that is new, where it begins.
        stops: The position of each event, in order; of more than were asked for, the first ones.
        more: Whether there are more.
        lag: How many there are, as far as the stream can tell.
        since: Unix time of the first of them; None: the stream does not say.
    """

    start: str
    stops: Sequence[str] = ()
    more: bool = False
    lag: int = 0
    since: float | None = None


class EventSource(Protocol):
    """A stream as a master asks it. Positions are texts, whose meaning is the stream's.

    Calls raise `Unavailable` while the stream is away, and `BadInput` where events are gone that were not trained.

    Attributes:
        look_s: Seconds between two looks at it while nothing waits there that makes a version.
    """

    look_s: float

    def ahead(self, positions: Mapping[str, str], most: int, until: Mapping[str, str] | None) -> Mapping[str, Waiting]:
        """What waits in each partition, new ones included.

        Args:
            positions: Partition -> position of its last event that is planned.
            most: Events of a partition that are listed.
            until: Partition -> position that nothing is listed behind; partitions without one are left out. None: no
                bound.
        """

    def ends(self, before: float | None = None) -> Mapping[str, str]:
        """Partition -> position of its last event now, or of the last one that came before a Unix time."""

    def identity(self) -> str:
        """What tells apart streams whose partitions have the same names, as far as positions do not; empty: nothing."""

    def committed(self, positions: Mapping[str, str]) -> None:
        """A version that contains everything up to these positions is committed: for tools that watch the stream."""


@dataclass(frozen=True, slots=True)
class BadEvent:
    """An event that could not be read: where it is, and why."""

    partition: str
    position: str
    reason: str


MOST_BAD_EVENTS = 1_000
"""Of one micro-batch; a stream with more holds something else."""


@dataclass(frozen=True, slots=True, order=True)
class Task:
    """One micro-batch to compute.

    Attributes:
        version: The version to compute on (in async mode the version that was
            current at the lease; the worker uses whatever is current).
        kind: Train on it, or evaluate it. Evaluation tasks of version v sort before training tasks of version v.
        micro_batch: Number within the whole job (for EVALUATE: within the validation split).
        epoch: Which part of which pass over the records, counted over all parts of all passes; without parts, the pass.
        start, stop: Positions in the record order of that part; of a stream, 0 and its events.
        spans: Of a stream: its events.
    """

    version: int
    kind: TaskKind
    micro_batch: int
    epoch: int
    start: int
    stop: int
    spans: tuple[Span, ...] = ()


@dataclass(frozen=True, slots=True)
class Lease:
    """The answer to a worker that asked for tasks.

    Attributes:
        tasks: The worker's until done or its lease ends.
        finished: No task will ever come again.
        revoked: Of what it said it holds: done by now, another worker's, or of no version in work. It is to drop them.
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

    @property
    def store_session(self) -> bytes:
        """What the worker shows to the job's store servers (`ShardStore.show_session`)."""

    def alive(self) -> bool:
        """False once the connection to the master is gone."""

    def close(self) -> None:
        """Leaves: the worker's leases are free for others."""


class MasterApi(Protocol):
    """The calls of a worker to its master: the master itself in one process, else its gRPC client.

    Every wait ends after its `wait_s`.

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


class ServedMaster(MasterApi):
    """A master whose calls may be answered later, by futures.

    Each `..._later` is its call: what is wrong at once is raised, what becomes wrong is the error of the future.
    Whoever cancels a future gets no answer. Results are set without any lock of the master, by the thread that they
    came of: what is called with one must not wait. A master whose calls do not wait need not define them.

    Attributes:
        pushes_wait: Whether the future of `report_gradient_later` may be not done: such calls cost a server more.
    """

    pushes_wait: bool = False

    def lease_tasks_later(
        self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None
    ) -> Future[Lease]:
        """As `lease_tasks`."""
        return at_once(self.lease_tasks(incarnation, want, wait_s, holding))

    def pull_dense_later(self, incarnation: str, version: int | None, wait_s: float) -> Future[DenseSnapshot | None]:
        """As `pull_dense`."""
        return at_once(self.pull_dense(incarnation, version, wait_s))

    def report_gradient_later(self, push: Push) -> Future[PushReply]:
        """As `report_gradient`."""
        return at_once(self.report_gradient(push))

    def ended(self) -> Future[str]:
        """How the job ended, once it has: the same future for everybody, not to be cancelled."""
        return Future()

    def not_ready(self) -> str | None:
        """Why workers cannot take part now, for health checks; None: they can."""
        return None

    def refuse_ended(self) -> None:
        """Raises the error that the job failed with; `StaleVersion` where it was stopped or is over."""


Tensor = Array


@dataclass(frozen=True, slots=True)
class SyncPushId:
    """Names a push by what it computed: duplicates have the same name."""

    version: int
    micro_batch: int


@dataclass(frozen=True, slots=True)
class AsyncPushId:
    """Names a push by who sent it; `micro_batch` is -1 where it belongs to no task."""

    incarnation: str
    sequence: int
    micro_batch: int = -1


PushId = SyncPushId | AsyncPushId


class DivisorKind(StrEnum):
    """What a micro-batch divided terms of its loss by, and so how much it weighs in its version.

    `RECORDS`: as many as it has records. `NOTHING`: they are sums; every micro-batch weighs 1. `AMOUNT`: a separate
    number, of weights or of what a mask let through. `ROWS`: they are of rows, and not of records: each row that the
    version touches counts once.
    """

    RECORDS = "records"
    NOTHING = "nothing"
    AMOUNT = "amount"
    ROWS = "rows"


@dataclass(frozen=True, slots=True)
class Divisor:
    """A divisor; with `AMOUNT` that number, which is finite and not negative."""

    kind: DivisorKind
    amount: float = 0.0


@dataclass(frozen=True, slots=True)
class GradientPart:
    """The gradient of those terms of a micro-batch's loss that are divided alike.

    Attributes:
        divisor: What they were divided by; the gradient is of the quotient.
        dense: Place of a trainable variable in model order -> its gradient; the others have none.
        slices: Table name -> IndexedSlices.
        losses: Place of a metric's total among `Push.metrics` -> the mean that these terms add to it; of `ROWS` only
            the places count.
        penalties: Of `ROWS`: table name -> the rows, and float32 `[n, 1]` what each adds to the loss.
    """

    divisor: Divisor
    dense: Mapping[int, Tensor] = field(default_factory=dict)
    slices: Mapping[str, Slices] = field(default_factory=dict)
    losses: Mapping[int, float] = field(default_factory=dict)
    penalties: Mapping[str, Slices] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Push:
    """The report of one micro-batch.

    Attributes:
        id: What makes it countable once.
        records: Records in the micro-batch: its weight in the mean.
        dense: Gradient of every trainable dense variable, in model order.
        slices: Table name -> IndexedSlices.
        states: Every non-trainable variable after the micro-batch, in model order.
        metrics: Keras metric state of this micro-batch alone (from reset), flat.
        job: The job it was computed for; "": whichever the master runs.
        computed_on: Async: the version of the dense variables it was computed on; None: unknown, and taken for fresh.
        incarnation: Sync: the worker that computed it, for the status; "": the holder of the lease.
        divisor: What the terms behind `dense` and `slices` were divided by;
            None: as the job's `average` says, by records or by nothing.
        losses: See `GradientPart`; of those terms.
        parts: The gradients of terms that were divided by something else.
        not_finite: Why its gradients hold NaN or Inf, where the worker knows, or why a store server refused its rows
            for that; "": it does not say.
        once: Those places of `losses`, here and in `parts`, whose count is of a batch, however many records it has: a
            version counts as one micro-batch does.
        bad_events: Of a stream: those that could not be read.
    """

    id: PushId
    records: int
    dense: tuple[Tensor, ...] = ()
    slices: Mapping[str, Slices] = field(default_factory=dict)
    states: tuple[Tensor, ...] = ()
    metrics: tuple[Tensor, ...] = ()
    job: str = ""
    computed_on: int | None = None
    incarnation: str = ""
    divisor: Divisor | None = None
    losses: Mapping[int, float] = field(default_factory=dict)
    parts: tuple[GradientPart, ...] = ()
    not_finite: str = ""
    once: tuple[int, ...] = ()
    bad_events: tuple[BadEvent, ...] = ()


KNOWN_VALUES = {
    "mode": ("sync", "async"),
    "average": ("mean", "records", "batches", "sum"),
    "not_finite": ("refuse", "skip"),
    "staleness_modulation": ("none", "inverse"),
}


# Field -> the mode that it belongs to, and why it has no meaning in the other one.
_OF_ONE_MODE = {
    "staleness_bound": ("async", "in sync mode nothing is stale"),
    "staleness_modulation": ("async", "in sync mode nothing is stale"),
    "steps_per_epoch": ("sync", "in async mode an epoch is a pass over the records"),
}
_LEAST = {
    **dict.fromkeys(("micro_batch_size", "grads_to_wait", "epochs", "intra_op_threads"), 1),
    **dict.fromkeys(
        ("train_records", "validation_records", "offload_above", "steps_per_epoch", "initial_epoch",
         "evaluation_batch_size", "versions_before", "parts_before", "micro_batches_before"), 0
    ),
}  # fmt: skip
_MOST = {"intra_op_threads": 2**31 - 1}  # as it is sent to workers; any other number: 2**63 - 1


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
        intra_op_threads: Those of its backend, on every worker: it changes roundings,
            so it belongs to the job and not to the host.
        store_url: "master": rows are looked up at the master; or servers:host:port,... of the job's store servers; in a
            folder that `export --format serving` wrote, the store whose versions follow.
        model_file: Path of the model file as the master knows it; "" in process.
        model_sha256: Of that file's bytes.
        offload_above: Keras embeddings of more than this many elements move to the store; 0 leaves them alone.
        on_worker: Tables that are Keras variables of the workers and in no store.
        train_records, validation_records: Sizes of the splits.
        shuffle: Whether the record order is a seeded permutation.
        average: How the micro-batches of a version are combined. "mean": as Keras would divide the loss of one batch
            of all their records; a loss of which that cannot be seen is refused where there are several. "records":
            each weighs its records, whatever its loss was divided by. "batches": all weigh the same, as in Keras'
            gradient_accumulation_steps. "sum": each weighs 1.
        not_finite: "refuse" a push with NaN or Inf (an error), or "skip" it.
        staleness_bound: Async: by how many versions a push may be behind when it is committed; one that is older is
            refused, and its micro-batch computed again. None: any number.
        staleness_modulation: Async: "none", or "inverse": the learning rate of
            a push that is s versions behind is divided by 1 + s.
        steps_per_epoch: Sync: steps in an epoch, where it is not a whole pass
            over the records (`elastable.master.tasks.schedule.Schedule`); 0: it is.
        initial_epoch: The epoch that the job begins at.
        evaluation_batch_size: Records evaluated together; 0: `micro_batch_size`.
        backend: What Keras runs on, on every worker: backends round differently. "": any.
        model_config: The model's Keras configuration, as JSON, compressed by zlib, in base64: a version names its model
            by it. "": a model that has none, such as a subclass without `get_config`.
        parts: Records of each part of a pass (`Reader.parts`), if there are several.
        versions_before, parts_before, micro_batches_before: Of the jobs that this one continues: it counts on.
        stream: Whether records are events of a stream: an epoch is `train_records` of them, more or less, and 0
            `epochs` have no end.
        records_digest: `Reader.digest` of the training records.
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
    backend: str = ""
    model_config: str = ""
    parts: tuple[int, ...] = ()
    versions_before: int = 0
    parts_before: int = 0
    micro_batches_before: int = 0
    stream: bool = False
    records_digest: str = ""

    def __post_init__(self) -> None:
        for name in ("on_worker", "parts"):
            object.__setattr__(self, name, tuple(getattr(self, name)))
        for name, known in KNOWN_VALUES.items():
            if getattr(self, name) not in known:
                raise BadSpec(f"job {name} {getattr(self, name)!r}: use {' or '.join(known)}")
        for name, (mode, reason) in _OF_ONE_MODE.items():
            if self.mode != mode and getattr(self, name) != _DEFAULTS[name]:
                raise BadSpec(f"job {name} is for mode {mode}: {reason}")
        for each in fields(JobSpec):
            value, most = getattr(self, each.name), _MOST.get(each.name, 2**63 - 1)
            if isinstance(value, int) and not -most - 1 <= value <= most:
                raise BadSpec(f"job {each.name} must lie within {-most - 1} and {most}, got {value}")
        if self.staleness_bound is not None and self.staleness_bound < 0:
            raise BadSpec(f"job staleness_bound must not be negative, got {self.staleness_bound}")
        if self.stream and self.mode != "sync":
            raise BadSpec("a stream of events is for mode sync: a version is a cut of the stream")
        for name, least in _LEAST.items():
            if getattr(self, name) < (0 if self.stream and name == "epochs" else least):
                limit = f"at least {least}" if least else "not be negative"
                raise BadSpec(f"job {name} must {'be ' if least else ''}{limit}, got {getattr(self, name)}")
        if self.parts and (sum(self.parts) != self.train_records or min(self.parts) < 1):
            raise BadSpec(f"job parts {list(self.parts)} must each hold a record, and together {self.train_records}")

    @property
    def parts_of_pass(self) -> tuple[int, ...]:
        """Records of each part of a pass."""
        return self.parts or (self.train_records,)

    @property
    def even_batches(self) -> bool:
        """Whether every micro-batch has `micro_batch_size` records."""
        return not self.stream and all(records % self.micro_batch_size == 0 for records in self.parts_of_pass)

    @property
    def micro_batches_per_version(self) -> int:
        """Micro-batches that make one version: `grads_to_wait`; async: 1."""
        return self.grads_to_wait if self.mode == "sync" else 1


_DEFAULTS = {each.name: each.default for each in fields(JobSpec)}


@dataclass(frozen=True, slots=True)
class WorkerIdentity:
    """One start of a worker process."""

    incarnation: str
    host: str = ""
    pid: int = 0

    @classmethod
    def of_this_process(cls) -> Self:
        """A new one."""
        return cls(uuid.uuid4().hex, socket.gethostname(), os.getpid())

    def __str__(self) -> str:
        """For logs: the incarnation, and where it is if that is known."""
        return f"{self.incarnation} (host {self.host}, pid {self.pid})" if self.host else self.incarnation


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """A worker that has joined.

    Attributes:
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
class StreamStatus:
    """How far a job is behind its stream.

    Attributes:
        lag_events: Events that are there and not in a version yet.
        lag_s: Seconds since the first of them came, as far as the stream says when.
        bad_events: Events that could not be read, of all runs of the job.
        away: Why the stream cannot be asked now; "": it can.
    """

    lag_events: int = 0
    lag_s: float = 0.0
    bad_events: int = 0
    away: str = ""


@dataclass(frozen=True, slots=True)
class JobStatus:
    """How far a job is.

    `state` is waiting, training, evaluating, stopping, finished or failed. `refusals`: of workers that could not take
    part, the latest last. `flush`: how far the tier of the store is behind, if it has one. `records_total`: of all
    epochs; 0: the job has no end. `records_per_s`: trained over the last minute. `gone`: workers that left while there
    was work and have not come back, the latest last. `servers`: the job's store servers, in order. `stopped`: the
    reason given to `stop`, where it was called before the job's end; it stays when the state becomes finished.
    `stream`: of a job on a stream of events.
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
    stream: StreamStatus | None = None

    @property
    def seconds_left(self) -> float | None:
        """Seconds of training that are left at this rate; None: that is not known."""
        if not (self.records_total and self.records_per_s > 0 and self.state in ("training", "evaluating", "waiting")):
            return None
        return max(0, self.records_total - self.records_trained) / self.records_per_s
