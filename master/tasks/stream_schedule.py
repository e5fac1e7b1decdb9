"""The plan of a job on a stream of events: versions are cut by position, from what waits."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from elastable.embedding_store.contract.malformed import MALFORMED, DocumentFields
from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import JobSpec, Span, Task, TaskKind, Waiting
from elastable.master.tasks.schedule import Schedule

Cut = tuple[tuple[Span, ...], ...]
"""Of a version: the events of each of its micro-batches."""


@dataclass(frozen=True, slots=True)
class StreamPoint:
    """How far the stream is planned: what comes next is a function of it and of what waits.

    Attributes:
        positions: Partition -> position of its last planned event.
        last: The partition of the last planned span; the one after it is next.
    """

    positions: Mapping[str, str] = field(default_factory=dict)
    last: str = ""


class StreamSchedule(Schedule):
    """The plan of a job on a stream.

    An epoch has as many versions, and a version as many micro-batches, as if it were a pass over the job's
    `train_records`, and they are numbered so. A version with fewer events, cut because they had waited for long enough
    or were the last, has fewer micro-batches; numbers of others do not change.

    A micro-batch is what waits in the partition whose turn it is, as far as it holds, and then in those after it, in
    the order of their names. So every partition gets its turn, and where all events are there before the first is
    planned, the cuts are those of every other run.

    Attributes:
        point: How far the stream is planned.
        until: Partition -> position behind which nothing is trained; None: there is no end yet.
        option: What `until` was found by: `MasterOptions.until`.
        identity: `EventSource.identity` of the stream; empty: not asked yet.
        ended: Whether nothing waits before `until`: no further version is planned.
        bad_events: How many events of committed versions could not be read.

    Raises:
        CheckpointError: what an earlier run of the job kept is malformed.
    """

    def __init__(self, job: JobSpec, kept: DocumentFields | None = None, version: int | None = None) -> None:
        super().__init__(job)
        self.group_count = job.versions_before if version is None else version
        self.complete = self.finished(self.group_count)
        self._cuts: dict[int, Cut] = {}
        self._points: dict[int, StreamPoint] = {}
        self.point, self.ended, self.bad_events = StreamPoint(), False, 0
        self.until: Mapping[str, str] | None = None
        self.option: str | None = None
        self.identity = ""
        self._passed: dict[int, int] = {}  # version -> its events that could not be read
        self._short_since: float | None = None  # since when there have been events, too few for a version
        if kept:
            self._restore(kept)

    def _restore(self, kept: DocumentFields) -> None:
        try:
            self.point = StreamPoint(_texts(kept["positions"]), str(kept["last"]))
            if kept["until"] is not None:
                self.option, until = kept["until"]
                self.until = _texts(until)
            self.bad_events, self.identity = int(kept["bad_events"]), str(kept["identity"])
            for cut in kept["cuts"]:
                self._add(tuple(tuple(Span(**span) for span in spans) for spans in cut))
        except MALFORMED as error:
            raise CheckpointError(f"{str(kept)[:200]!r} is no place in a stream: {error}") from error

    def kept(self, version: int) -> dict[str, object]:
        """What a job that resumes at `version` needs: its positions, and the cuts of later versions that are known."""
        point = self._points.get(version, self.point)
        cuts = [
            [[asdict(span) for span in spans] for spans in self._cuts[each]]
            for each in range(version, self.group_count)
        ]
        over = self.until is None or (self.ended and version == self.group_count)
        return {
            "identity": self.identity, "positions": dict(point.positions), "last": point.last, "cuts": cuts,
            "until": None if over else [self.option, dict(self.until or {})],
            "bad_events": self.bad_events + sum(count for each, count in self._passed.items() if each <= version),
        }  # fmt: skip

    def positions(self, version: int) -> Mapping[str, str]:
        """Partition -> position of its last event in `version`."""
        return self._points.get(version, self.point).positions

    # The schedule, as far as it is planned

    def micro_batches(self, version: int) -> range:
        numbers = super().micro_batches(version)
        return numbers[: len(self._cuts[version])] if version in self._cuts else numbers

    def task(self, version: int, micro_batch: int) -> Task:
        spans = self._cuts[version][micro_batch - super().micro_batches(version).start]
        events = sum(span.events for span in spans)
        return Task(version, TaskKind.TRAIN, micro_batch, self.epoch(version), 0, events, spans)

    def events_from(self, version: int) -> int:
        """Events of the versions that are planned and not made yet, where this one is current."""
        cuts = (self._cuts[each] for each in range(version, self.group_count))
        return sum(span.events for cut in cuts for spans in cut for span in spans)

    # Planning

    def wanted(self, version: int, ahead: int) -> int:
        """Events of each partition to look for; 0: none, as `ahead` versions from the current one on are planned."""
        if self.complete or self.group_count >= version + ahead:
            return 0
        return self.group * self.job.micro_batch_size

    def plan(self, waiting: Mapping[str, Waiting], now: float, linger_s: float) -> bool:
        """Cuts as many versions of what waits as it makes.

        Args:
            waiting: As `EventSource.ahead` gives it for `point.positions`, `wanted` events and `until`.
            now: Seconds, of a monotonic clock.
            linger_s: For so long fewer events than make a version wait for others.

        Returns:
            Whether the plan has changed.
        """
        before, whole = self.group_count, self.group * self.job.micro_batch_size
        more = any(each.more for each in waiting.values())
        rest = {name: list(waiting[name].stops) for name in sorted(waiting, key=_by_number)}
        there = {**{name: each.start for name, each in waiting.items()}, **self.point.positions}
        self.point = StreamPoint(dict(there), self.point.last)
        last_ones = self.until is not None and not more
        while not self.complete and (left := sum(map(len, rest.values()))):
            if left < whole and not last_ones and (more or not self._lingered(now, linger_s)):
                break
            if self.group_count > before and any(len(rest[name]) < whole and waiting[name].more for name in rest):
                break  # of a partition with more events than are listed: they are asked for first
            self._add(self._cut(rest, there))
            self._short_since = None
        else:
            self.ended = self.ended or last_ones
            self.complete = self.complete or self.ended
        return self.group_count > before or self.ended

    def _lingered(self, now: float, linger_s: float) -> bool:
        if self._short_since is None:
            self._short_since = now
        return now - self._short_since >= linger_s

    def _cut(self, rest: dict[str, list[str]], there: dict[str, str]) -> Cut:
        """The next version: its events leave `rest`, and `there` has their positions."""
        cut, last = [], self.point.last
        for _ in range(self.group):
            spans = []
            room = self.job.micro_batch_size
            for name in _after(list(rest), last):
                if taken := rest[name][:room]:
                    spans.append(Span(name, there[name], taken[-1], len(taken)))
                    del rest[name][: len(taken)]
                    there[name], last, room = taken[-1], name, room - len(taken)
                if not room:
                    break
            if spans:
                cut.append(tuple(spans))
        return tuple(cut)

    def _add(self, cut: Cut) -> None:
        self._points[self.group_count] = self.point
        self._cuts[self.group_count] = cut
        spans = [span for spans in cut for span in spans]
        positions = {**self.point.positions, **{span.partition: span.stop for span in spans}}
        self.point = StreamPoint(positions, spans[-1].partition)
        self.group_count += 1
        self.complete = self.finished(self.group_count)

    def forget(self, version: int) -> None:
        """Versions before this one are committed: their cuts are needed no more."""
        for each in [each for each in self._cuts if each < version]:
            del self._cuts[each], self._points[each]
        for each in [each for each in self._passed if each <= version]:
            self.bad_events += self._passed.pop(each)

    def pass_over(self, version: int, events: int) -> int:
        """Counts the events of a version that could not be read; how many there were in all."""
        self._passed[version] = events
        return self.bad_events + sum(self._passed.values())


def _texts(mapping: Mapping[object, object]) -> dict[str, str]:
    return {str(name): str(value) for name, value in mapping.items()}


def _by_number(name: str) -> tuple[object, ...]:
    """Sorts names by the numbers in them: partition 10 comes after 9; no two are equal."""
    return tuple((int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d+)", name)), name


def _after(names: Sequence[str], last: str) -> list[str]:
    """All names, those after `last` first."""
    place = next((place for place, name in enumerate(names) if _by_number(name) > _by_number(last)), 0)
    return [*names[place:], *names[:place]]
