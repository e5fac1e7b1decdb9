"""The thread that makes versions: commits, evaluations, and the hooks between them."""

from __future__ import annotations

import threading
import time

from embedding_store.errors import JobFailed
from master.api import Tensor
from master.committing import Committer
from master.dense import DensePart
from master.hooks import Hooks, MasterOptions
from master.job_state import JobState, Work, as_failure
from master.metrics import LazyLogs, MetricBook

__all__ = ["Driver"]

_LONGEST_WAIT_S = 0.25


class Driver:
    """Drives a job from its start to its end in one thread.

    Args:
        state: Shared with the threads that serve workers.
        changed: Guards `state`; told of every change.
        committer: Makes versions.
        dense: The dense part of the model.
        metrics: The model's metrics.
        options: Patience.
    """

    def __init__(
        self,
        state: JobState,
        changed: threading.Condition,
        committer: Committer,
        dense: DensePart,
        metrics: MetricBook,
        options: MasterOptions,
    ) -> None:
        self._state = state
        self._changed = changed
        self._committer = committer
        self._dense = dense
        self._metrics = metrics
        self._options = options
        self._hooks = Hooks()

    def run(self, hooks: Hooks) -> None:
        """Until the last version is committed and evaluated, the job is stopped, or fails.

        Raises:
            ElastableError: what made it fail; also whatever a hook raised.
        """
        self._hooks = hooks
        try:
            self._begin()
            while not (work := self._next_work()).over:
                if work.tickets is not None:
                    self._make_version(work)
        except BaseException as error:
            self.fail(error)
            raise
        finally:
            with self._changed:
                self._state.over = True
                self._changed.notify_all()
        if self._state.failure is not None:
            raise self._state.failure

    def fail(self, error: BaseException) -> None:
        """Fails the job; the first reason stands."""
        with self._changed:
            if self._state.failure is None and not self._state.over:
                self._state.failure = as_failure(error)
            self._changed.notify_all()

    def _begin(self) -> None:
        state = self._state
        if state.board.ends_epoch and not state.evaluated:
            self._publish()
            self._end_epoch(state.epoch - 1)
        else:
            self._begin_epoch()

    def _make_version(self, work: Work) -> None:
        """One commit; while it is made workers can push nothing that it would have to wait for."""
        tickets = work.tickets or ()
        epoch = self._state.epoch
        made = self._committer.commit(
            self._state.version + 1, [ticket.push for ticket in tickets if ticket.push is not None]
        )
        with self._changed:
            ended = self._state.committed(tickets, made)
            sums = self._state.epoch_metrics
        self._hooks.on_version(self._state.version, self._logs(sums))
        self._publish()
        if ended:
            self._end_epoch(epoch)
        else:
            self._open()

    def _end_epoch(self, epoch: int) -> None:
        evaluated = self._evaluate()
        if evaluated is None:
            return
        with self._changed:
            trained = self._state.end_epoch()
        logs = {**self._metrics.results(trained), **self._metrics.results(evaluated, "val_")}
        with self._changed:
            self._state.logs = logs
        self._hooks.on_epoch_end(epoch, logs)
        if not self._state.ending and not self._state.board.trained:
            self._begin_epoch()

    def _evaluate(self) -> tuple[Tensor, ...] | None:
        """Summed metric state of the validation split on the current version; None if the job is ending."""
        if not self._state.schedule.evaluation_tasks:
            return ()
        self._hooks.on_evaluation_begin(self._state.version)
        with self._changed:
            self._state.board.begin_evaluation()
            self._changed.notify_all()
        if self._next_work().over:
            return None
        with self._changed:
            return self._state.take_evaluation_total()

    def _begin_epoch(self) -> None:
        if not self._state.board.trained:
            self._hooks.on_epoch_begin(self._state.epoch)
            if self._state.snapshot is None:
                self._publish()
            self._open()

    def _open(self) -> None:
        with self._changed:
            self._state.board.open()
            self._changed.notify_all()
        # No hook is called, and so no learning rate assigned, before the next commit.
        self._committer.foresee()

    def _publish(self) -> None:
        """Shows the version that stands to workers."""
        snapshot = self._dense.snapshot(self._state.version)
        with self._changed:
            self._state.snapshot = snapshot
            self._changed.notify_all()

    def _logs(self, sums: tuple[Tensor, ...]) -> LazyLogs:
        return LazyLogs(lambda: self._metrics.results(sums))

    def _next_work(self) -> Work:
        """Waits for something to do.

        Raises:
            JobFailed: there was no worker for longer than the options allow.
        """
        alone_since = time.monotonic()
        with self._changed:
            while (work := self._state.next_work()) is None:
                if len(self._state.sessions):
                    alone_since = time.monotonic()
                self._refuse_loneliness(time.monotonic() - alone_since)
                self._changed.wait(_LONGEST_WAIT_S)
            return work

    def _refuse_loneliness(self, seconds: float) -> None:
        limit = self._options.no_worker_timeout_s
        if limit is not None and seconds > limit:
            raise JobFailed(f"no worker for {limit} s while work remains")
