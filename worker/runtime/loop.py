"""A worker's life: join, take tasks, look up, compute, report, until the job ends."""

from __future__ import annotations

import logging
import time
from dataclasses import fields

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.errors import (
    ElastableError,
    FutureVersion,
    JobFailed,
    NotJoined,
    PermissionDenied,
    ShardLost,
    StaleVersion,
    Unauthenticated,
    Unavailable,
    VersionError,
)
from elastable.embedding_store.support.retry import retry
from elastable.master.api import (
    DenseSnapshot,
    EvaluationReport,
    JobSpec,
    MasterApi,
    Push,
    PushOutcome,
    Session,
    Task,
    TaskKind,
    WorkerIdentity,
)
from elastable.worker.runtime.compute import MicroBatchComputer, Prepared
from elastable.worker.runtime.push_naming import push_naming
from elastable.worker.runtime.rows_ahead import RowsAhead, source_for
from elastable.worker.runtime.task_feed import TaskFeed

__all__ = ["Worker"]

_log = logging.getLogger(__name__)

#: How long one wait for a version lasts before the earliest task is looked at
#: anew: an evaluation, or a task of a dead worker, may have taken its place.
_VERSION_WAIT_S = 0.05


class Worker:
    """Computes micro-batches of a job until there are none left.

    Args:
        master: The master, or its client.
        computer: What computes a micro-batch.
        source: Where rows are looked up.
        session: The session that `master.join(identity)` opened.
        identity: This start of the worker.
        deadline_s: How long a master or store may stay away.
        ahead: Tasks that are read and planned ahead.
    """

    def __init__(
        self,
        master: MasterApi,
        computer: MicroBatchComputer,
        source: RowSource,
        session: Session,
        identity: WorkerIdentity,
        deadline_s: float = 30.0,
        ahead: int = 4,
    ) -> None:
        self._master = master
        self._computer = computer
        self._source = source
        self._session = session
        self._identity = identity
        self._deadline_s = deadline_s
        self._naming = push_naming(session.job, identity.incarnation)
        self._snapshots: dict[TaskKind, DenseSnapshot] = {}
        self._ahead_since: float | None = None  # when the master was first seen at an earlier version, of late
        self._stopped = False
        self._feed = TaskFeed(master, identity.incarnation, computer.prepare, ahead)
        self._rows_ahead = RowsAhead(source, deadline_s)

    def run(self) -> int:
        """Works until the job ends; the number of micro-batches that counted.

        Raises:
            ElastableError: what made it stop, also told to the master.
        """
        counted = 0
        self._feed.start()
        self._rows_ahead.start()
        try:
            while not self._feed.finished() and not self._stopped:
                prepared = self._feed.head(wait_s=0.5)
                if not self._session.alive() or self._feed.outside:
                    self._rejoin()
                elif prepared is not None:
                    counted += self._attempt(prepared)
        except Exception as error:
            self._tell(error)
            raise
        finally:
            self._feed.stop()
            self._rows_ahead.close()
            self._session.close()
        return counted

    def stop(self) -> None:
        """Makes `run` return after the micro-batch in work."""
        self._stopped = True

    def _attempt(self, prepared: Prepared) -> int:
        """Computes the task if its version is there; 1 if it counted."""
        try:
            if not self._hold(prepared.task):
                self._feed.idle()
                return 0
            counted = self._train(prepared) if prepared.task.kind is TaskKind.TRAIN else self._evaluate(prepared)
        except StaleVersion as stale:
            # Somebody else computed it: its lease had been given on.
            _log.info("micro-batch %d dropped: %s", prepared.task.micro_batch, stale)
            counted = 0
        except FutureVersion as ahead:
            self._go_back(ahead)
            return 0
        except NotJoined:
            # The master was started again while this was computed, and knows nobody yet.
            self._rejoin()
            return 0
        self._feed.done(prepared)
        if counted:
            self._ahead_since = None
        return counted

    def _hold(self, task: Task) -> bool:
        """Gets the dense part of the task's version; False if it is not committed yet."""
        wanted = self._naming.version_of(task)
        held = self._snapshots.get(task.kind)
        if wanted is None or held is None or held.version != wanted:
            # One for each kind: the version evaluated is not the version trained on.
            held = self._master.pull_dense(self._identity.incarnation, wanted, _VERSION_WAIT_S)
            if held is None:
                return False
            self._snapshots[task.kind] = held
        # Also where the version is held already: the micro-batch before changed the states.
        self._computer.hold(held)
        return True

    def _train(self, prepared: Prepared) -> int:
        rows = self._look_up(prepared)
        self._look_ahead(prepared)
        result = self._computer.train(prepared, rows)
        push = Push(
            id=self._naming.next_id(prepared.task),
            records=prepared.records,
            dense=result.dense,
            slices=result.slices,
            states=result.states,
            metrics=result.metrics,
            job=self._session.job.job,
            computed_on=self._naming.computed_on(self._snapshots[TaskKind.TRAIN].version),
            incarnation=self._identity.incarnation,
            divisor=result.divisor,
            losses=result.losses,
            parts=result.parts,
        )
        reply = self._master.report_gradient(push)
        self._look_ahead(prepared)  # again, where the next one was not prepared yet
        if reply.outcome is not PushOutcome.ACCEPTED:
            _log.info("micro-batch %d %s: %s", prepared.task.micro_batch, reply.outcome, reply.reason)
        return int(reply.outcome is PushOutcome.ACCEPTED)

    def _evaluate(self, prepared: Prepared) -> int:
        metrics = self._computer.evaluate(prepared, self._look_up(prepared))
        task = prepared.task
        report = EvaluationReport(self._identity.incarnation, task.version, task.micro_batch, prepared.records, metrics)
        return int(self._master.report_evaluation(report) is PushOutcome.ACCEPTED)

    def _look_up(self, prepared: Prepared) -> dict[str, Float32]:
        """All rows of the micro-batch, of its version, in one lookup."""
        asked = prepared.ids.unique
        if not asked:
            return {}
        rows = self._rows_ahead.take(prepared)
        if rows is not None:
            return rows
        version = self._naming.version_of(prepared.task)
        source = source_for(self._source, prepared.task)

        def look_up() -> dict[str, Float32]:
            self._feed.refuse_failed()  # a store that is gone for good ends the job before this worker's patience
            return source.lookup(asked, version)

        return retry(look_up, "a lookup", self._deadline_s, on=(Unavailable,))

    def _look_ahead(self, prepared: Prepared) -> None:
        """Starts the lookup of the next micro-batch, where its rows are already determined."""
        if self._naming.looks_ahead:
            self._rows_ahead.begin(self._feed.following(prepared))

    def _go_back(self, ahead: FutureVersion) -> None:
        """Begins anew with a master that stands at an earlier version: it was started again.

        Raises:
            FutureVersion: that goes on for longer than the deadline, so it is no restart.
        """
        self._ahead_since = self._ahead_since or time.monotonic()
        if time.monotonic() - self._ahead_since > self._deadline_s:
            raise ahead
        _log.warning("the master stands at an earlier version: %s", ahead)
        self._rejoin(keep=False)

    def _rejoin(self, keep: bool = True) -> None:
        """Opens another session, with this master or the one in its place.

        What is prepared may stay: a push names what it computed, so it counts once whether the lease is still this
        worker's or not. Values do not: they are read anew.

        Raises:
            JobFailed: the master runs another job, or this one otherwise.
        """
        _log.warning("the session with the master ended; joining again")
        self._session.close()
        before = self._session.job
        self._session = self._master.join(self._identity)
        _refuse_other_job(before, self._session.job)
        self._snapshots.clear()
        self._rows_ahead.forget()
        self._source.forget()
        self._feed.begin_anew(keep)

    def _tell(self, error: Exception) -> None:
        if isinstance(error, JobFailed) or (isinstance(error, Unavailable) and not self._session.alive()):
            # It is the master that said so, perhaps that of another job; or that cannot be reached.
            return
        # What fails here fails everywhere, but for a server out of reach, credentials and memory that is short here.
        # Whether a shard is lost the master finds out for itself: this worker's way to it may be cut.
        local = Unavailable | ShardLost | Unauthenticated | PermissionDenied | VersionError | MemoryError
        fatal = not isinstance(error, local)
        try:
            self._master.report_failure(self._identity.incarnation, error, fatal)
        except ElastableError as silence:
            _log.warning("the master could not be told of %s: %s", error, silence)


def _refuse_other_job(before: JobSpec, now: JobSpec) -> None:
    if now.job != before.job:
        raise JobFailed(f"the master runs another job now ({now.job}); this worker was in {before.job}")
    # A job may be resumed for more epochs, from a copy of its model file.
    differing = [
        f"{field.name} was {getattr(before, field.name)} and is {getattr(now, field.name)}"
        for field in fields(JobSpec)
        if field.name not in ("epochs", "model_file") and getattr(before, field.name) != getattr(now, field.name)
    ]
    if differing:
        raise JobFailed(
            f"the master runs job {now.job} otherwise now ({'; '.join(differing)}): start this worker again"
        )
