"""The worker's main loop: join, take tasks, look up rows, compute, report, until the job ends."""

import logging
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import fields, replace
from functools import partial

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    ElastableError,
    FutureVersion,
    JobFailed,
    NotFinite,
    NotJoined,
    PermissionDenied,
    ShardLost,
    StaleVersion,
    Unauthenticated,
    Unavailable,
    VersionError,
)
from elastable.embedding_store.measures import span
from elastable.embedding_store.shards.server_contract import RowPush, RowPushOutcome, ShardStore
from elastable.embedding_store.support.futures import DaemonExecutor, at_once
from elastable.embedding_store.support.retry import retry
from elastable.master.api import (
    AsyncPushId,
    DenseSnapshot,
    EvaluationReport,
    JobSpec,
    JobStatus,
    MasterApi,
    Push,
    PushId,
    PushOutcome,
    Session,
    SyncPushId,
    Task,
    TaskKind,
    WorkerIdentity,
)
from elastable.worker.runtime.compute import MicroBatchComputer, Prepared
from elastable.worker.runtime.worker_measures import WorkerMeasures, trace_of

#: Seconds a lookup waits for its version at the source; the worker itself retries for longer.
_WAIT_S = 1.0

Rows = dict[str, Float32]


class RowsAhead:
    """Looks up at most one synchronous micro-batch ahead, in a separate thread.

    The rows are those of the micro-batch's version; if that is not committed yet, the lookup waits at the source. So
    rows and dense part of a version are transferred at the same time.

    Args:
        deadline_s: Seconds to wait for a running lookup.
        job: Whose traces its lookups belong to.
    """

    def __init__(self, source: RowSource, deadline_s: float, job: str = "") -> None:
        self._job = job
        self._source = source
        self._deadline_s = deadline_s
        self._asked: Prepared | None = None
        self._rows: Future[Rows | None] = at_once({})
        self._thread = DaemonExecutor("elastable-rows-ahead")

    def begin(self, following: Prepared | None, store: EmbeddingStore | None = None) -> None:
        """Starts the lookup of a micro-batch, unless one is still running.

        Args:
            store: That brings its cold rows near instead (`read_ahead`), for `take` to wait for; None: none.
        """
        if following is None or following is self._asked or not following.ids.unique or not self._rows.done():
            return
        read = partial(store.read_ahead, following.ids.unique) if store else partial(self._look_up, following)
        self._asked, self._rows = following, self._thread.submit(read)

    def take(self, prepared: Prepared) -> Rows | None:
        """The rows of a micro-batch whose version is committed; None: look them up.

        Raises:
            ElastableError: the error of the lookup.
        """
        if prepared is not self._asked:
            return None
        self._asked = None
        try:
            return self._rows.result(timeout=self._deadline_s + _WAIT_S)
        except (FutureVersion, Unavailable, TimeoutError):
            return None  # it may succeed once the version is committed, or with more retries

    def forget(self) -> None:
        """Discards the running lookup: its rows may come from another master's store."""
        self._asked = None

    def close(self) -> None:
        """Ends the thread."""
        self._thread.close()

    def _look_up(self, prepared: Prepared) -> Rows:
        task = prepared.task
        with span("lookup ahead", trace_of(self._job, task, task.version), {"micro_batch": task.micro_batch}):
            return self._source.lookup_when(prepared.ids.unique, task.version, _WAIT_S)


_LOOK_EVERY_S = 0.25
_LEASE_WAIT_S = 20.0  # at the master, where waiting costs nothing, and asking does
_IDLE_WAIT_S = 0.1
_JOIN_S = 5.0
_FEW = 3  # with fewer prepared evaluations the master is asked for more


class TaskFeed:
    """Keeps a few tasks prepared, the earliest first.

    Only data and ids are prepared, never values: rows and dense variables are read when a task's version is committed.
    Each request to the master lists the tasks held here, so a lost reply is repeated and tasks done elsewhere are
    dropped.

    Attributes:
        outside: Whether the master reported that this worker has no session.
    """

    def __init__(self, master: MasterApi, incarnation: str, prepare: Callable[[Task], Prepared], ahead: int) -> None:
        self._master = master
        self._incarnation = incarnation
        self._prepare = prepare
        self._ahead = ahead
        self._ready: dict[Task, Prepared] = {}
        self._life = 0  # sessions joined since the first
        self.outside = False
        self._idle = False
        self._changed = threading.Condition()
        self._stopping = False
        self._finished = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name="elastable-task-feed", daemon=True)

    def start(self) -> None:
        """Starts leasing."""
        self._thread.start()

    def head(self, wait_s: float) -> Prepared | None:
        """The earliest prepared task, waiting up to `wait_s` seconds for one.

        Raises:
            ElastableError: the error of leasing or preparing.
        """
        with self._changed:
            self._changed.wait_for(
                lambda: self._ready or self._finished or self._failure or self.outside, timeout=wait_s
            )
            if self._failure is not None:
                raise self._failure
            return self._ready[min(self._ready)] if self._ready else None

    def refuse_failed(self) -> None:
        """Raises the error of leasing or preparing, if there is one: the job may be over."""
        with self._changed:
            if self._failure is not None:
                raise self._failure

    def following(self, prepared: Prepared) -> Prepared | None:
        """The earliest prepared task after `prepared`, if there is one."""
        with self._changed:
            for task in sorted(self._ready):
                if task > prepared.task:
                    return self._ready[task]
        return None

    def idle(self) -> None:
        """Records that no prepared task can be computed yet: the master may have one that can."""
        with self._changed:
            self._idle = True
            self._changed.notify_all()

    def finished(self) -> bool:
        """Whether no task is left or will come; False after a failure, which `head` raises."""
        with self._changed:
            return self._finished and not self._ready and self._failure is None

    def done(self, prepared: Prepared) -> None:
        """Removes a task that was computed or dropped."""
        with self._changed:
            self._ready.pop(prepared.task, None)
            if prepared.task.kind is TaskKind.EVALUATE:
                # There may be more; tasks prepared ahead would leave no room for them, and may have to wait for them.
                self._idle |= sum(task.kind is TaskKind.EVALUATE for task in self._ready) < _FEW
            self._changed.notify_all()

    def begin_anew(self, keep: bool) -> None:
        """Records that a new session was opened, perhaps with another master.

        Args:
            keep: Whether to keep prepared tasks: the next request lists them, and the master revokes what is obsolete.
        """
        with self._changed:
            self.outside = False
            self._life += 1
            if not keep:
                self._ready.clear()
            self._changed.notify_all()

    def stop(self) -> None:
        """Makes the thread end; what it may be waiting for at the master ends with the worker's session."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()

    def join(self) -> None:
        """Waits a few seconds for the thread, which was stopped."""
        if self._thread.is_alive():
            self._thread.join(timeout=_JOIN_S)

    def _run(self) -> None:
        try:
            while self._lease_more():
                pass
        except Exception as error:  # noqa: BLE001 - a reader may raise anything; the loop re-raises it
            self._end(error)

    def _lease_more(self) -> bool:
        with self._changed:
            # Late, for several at a time: one call per task would cost the master too much.
            self._changed.wait_for(
                lambda: self._stopping or self._idle or 4 * len(self._ready) <= self._ahead, timeout=_LOOK_EVERY_S
            )
            if self._stopping:
                return False
            want = max(0, self._ahead - len(self._ready))
            wait_s = _LEASE_WAIT_S if want else _IDLE_WAIT_S if self._idle else 0.0
            self._idle = False
            holding, life = tuple(self._ready), self._life
        # With nothing wanted the call is made now and then all the same: a task
        # of the version in work may be handed on from a worker that died.
        try:
            lease = self._master.lease_tasks(self._incarnation, want, wait_s, holding)
        except NotJoined:
            # The session ended, or the master was replaced: the loop joins again.
            with self._changed:
                self.outside = life == self._life
                self._changed.notify_all()
                self._changed.wait_for(lambda: self._stopping, timeout=_LOOK_EVERY_S)
            return True
        with self._changed:
            for task in lease.revoked:  # others did it, or its version is no longer handed out
                self._ready.pop(task, None)
        for task in lease.tasks:
            prepared = self._prepare(task)
            with self._changed:
                if life != self._life:
                    return True  # leased by the previous master; the new one decides
                self._ready[task] = prepared
                self._changed.notify_all()
        if lease.finished:
            self._end(None)
        return not lease.finished

    def _end(self, failure: BaseException | None) -> None:
        with self._changed:
            self._finished = True
            self._failure = failure
            self._changed.notify_all()


_log = logging.getLogger(__name__)

#: How long one wait for a version lasts before the earliest task is looked at
#: anew: an evaluation, or a task of a dead worker, may have taken its place.
_VERSION_WAIT_S = 0.05
_TASK_WAIT_S = 0.5
_AHEAD = 4  # tasks to read and plan ahead


class Worker:
    """Computes micro-batches of a job until none are left.

    Args:
        master: The master, or its client.
        session: The session that `master.join(identity)` opened.
        identity: This start of the worker.
        deadline_s: Seconds that the master or store may be unreachable.
        measures: Counts what it does; None: not read by others.
        rows_to: Where gradients of rows go: the job's store servers; None: to the master, with all others.
        rows_change: Whether callbacks may write rows of a version that is committed: none are looked up ahead.

    Attributes:
        job_ended: After `run`: the last status of the job; None: its master is gone, or this worker left before.
        counted: Micro-batches that counted.
    """

    def __init__(
        self,
        master: MasterApi,
        computer: MicroBatchComputer,
        source: RowSource,
        session: Session,
        identity: WorkerIdentity,
        deadline_s: float = 30.0,
        measures: WorkerMeasures | None = None,
        rows_to: ShardStore | None = None,
        rows_change: bool = False,
    ) -> None:
        self._measures = measures or WorkerMeasures()
        self._measures.sessions += 1
        self._master, self._deadline_s = master, deadline_s
        self._computer, self._source = computer, source
        self._session, self._identity = session, identity
        self._sync = session.job.mode == "sync"  # a task then is computed on the version that it is for
        # Rows of a numbered version do not change, unless callbacks write some after its commit; those of an
        # asynchronous job are wanted as late as possible.
        self._looks_ahead = self._sync and not rows_change
        self._sequence = 0  # of asynchronous pushes
        self._snapshots: dict[TaskKind, DenseSnapshot] = {}
        self._ahead_since: float | None = None  # since when the master has been at an earlier version
        self._stopped = False
        self.job_ended: JobStatus | None = None
        self._feed = TaskFeed(master, identity.incarnation, computer.prepare, _AHEAD)
        self.counted = 0
        self._rows_ahead = RowsAhead(source, deadline_s, session.job.job)
        self._rows_to = rows_to
        self._show_session()

    def run(self) -> int:
        """Works until the job ends; the number of micro-batches that counted.

        Raises:
            ElastableError: what stopped it; also reported to the master.
        """
        self._feed.start()
        try:
            while not self._feed.finished() and not self._stopped:
                prepared = self._feed.head(_TASK_WAIT_S)
                if not self._session.alive() or self._feed.outside:
                    self._rejoin()
                elif prepared is not None:
                    self._attempt(prepared)
            if not self._stopped and self._session.alive():
                with suppress(ElastableError):  # it waits for open sessions before it goes, and so answers
                    self.job_ended = self._master.status()
        except Exception as error:
            self._report(error)
            raise
        finally:
            self._feed.stop()
            self._rows_ahead.close()
            self._session.close()
            self._feed.join()
            self._measures.close()
        return self.counted

    def not_ready(self) -> dict[str, str]:
        """Why it cannot work now, for health checks; empty: it can."""
        return {} if self._session.alive() else {"worker": "the session with the master has ended"}

    def stop(self) -> None:
        """Makes `run` return after the current micro-batch."""
        self._stopped = True

    def _attempt(self, prepared: Prepared) -> None:
        """Computes the task, if its version is committed."""
        try:
            with self._measures.phase("wait"):
                held = self._hold(prepared.task)
            if not held:
                self._feed.idle()
                return
            task = prepared.task
            job, computed_on = self._session.job.job, self._snapshots[task.kind].version
            with self._measures.micro_batch(job, task, computed_on, self._identity.incarnation):
                counted = self._train(prepared) if task.kind is TaskKind.TRAIN else self._evaluate(prepared)
        except StaleVersion as stale:
            # Another worker computed it: its lease had been reassigned.
            _log.info("micro-batch %d dropped: %s", prepared.task.micro_batch, stale)
            counted = 0
        except FutureVersion as ahead:
            self._go_back(ahead)
            return
        except NotJoined:
            # The master restarted during the computation and does not know this session.
            self._rejoin()
            return
        self._feed.done(prepared)
        self._measures.note(prepared.task.kind.value, bool(counted), prepared.records)
        if counted:
            self._ahead_since = None
            self.counted += 1

    def _hold(self, task: Task) -> bool:
        """Gets the dense part of the task's version; False if it is not committed yet."""
        wanted = self._version_of(task)
        held = self._snapshots.get(task.kind)
        if wanted is None or held is None or held.version != wanted:
            # One for each kind: the version evaluated is not the version trained on.
            held = self._master.pull_dense(self._identity.incarnation, wanted, _VERSION_WAIT_S)
            if held is None:
                return False
            self._snapshots[task.kind] = held
        # Even if the version has not changed: the previous micro-batch changed the states.
        self._computer.hold(held)
        return True

    def _version_of(self, task: Task) -> int | None:
        """The version that a task is computed on; None: whichever is current."""
        return task.version if self._sync or task.kind is TaskKind.EVALUATE else None

    def _next_id(self, task: Task) -> PushId:
        """The name of the push of a task that has been computed."""
        if self._sync:
            return SyncPushId(task.version, task.micro_batch)
        self._sequence += 1
        return AsyncPushId(self._identity.incarnation, self._sequence, task.micro_batch)

    def _train(self, prepared: Prepared) -> int:
        push = Push(
            id=self._next_id(prepared.task),
            records=prepared.records,
            job=self._session.job.job,
            incarnation=self._identity.incarnation,
            bad_events=prepared.bad_events,
        )
        if not prepared.records:  # no event of its stream could be read
            self._master.report_gradient(push)
            return 0
        rows = self._look_up(prepared)
        self._look_ahead(prepared)
        with self._measures.phase("compute"):
            computed_on = None if self._sync else self._snapshots[TaskKind.TRAIN].version
            push = self._computer.train(prepared, rows).pushed(push, computed_on)
        with self._measures.phase("push"):
            if self._rows_to is not None:
                push = push_rows(push, self._rows_to, self._session.job, self._deadline_s, self._feed.refuse_failed)
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
        self._measures.lookups.add(asked)

        def look_up() -> dict[str, Float32]:
            self._feed.refuse_failed()  # a store that is lost for good ends the job before the retries run out
            return self._source.lookup(asked, self._version_of(prepared.task))

        with self._measures.phase("lookup"):
            rows = self._rows_ahead.take(prepared)
            return retry(look_up, "a lookup", self._deadline_s, on=(Unavailable,)) if rows is None else rows

    def _look_ahead(self, prepared: Prepared) -> None:
        """Starts the lookup of the next micro-batch, where its rows are already determined."""
        if self._looks_ahead:
            self._rows_ahead.begin(self._feed.following(prepared))

    def _go_back(self, ahead: FutureVersion) -> None:
        """Starts again with a restarted master, which is at an earlier version, unless it stays behind: no restart."""
        self._ahead_since = self._ahead_since or time.monotonic()
        if time.monotonic() - self._ahead_since > self._deadline_s:
            raise ahead
        _log.warning("the master is at an earlier version: %s", ahead)
        self._rejoin(keep=False)

    def _rejoin(self, keep: bool = True) -> None:
        """Opens a new session, with this master or its replacement.

        Prepared tasks may be kept: a push identifies its micro-batch, so it counts once, whoever holds the lease. Rows
        and dense values are read again. Not those of a stream, which another master may have cut in another way: what
        it leased names its own cut, and neither it nor a store server takes a push of a session before.

        Raises:
            JobFailed: the master runs another job, or this one with other settings.
        """
        _log.warning("the session with the master ended; joining again")
        self._session.close()
        before = self._session.job
        self._session = self._master.join(self._identity)
        self._show_session()
        self._measures.sessions += 1
        _refuse_other_job(before, self._session.job)
        self._snapshots.clear()
        self._rows_ahead.forget()
        self._source.forget()
        self._feed.begin_anew(keep and not self._session.job.stream)

    def _show_session(self) -> None:
        if self._rows_to is not None:
            self._rows_to.show_session(self._session.store_session)

    def _report(self, error: Exception) -> None:
        if isinstance(error, JobFailed) or (isinstance(error, Unavailable | ShardLost) and not self._session.alive()):
            # The master reported it, perhaps that of another job, or it cannot be reached, or has ended for it.
            return
        # What fails here fails on every worker, except an unreachable server, credentials, and too little memory.
        # The master itself decides whether a shard is lost: only this worker's connection may be broken.
        local = Unavailable | ShardLost | Unauthenticated | PermissionDenied | VersionError | MemoryError
        fatal = not isinstance(error, local)
        try:
            self._master.report_failure(self._identity.incarnation, error, fatal)
        except ElastableError as silence:
            _log.warning("the master could not be informed of %s: %s", error, silence)


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


# Gradients of rows on their way to store servers; the rest goes to the master


def push_rows(
    push: Push, servers: ShardStore, job: JobSpec, deadline_s: float, refuse_failed: Callable[[], None]
) -> Push:
    """Hands in the gradients of rows; what is left is the master's.

    Args:
        servers: All store servers of the job.
        deadline_s: Seconds that a server may be away, or be full.
        refuse_failed: Called before every attempt; raises where the job is over.

    Raises:
        StaleVersion: the version that it was computed on is past; of an asynchronous job: a later push of this worker
            has come before it.
        NotFinite: gradients hold NaN or Inf, and the job refuses these.
        ElastableError: as `ShardStore.push_rows`.
    """
    rows = _rows_of(push, job.job)
    left = replace(push, slices={}, parts=tuple(replace(part, slices={}) for part in push.parts))

    def attempt() -> RowPushOutcome:
        refuse_failed()
        return servers.push_rows(rows)

    try:
        outcome = retry(attempt, "a push of rows", deadline_s, on=(Unavailable,))
    except NotFinite as error:
        reason = push.not_finite or str(error)
        if job.not_finite != "skip":
            raise NotFinite(reason) from error
        return replace(left, not_finite=reason)
    if outcome is RowPushOutcome.STALE:
        raise StaleVersion(f"a store server has no use for push {push.id}: it has a later version, or a later push")
    return left


def _rows_of(push: Push, job: str) -> RowPush:
    parts = (push.slices, *(part.slices for part in push.parts))
    if isinstance(push.id, SyncPushId):
        return RowPush(job, push.id.version, push.id.micro_batch, parts)
    assert push.computed_on is not None, "a worker says what it computed an asynchronous push on"
    return RowPush(job, push.computed_on, push.id.sequence, parts, sender=push.id.incarnation)
