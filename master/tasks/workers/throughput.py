"""How fast records are trained: by a job, or by one worker."""

from __future__ import annotations

from collections import deque

__all__ = ["Throughput"]

_WINDOW_S = 60.0
_SILENT_GAPS = 3  # usual gaps between two notes, after which a silence counts as time in which nothing was trained


class Throughput:
    """Records a second over the last minute. Whoever uses it guards it.

    Args:
        points: Notes that are kept at most.
    """

    def __init__(self, points: int = 256) -> None:
        self._notes: deque[tuple[float, int]] = deque(maxlen=points)
        self._before = 0.0

    def note(self, now: float, records: int) -> None:
        """So many records are trained at `now`, in seconds of a monotonic clock, all earlier ones included."""
        self._notes.append((now, records))
        while len(self._notes) > 2 and self._notes[0][0] < now - _WINDOW_S:
            self._notes.popleft()

    def pause(self, now: float) -> None:
        """Nothing is to be trained for a while, which counts for nothing: the rate stays as it is."""
        self._before = self.rate(now)
        self._notes.clear()

    def rate(self, now: float) -> float:
        """Records a second; 0 where nothing is known."""
        if len(self._notes) < 2:
            return self._before
        (begun, first), (ended, last) = self._notes[0], self._notes[-1]
        seconds, silent = ended - begun, now - ended
        if silent > _SILENT_GAPS * seconds / (len(self._notes) - 1):
            seconds += silent
        return (last - first) / seconds if seconds > 0 else self._before
