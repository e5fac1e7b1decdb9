"""Synchronous pushes: named by what they computed, and a version is due once it has all of its micro-batches."""

from __future__ import annotations

from collections.abc import Callable, Collection

from elastable.embedding_store.errors import BadGradient, BadInput, FutureVersion
from elastable.master.api import DivisorKind, Push, PushOutcome, SyncPushId, TaskKind
from elastable.master.commits.push_protocol import PushProtocol, ResumePoint, Ticket, Verdict
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule

__all__ = ["SyncPushes"]


class SyncPushes(PushProtocol):
    """A group is a version; the version says where a resumed job continues."""

    replies_after_commit = False
    leases_ahead = True

    def __init__(self, schedule: Schedule, options: MasterOptions, start: Progress, now: Callable[[], float]) -> None:
        super().__init__(schedule, options, start, now)
        self._tickets: dict[int, Ticket] = {}

    @property
    def group_count(self) -> int:
        return self.schedule.versions_total

    def first_group(self, start: Progress) -> int:
        return start.version

    def micro_batches(self, group: int) -> range:
        return self.schedule.micro_batches(group)

    def epoch(self, group: int) -> int:
        return self.schedule.epoch(group)

    def epoch_stop(self, group: int) -> int:
        return self.schedule.first_version(self.schedule.epoch(group) + 1)

    def starts_epoch(self, group: int) -> bool:
        return self.schedule.ends_epoch(group)

    def judge(self, push: Push, version: int) -> Verdict | Ticket | None:
        name = push.id
        if not isinstance(name, SyncPushId):
            raise BadInput("the job is synchronous: a push is named by (version, micro-batch), not by a sequence")
        if name.version < version:
            return PushOutcome.STALE, f"version {name.version} is committed; the current version is {version}"
        if name.version > version:
            raise FutureVersion(f"push for version {name.version}, which is not there; the current one is {version}")
        if self.board.training.over:
            return PushOutcome.STALE, f"version {version} is the job's last; nothing is trained on it"
        numbers = self.schedule.micro_batches(version)
        if name.micro_batch not in numbers:
            raise BadInput(
                f"micro-batch {name.micro_batch} is not of version {version}, which is made of "
                f"{numbers.start} to {numbers.stop - 1}"
            )
        self._check_records(push, version, name.micro_batch)
        if name.micro_batch in self._tickets:
            return PushOutcome.DUPLICATE, f"micro-batch {name.micro_batch} was counted before"
        self._refuse_unlike(push)
        return None

    def _refuse_unlike(self, push: Push) -> None:
        """Raises `BadGradient` where the loss is divided otherwise than in the version's other micro-batches."""
        # They are all alike: one of them stands for all.
        other = next((ticket.push for ticket in self._tickets.values() if ticket.push is not None), None)
        if other is not None and _divisor_kinds(other) != _divisor_kinds(push):
            raise BadGradient(
                f"micro-batch {push.id.micro_batch} divides its loss by {_described(push)}, and another one of its "
                f"version by {_described(other)}: run the same model everywhere"
            )

    def take(self, push: Push, skipped: bool) -> Ticket:
        _, worker = self.board.complete(TaskKind.TRAIN, push.id.micro_batch, by=push.incarnation)
        ticket = Ticket(None if skipped else push, push.id, worker)
        self._tickets[push.id.micro_batch] = ticket
        return ticket

    def ready(self) -> list[Ticket] | None:
        if not (self.board.is_open and self.board.training.current_done):
            return None
        return [self._tickets[number] for number in sorted(self._tickets)]

    def forget(self, numbers: Collection[int]) -> list[Ticket]:
        lost = [self._tickets.pop(number) for number in numbers if number in self._tickets]
        self.board.training.reopen(ticket.id.micro_batch for ticket in lost)
        return lost

    def commit(self) -> bool:
        self._tickets = {}
        self.board.training.advance()
        return self.board.training.ends_epoch

    def resume_point(self, after_next: bool = False) -> ResumePoint:
        return ResumePoint()


def _divisor_kinds(push: Push) -> tuple[DivisorKind | None, ...]:
    return (None if push.divisor is None else push.divisor.kind, *(part.divisor.kind for part in push.parts))


def _described(push: Push) -> str:
    return ", ".join(kind or "what the job says" for kind in _divisor_kinds(push))
