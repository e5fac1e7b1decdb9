"""What a worker counts for those who watch it."""

from __future__ import annotations

from elastable.embedding_store.measures.counters import Counts, Durations, LookupCounts, Total

__all__ = ["WorkerMeasures"]


class WorkerMeasures:
    """Of one worker.

    Attributes:
        micro_batches: By kind ("train" or "evaluate") and outcome ("counted" or "dropped").
        records: Of training micro-batches that counted.
        lookups: Its lookups, wherever the rows came from.
        phases: Seconds of a micro-batch by phase: "wait" (for its version), "lookup", "compute", "push".
        sessions: That it opened; each after the first follows a broken connection or a master that was restarted.
    """

    def __init__(self) -> None:
        self.micro_batches, self.records = Counts(), Total()
        self.lookups, self.phases = LookupCounts(), Durations()
        self.sessions = Total()

    def note(self, kind: str, counted: bool, records: int) -> None:
        """A micro-batch of this kind is over."""
        self.micro_batches.add(kind, "counted" if counted else "dropped")
        if counted and kind == "train":
            self.records.add(records)
