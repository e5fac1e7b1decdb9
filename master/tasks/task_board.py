"""Which worker gets which micro-batch, who holds it and until when. Not thread-safe: the master's lock guards it."""

import heapq
from collections.abc import Callable, Iterable

from elastable.embedding_store.errors import NotJoined
from elastable.master.api import Lease, Task, TaskKind
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.schedule import Schedule

_JOINS = "worker {!r} has not joined the job: open a session first"
_AT_ONCE = 4  # evaluation tasks that a worker holds while training waits for them: an answer is a round trip


class TaskGroup:
    """Micro-batches that must all be done before the job continues, and who holds them.

    Attributes:
        numbers: The micro-batches (`Task.micro_batch`).
        version: The version that is evaluated; 0 of training.
        opened: When work on the group could start; None: not yet.
        done: The micro-batches that are done.
        granted: Micro-batch -> worker -> when it was last granted to that worker, the latest grant last.
        returned: A heap of those below `fresh` that a worker gave up, or whose lease has ended.
        lowest: Nothing below it is undone: an epoch of a million tasks is not searched from its start at every lease.
        fresh: Nothing from it on was granted.
        look_at: Before that time no lease of its micro-batches ends.
    """

    def __init__(self, kind: TaskKind, numbers: range, version: int = 0, opened: float | None = None) -> None:
        self.kind, self.numbers, self.version, self.opened = kind, numbers, version, opened
        self.done: set[int] = set()
        self.granted: dict[int, dict[str, float]] = {}
        self.returned: list[int] = []
        self.lowest = self.fresh = numbers.start
        self.look_at = 0.0

    def undone(self) -> Iterable[int]:
        """The micro-batches that are not done, in order."""
        while self.lowest in self.done:
            self.lowest += 1
        return (number for number in range(self.lowest, self.numbers.stop) if number not in self.done)

    def give_back(self, number: int, worker: str = "") -> None:
        """Frees a micro-batch that the worker held ("": nobody does, or its lease has ended)."""
        holders = self.granted.get(number, {})
        holders.pop(worker, None)
        if not holders:
            self.granted.pop(number, None)
        if number < self.fresh:
            heapq.heappush(self.returned, number)


class TaskBoard:
    """Decides which tasks a worker gets: of the current group, fetched ahead, or of an evaluation.

    Groups are trained one after the other (see `Schedule`). The current group takes pushes only once it is open
    (`open`); workers may fetch up to `MasterOptions.look_ahead` further groups of its epoch. Between epochs, and after
    the last one, the validation split may be evaluated; nothing of the next epoch is leased before that is opened.
    Other versions may be evaluated while training continues: a worker gets one such task per answer, after its tasks of
    the current group and before anything fetched ahead; where it can do nothing for that group, whatever it has fetched
    ahead; and a few at a time where training waits for evaluations.

    A lease ends `MasterOptions.lease_seconds` after the latest of: its grant, the opening of its group (a micro-batch
    fetched ahead cannot be worked on before), and the last micro-batch its worker finished (its others wait in the
    worker's queue). Then the micro-batch may be given to another worker, while the first one may still answer. A
    worker's leases are limited to its fair share: the undone micro-batches of a group divided by the workers, rounded
    up. So an idle worker always gets what is free, and the first one to ask does not get everything.

    A worker that waits for a version must keep asking: a free micro-batch of the current group is granted to it
    whatever it has fetched ahead. Where none is free and it has none itself, it may get a backup of one that another
    worker has been computing for long: the first result counts.

    Attributes:
        position: The number of the group in training.
        evaluations: Version -> its group, of those under evaluation.
        awaited: The version whose evaluation training waits for; None: all of them run concurrently with training.

    Args:
        now: Monotonic clock, in seconds.
        position, done: The group that is trained next, and its micro-batches that are done.
    """

    def __init__(
        self,
        schedule: Schedule,
        now: Callable[[], float],
        options: MasterOptions,
        position: int = 0,
        done: Iterable[int] = (),
    ) -> None:
        self._schedule, self._now = schedule, now
        self._lease_s, self._backup_after = options.lease_seconds, options.backup_after_s
        self._look_ahead = 0 if schedule.by_epoch else options.look_ahead
        self._held: dict[str, set[tuple[TaskGroup, int]]] = {}
        self._progress: dict[str, float] = {}  # worker -> when it last finished a micro-batch
        self.evaluations: dict[int, TaskGroup] = {}
        self.awaited: int | None = None
        self._groups: list[TaskGroup] = []  # the current one, and those of its epoch that workers may fetch ahead
        self._opens = False  # the current group was to be opened, and is not planned yet
        self.position = position - 1
        self.advance()
        if self._groups:
            self._groups[0].done.update(done)

    # Training

    @property
    def over(self) -> bool:
        """Whether every micro-batch of the job has been trained."""
        return not self._groups and self._schedule.complete

    @property
    def is_open(self) -> bool:
        """Whether training may go on now."""
        return self.awaited is None and bool(self._groups) and self._groups[0].opened is not None

    @property
    def current_done(self) -> bool:
        """Whether all micro-batches of the current group are done."""
        return bool(self._groups) and len(self._groups[0].done) == len(self._groups[0].numbers)

    @property
    def ends_epoch(self) -> bool:
        """Whether an epoch has just ended and nothing of the next one is done."""
        if self.position == 0 or (self._groups and self._groups[0].done):
            return False
        return self._schedule.by_epoch or self._schedule.ends_epoch(self.position)

    def done(self) -> tuple[int, ...]:
        """Micro-batches of the current group that are done, in order."""
        return tuple(sorted(self._groups[0].done)) if self._groups else ()

    def was_trained(self, micro_batch: int) -> bool:
        """Whether a micro-batch is done."""
        return not self._groups or micro_batch < self._groups[0].numbers.start or micro_batch in self._groups[0].done

    def reopen(self, micro_batches: Iterable[int]) -> None:
        """What was done of micro-batches of the current group is lost: they are to be done again."""
        group = self._groups[0]
        for number in micro_batches:
            group.done.discard(number)
            group.lowest = min(group.lowest, number)
            group.give_back(number)

    def advance(self) -> None:
        """Goes on from the current group, which is done, to the next one, which is not open yet."""
        del self._groups[:1]
        self.position, self._opens = self.position + 1, False
        self.extend()

    def extend(self) -> None:
        """Takes in what is planned by now, of what workers may fetch."""
        stop = min(self.position + self._look_ahead + 1, self._schedule.epoch_stop(self.position))
        for number in range(self.position + len(self._groups), min(stop, self._schedule.group_count)):
            self._groups.append(TaskGroup(TaskKind.TRAIN, self._schedule.of_group(number)))
        if self._opens:
            self.open()

    def open(self) -> None:
        """Opens the current group, unless it is open; one that is not planned yet, as soon as it is."""
        self._opens = not self._groups
        if self._groups and self._groups[0].opened is None:
            self._groups[0].opened = self._now()

    # Evaluation

    @property
    def evaluated(self) -> int | None:
        """The oldest version whose evaluation is complete, if any; the awaited one first."""
        oldest = None
        for version, group in self.evaluations.items():
            if len(group.done) == len(group.numbers):
                if version == self.awaited:
                    return version
                oldest = version if oldest is None else min(oldest, version)
        return oldest

    def begin_evaluation(self, version: int, concurrent: bool = False) -> None:
        """Opens the validation split on `version`; training waits for it unless `concurrent` is set."""
        tasks = range(self._schedule.evaluation_tasks)
        self.evaluations[version] = TaskGroup(TaskKind.EVALUATE, tasks, version, self._now())
        if not concurrent:
            self.awaited = version

    def end_evaluation(self, version: int) -> None:
        """Ends the evaluation of that version, complete or not."""
        if self.awaited == version:
            self.awaited = None
        group = self.evaluations.pop(version)
        for number in group.undone():
            self._finish(group, number)

    # Workers

    def join(self, worker: str) -> None:
        """Adds a worker; joining twice is harmless."""
        self._held.setdefault(worker, set())
        self._progress.setdefault(worker, self._now())

    def release(self, worker: str) -> int:
        """Removes a worker and frees everything it holds; how many micro-batches that were."""
        held = self._held.pop(worker, ())
        for group, number in held:
            group.give_back(number, worker)
        self._progress.pop(worker, None)
        return len(held)

    def held_by(self, worker: str) -> int:
        """Unfinished micro-batches that the worker holds."""
        return len(self._held.get(worker, ()))

    def lease(self, worker: str, want: int, version: int) -> tuple[Task, ...]:
        """Up to `want` tasks for the worker, the most urgent first.

        Some tasks of the current group, and of evaluations where a worker has nothing to
        do for that, are granted even where `want` is 0.

        Args:
            want: How many more tasks it can hold.

        Raises:
            NotJoined: the worker has no session.
        """
        if worker not in self._held:
            raise NotJoined(_JOINS.format(worker))
        granted: list[Task] = []
        if self.awaited is not None:
            most = max(want, _AT_ONCE - self._evaluating_now(worker))
            granted += self._grant_share(self.evaluations[self.awaited], worker, most, version)
        groups = self._in_training()
        for ahead, group in enumerate(groups):
            current = ahead == 0 and self.is_open
            if current or not self._schedule.by_epoch:
                most = max(want - len(granted), 1 if current else 0)
                granted += self._grant_share(group, worker, most, version + ahead)
            if ahead == 0 and self.evaluations:
                granted += self._evaluate_concurrently(worker, want - len(granted))
        if not groups and self.evaluations:
            granted += self._evaluate_concurrently(worker, want - len(granted))
        now = False
        for task in granted:
            now |= task.version <= version
        if not now and len(self._held) > 1:  # what others hold
            granted += self._back_up(worker, version)
        return tuple(granted)

    def offers(self) -> bool:
        """Whether a worker that asks now may get something; False: none does, however it asks."""
        for group in self._leasable():
            if self._lowest_free(group) is not None:
                return True
        longest = self._longest_held()
        return longest is not None and longest[2] < self._now()

    def next_due(self) -> float:
        """A time before which nothing can be offered unless something else happens."""
        now = self._now()
        due = now + min(self._lease_s, self._backup_after or self._lease_s)
        for group in self._leasable():
            if group.opened is not None and len(group.done) < len(group.numbers):
                due = min(due, group.look_at)
        if (longest := self._longest_held()) is not None:
            due = min(due, longest[2])
        return max(now, due)

    def reconcile(self, worker: str, holding: Iterable[Task], version: int) -> Lease:
        """Reconciles the worker's leases with the tasks that it reports to hold.

        Unleased tasks that it holds are granted to it: an earlier master may have leased
        them to it, or this one in an earlier session.

        Args:
            holding: All tasks that it has not finished.

        Returns:
            As `tasks` those that were leased to it in an answer that was lost; as `revoked` those it must drop.
        """
        if worker not in self._held:
            raise NotJoined(_JOINS.format(worker))
        revoked, held = [], set()
        for task in holding:
            number, group = task.micro_batch, self._group_of(task.kind, task.micro_batch, task.version)
            if group is None or number in group.done:
                revoked.append(task)
                continue
            held.add((group, number))
            if self._is_live(group, number, worker):
                continue
            if not self._is_free(group, number):
                revoked.append(task)
            elif worker not in group.granted.get(number, ()):  # else it ended: kept until another asks
                self._grant(group, number, worker, self._version_of(group, version))
        lost = []
        for group, number in sorted(self._held[worker] - held, key=_in_order):
            if self._is_live(group, number, worker):
                lost.append(self._grant(group, number, worker, self._version_of(group, version)))
        return Lease(tuple(lost), revoked=tuple(revoked))

    def give_back(self, micro_batch: int, worker: str) -> None:
        """Frees a training micro-batch that the worker holds, unless another one holds it too."""
        if (group := self._group_of(TaskKind.TRAIN, micro_batch, 0)) is not None:
            self._held.get(worker, set()).discard((group, micro_batch))
            group.give_back(micro_batch, worker)

    def complete(self, kind: TaskKind, micro_batch: int, version: int = 0, by: str = "") -> tuple[bool, str | None]:
        """Counts a micro-batch of the current group, or of the evaluation of `version`, as done.

        Args:
            version: The version that was evaluated.
            by: The worker that did it; "": the one it was granted to last.

        Returns:
            Whether it counts (False: it was done before, or is not of that
            group), and the worker that did it, if known.
        """
        if kind is TaskKind.EVALUATE:
            group = self.evaluations.get(version)
        else:
            group = self._groups[0] if self._groups else None
        if group is None or micro_batch not in group.numbers or micro_batch in group.done:
            return False, None
        group.done.add(micro_batch)
        return True, self._finish(group, micro_batch, by)

    # Leases

    def _in_training(self) -> list[TaskGroup]:
        """The current group and those behind it; none between two epochs, before the next one is opened."""
        return self._groups if self._groups and not (self._groups[0].opened is None and self.ends_epoch) else []

    def _group_of(self, kind: TaskKind, micro_batch: int, version: int) -> TaskGroup | None:
        if kind is TaskKind.EVALUATE:
            groups = [self.evaluations[version]] if version in self.evaluations else []
        else:
            groups = self._in_training()
        for group in groups:
            if micro_batch in group.numbers:
                return group
        return None

    def _leasable(self) -> list[TaskGroup]:
        """The groups that tasks may be leased of now, the most urgent first."""
        groups = [] if self.awaited is None else [self.evaluations[self.awaited]]
        if not self._schedule.by_epoch or self.is_open:
            groups += self._in_training()
        for version in sorted(self.evaluations):
            if version != self.awaited:
                groups.append(self.evaluations[version])
        return groups

    def _version_of(self, group: TaskGroup, current: int) -> int:
        """The version that tasks of a group of training are computed on."""
        return current + (self._groups.index(group) if group.kind is TaskKind.TRAIN else 0)

    def _grant(self, group: TaskGroup, number: int, worker: str, version: int) -> Task:
        """Gives a micro-batch to the worker; earlier holders may still answer. `version`: of training."""
        holders = group.granted.setdefault(number, {})
        holders.pop(worker, None)  # dicts keep the position of a key: the latest grant must be last
        holders[worker] = self._now()
        self._held[worker].add((group, number))
        if group.kind is TaskKind.EVALUATE:
            return self._schedule.evaluation(group.version, number)
        return self._schedule.task(version, number)

    def _grant_share(self, group: TaskGroup, worker: str, want: int, version: int) -> list[Task]:
        """Grants up to `want` free micro-batches of the group, and no more than the worker's fair share."""
        undone = len(group.numbers) - len(group.done)
        if want < 1 or not undone:
            return []
        room = -(-undone // max(1, len(self._held)))
        for other, number in self._held[worker]:
            if other is group and self._is_live(group, number, worker):
                room -= 1
        granted: list[Task] = []
        while len(granted) < min(want, room) and (free := self._lowest_free(group)) is not None:
            granted.append(self._grant(group, free, worker, version))
        return granted

    def _lowest_free(self, group: TaskGroup) -> int | None:
        """The lowest undone micro-batch of the group that nobody has a lease of that has not ended.

        Those from `fresh` on, and those in `returned`, are all that can be free: a thousand that are held are not
        searched at every lease.
        """
        if group.opened is not None and self._now() >= group.look_at:
            self._return_ended(group, group.opened)
        while group.returned:
            number = group.returned[0]
            if number not in group.done and self._is_free(group, number):
                return number
            heapq.heappop(group.returned)
        while group.fresh < group.numbers.stop:
            if group.fresh not in group.done and self._is_free(group, group.fresh):
                return group.fresh
            group.fresh += 1
        return None

    def _return_ended(self, group: TaskGroup, opened: float) -> None:
        """Finds the leases that have ended: whoever holds one may still be working, and does not say so."""
        # A lease that is granted, or prolonged, from now on ends later than that.
        group.look_at = self._now() + self._lease_s
        for number in group.granted:
            if not self._is_free(group, number):
                group.look_at = min(group.look_at, self._held_since(group, number, opened) + self._lease_s)
            elif number < group.fresh:
                heapq.heappush(group.returned, number)

    def _is_live(self, group: TaskGroup, number: int, worker: str) -> bool:
        """Whether the worker has a lease of the micro-batch that has not ended; before its group opens none ends."""
        at = group.granted.get(number, {}).get(worker)
        if at is None or group.opened is None:
            return at is not None
        return self._now() - max(at, group.opened, self._progress[worker]) <= self._lease_s

    def _is_free(self, group: TaskGroup, number: int) -> bool:
        """Whether nobody has a lease of the micro-batch that has not ended."""
        if number not in group.granted or group.opened is None:
            return number not in group.granted
        return self._now() - self._held_since(group, number, group.opened) > self._lease_s

    def _held_since(self, group: TaskGroup, number: int, opened: float) -> float:
        """When the last of its holders could start; `opened` where it has none."""
        for worker, at in group.granted.get(number, {}).items():
            opened = max(opened, at, self._progress[worker])
        return opened

    def _finish(self, group: TaskGroup, number: int, by: str = "") -> str | None:
        """Ends every lease of the micro-batch; returns who finished it ("": whom it was granted to last), if known."""
        holders = group.granted.pop(number, {})
        for worker in holders:
            self._held[worker].discard((group, number))
        by = by or next(reversed(holders), "")
        if by in self._progress:
            # Only this worker: what a stopped worker still holds must not be held for longer.
            self._progress[by] = self._now()
        return by or None

    def _evaluating_now(self, worker: str) -> int:
        return sum(group.kind is TaskKind.EVALUATE for group, _ in self._held[worker])

    def _evaluate_concurrently(self, worker: str, want: int) -> list[Task]:
        """Tasks of the oldest concurrent evaluation that has some for the worker."""
        most = min(want, 1)
        if not self.is_open:
            most = max(most, _AT_ONCE - self._evaluating_now(worker))
        elif not any(group is self._groups[0] or group.kind is TaskKind.EVALUATE for group, _ in self._held[worker]):
            most = max(most, 1)  # it holds nothing that it can do now
        for version in sorted(self.evaluations):
            if version != self.awaited and (tasks := self._grant_share(self.evaluations[version], worker, most, 0)):
                return tasks
        return []

    def _back_up(self, worker: str, version: int) -> list[Task]:
        """The micro-batch of the current group that has been in progress for longest, for a worker without work."""
        longest = self._longest_held()
        if longest is None or longest[2] >= self._now():
            return []
        group, number, _ = longest
        if any(other is group for other, _ in self._held[worker]):
            return []
        return [self._grant(group, number, worker, version)]

    def _longest_held(self) -> tuple[TaskGroup, int, float] | None:
        """What has been in progress for longest of the group that is waited for, and when a backup may be given."""
        if self._backup_after is None:
            return None
        if self.is_open:
            group = self._groups[0]
        elif self.awaited is not None:
            group = self.evaluations[self.awaited]
        else:
            return None
        assert group.opened is not None
        # Nothing of the group is free when this matters: so they are few.
        since = {number: self._held_since(group, number, group.opened) for number in group.undone()}
        longest = min(since, key=lambda number: since[number], default=None)
        return None if longest is None else (group, longest, since[longest] + self._backup_after)


def _in_order(held: tuple[TaskGroup, int]) -> tuple[TaskKind, int, int]:
    group, number = held
    return group.kind, group.version, number
