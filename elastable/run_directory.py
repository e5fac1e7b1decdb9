"""What a run leaves behind: results, metrics, curves, checkpoint, exported model."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tensorflow as tf

from elastable.learning_curve import draw_learning_curve
from embedding_store.errors import BadInput

__all__ = ["RunDirectory"]


class RunDirectory:
    """`runs/<time>/`, with `runs/latest` pointing at it.

    Holds `metrics.jsonl` (a line every so many versions and one an epoch),
    `tensorboard/`, and at the end `result.json` and `learning_curve.png`.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            path.mkdir(parents=True, exist_ok=True)
            self._metrics = (path / "metrics.jsonl").open("a", buffering=1)
        except OSError as error:
            raise BadInput(f"run directory {path} cannot be written: {error}") from error
        self._events = tf.summary.create_file_writer(str(path / "tensorboard"))
        self._lines: list[dict[str, Any]] = []
        self._started = time.time()

    @classmethod
    def create(cls, home: Path) -> RunDirectory:
        """A new directory in `home`, named after the time."""
        name = time.strftime("%Y%m%d-%H%M%S")
        path = next(
            candidate
            for candidate in (home / (name if not again else f"{name}-{again}") for again in range(1000))
            if not candidate.exists()
        )
        run = cls(path)
        latest = home / "latest"
        latest.unlink(missing_ok=True)
        latest.symlink_to(path.name)
        return run

    def record(self, kind: str, version: int, epoch: int, values: Mapping[str, float]) -> None:
        """Notes metrics of kind "train" or "epoch" at a version."""
        line = {"kind": kind, "version": version, "epoch": epoch, "seconds": time.time() - self._started, **values}
        self._lines.append(line)
        self._metrics.write(json.dumps(line) + "\n")
        with self._events.as_default(step=version):
            for name, value in values.items():
                tf.summary.scalar(f"{kind}/{name}", value)

    def finish(self, result: Mapping[str, Any]) -> None:
        """Writes `result.json` and the learning curve, and closes all files."""
        draft = self.path / ".result.json"
        draft.write_text(json.dumps(dict(result), indent=2) + "\n")
        draft.rename(self.path / "result.json")
        draw_learning_curve(self._lines, self.path / "learning_curve.png")
        self.close()

    def close(self) -> None:
        """Closes the files; what was recorded stays."""
        self._metrics.close()
        self._events.close()
