"""The workers of a job: sessions, what each has done and how fast, who failed or left."""

from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

from elastable.master.api import GoneWorker, JobSpec, Refusal, WorkerIdentity, WorkerStatus

_POINTS = 32
_MOST_GONE = 32


_WINDOW_S = 60.0
_SILENT_GAPS = 3  # usual gaps between two notes, after which a silence counts as time in which nothing was trained


class Throughput:
    """Records a second over the last minute, of at most `points` notes. Whoever uses it guards it."""

    def __init__(self, points: int = 256) -> None:
        self._notes: deque[tuple[float, int]] = deque(maxlen=points)
        self._before = 0.0

    def note(self, now: float, records: int) -> None:
        """So many records are trained at `now`, in seconds of a monotonic clock, all earlier ones included."""
        self._notes.append((now, records))
        while len(self._notes) > 2 and self._notes[0][0] < now - _WINDOW_S:
            self._notes.popleft()

    def pause(self, now: float) -> None:
        """Nothing is to be trained for a while, which counts for nothing: the rate stays as it is."""
        self._before = self.rate(now)
        self._notes.clear()

    def rate(self, now: float) -> float:
        """Records a second; 0 where nothing is known."""
        if len(self._notes) < 2:
            return self._before
        (begun, first), (ended, last) = self._notes[0], self._notes[-1]
        seconds, silent = ended - begun, now - ended
        if silent > _SILENT_GAPS * seconds / (len(self._notes) - 1):
            seconds += silent
        return (last - first) / seconds if seconds > 0 else self._before


@dataclass(slots=True)
class _Record:
    """Of one worker: micro-batches that counted, their records, and when it was last heard of."""

    heard: float
    micro_batches: int = 0
    records: int = 0
    throughput: Throughput = field(default_factory=partial(Throughput, _POINTS))


class WorkerRecords:
    """By incarnation. Not thread-safe: the master's lock guards it.

    A worker whose connection broke may open its next session before the end of the last
    one is noticed, so it counts until all of its sessions are closed.

    Attributes:
        present: Those with a session, and how many each has.

    Args:
        now: A monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self.present: dict[str, tuple[WorkerIdentity, int]] = {}
        self._records: dict[str, _Record] = {}
        self._gone: OrderedDict[str, tuple[WorkerIdentity, int, float]] = OrderedDict()  # leases, and when

    @property
    def contributors(self) -> int:
        """Workers, those that left included, of whom a training micro-batch counted."""
        return sum(1 for record in self._records.values() if record.micro_batches)

    def identity(self, incarnation: str) -> WorkerIdentity:
        """The worker of an incarnation; only the incarnation is known of one without a session."""
        return self.present[incarnation][0] if incarnation in self.present else WorkerIdentity(incarnation)

    def joined(self, worker: WorkerIdentity) -> None:
        """The worker opens a session."""
        _, count = self.present.get(worker.incarnation, (worker, 0))
        self.present[worker.incarnation] = (worker, count + 1)
        self._records.setdefault(worker.incarnation, _Record(self._now())).heard = self._now()
        self._gone.pop(worker.incarnation, None)

    def closed(self, incarnation: str) -> WorkerIdentity | None:
        """The worker closes a session; returns the worker where it was its last."""
        worker, count = self.present.pop(incarnation)
        if count > 1:
            self.present[incarnation] = (worker, count - 1)
        return worker if count == 1 else None

    def counted(self, incarnation: str, records: int) -> None:
        """A training micro-batch of so many records counted."""
        now = self._now()
        record = self._records.setdefault(incarnation, _Record(now))
        record.heard = now
        record.micro_batches += 1
        record.records += records
        record.throughput.note(now, record.records)

    def left(self, worker: WorkerIdentity, leases: int) -> None:
        """The worker's last session has ended while there was work; it held so many leases."""
        if not self._micro_batches(worker):
            self._records.pop(worker.incarnation, None)  # else whoever joins and leaves is remembered for ever
        self._gone[worker.incarnation] = (worker, leases, self._now())
        while len(self._gone) > _MOST_GONE:
            self._gone.popitem(last=False)

    def status(self, worker: WorkerIdentity, leases: int) -> WorkerStatus:
        """Of a worker that is there and holds so many leases."""
        now = self._now()
        record = self._records.get(worker.incarnation) or _Record(now)
        rate = record.throughput.rate(now)
        return WorkerStatus(worker, leases, record.micro_batches, rate, max(0.0, now - record.heard))

    def gone(self) -> tuple[GoneWorker, ...]:
        """Those that left while there was work and have not come back, the latest last."""
        now, found = self._now(), []
        for worker, leases, at in self._gone.values():
            found.append(GoneWorker(worker, leases, self._micro_batches(worker), max(0.0, now - at)))
        return tuple(found)

    def _micro_batches(self, worker: WorkerIdentity) -> int:
        record = self._records.get(worker.incarnation)
        return 0 if record is None else record.micro_batches


_MOST = 16  # of different reasons; workers that are started again and again have the same one
_LONGEST = 1_000  # characters of a message


class Refusals:
    """The latest reasons, each with the worker that gave it last and how many gave it. The master's lock guards it."""

    def __init__(self) -> None:
        self._by_reason: OrderedDict[tuple[str, str], Refusal] = OrderedDict()

    def note(self, worker: WorkerIdentity, error: BaseException) -> None:
        """Records why a worker leaves."""
        reason = type(error).__name__, str(error)[:_LONGEST]
        before = self._by_reason.pop(reason, Refusal(worker, *reason, count=0))
        self._by_reason[reason] = replace(before, worker=worker, count=before.count + 1)
        while len(self._by_reason) > _MOST:
            self._by_reason.popitem(last=False)

    def latest(self) -> tuple[Refusal, ...]:
        """All that are kept, the latest last."""
        return tuple(self._by_reason.values())


@dataclass(eq=False)
class LocalSession:
    """A `Session` in the master's own process; `leave` ends it there."""

    job: JobSpec
    leave: Callable[[], None]
    store_session: bytes = b""
    closed: bool = False

    def alive(self) -> bool:
        return not self.closed

    def close(self) -> None:
        if not self.closed:
            self.closed = True
            self.leave()
