"""The checkpoints that a job has written, also before it was resumed, or could not write."""

import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

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
    """The latest of them, and how many this process has written. Any thread may use it."""

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
