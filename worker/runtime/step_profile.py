"""A profile of some of a worker's micro-batches, for TensorBoard."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import tensorflow as tf

from elastable.embedding_store.errors import BadInput
from elastable.master.api import Task, TaskKind

__all__ = ["StepProfile"]

_log = logging.getLogger(__name__)

_FAILURES = (tf.errors.OpError, RuntimeError, OSError)
_BEFORE, _PROFILED = 5, 10  # micro-batches; the first ones trace the model and open connections


class StepProfile:
    """Profiles ten micro-batches that train, after the first five.

    TensorFlow's profiler is one of a process, so one of these is open at a time. What it measures changes no number.

    Args:
        folder: TensorBoard's log directory; the profile lies below `plugins/profile`. It is made if it is missing.

    Raises:
        BadInput: the folder cannot be made.
    """

    def __init__(self, folder: Path) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise BadInput(f"--profile {folder}: the folder cannot be made: {error.strerror}") from error
        self._folder = folder
        self._trained, self._running = 0, False

    @contextmanager
    def micro_batch(self, task: Task) -> Iterator[None]:
        """Around a micro-batch, which is a step in TensorBoard if it trains."""
        if task.kind is not TaskKind.TRAIN:
            yield
            return
        if self._trained == _BEFORE:
            self._start()
        self._trained += 1
        if not self._running:
            yield
            return
        with tf.profiler.experimental.Trace("micro-batch", step_num=task.micro_batch, _r=1):
            yield
        if self._trained >= _BEFORE + _PROFILED:
            self.close()

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Around a phase of a micro-batch."""
        if not self._running:
            yield
            return
        with tf.profiler.experimental.Trace(label):
            yield

    def close(self) -> None:
        """Writes what was profiled; nothing, where it is written or fewer than six micro-batches were trained."""
        if not self._running:
            return
        self._running = False
        try:
            tf.profiler.experimental.stop()
        except _FAILURES as error:  # a profile that cannot be written is no reason to leave the job
            _log.warning("the profile was not written to %s: %s", self._folder, error)
        else:
            _log.info("a profile of %d micro-batches is in %s", self._trained - _BEFORE, self._folder)

    def _start(self) -> None:
        try:
            tf.profiler.experimental.start(str(self._folder))
        except _FAILURES as error:  # such as a profiler that the program has started itself
            _log.warning("nothing is profiled: %s", error)
        else:
            self._running = True
