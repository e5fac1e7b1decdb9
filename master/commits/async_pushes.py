"""Asynchronous pushes: named by their sender's sequence, and each is a version when its turn comes."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Collection

from elastable.embedding_store.errors import BadInput, FutureVersion
from elastable.master.api import AsyncPushId, Push, PushOutcome, TaskKind
from elastable.master.commits.push_protocol import PushProtocol, ResumePoint, Sequences, Ticket, Verdict
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule

__all__ = ["AsyncPushes"]


class AsyncPushes(PushProtocol):
    """A group is an epoch, which is a pass over the records; pushes are committed in the order of their arrival.

    A push of a task counts once per micro-batch, whoever computes it and however often; any other push counts once
    per sequence.
    """

    replies_after_commit = True
    leases_ahead = False

    def __init__(self, schedule: Schedule, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        super().__init__(schedule, options, start, now)
        self._committed = Sequences(start.sequences)
        self._queue: deque[Ticket] = deque()

    @property
    def group_count(self) -> int:
        return self.schedule.job.epochs

    def first_group(self, start: Progress) -> int:
        return start.epoch

    def micro_batches(self, group: int) -> range:
        return self.schedule.micro_batches_of_epoch(group)

    def epoch(self, group: int) -> int:
        return group

    def epoch_stop(self, group: int) -> int:
        return group + 1

    def starts_epoch(self, group: int) -> bool:
        return True

    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        name = push.id
        if not isinstance(name, AsyncPushId):
            raise BadInput("the job is asynchronous: a push is named by (incarnation, sequence), not by a version")
        same = (ticket for ticket in self._queue if ticket.id == name)
        if (ticket := next(same, None)) is not None:
            return ticket
        if name.micro_batch >= 0:
            verdict = self._judge_task(push, name.micro_batch, version)
            if verdict is not None:
                return verdict
        elif self._committed.knows(name):
            return PushOutcome.DUPLICATE, f"sequence {name.sequence} of {name.incarnation!r} was counted before"
        elif push.records < 1:
            raise BadInput(f"a push of {push.records} records: it must have at least one")
        if not self.board.is_open:
            return PushOutcome.STALE, "an epoch has ended: nothing is trained before the next one begins"
        return None if push.computed_on is None else self._judge_age(name, push.computed_on, version)

    def _judge_age(self, name: AsyncPushId, computed_on: int, version: int) -> Verdict | None:
        """Refuses a push that is too stale; its micro-batch is free again at once."""
        if computed_on > version:
            raise FutureVersion(f"push computed on version {computed_on}, which is not there; the current is {version}")
        bound = self.schedule.job.staleness_bound
        # Every push in the queue makes a version before this one would.
        behind = version + len(self._queue) - computed_on
        if bound is None or behind <= bound:
            return None
        if name.micro_batch >= 0:
            self.board.give_back(name.micro_batch, name.incarnation)
        return (
            PushOutcome.STALE,
            f"computed on version {computed_on}, it would be committed {behind} versions later; the bound is {bound}",
        )

    def _judge_task(self, push: Push, micro_batch: int, version: int) -> Verdict | None:
        if micro_batch >= self.schedule.versions_total:
            raise BadInput(f"micro-batch {micro_batch} is not of this job, which has {self.schedule.versions_total}")
        self._check_records(push, version, micro_batch)
        if self.board.training.was_trained(micro_batch):
            return PushOutcome.DUPLICATE, f"micro-batch {micro_batch} was counted before"
        if micro_batch // self.schedule.micro_batches_per_pass > self.board.training.position:
            raise FutureVersion(f"micro-batch {micro_batch} is of an epoch that has not begun")
        return None

    def take(self, push: Push, skipped: bool) -> Ticket:
        worker = None
        if isinstance(push.id, AsyncPushId) and push.id.micro_batch >= 0:
            _, worker = self.board.complete(TaskKind.TRAIN, push.id.micro_batch, by=push.id.incarnation)
        self._queue.append(Ticket(None if skipped else push, push.id, worker))
        return self._queue[-1]

    def ready(self) -> list[Ticket] | None:
        return [self._queue[0]] if self._queue else None

    def forget(self, numbers: Collection[int]) -> list[Ticket]:
        ticket = self._queue.popleft()  # what is ready is always one push
        if ticket.id.micro_batch >= 0:
            self.board.training.reopen([ticket.id.micro_batch])
        return [ticket]

    def commit(self) -> bool:
        ticket = self._queue.popleft()
        if isinstance(ticket.id, AsyncPushId):
            self._committed.remember(ticket.id)
        if self._queue or not self.board.training.current_done:
            return False
        self.board.training.advance()
        return True

    def resume_point(self, after_next: bool = False) -> ResumePoint:
        waiting = list(self._queue)
        sequences = self._committed.as_dict()
        ends = False
        if after_next:
            first = waiting.pop(0).id
            ends = not waiting and self.board.training.current_done
            if isinstance(first, AsyncPushId):
                sequences[first.incarnation] = first.sequence
        coming = {ticket.id.micro_batch for ticket in waiting}
        done = () if ends else tuple(number for number in self.board.training.done() if number not in coming)
        return ResumePoint(self.board.training.position + ends, done, sequences)
