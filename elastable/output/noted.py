"""What a job notes for those who watch it: its metrics as curves, and its checkpoints. Any thread may use either."""

import math
import threading
import time
from collections import deque
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

JOB_FILE = "job.json"
"""Of a run directory: the job, the address of its master, and the version that it began with."""

_MOST_POINTS = 256
_MOST_CURVES = 32


class Curves:
    """Points (version, value) by name of the metric. A full one loses every second point."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._points: dict[str, list[tuple[int, float]]] = {}

    def note(self, kind: str, version: int, values: Mapping[str, float]) -> None:
        """Takes what `RunDirectory.record` notes; of an epoch the metrics of the validation split alone."""
        with self._lock:
            for name, value in values.items():
                if (kind == "epoch" and not name.startswith("val_")) or not math.isfinite(value):
                    continue
                if name not in self._points and len(self._points) >= _MOST_CURVES:
                    continue
                points = self._points.setdefault(name, [])
                points.append((version, float(value)))
                if len(points) > _MOST_POINTS:
                    del points[1::2]

    def points(self) -> dict[str, list[tuple[int, float]]]:
        """Name -> points, by version."""
        with self._lock:
            return {name: sorted(points) for name, points in self._points.items()}


MOST_CHECKPOINTS = 20
"""That are noted."""


@dataclass(frozen=True, slots=True)
class NotedCheckpoint:
    """One checkpoint.

    Attributes:
        version: Of the job.
        at: Unix time, in seconds.
        seconds: It took; None: an earlier process has written it.
        place: Path or URL; "" where it could not be written.
        bytes: Of its files; None: it is not in a local folder.
        error: Why it could not be written; None: it was.
    """

    version: int
    at: float
    seconds: float | None
    place: str = ""
    bytes: int | None = None
    error: str | None = None


class CheckpointLog:
    """The latest of them, and how many this process has written."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._noted: deque[NotedCheckpoint] = deque(maxlen=MOST_CHECKPOINTS)
        self.written = 0
        self.failed = 0

    def note(self, version: int, seconds: float, place: str) -> None:
        """One has been written."""
        size = None
        if "://" not in place:
            with suppress(OSError):
                size = sum(file.stat().st_size for file in Path(place).rglob("*") if file.is_file())
        with self._lock:
            self.written += 1
            self._noted.append(NotedCheckpoint(version, time.time(), seconds, place, size))

    def note_earlier(self, version: int, at: float, place: str, size: int) -> None:
        """One was there when the process began."""
        with self._lock:
            self._noted.append(NotedCheckpoint(version, at, None, place, size))

    def note_failure(self, version: int, seconds: float, error: str) -> None:
        """One could not be written."""
        with self._lock:
            self.failed += 1
            self._noted.append(NotedCheckpoint(version, time.time(), seconds, error=error))

    def noted(self) -> tuple[NotedCheckpoint, ...]:
        """The latest, in the order in which they ended."""
        with self._lock:
            return tuple(self._noted)
