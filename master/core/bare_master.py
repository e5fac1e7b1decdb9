"""A parameter server without a model: clients create tables, look up, and push."""

import threading
import time
from collections.abc import Collection, Mapping
from concurrent.futures import Future
from dataclasses import replace

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, NotFinite
from elastable.embedding_store.support.futures import Timers, at_once, settle
from elastable.master.api import (
    AsyncPushId,
    DenseSnapshot,
    EvaluationReport,
    JobSpec,
    JobStatus,
    Lease,
    Push,
    PushOutcome,
    PushReply,
    Session,
    Task,
    WorkerIdentity,
    WorkerStatus,
)
from elastable.master.commits.committer import Committer
from elastable.master.commits.dense_part import DensePart
from elastable.master.commits.push_protocol import Sequences
from elastable.master.commits.version_record import VersionRecord
from elastable.master.core.served_master import ServedMaster
from elastable.master.master_options import MasterOptions
from elastable.master.push_check import Expected, check_finite, check_push
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.worker_records import LocalSession, Sessions

_SETTLED_S = 60.0  # beyond its own time, in which every wait is answered
_MOST_COUNTED = 65_536  # clients whose pushes are counted; of more, those that pushed last


class BareMaster(ServedMaster):
    """Commits every push at once, with the learning rates of the tables' own optimizers.

    There are no tasks and no dense variables; after `stop` leases are returned as finished. A store that keeps records
    keeps the clients' sequences with the version: a server that takes over knows every push that was committed.

    Args:
        store: Where tables are created and rows change.
        job: Its `not_finite` says what becomes of NaN and Inf.
        options: Of them, the commit's deadline.
    """

    def __init__(self, store: EmbeddingStore, job: JobSpec | None = None, options: MasterOptions | None = None) -> None:
        self.job = job or JobSpec(job="bare", mode="async")
        options = options or MasterOptions()
        self._store = store
        self._committer = Committer(store, DensePart(), replace(self.job, average="sum"), options.commit_deadline_s)
        before = self._taken_over()
        self._sequences = Sequences(before.sequences)
        self._tables: Mapping[str, TableSpec] = {}
        self._lock = threading.Lock()
        self._timers = Timers("elastable-waits")
        self._idle: set[Future[Lease]] = set()
        self._ended: Future[JobStatus] = Future()
        self._sessions = Sessions()
        self._pushes: dict[str, int] = {}
        self._records = before.records
        self._stopped = False

    def _taken_over(self) -> Progress:
        if not self._store.keeps_records:
            return Progress()
        self._store.recover()
        record = self._store.record()
        return Progress() if record is None else VersionRecord.from_bytes(record).progress

    def join(self, worker: WorkerIdentity) -> Session:
        with self._lock:
            self._sessions.open(worker)
        return LocalSession(self.job, lambda: self._leave(worker.incarnation), lambda: not self._stopped)

    def _leave(self, incarnation: str) -> None:
        with self._lock:
            self._sessions.close(incarnation)

    def lease_tasks(self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None) -> Lease:
        return self.lease_tasks_later(incarnation, want, wait_s, holding).result(wait_s + _SETTLED_S)

    def lease_tasks_later(
        self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None
    ) -> Future[Lease]:
        if self._stopped or wait_s <= 0:
            return at_once(Lease(finished=self._stopped))
        result: Future[Lease] = Future()
        timer = self._timers.call_at(time.monotonic() + wait_s, lambda: settle(result, Lease()))

        def over(_: object) -> None:
            timer.cancel()
            self._idle.discard(result)

        self._idle.add(result)
        result.add_done_callback(over)
        if self._stopped:  # meanwhile
            settle(result, Lease(finished=True))
        return result

    def ended(self) -> Future[JobStatus]:
        return self._ended

    def not_ready(self) -> str | None:
        return "it was stopped" if self._stopped else None

    def pull_dense(self, incarnation: str, version: int | None, wait_s: float) -> DenseSnapshot | None:
        return DenseSnapshot(self._store.version(), (), ())

    def report_gradient(self, push: Push) -> PushReply:
        name = push.id
        if not isinstance(name, AsyncPushId):
            raise BadInput("a parameter server without a model takes pushes named by (incarnation, sequence)")
        if not set(push.slices) <= set(self._tables):
            self._tables = self._store.specs()
        expected = Expected(tables=self._tables)
        check_push(push, expected)
        with self._lock:
            if self._sequences.knows(name):
                reason = f"sequence {name.sequence} of {name.incarnation!r} was counted before"
                return PushReply(PushOutcome.DUPLICATE, reason, self._store.version())
            try:
                check_finite(push, expected)
            except NotFinite as error:
                if self.job.not_finite != "skip":
                    raise
                self._sequences.remember(name)
                return PushReply(PushOutcome.SKIPPED, str(error), self._store.version())
            version = self._store.version() + 1
            made = self._committer.commit(version, [push], lambda made: self._place_after(version, name, made.records))
            self._records += made.records
            self._sequences.remember(name)
            self._count(name.incarnation)
            return PushReply(PushOutcome.ACCEPTED, "", version)

    def _count(self, incarnation: str) -> None:
        self._pushes[incarnation] = self._pushes.pop(incarnation, 0) + 1
        while len(self._pushes) > _MOST_COUNTED:
            del self._pushes[next(iter(self._pushes))]

    def _place_after(self, version: int, name: AsyncPushId, records: int) -> Progress:
        sequences = {**self._sequences.as_dict(), name.incarnation: name.sequence}
        return Progress(version, records=self._records + records, sequences=sequences)

    def report_evaluation(self, report: EvaluationReport) -> PushOutcome:
        return PushOutcome.STALE

    def report_failure(self, incarnation: str, error: BaseException, fatal: bool) -> None:
        """Does nothing: one client's failure is not another's."""

    def status(self) -> JobStatus:
        with self._lock:
            workers = tuple(
                WorkerStatus(identity, 0, self._pushes.get(identity.incarnation, 0)) for identity in self._sessions
            )
            return JobStatus(
                job=self.job.job,
                state="finished" if self._stopped else "training",
                mode="async",
                version=self._store.version(),
                versions_total=0,
                epoch=0,
                epochs=0,
                records_trained=self._records,
                metrics={},
                workers=workers,
                store=self.job.store_url,
            )

    def stop(self, reason: str) -> None:
        with self._lock:
            self._stopped = True
        for waiting in tuple(self._idle):
            settle(waiting, Lease(finished=True))
        settle(self._ended, self.status())
