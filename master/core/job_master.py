"""The master: leases tasks, takes pushes, and makes one version after the other."""

import logging
import secrets
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future, wait
from contextlib import nullcontext
from dataclasses import replace
from functools import partial

from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ElastableError, JobFailed, NotFinite, StaleVersion
from elastable.embedding_store.shards.ownership import session_of
from elastable.embedding_store.shards.server_contract import ShardStore
from elastable.embedding_store.support.futures import at_once, settle
from elastable.embedding_store.tiers.redis.url import redacted
from elastable.master.api import (
    DenseSnapshot,
    EvaluationReport,
    EventSource,
    JobSpec,
    JobStatus,
    Lease,
    Push,
    PushOutcome,
    PushReply,
    ServedMaster,
    Session,
    Task,
    Tensor,
    WorkerIdentity,
)
from elastable.master.commits.dense_part import DensePart
from elastable.master.commits.push_protocol import Ticket
from elastable.master.core.driver import Driver, JobMeasures
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_state import JobState
from elastable.master.core.stream_planner import StreamPlanner
from elastable.master.core.waits import Waits
from elastable.master.master_options import MasterOptions
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.push_check import Expected, check_evaluation, check_finite, check_push
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.stream_schedule import StreamSchedule
from elastable.master.tasks.worker_records import LocalSession

_log = logging.getLogger(__name__)

_METRICS_AGE_S = 0.5
_PUSH_DEADLINE_S = 60.0  # that an async push may wait for its commit
_SETTLED_S = 60.0  # beyond its own time, in which every wait is answered


class Master(ServedMaster):
    """The one authority over a job's version.

    Any thread may call it. One thread calls `run`: it commits, and calls the hooks, so that they see one version.

    Args:
        store: Holds the job's tables, at the version of `start`.
        metrics: The model's metrics; None: metric states are not checked.
        start: Where a resumed job continues.
        events: The stream that the job trains on; None: it trains on numbered records.

    Raises:
        BadInput: no training records, or the store is at another version.
    """

    def __init__(
        self,
        job: JobSpec,
        store: EmbeddingStore,
        dense: DensePart,
        metrics: ModelMetrics | None = None,
        *,
        start: Progress | None = None,
        options: MasterOptions | None = None,
        events: EventSource | None = None,
    ) -> None:
        start, self._options = start or Progress(), options or MasterOptions()
        if store.version() != start.version:
            raise BadInput(
                f"the store is at version {store.version()}, the job begins at version {start.version}: restore the "
                "checkpoint of that version, or begin with an empty store"
            )
        self.job, self._metrics = job, metrics or ModelMetrics()
        known = None if metrics is None else metrics.specs
        self._session_key = b""  # of the job's store servers
        if elsewhere := isinstance(store, ShardStore):
            self._session_key = secrets.token_bytes(32)
            store.begin_job(job.job, dense.may_overflow, self._session_key)
        self._expected = Expected(dense.variables, dense.states, known, store.specs(), dense.may_overflow, elsewhere)
        self._changed, self._ended = threading.Condition(), Future[str]()
        self._state = JobState(job, self._options, start, time.monotonic)
        self.pushes_wait = self._state.pushes.replies_after_commit
        self._flush_status, self.measures, self._begun = store.flush_status, JobMeasures(), False
        self._servers = store.watch.statuses if isinstance(store, StoreServers) else tuple
        self._waits = Waits(self._state, self._changed)
        self._driver = Driver(
            self._state, self._waits, self._changed, store, dense, self._metrics, self._options, self.measures
        )
        self._planner: StreamPlanner | None = None
        if isinstance(schedule := self._state.schedule, StreamSchedule):
            assert events is not None, "a job on a stream reads one"
            self._planner = StreamPlanner(
                schedule, self._state.board, events, self._options, lambda: self._state.version,
                lambda: self._state.logged, self._waits.changing, self._planned,
            )  # fmt: skip
        self._running_metrics: tuple[float, dict[str, float]] = (-_METRICS_AGE_S, {})

    def run(self, hooks: Hooks | None = None, work_here: Callable[[], bool] | None = None) -> None:
        """Drives the job in this thread until it ends.

        Args:
            hooks: Called between versions.
            work_here: Computes a micro-batch in this thread, where nothing else is to be done; False: there is none
                now. None: all workers are in other threads or processes.

        Raises:
            ElastableError: why the job failed (`JobFailed` for a worker's error of another kind, or when none came).
        """
        self._begun = True
        try:
            with self._planner.running(self._driver.fail) if self._planner else nullcontext():
                self._driver.run(hooks or Hooks(), work_here)
        finally:
            phase, version, last = self._state.phase, self._state.logged, self._state.schedule.versions_total
            settle(self._ended, f"the job {phase} at version {version} of {last}")

    def _planned(self) -> None:
        """More of a stream is planned. Called under the lock."""
        self._waits.tasks_free()
        self._changed.notify_all()

    def wait(self, timeout_s: float) -> bool:
        """Waits in another thread for `run` to end; False if it has not after `timeout_s` seconds."""
        ended = bool(wait((self._ended,), timeout_s).done)
        if self._state.failure is not None:
            raise self._state.failure
        return ended

    def refuse_ended(self) -> None:
        if self._state.failure is not None:
            raise self._state.failure
        if self._state.ending:
            raise StaleVersion(f"the job has ended: {self._state.stop_reason or 'all is trained'}")

    def ended(self) -> Future[str]:
        return self._ended

    def progress(self) -> Progress:
        """How far the job is, for a checkpoint; call it in a hook or after `run`."""
        self._driver.note_hooks()
        with self._waits.changing():
            return self._state.progress()

    def not_ready(self) -> str | None:
        state = self._state
        if state.failure is not None:
            return f"the job failed: {type(state.failure).__name__}: {state.failure}"
        if state.over or state.stop_reason is not None:
            return f"the job has ended: {state.stop_reason or 'all is trained'}"
        return None if self._begun else "the job has not begun"

    @property
    def stop_reason(self) -> str | None:
        """The reason given to `stop`; None: it was not called."""
        return self._state.stop_reason

    @property
    def contributors(self) -> int:
        """How many workers, including those that left, computed a training micro-batch that counted."""
        with self._waits.changing():
            return self._state.workers.contributors

    def join(self, worker: WorkerIdentity) -> Session:
        with self._waits.changing():
            self._state.refuse_failed()
            self._state.board.join(worker.incarnation)
            self._state.workers.joined(worker)
            self.measures.joined += 1
        _log.info("worker %s joined", worker, extra={"worker": worker.incarnation})
        shown = session_of(self._session_key, worker.incarnation) if self._session_key else b""
        return LocalSession(self.job, partial(self._leave, worker.incarnation), shown)

    def _leave(self, incarnation: str) -> None:
        with self._waits.changing():
            if (worker := self._state.workers.closed(incarnation)) is None:
                return
            held = self._state.board.release(incarnation)
            over = self._state.ending or self._state.board.over
            if not over:
                self._state.workers.left(worker, held)
                self.measures.left += 1
            self._waits.left(incarnation)
        what = "left: the job is over" if over else f"left or died; {held} of its micro-batches go to others"
        _log.info("worker %s %s", worker, what, extra={"worker": incarnation})

    def lease_tasks(self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None) -> Lease:
        return self.lease_tasks_later(incarnation, want, wait_s, holding).result(wait_s + _SETTLED_S)

    def lease_tasks_later(
        self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None
    ) -> Future[Lease]:
        with self._waits.changing():
            self._state.refuse_failed()
            lease = self._state.lease(incarnation, want, holding)
            if lease == Lease() and wait_s > 0:
                return self._waits.for_tasks(incarnation, want, wait_s)
            self._waits.leased(incarnation, lease)
        return at_once(lease)

    def pull_dense(self, incarnation: str, version: int | None, wait_s: float) -> DenseSnapshot | None:
        return self.pull_dense_later(incarnation, version, wait_s).result(wait_s + _SETTLED_S)

    def pull_dense_later(self, incarnation: str, version: int | None, wait_s: float) -> Future[DenseSnapshot | None]:
        with self._waits.changing():
            self._state.refuse_failed()
            snapshot = self._state.snapshot_of(version)
            if snapshot is None and wait_s > 0:
                return self._waits.for_version(incarnation, version, wait_s)
        return at_once(snapshot)

    def report_gradient(self, push: Push) -> PushReply:
        return self.report_gradient_later(push).result(_PUSH_DEADLINE_S + _SETTLED_S)

    def report_gradient_later(self, push: Push) -> Future[PushReply]:
        try:
            reply = self._report_gradient(push)
        except Exception as error:
            self.measures.refused.add(type(error).__name__)
            raise
        reply.add_done_callback(self.measures.count)
        return reply

    def _report_gradient(self, push: Push) -> Future[PushReply]:
        with self._waits.changing():
            found = self._state.judge(push)
        if isinstance(found, PushReply):
            return at_once(found)
        problem = None if found is not None else self._problem(push)
        with self._waits.changing():
            # Again: another worker may have been faster while the tensors were checked.
            found = self._state.judge(push)
            if isinstance(found, PushReply):
                return at_once(found)
            outcome = PushOutcome.DUPLICATE
            if found is None:
                outcome = PushOutcome.ACCEPTED if problem is None else PushOutcome.SKIPPED
                found = self._state.take(push, skipped=problem is not None)
                self._wake_driver()
            if self._state.pushes.replies_after_commit:
                return self._reply_after_commit(found, outcome, problem or "")
            return at_once(PushReply(outcome, problem or "", self._state.version))

    def _reply_after_commit(self, ticket: Ticket, outcome: PushOutcome, reason: str) -> Future[PushReply]:
        """Called under the lock."""

        def reply(committed: bool) -> PushReply:
            if committed:
                return PushReply(outcome, reason, self._state.version)
            return PushReply(PushOutcome.STALE, ticket.why_not, self._state.version)

        if ticket.committed or self._state.over:
            return at_once(reply(ticket.committed))
        return self._waits.for_commit(ticket, reply, _PUSH_DEADLINE_S)

    def _wake_driver(self) -> None:
        """Called under the lock, of which the driver alone is notified: it need not look at what changes nothing."""
        if self._state.next_work() is not None:
            self._changed.notify_all()

    def _problem(self, push: Push) -> str | None:
        """Why a push is to be skipped; None: it is not."""
        if self.job.stream and not push.records:
            return "none of its events could be read"
        check_push(push, self._expected)
        try:
            check_finite(push, self._expected)
        except NotFinite as error:
            if self.job.not_finite != "skip":
                raise
            _log.warning("push %s is skipped: %s", push.id, error)
            return str(error)
        return None

    def report_evaluation(self, report: EvaluationReport) -> PushOutcome:
        check_evaluation(report, self._expected)
        with self._waits.changing():
            self._state.refuse_failed()
            outcome = self._state.take_evaluation(report)
            self._wake_driver()
            self._waits.tasks_free()
        return outcome

    def report_failure(self, incarnation: str, error: BaseException, fatal: bool) -> None:
        with self._waits.changing():
            worker = self._state.workers.identity(incarnation)
            self._state.refusals.note(worker, error)
        _log.warning("worker %s failed: %s: %s", worker, type(error).__name__, error)
        if fatal:
            message = f"worker {incarnation}: {type(error).__name__}: {error}"
            self._driver.fail(error if isinstance(error, ElastableError) else JobFailed(message))

    def status(self) -> JobStatus:
        with self._waits.changing():
            status = self._state.status()
            sums, ended = self._state.epoch_metrics, dict(self._state.logs)
        metrics = {**ended, **self._current_metrics(sums)}
        flush, servers = self._flush_status(), self._servers()
        stream = None if self._planner is None else self._planner.status()
        where = redacted(self.job.store_url)
        return replace(status, metrics=metrics, store=where, flush=flush, servers=servers, stream=stream)

    def _current_metrics(self, sums: tuple[Tensor, ...]) -> dict[str, float]:
        """Results of the current epoch, cached for `_METRICS_AGE_S` because every worker's session asks for them."""
        if sums and time.monotonic() - self._running_metrics[0] > _METRICS_AGE_S:
            self._running_metrics = (time.monotonic(), self._metrics.results(sums))
        return self._running_metrics[1] if sums else {}

    def stop(self, reason: str) -> None:
        with self._waits.changing():
            if not self._state.over and self._state.stop_reason is None:
                self._state.stop_reason = reason
            self._waits.ended()
            self._changed.notify_all()
