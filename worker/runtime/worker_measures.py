"""What a worker counts and profiles, and which trace its work belongs to."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path

from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.measures import Counts, Durations, LookupCounts, VersionTrace, span
from elastable.master.api import Task, TaskKind
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf

_log = logging.getLogger(__name__)

_FAILURES = (RuntimeError, OSError)  # and those of TensorFlow
_BEFORE, _PROFILED = 5, 10  # micro-batches; the first ones trace the model and open connections


class StepProfile:
    """Profiles ten micro-batches that train, after the first five.

    TensorFlow's profiler is one of a process, so one of these is open at a time. What it measures changes no number.

    Args:
        folder: TensorBoard's log directory; the profile is below `plugins/profile`. It is made if it is missing.

    Raises:
        BadInput: the folder cannot be made.
        Unsupported: Keras runs on another backend than TensorFlow.
    """

    def __init__(self, folder: Path) -> None:
        if not backend().has_graphs:
            raise Unsupported(f"--profile {folder}: it is TensorFlow's profiler, and Keras runs on {backend().name}")
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
        except (
            tf.errors.OpError,
            *_FAILURES,
        ) as error:  # a profile that cannot be written is no reason to leave the job
            _log.warning("the profile was not written to %s: %s", self._folder, error)
        else:
            _log.info("a profile of %d micro-batches is in %s", self._trained - _BEFORE, self._folder)

    def _start(self) -> None:
        try:
            tf.profiler.experimental.start(str(self._folder))
        except (tf.errors.OpError, *_FAILURES) as error:  # such as a profiler that the program has started itself
            _log.warning("nothing is profiled: %s", error)
        else:
            self._running = True


# Profiles of micro-batches, for TensorBoard


@dataclass(eq=False)
class WorkerMeasures:
    """Of one worker, whose thread alone counts.

    Attributes:
        profile: Of some micro-batches; None: none is made.
        micro_batches: By kind ("train" or "evaluate") and outcome ("counted" or "dropped").
        records: Of training micro-batches that counted.
        lookups: Its lookups, wherever the rows came from.
        phases: Seconds of a micro-batch by phase: "wait" (for its version), "lookup", "compute", "push".
        sessions: That it opened; each after the first follows a broken connection or a master that was restarted.
    """

    profile: StepProfile | None = None
    micro_batches: Counts = field(default_factory=Counts)
    lookups: LookupCounts = field(default_factory=LookupCounts)
    phases: Durations = field(default_factory=Durations)
    records: int = 0
    sessions: int = 0

    def note(self, kind: str, counted: bool, records: int) -> None:
        """A micro-batch of this kind is over."""
        self.micro_batches.add(kind, "counted" if counted else "dropped")
        if counted and kind == "train":
            self.records += records

    @contextmanager
    def micro_batch(self, job: str, task: Task, computed_on: int, worker: str) -> Iterator[None]:
        """Around a micro-batch, from its lookup until its gradients count.

        Args:
            worker: Incarnation of the worker.
        """
        profiled = nullcontext() if self.profile is None else self.profile.micro_batch(task)
        attributes = {"micro_batch": task.micro_batch, "kind": task.kind.value, "worker": worker}
        with span("micro-batch", trace_of(job, task, computed_on), attributes), profiled:
            yield

    @contextmanager
    def phase(self, label: str) -> Iterator[None]:
        """Around a phase of a micro-batch."""
        profiled = nullcontext() if self.profile is None else self.profile.phase(label)
        with self.phases.timing(label), profiled:
            yield

    def close(self) -> None:
        """Nothing is measured any more: a profile that is being made is written."""
        if self.profile is not None:
            self.profile.close()


def trace_of(job: str, task: Task, computed_on: int) -> VersionTrace:
    """The version that a task is for: the one after `computed_on` where it trains, that one where it evaluates."""
    return VersionTrace(job, computed_on + (task.kind is TaskKind.TRAIN))
