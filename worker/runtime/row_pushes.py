"""Gradients of rows on their way to store servers; the rest goes to the master."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from elastable.embedding_store.errors import NotFinite, StaleVersion, Unavailable
from elastable.embedding_store.shards import RowPush, RowPushOutcome, ShardStore
from elastable.embedding_store.support.retry import retry
from elastable.master.api import JobSpec, Push, SyncPushId

__all__ = ["RowPushes"]


class RowPushes:
    """Hands the rows' part of pushes to store servers.

    Args:
        servers: All of the job's.
        job: The job.
        deadline_s: Seconds that a server may be away, or be full.
    """

    def __init__(self, servers: ShardStore, job: JobSpec, deadline_s: float) -> None:
        self._servers = servers
        self._job = job
        self._deadline_s = deadline_s

    def send(self, push: Push, refuse_failed: Callable[[], None]) -> Push:
        """Hands in the gradients of rows; what is left is the master's.

        Args:
            push: Of a micro-batch.
            refuse_failed: Called before every attempt; raises where the job is over.

        Raises:
            StaleVersion: the version that it was computed on is past; of an asynchronous job: a later push of this
                worker has come before it.
            NotFinite: gradients hold NaN or Inf, and the job refuses these.
            ElastableError: as `ShardStore.push_rows`.
        """
        rows = self._rows_of(push)
        left = replace(push, slices={}, parts=tuple(replace(part, slices={}) for part in push.parts))

        def attempt() -> RowPushOutcome:
            refuse_failed()
            return self._servers.push_rows(rows)

        try:
            outcome = retry(attempt, "a push of rows", self._deadline_s, on=(Unavailable,))
        except NotFinite as error:
            if self._job.not_finite != "skip":
                raise
            return replace(left, not_finite=str(error))
        if outcome is RowPushOutcome.STALE:
            raise StaleVersion(f"a store server has no use for push {push.id}: it has a later version, or a later push")
        return left

    def _rows_of(self, push: Push) -> RowPush:
        parts = (push.slices, *(part.slices for part in push.parts))
        if isinstance(push.id, SyncPushId):
            return RowPush(self._job.job, push.id.version, push.id.micro_batch, parts)
        assert push.computed_on is not None, "a worker says what it computed an asynchronous push on"
        return RowPush(self._job.job, push.computed_on, push.id.sequence, parts, sender=push.id.incarnation)
