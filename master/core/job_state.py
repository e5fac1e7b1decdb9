"""The state that a master's threads share. Not thread-safe: `Master` guards it with its lock; nothing here waits."""

import logging
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.engine.pins import PinKeeper
from elastable.embedding_store.errors import ElastableError, FutureVersion, JobFailed, ShardLost, StaleVersion
from elastable.master.api import (
    DenseSnapshot,
    EvaluationReport,
    JobSpec,
    JobStatus,
    Lease,
    Push,
    PushOutcome,
    PushReply,
    Task,
    TaskKind,
    Tensor,
)
from elastable.master.commits.accumulate import Accumulated, add_metrics
from elastable.master.commits.push_protocol import AsyncPushes, PushProtocol, SyncPushes, Ticket
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.master.tasks.stream_schedule import StreamSchedule
from elastable.master.tasks.worker_records import Refusals, Throughput, WorkerRecords

_log = logging.getLogger(__name__)

LEASE_S = 30.0
"""Seconds that the pin of a master that died outlives it at most."""
_RENEW_EVERY_S = LEASE_S / 6
_PROTOCOLS: Mapping[str, type[PushProtocol]] = {"sync": SyncPushes, "async": AsyncPushes}


@dataclass(frozen=True, slots=True)
class Work:
    """What the driving thread does next: one of the three, or nothing, as an evaluation was given up.

    Attributes:
        tickets: The pushes of the next version; None: no version is ready.
        evaluated: The version whose evaluation is complete; None: none is.
        over: Nothing is left to do, or the job was stopped.
    """

    tickets: tuple[Ticket, ...] | None = None
    evaluated: int | None = None
    over: bool = False


class ConcurrentEvaluation:
    """Keeps the rows and the dense part of a version readable until `end`; the pin is taken over, and renewed."""

    def __init__(self, snapshot: DenseSnapshot, pin: Snapshot, renew_every_s: float = _RENEW_EVERY_S) -> None:
        self.snapshot = snapshot
        self._keeper = PinKeeper(pin, renew_every_s, f"the evaluation of version {snapshot.version}")

    def readable(self) -> bool:
        """Whether the version is still readable, as far as is known."""
        if self._keeper.gone is None:
            return True
        _log.warning("the evaluation of version %d is given up: %s", self.snapshot.version, self._keeper.gone)
        return False

    def end(self) -> None:
        """Releases the version."""
        self._keeper.close()


class JobState:
    """A job between its first version and its last; `now` is a monotonic clock, in seconds."""

    def __init__(self, job: JobSpec, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        self.schedule = StreamSchedule(job, start.stream, start.version) if job.stream else Schedule(job)
        self.pushes = _PROTOCOLS[job.mode](self.schedule, options, start, now)
        self.board = self.pushes.board
        self.version = start.version
        self.unlogged: Callable[[], int | None] = lambda: None  # the version that the store still logs
        self.evaluated = start.evaluated
        self.records = self._records_before = start.records
        self.epoch_metrics = start.metrics
        self.logs: Mapping[str, float] = dict(start.logs)
        self.hooks: Mapping[str, object] = dict(start.hooks)
        self.evaluations: dict[int, dict[int, tuple[Tensor, ...]]] = {}
        self.concurrent: dict[int, ConcurrentEvaluation] = {}
        self.snapshot: DenseSnapshot | None = None
        self.workers, self.throughput, self._now = WorkerRecords(now), Throughput(), now
        self.refusals = Refusals()
        self.stop_reason: str | None = None
        self.failure: BaseException | None = None
        self.over = False

    @property
    def epoch(self) -> int:
        """The current epoch, counted from 0; after the last one, the number of epochs."""
        return self.board.position if self.schedule.by_epoch else self.schedule.epoch(self.board.position)

    @property
    def ending(self) -> bool:
        """Whether no task will ever come again."""
        return self.over or self.stop_reason is not None or self.failure is not None

    @property
    def phase(self) -> str:
        """The state as `JobStatus` names it."""
        if self.failure is not None:
            return "failed"
        if self.over:
            return "finished"
        if self.stop_reason is not None:
            return "stopping"
        if not self.workers.present:
            return "waiting"
        return "evaluating" if self.board.awaited is not None else "training"

    def refuse_failed(self) -> None:
        """Raises `JobFailed`, or `ShardLost`, with the reason, once the job has failed."""
        if self.failure is not None:
            # A lost shard is reported in the same way by every process that meets it.
            kind = ShardLost if isinstance(self.failure, ShardLost) else JobFailed
            raise kind(f"the job failed: {type(self.failure).__name__}: {self.failure}") from self.failure

    def lease(self, incarnation: str, want: int, holding: Collection[Task] | None) -> Lease:
        """Tasks for a worker that has joined; see `MasterApi.lease_tasks`."""
        if self.ending:
            return Lease(finished=True)
        if holding is None:
            return Lease(self.board.lease(incarnation, want, self.version))
        found = self.board.reconcile(incarnation, holding, self.version)
        more = self.board.lease(incarnation, want - len(found.tasks), self.version)
        return Lease((*found.tasks, *more), revoked=found.revoked)

    def snapshot_of(self, version: int | None) -> DenseSnapshot | None:
        """The snapshot of a version (None: the current one); None while it is not committed.

        Raises:
            StaleVersion: it is past, or will never be.
        """
        if version is None:
            return self.snapshot
        if self.ending:
            raise StaleVersion(f"version {version} is no longer trained on: the job has ended")
        if version in self.concurrent:
            return self.concurrent[version].snapshot
        if version < self.version:
            raise StaleVersion(f"version {version} is past; the current version is {self.version}")
        there = self.snapshot is not None and self.snapshot.version == version
        return self.snapshot if there else None

    def judge(self, push: Push) -> PushReply | Ticket | None:
        """What becomes of a push, or None where it is to be taken; see `PushProtocol.judge`."""
        self.refuse_failed()
        ours = self.schedule.job.job
        if push.job not in ("", ours):
            raise JobFailed(f"the master runs another job now ({ours}); the push is of {push.job}")
        if self.ending:
            why = f"the job has ended: {self.stop_reason or 'all is trained'}"
            return PushReply(PushOutcome.STALE, why, self.version)
        found = self.pushes.judge(push, self.version)
        return PushReply(*found, self.version) if isinstance(found, tuple) else found

    def take(self, push: Push, skipped: bool) -> Ticket:
        """Counts a push that `judge` let through."""
        ticket = self.pushes.take(push, skipped)
        if ticket.worker is not None and not skipped:
            self.workers.counted(ticket.worker, push.records)
        return ticket

    def take_evaluation(self, report: EvaluationReport) -> PushOutcome:
        """Counts an evaluated micro-batch."""
        if report.version > self.version:
            raise FutureVersion(f"evaluation of version {report.version}; the current version is {self.version}")
        if self.ending or report.version not in self.board.evaluations:
            return PushOutcome.STALE
        counts, _ = self.board.complete(TaskKind.EVALUATE, report.micro_batch, report.version, report.incarnation)
        if counts:
            self.evaluations.setdefault(report.version, {})[report.micro_batch] = report.metrics
        return PushOutcome.ACCEPTED if counts else PushOutcome.DUPLICATE

    def next_work(self) -> Work | None:
        """What can be done now, if anything."""
        if self.failure is not None or self.stop_reason is not None:
            return Work(over=True)
        if self.board.evaluations and (evaluated := self.board.evaluated) is not None:
            return Work(evaluated=evaluated)
        if self.board.awaited is not None:
            return None
        tickets = self.pushes.ready()
        if tickets is not None:
            return Work(tickets=tuple(tickets))
        return Work(over=True) if self.board.over and not self.board.evaluations else None

    def committed(self, tickets: tuple[Ticket, ...], made: Accumulated) -> bool:
        """Advances to the version that was committed; returns whether it ends an epoch. Workers do not see it yet."""
        self._records_before = self.records
        self.records += made.records
        self.version += 1
        self.evaluated = False
        self.throughput.note(self._now(), self.records)
        if made.metrics:
            self.epoch_metrics = add_metrics(self.epoch_metrics, [made.metrics])
        ended = self.pushes.commit()
        if isinstance(self.schedule, StreamSchedule):
            self.schedule.forget(self.version - 1)  # the store may still log this one
        for ticket in tickets:
            ticket.committed = True
        return ended

    @property
    def logged(self) -> int:
        """The version that the store has logged."""
        return self.version - (self.unlogged() == self.version)

    def pass_over(self, events: int) -> int:
        """Counts events of the next version that could not be read; how many there were in all."""
        assert isinstance(self.schedule, StreamSchedule)
        return self.schedule.pass_over(self.version + 1, events)

    def ends_within_epoch(self) -> bool:
        """Whether the job is over, and its last epoch shorter than the others: a stream has ended."""
        trained = self.version > self.schedule.job.versions_before and not self.evaluated
        return not self.ending and self.board.over and trained

    def begin_evaluation(self, version: int) -> None:
        """Starts the evaluation of a version, for which training waits."""
        self.throughput.pause(self._now())
        self.board.begin_evaluation(version)

    def begin_concurrent(self, evaluation: ConcurrentEvaluation) -> None:
        """Starts the evaluation of a version while training continues."""
        self.concurrent[evaluation.snapshot.version] = evaluation
        self.board.begin_evaluation(evaluation.snapshot.version, concurrent=True)

    def take_evaluation_total(self, version: int) -> tuple[Tensor, ...]:
        """The summed metric state of a version's evaluation, which is over."""
        reports = self.evaluations.pop(version, {})
        self.board.end_evaluation(version)
        return add_metrics((), [reports[number] for number in sorted(reports)])

    def end_epoch(self) -> tuple[Tensor, ...]:
        """The epoch's summed metric state; the next epoch counts from zero."""
        total, self.epoch_metrics, self.evaluated = self.epoch_metrics, (), True
        return total

    def progress(self) -> Progress:
        """Where the job is between two versions."""
        return self._progress(self.pushes.resume_point(), self.version, self.evaluated, self.records)

    def progress_after(self, made: Accumulated) -> Progress:
        """Where the job is once the version that is ready is committed."""
        point, records = self.pushes.resume_point(after_next=True), self.records + made.records
        found = self._progress(point, self.version + 1, False, records)
        return replace(found, metrics=add_metrics(found.metrics, [made.metrics])) if made.metrics else found

    def _progress(self, point: Progress, version: int, evaluated: bool, records: int) -> Progress:
        return replace(
            point, version=version, evaluated=evaluated, records=records, metrics=self.epoch_metrics, logs=self.logs,
            hooks=self.hooks,
            stream=self.schedule.kept(version) if isinstance(self.schedule, StreamSchedule) else {},
        )  # fmt: skip

    def status(self) -> JobStatus:
        """How far the job is, without metrics and the store's address."""
        job, logged, workers = self.schedule.job, self.logged, []
        for incarnation, (worker, _) in self.workers.present.items():
            workers.append(self.workers.status(worker, self.board.held_by(incarnation)))
        return JobStatus(
            job=job.job,
            state=self.phase,
            mode=job.mode,
            version=logged,
            versions_total=self.schedule.versions_total,
            epoch=min(self.epoch, job.epochs - 1) if job.epochs else self.epoch,
            epochs=job.epochs,
            records_trained=self._records_before if logged < self.version else self.records,
            metrics={},
            workers=tuple(workers),
            store="",
            refusals=self.refusals.latest(),
            records_total=job.train_records * job.epochs,
            records_per_s=self.throughput.rate(self._now()),
            gone=self.workers.gone(),
            stopped=self.stop_reason or "",
        )


def as_elastable_error(error: BaseException) -> ElastableError:
    """The error itself where it is an `ElastableError`, else a `JobFailed` with its text."""
    if isinstance(error, ElastableError):
        return error
    return JobFailed(f"{type(error).__name__}: {error}")
