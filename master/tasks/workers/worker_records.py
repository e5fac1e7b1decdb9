"""What each worker of a job has done, and who has left while there was work."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field

from elastable.master.api import GoneWorker, WorkerIdentity, WorkerStatus
from elastable.master.tasks.workers.throughput import Throughput

__all__ = ["WorkerRecords"]

_POINTS = 32
_MOST_GONE = 32


@dataclass(slots=True)
class _Record:
    """Of one worker: micro-batches that counted, their records, and when it was last heard of."""

    heard: float
    micro_batches: int = 0
    records: int = 0
    throughput: Throughput = field(default_factory=lambda: Throughput(_POINTS))


@dataclass(frozen=True, slots=True)
class _Gone:
    worker: WorkerIdentity
    at: float
    leases: int


class WorkerRecords:
    """By incarnation. Not thread-safe: the master's lock guards it.

    Args:
        now: Monotonic clock, in seconds.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._records: dict[str, _Record] = {}
        self._gone: OrderedDict[str, _Gone] = OrderedDict()

    @property
    def contributors(self) -> int:
        """Workers, those that left included, of whom a training micro-batch counted."""
        return sum(1 for record in self._records.values() if record.micro_batches)

    def joined(self, incarnation: str) -> None:
        """The worker has a session."""
        self._records.setdefault(incarnation, _Record(self._now())).heard = self._now()
        self._gone.pop(incarnation, None)

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
        self._gone[worker.incarnation] = _Gone(worker, self._now(), leases)
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
        now = self._now()
        return tuple(
            GoneWorker(it.worker, it.leases, self._micro_batches(it.worker), max(0.0, now - it.at))
            for it in self._gone.values()
        )

    def _micro_batches(self, worker: WorkerIdentity) -> int:
        record = self._records.get(worker.incarnation)
        return 0 if record is None else record.micro_batches
