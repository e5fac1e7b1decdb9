"""The thread that makes versions: commits, evaluations, and the hooks between them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterable

from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import JobFailed
from elastable.embedding_store.measures.spans import VersionTrace
from elastable.master.api import Tensor
from elastable.master.commits.accumulate import Accumulated
from elastable.master.commits.committer import Committer
from elastable.master.commits.dense_part import DensePart
from elastable.master.commits.push_protocol import Ticket
from elastable.master.commits.row_gradients import PushesLost
from elastable.master.jobs.evaluations import Evaluations
from elastable.master.jobs.hooks import Hooks
from elastable.master.jobs.job_measures import JobMeasures
from elastable.master.jobs.job_state import JobState, Work, as_elastable_error
from elastable.master.jobs.waits import Waits
from elastable.master.keras.metrics import LazyLogs, ModelMetrics
from elastable.master.master_options import MasterOptions, is_due
from elastable.master.tasks.progress import Progress

__all__ = ["Driver"]

_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 0.25


class Driver:
    """Drives a job from its start to its end in one thread.

    Args:
        state: Shared with the threads that serve workers.
        waits: The calls that wait for it.
        changed: Guards both, and is notified when there may be something to do.
        store: Holds the job's tables.
        dense: The dense part of the model.
        metrics: The model's metrics.
        options: Deadlines and intervals.
        measures: Where versions are timed.
    """

    def __init__(
        self,
        state: JobState,
        waits: Waits,
        changed: threading.Condition,
        store: EmbeddingStore,
        dense: DensePart,
        metrics: ModelMetrics,
        options: MasterOptions,
        measures: JobMeasures,
    ) -> None:
        self._state = state
        self._waits = waits
        self._changed = changed
        self._measures = measures
        self._opened = time.monotonic()
        # Workers of a synchronous job may compute the next version while this one is logged: if it never is, what they
        # computed counts nowhere. In an asynchronous job a push that was confirmed would be lost.
        ahead = not state.pushes.replies_after_commit
        self._committer = Committer(
            store,
            dense,
            state.schedule.job,
            options.commit_deadline_s,
            self._ends_chapter,
            measures.phases,
            ahead=ahead,
        )
        state.unlogged = lambda: self._committer.unlogged
        self._metrics = metrics
        self._options = options
        self._hooks = Hooks()
        self._evaluations = Evaluations(state, waits, store, metrics, options, self._next_work)

    def _ends_chapter(self, version: int) -> bool:
        return self._state.schedule.ends_epoch(version) or is_due(version, self._options.checkpoint_every)

    def run(self, hooks: Hooks) -> None:
        """Until the last version is committed and evaluated, the job is stopped, or fails.

        Raises:
            ElastableError: the error that made it fail; also whatever a hook raised.
        """
        self._hooks = self._evaluations.hooks = hooks
        try:
            self._begin()
            while not (work := self._next_work()).over:
                if work.tickets is not None:
                    self._make_version(work)
                elif work.evaluated is not None:
                    self._evaluations.end_concurrent(work.evaluated)
                    self._committer.forget()
            self._committer.settle()
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            with self._waits.changing():
                self._state.over = True
                self._waits.ended()
            for evaluation in self._state.concurrent.values():
                evaluation.end()
        if self._state.failure is not None:
            raise self._state.failure

    def note_hooks(self) -> None:
        """Takes the hooks' state into the next `Progress`. Called by the thread of `run`, or after it."""
        state = self._hooks.state()
        with self._waits.changing():
            self._state.hooks = state

    def fail(self, error: BaseException) -> None:
        """Fails the job; later failures are ignored."""
        with self._waits.changing():
            if self._state.failure is None and not self._state.over:
                self._state.failure = as_elastable_error(error)
            self._waits.ended()
            self._changed.notify_all()

    def _begin(self) -> None:
        state = self._state
        if state.board.training.ends_epoch and not state.evaluated:
            self._publish()
            self._end_epoch(state.epoch - 1)
        elif self._hooks.stops_epoch():
            self._publish()
            self._end_epoch(state.epoch)
        else:
            # The evaluation that the interruption at this version cut off.
            self._begin_epoch(due=state.version > 0 and not state.evaluated)

    def _make_version(self, work: Work) -> None:
        """One commit; workers can push nothing meanwhile that it would have to wait for."""
        epoch, trace = self._state.epoch, VersionTrace(self._state.schedule.job.job, self._state.version + 1)
        try:
            with self._measures.versions.timing_version(self._opened, trace):
                ended = self._commit(work.tickets or ())
        except PushesLost as lost:
            self._compute_again(lost)
            return
        if ended or self._hooks.stops_epoch():
            self._end_epoch(epoch)
        else:
            self._evaluate_if_due()
            self._open()

    def _commit(self, tickets: tuple[Ticket, ...]) -> bool:
        """The phases of one version; True if it ends its epoch."""
        phases = self._measures.phases
        phases.add("wait", time.monotonic() - self._opened)
        pushes = [ticket.push for ticket in tickets if ticket.push is not None]
        made = self._committer.commit(self._state.version + 1, pushes, self._place_after)
        with phases.timing("callbacks"):
            if self._hooks.waits_for_log(self._state.version + 1):
                self._committer.settle()
            self._hooks.on_rows(self._state.version + 1, made)
            with self._waits.changing():
                ended = self._state.committed(tickets, made)
                sums = self._state.epoch_metrics
            self._hooks.on_version(self._state.version, self._logs(sums))
            if self._hooks.may_assign():
                self._committer.forget()
        self._publish(tickets)
        return ended

    def _compute_again(self, lost: PushesLost) -> None:
        """Opens micro-batches whose pushes a store server has lost, and tells those who wait for their commit."""
        _log.warning("a store server was started again: %s and are computed again", lost)
        with self._waits.changing():
            self._waits.lost(self._state.pushes.forget(lost.numbers))
            self._opened = time.monotonic()
            self._waits.tasks_free()

    def _place_after(self, made: Accumulated) -> Progress:
        self.note_hooks()
        with self._waits.changing():
            return self._state.progress_after(made)

    def _evaluate_if_due(self) -> None:
        if self._evaluations.is_due():
            self._committer.settle()
            self._evaluations.begin_due()
            self._committer.forget()

    def _end_epoch(self, epoch: int) -> None:
        self._committer.settle()
        self._committer.forget()
        evaluated = self._evaluations.evaluate() if self._options.evaluates(epoch) else ()
        if evaluated is None:
            return
        with self._waits.changing():
            trained = self._state.end_epoch()
        logs = {**self._metrics.results(trained), **self._metrics.results(evaluated, "val_")}
        with self._waits.changing():
            self._state.logs = logs
        self._hooks.on_epoch_end(epoch, logs)
        if not self._state.ending and not self._state.board.training.over:
            self._begin_epoch()

    def _begin_epoch(self, due: bool = False) -> None:
        if not self._state.board.training.over:
            self._hooks.on_epoch_begin(self._state.epoch)
            self._committer.forget()
            # Hooks may have set weights, and what is trained: no worker has begun the epoch.
            self._publish()
            if due:
                self._evaluate_if_due()
            self._open()

    def _open(self) -> None:
        with self._waits.changing():
            self._state.board.open()
            self._waits.tasks_free()
        self._opened = time.monotonic()
        # No hook is called, and so no learning rate assigned, before the next commit.
        self._committer.prepare_step()

    def _publish(self, tickets: Iterable[Ticket] = ()) -> None:
        """Publishes the current version to the workers, and answers those whose pushes made it."""
        snapshot = self._committer.publish(self._state.version)
        with self._waits.changing():
            self._state.snapshot = snapshot
            self._waits.published(tickets)

    def _logs(self, sums: tuple[Tensor, ...]) -> LazyLogs:
        return LazyLogs(lambda: self._metrics.results(sums))

    def _next_work(self) -> Work:
        """Waits for something to do.

        Raises:
            JobFailed: there was no worker for longer than the options allow.
        """
        alone_since = time.monotonic()
        while True:
            self._evaluations.give_up_unreadable()
            self._committer.settle(wait=False)  # nobody reads a store that could not log: workers wait for this
            with self._waits.changing():
                if (work := self._state.next_work()) is not None:
                    return work
                if len(self._state.sessions):
                    alone_since = time.monotonic()
                self._fail_without_workers(time.monotonic() - alone_since)
                self._changed.wait(_LONGEST_WAIT_S)

    def _fail_without_workers(self, seconds: float) -> None:
        limit = self._options.no_worker_timeout_s
        if limit is not None and seconds > limit:
            raise JobFailed(f"no worker for {limit} s while work remains")
