"""What a job's master counts and logs for those who watch it."""

from __future__ import annotations

import logging
from collections.abc import Callable
from concurrent.futures import Future

from elastable.embedding_store.measures.counters import Counts, Durations, Total
from elastable.master.api import PushReply, WorkerIdentity

__all__ = ["PHASES", "JobMeasures"]

_log = logging.getLogger(__name__)

PHASES = {
    "wait": "for the workers' gradients",
    "sum": "adding the gradients up, and clipping them",
    "dense": "the optimizer of the dense variables",
    "rows": "committing the rows to the store",
    "callbacks": "callbacks, records and checkpoints",
}
"""What one version after the other is made of -> what is done then."""


class JobMeasures:
    """Of one job, from the start of this process on.

    Attributes:
        phases: Seconds of each version by phase; see `PHASES`.
        versions: Seconds of each version, all phases together; its label is "version".
        pushes: Pushes by outcome.
        refused: Pushes that raised, by name of the error.
        joined, left: Sessions that workers opened, and that ended while there was work.
    """

    def __init__(self) -> None:
        self.phases, self.versions = Durations(), Durations()
        self.pushes, self.refused = Counts(), Counts()
        self.joined, self.left = Total(), Total()

    def worker_joined(self, worker: WorkerIdentity) -> None:
        """It has opened a session."""
        self.joined.add(1)
        _log.info("worker %s joined", worker, extra={"worker": worker.incarnation})

    def worker_left(self, worker: WorkerIdentity, held: int, ending: bool) -> None:
        """Its last session has ended; it held so many micro-batches. `ending`: there was nothing left to do."""
        field = {"worker": worker.incarnation}
        if ending:
            _log.info("worker %s left: the job is over", worker, extra=field)
            return
        self.left.add(1)
        _log.info("worker %s left or died; %d of its micro-batches go to others", worker, held, extra=field)

    def counted(self, report: Callable[[], Future[PushReply]]) -> Future[PushReply]:
        """The reply to a push; its outcome, or what refuses it, is counted."""
        try:
            reply = report()
        except Exception as error:
            self.refused.add(type(error).__name__)
            raise
        reply.add_done_callback(self._count)
        return reply

    def _count(self, reply: Future[PushReply]) -> None:
        if reply.cancelled():
            return
        if (error := reply.exception()) is not None:
            self.refused.add(type(error).__name__)
        else:
            self.pushes.add(reply.result().outcome.value)
