"""The worker in the thread that drives its master: micro-batches are computed by direct calls, and nothing is sent."""

import logging
import time
from concurrent.futures import Future, wait
from functools import partial

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import FutureVersion, StaleVersion, Unavailable
from elastable.embedding_store.shards.server_contract import ShardStore
from elastable.embedding_store.support.futures import DaemonExecutor
from elastable.embedding_store.support.retry import retry
from elastable.master.api import (
    AsyncPushId,
    EvaluationReport,
    Push,
    PushId,
    PushOutcome,
    ServedMaster,
    SyncPushId,
    Task,
    TaskKind,
    WorkerIdentity,
)
from elastable.worker.runtime.compute import MicroBatchComputer, Prepared
from elastable.worker.runtime.loop import RowsAhead, push_rows
from elastable.worker.runtime.worker_measures import WorkerMeasures

_log = logging.getLogger(__name__)

_AHEAD = 4  # tasks to read and plan ahead
_LOOK_EVERY_S = 0.25
_JOIN_S = 5.0


class WorkHere:
    """Computes the micro-batches of a job in its master's thread: what `Master.run` takes as `work_here`.

    Data and ids of the next tasks are read and planned in another thread meanwhile. Close it after the job.

    Args:
        computer: Of the master's own model.
        store: The master's.
        deadline_s: Seconds that the store may be unreachable.
        measures: Counts what it does; None: not read by others.
        rows_change: Whether callbacks may write rows of a version that is committed: none are looked up ahead.
    """

    def __init__(
        self,
        master: ServedMaster,
        computer: MicroBatchComputer,
        store: EmbeddingStore,
        deadline_s: float = 30.0,
        measures: WorkerMeasures | None = None,
        rows_change: bool = False,
    ) -> None:
        self._master, self._computer, self._store, self._deadline_s = master, computer, store, deadline_s
        self._measures = measures or WorkerMeasures()
        self._measures.sessions += 1
        identity = WorkerIdentity.of_this_process()
        self._session, self._incarnation = master.join(identity), identity.incarnation
        job = self._job = self._session.job
        self._sync = job.mode == "sync"
        self._servers = store if isinstance(store, ShardStore) else None
        if self._servers is not None:
            self._servers.show_session(self._session.store_session)
        self._preparing: dict[Task, Future[Prepared]] = {}
        self._reader = DaemonExecutor("elastable-task-feed")
        self._asks = True  # before it computes what is here: there may be tasks that come before
        self._sequence = 0  # of asynchronous pushes
        self._ahead_since: float | None = None  # since when the store has been at an earlier version
        # This thread commits meanwhile: of the next version only cold rows of a tier can be brought near.
        self._tiered = self._servers is None and store.flush_status() is not None
        self._rows_ahead: RowsAhead | None = None
        if self._sync and not rows_change and (self._tiered or job.micro_batches_per_version > 1):
            self._rows_ahead = RowsAhead(store, deadline_s, job.job)

    def __call__(self) -> bool:
        """Computes the earliest task; False: there is none that can be computed now.

        Raises:
            ElastableError: of the reader, the step, the store or the master.
        """
        # Twice: the first time may find out that the master has a task that comes before those which are here.
        return self._work() or self._work()

    def close(self) -> None:
        """Ends its session, and waits a few seconds for what is read now."""
        self._reader.close(_JOIN_S)
        if self._rows_ahead is not None:
            self._rows_ahead.close()
        self._session.close()
        self._measures.close()

    def _work(self) -> bool:
        if (prepared := self._earliest()) is None:
            return False
        task, counted = prepared.task, False
        version = task.version if self._sync or task.kind is TaskKind.EVALUATE else None
        try:
            with self._measures.phase("wait"):
                held = self._master.pull_dense_later(self._incarnation, version, 0.0).result()
            if held is None:
                self._asks = True
                return False
            self._computer.hold(held)
            with self._measures.micro_batch(self._job.job, task, held.version, self._incarnation):
                rows = self._rows(prepared, version)
                if task.kind is TaskKind.TRAIN:
                    counted = self._train(prepared, rows, held.version)
                else:
                    counted = self._evaluate(prepared, rows)
        except StaleVersion as stale:
            # Another worker computed it: its lease had been reassigned.
            _log.info("micro-batch %d dropped: %s", task.micro_batch, stale)
        except FutureVersion as ahead:
            self._wait_for(ahead)
            return False
        del self._preparing[task]
        self._asks = task.kind is TaskKind.EVALUATE  # there may be more
        self._measures.note(task.kind.value, counted, prepared.records)
        self._ahead_since = None if counted else self._ahead_since
        return True

    def _earliest(self) -> Prepared | None:
        """The earliest task, once it is prepared; None: there is none now, or the job has ended."""
        if self._asks or 4 * len(self._preparing) <= _AHEAD:
            self._asks = False
            want, holding = max(0, _AHEAD - len(self._preparing)), tuple(self._preparing)
            lease = self._master.lease_tasks_later(self._incarnation, want, 0.0, holding).result()
            for task in lease.revoked:  # others did it
                self._preparing.pop(task, None)
            for task in lease.tasks:
                if task not in self._preparing:
                    self._preparing[task] = self._reader.submit(partial(self._computer.prepare, task))
        if not self._preparing:
            return None
        first = self._preparing[min(self._preparing)]
        while not wait((first,), _LOOK_EVERY_S).done:  # its reader may be waiting for a stream that is away
            if self._master.not_ready() is not None:
                return None
        return first.result()

    def _rows(self, prepared: Prepared, version: int | None) -> dict[str, Float32]:
        """All rows of the micro-batch, in one lookup."""
        asked = prepared.ids.unique
        if not asked:
            return {}
        self._measures.lookups.add(asked)

        def look_up() -> dict[str, Float32]:
            self._master.refuse_ended()  # a store that is lost for good ends the job before the retries run out
            return self._store.lookup(asked, version)

        with self._measures.phase("lookup"):
            rows = None if self._rows_ahead is None else self._rows_ahead.take(prepared)
            return retry(look_up, "a lookup", self._deadline_s, on=(Unavailable,)) if rows is None else rows

    def _train(self, prepared: Prepared, rows: dict[str, Float32], computed_on: int) -> bool:
        task, job = prepared.task, self._job.job
        self._sequence += 1
        sync, name = SyncPushId(task.version, task.micro_batch), self._incarnation
        push_id: PushId = sync if self._sync else AsyncPushId(name, self._sequence, task.micro_batch)
        push = Push(push_id, prepared.records, job=job, incarnation=name, bad_events=prepared.bad_events)
        if not prepared.records:  # no event of its stream could be read
            self._master.report_gradient_later(push)
            return False
        if self._rows_ahead is not None:
            self._look_ahead(self._rows_ahead, task)
        with self._measures.phase("compute"):
            push = self._computer.train(prepared, rows).pushed(push, None if self._sync else computed_on)
        with self._measures.phase("push"):
            if self._servers is not None:
                push = push_rows(push, self._servers, self._job, self._deadline_s, self._master.refuse_ended)
            later = self._master.report_gradient_later(push)
        if not later.done():
            return True  # of an asynchronous job: this thread commits it next
        if self._rows_ahead is not None:
            self._look_ahead(self._rows_ahead, task)  # again, where the next one was not prepared yet
        reply = later.result()
        if reply.outcome is not PushOutcome.ACCEPTED:
            _log.info("micro-batch %d %s: %s", task.micro_batch, reply.outcome, reply.reason)
        return reply.outcome is PushOutcome.ACCEPTED

    def _evaluate(self, prepared: Prepared, rows: dict[str, Float32]) -> bool:
        task, metrics = prepared.task, self._computer.evaluate(prepared, rows)
        report = EvaluationReport(self._incarnation, task.version, task.micro_batch, prepared.records, metrics)
        return self._master.report_evaluation(report) is PushOutcome.ACCEPTED

    def _look_ahead(self, rows: RowsAhead, task: Task) -> None:
        """Starts the lookup of the next micro-batch, where its rows are already determined."""
        following = min((other for other in self._preparing if other > task), default=None)
        if following is None or not self._preparing[following].done():
            return
        if following.version == task.version:
            rows.begin(self._preparing[following].result())
        elif self._tiered:
            rows.begin(self._preparing[following].result(), self._store)

    def _wait_for(self, ahead: FutureVersion) -> None:
        """A store server was started again, at an earlier version; raises where it stays behind."""
        self._ahead_since = self._ahead_since or time.monotonic()
        if time.monotonic() - self._ahead_since > self._deadline_s:
            raise ahead
        _log.warning("the store is at an earlier version: %s", ahead)
        if self._rows_ahead is not None:
            self._rows_ahead.forget()
        self._store.forget()
