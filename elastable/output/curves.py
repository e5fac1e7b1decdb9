"""Loss and metrics over versions, as many points as a picture needs."""

import math
import threading
from collections.abc import Mapping

_MOST_POINTS = 256
_MOST_CURVES = 32


class Curves:
    """Points (version, value) by name of the metric. A full one loses every second point. Any thread may use it."""

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
