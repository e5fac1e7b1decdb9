"""Workers that failed or did not fit, and left: the status shows why a master is still waiting for workers."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import replace

from elastable.master.api import Refusal, WorkerIdentity

__all__ = ["Refusals"]

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
