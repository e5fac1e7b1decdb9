"""Metrics of a job's checkpoints."""

from __future__ import annotations

from collections.abc import Iterator

from elastable.monitoring.checkpoint_log import CheckpointLog
from elastable.monitoring.metric import Sample, counter, gauge

__all__ = ["METRICS", "CheckpointSource"]

_WRITTEN = counter("elastable_checkpoints_total", "checkpoints", "Checkpoints: written, failed.", "result")
_VERSION = gauge("elastable_checkpoint_version", "version", "Version of the newest checkpoint.")
_TIME = gauge("elastable_checkpoint_timestamp_seconds", "Unix time", "When the newest checkpoint was written.")
_SECONDS = gauge("elastable_checkpoint_duration_seconds", "seconds", "How long that took.")
_BYTES = gauge("elastable_checkpoint_bytes", "bytes", "Its size, where it is a local folder.")

METRICS = (_WRITTEN, _VERSION, _TIME, _SECONDS, _BYTES)


class CheckpointSource:
    """Of the checkpoints that this process writes.

    Args:
        log: Where they are noted.
    """

    def __init__(self, log: CheckpointLog) -> None:
        self._log = log

    def __call__(self) -> Iterator[Sample]:
        noted = self._log.noted()
        yield _WRITTEN(self._log.written, "written")
        yield _WRITTEN(self._log.failed, "failed")
        newest = next((each for each in reversed(noted) if each.error is None), None)
        if newest is None:
            return
        yield _VERSION(newest.version)
        yield _TIME(newest.at)
        if newest.seconds is not None:
            yield _SECONDS(newest.seconds)
        if newest.bytes is not None:
            yield _BYTES(newest.bytes)
