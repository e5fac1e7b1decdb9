"""What a job's master counts for those who watch it."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future

from elastable.embedding_store.measures.counters import Counts, Durations, Total
from elastable.master.api import PushReply

__all__ = ["PHASES", "JobMeasures"]

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
