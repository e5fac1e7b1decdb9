"""The thread that makes versions: commits, evaluations, and the hooks between them; what it counts and logs."""

import logging
import threading
import time
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from functools import partial

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.measures import Counts, Durations, VersionTrace
from elastable.embedding_store.support.printable import printable
from elastable.embedding_store.support.retry import retry
from elastable.master.api import BadEvent, DenseSnapshot, PushReply, Tensor
from elastable.master.commits.accumulate import Accumulated
from elastable.master.commits.committer import Committer
from elastable.master.commits.dense_part import DensePart
from elastable.master.commits.push_protocol import Ticket
from elastable.master.commits.row_gradients import PushesLost
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_state import LEASE_S, ConcurrentEvaluation, JobState, Work, as_elastable_error
from elastable.master.core.waits import Waits
from elastable.master.master_options import MasterOptions, is_due
from elastable.master.model.model_metrics import LazyLogs, ModelMetrics
from elastable.master.tasks.progress import Progress


@dataclass(eq=False)
class JobMeasures:
    """Of one job, from the start of this process on.

    Attributes:
        phases: Seconds of each version by phase: "wait" for gradients, "sum", "dense", "rows", "callbacks".
        versions: Seconds of each version, all phases together; its label is "version".
        pushes: Pushes by outcome.
        refused: Pushes that raised, by name of the error.
        joined, left: Sessions that workers opened, and that ended while there was work; the master's lock guards both.
    """

    phases: Durations = field(default_factory=Durations)
    versions: Durations = field(default_factory=Durations)
    pushes: Counts = field(default_factory=Counts)
    refused: Counts = field(default_factory=Counts)
    joined: int = 0
    left: int = 0

    def count(self, reply: Future[PushReply]) -> None:
        """The reply to a push is there."""
        if reply.cancelled():
            return
        if (error := reply.exception()) is not None:
            self.refused.add(type(error).__name__)
        else:
            self.pushes.add(reply.result().outcome.value)


_log = logging.getLogger(__name__)

_LONGEST_WAIT_S = 0.25


class Driver:
    """Drives a job from its start to its end in one thread.

    `changed` guards `state` and `waits`, and is notified when there may be something to do.
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
        self._opened, self._noted_bad = time.monotonic(), 0  # the last version whose bad events are noted
        # Workers of a synchronous job may compute the next version while this one is logged: if it never is, what they
        # computed counts nowhere. In an asynchronous job a push that was confirmed would be lost.
        ahead = not state.pushes.replies_after_commit
        self._committer = Committer(
            store,
            dense,
            state.schedule.job,
            options.commit_deadline_s,
            self._ends_replay_epoch,
            measures.phases,
            ahead=ahead,
        )
        state.unlogged = lambda: self._committer.unlogged
        self._metrics = metrics
        self._options = options
        self._hooks = Hooks()
        self._evaluations = Evaluations(state, waits, store, metrics, options, self._next_work)
        self._work_here: Callable[[], bool] | None = None

    def _ends_replay_epoch(self, version: int) -> bool:
        schedule = self._state.schedule
        ends = schedule.ends_epoch(version) or schedule.ends_part(version)
        return ends or is_due(version, self._options.checkpoint_every)

    def run(self, hooks: Hooks, work_here: Callable[[], bool] | None = None) -> None:
        """Until the last version is committed and evaluated, the job is stopped, or fails.

        Args:
            work_here: As of `Master.run`.

        Raises:
            ElastableError: the error that made it fail; also whatever a hook raised.
        """
        self._hooks = self._evaluations.hooks = hooks
        self._work_here = work_here
        try:
            self._begin()
            while not (work := self._next_work()).over:
                if work.tickets is not None:
                    self._make_version(work)
                elif work.evaluated is not None:
                    self._evaluations.end_concurrent(work.evaluated)
                    self._committer.forget()
            self._committer.settle()
            if self._state.schedule.job.stream and self._state.ends_within_epoch():
                self._end_epoch(self._state.schedule.epoch(self._state.version - 1))
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
        if state.board.ends_epoch and not state.evaluated:
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
            if self._options.evaluate_every and self._evaluations.is_due():
                self._evaluate_due()
            self._open()

    def _commit(self, tickets: tuple[Ticket, ...]) -> bool:
        """The phases of one version; True if it ends its epoch."""
        phases = self._measures.phases
        phases.add("wait", time.monotonic() - self._opened)
        pushes, bad = [], list[BadEvent]()
        for ticket in tickets:
            bad += ticket.bad_events
            if ticket.push is not None:
                pushes.append(ticket.push)
        if bad:
            self._pass_over(bad)
        made = self._committer.commit(self._state.version + 1, pushes, self._place_after)
        with phases.timing("callbacks"):
            if self._hooks.waits_for_log(self._state.version + 1):
                self._committer.settle()
            self._hooks.on_rows(self._state.version + 1, made)
            with self._waits.changing():
                ended = self._state.committed(tickets, made)
                sums = self._state.epoch_metrics
            self._hooks.on_version(self._state.version, LazyLogs(partial(self._metrics.results, sums)))
            if self._hooks.may_assign():
                self._committer.forget()
        self._publish(tickets)
        return ended

    def _pass_over(self, bad: Sequence[BadEvent]) -> None:
        """Notes events of the next version that could not be read. Raises `BadInput` for one too many."""
        if self._noted_bad <= self._state.version:  # else pushes were lost, and computed again
            self._hooks.on_bad_events(self._state.version + 1, bad)
            self._noted_bad = self._state.version + 1
        count, most = self._state.pass_over(len(bad)), self._options.max_bad_events
        if count > most:
            first = bad[0]
            raise BadInput(
                f"{count} events of the stream could not be read, and --max-bad-events is {most}: the first of the "
                f"last ones is {printable(first.partition, 256, lines=False)} "
                f"{printable(first.position, 256, lines=False)}: {printable(first.reason, 256, lines=False)}"
            )

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

    def _evaluate_due(self) -> None:
        self._committer.settle()
        self._evaluations.begin_due()
        self._committer.forget()

    def _end_epoch(self, epoch: int) -> None:
        self._committer.settle()
        self._committer.forget()
        due = self._state.schedule.evaluation_tasks and self._options.evaluates(epoch)
        evaluated = self._evaluations.evaluate() if due else ()
        if evaluated is None:
            return
        with self._waits.changing():
            trained = self._state.end_epoch()
        logs = {**self._metrics.results(trained), **self._metrics.results(evaluated, "val_")}
        with self._waits.changing():
            self._state.logs = logs
        self._hooks.on_epoch_end(epoch, logs)
        if not self._state.ending and not self._state.board.over:
            self._begin_epoch()

    def _begin_epoch(self, due: bool = False) -> None:
        if not self._state.board.over:
            self._hooks.on_epoch_begin(self._state.epoch)
            self._committer.forget()
            # Hooks may have set weights, and what is trained: no worker has begun the epoch.
            self._publish()
            if due and self._evaluations.is_due():
                self._evaluate_due()
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

    def _next_work(self) -> Work:
        """Waits for something to do."""
        idle = self._work_here is None
        while True:
            if self._state.concurrent and self._evaluations.give_up_unreadable():
                return Work()  # whoever waits for fewer evaluations need not wait any longer
            self._committer.settle(wait=False)  # nobody reads a store that could not log: workers wait for this
            with self._waits.changing():
                if (work := self._state.next_work()) is not None:
                    return work
                if idle:
                    self._changed.wait(_LONGEST_WAIT_S)
            idle = self._work_here is None or not self._work_here()


# Versions that are evaluated concurrently with training. Training waits before another one starts, so that every
# version that is due is evaluated however slow the workers are, and before-images do not pile up.
_MOST_CONCURRENT = 2


class Evaluations:
    """Has versions evaluated, which the store has logged. Used by the thread that drives the job.

    `next_work` waits for something to do; `hooks` are informed of how evaluations end.
    """

    def __init__(
        self,
        state: JobState,
        waits: Waits,
        store: EmbeddingStore,
        metrics: ModelMetrics,
        options: MasterOptions,
        next_work: Callable[[], Work],
    ) -> None:
        self._state = state
        self._waits = waits
        self._store = store
        self._metrics = metrics
        self._options = options
        self._next_work = next_work
        self.hooks = Hooks()

    def is_due(self) -> bool:
        """Whether the current version is to be evaluated, although it ends no epoch."""
        there = self._state.snapshot is not None and self._state.schedule.evaluation_tasks
        return bool(there and is_due(self._state.version, self._options.evaluate_every))

    def begin_due(self) -> None:
        """Evaluates the current version, concurrently with training or before it continues."""
        version, snapshot = self._state.version, self._state.snapshot
        assert snapshot is not None
        if self._options.concurrent_evaluation:
            self._begin_concurrent(snapshot)
        elif (total := self.evaluate()) is not None:
            self.hooks.on_evaluation(version, self._metrics.results(total, "val_"))

    def evaluate(self) -> tuple[Tensor, ...] | None:
        """Summed metric state of the validation split on the current version; None if the job is ending."""
        version = self._state.version
        self.hooks.on_evaluation_begin(version)
        with self._waits.changing():
            self._state.begin_evaluation(version)
            self._waits.tasks_free()
        while (work := self._next_work()).evaluated != version:
            if work == Work():
                continue
            if work.over or work.evaluated is None:
                return None
            self.end_concurrent(work.evaluated)
        with self._waits.changing():
            return self._state.take_evaluation_total(version)

    def end_concurrent(self, version: int) -> None:
        """A concurrent evaluation is complete."""
        with self._waits.changing():
            total = self._state.take_evaluation_total(version)
            evaluation = self._state.concurrent.pop(version)
        evaluation.end()
        self.hooks.on_evaluation(version, self._metrics.results(total, "val_"))

    def give_up_unreadable(self) -> bool:
        """Ends the concurrent evaluations whose version can no longer be read; whether there were any."""
        before = tuple(self._state.concurrent.items())
        for version, evaluation in before:
            if not evaluation.readable():
                with self._waits.changing():
                    self._state.take_evaluation_total(version)
                    del self._state.concurrent[version]
                evaluation.end()
        return len(self._state.concurrent) < len(before)

    def _begin_concurrent(self, snapshot: DenseSnapshot) -> None:
        while len(self._state.concurrent) >= _MOST_CONCURRENT:
            work = self._next_work()
            if work == Work():
                continue
            if work.over or work.evaluated is None:
                return
            self.end_concurrent(work.evaluated)
        evaluation = ConcurrentEvaluation(
            snapshot, retry(self._pin, "pinning a version", self._options.commit_deadline_s)
        )
        with self._waits.changing():
            self._state.begin_concurrent(evaluation)
            self._waits.tasks_free()

    def _pin(self) -> Snapshot:
        return self._store.pin(self._state.version, LEASE_S)
