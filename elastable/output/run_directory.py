"""What a run leaves behind: results, metrics, a picture of its curves, checkpoint, exported model."""

from __future__ import annotations

import json
import logging
import os
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from tensorboard.summary import Writer

from elastable.embedding_store.contract.malformed import UNREADABLE
from elastable.embedding_store.errors import BadInput
from elastable.master.api import BadEvent
from elastable.output.noted import JOB_FILE, Curves

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_log = logging.getLogger(__name__)

_METRICS = "metrics.jsonl"


def require_writable(home: Path) -> None:
    """Makes a directory, and makes sure that files can be written there.

    Raises:
        BadInput: naming the directory and why not.
    """
    try:
        home.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=home):
            return
    except OSError as error:
        raise BadInput(f"directory {home} cannot be written: {error}") from error


class RunDirectory:
    """`runs/<time>/`, with `runs/latest` pointing at it.

    Holds `job.json`, `metrics.jsonl` (a line every so many versions and one an epoch), `tensorboard/`, and at the end
    `result.json` and `learning_curve.png`. What cannot be written while a job runs is warned of once and left out: a
    disk that is full for a while must not end hours of training.

    Attributes:
        curves: What was recorded, as curves; of a job that goes on, also by the runs before it in the same home.
    """

    def __init__(self, path: Path) -> None:
        self.path, self.curves = path, Curves()
        try:
            path.mkdir(parents=True)
            self._events = Writer(str(path / "tensorboard"))
            self._metrics = (path / _METRICS).open("a", buffering=1)
        except _failures() as error:
            raise BadInput(f"run directory {path} cannot be written: {error}") from error
        self._closed = False
        self._warned = False
        self._lines: list[dict[str, object]] = []
        self._started = time.monotonic()

    @classmethod
    def create(cls, home: Path) -> RunDirectory:
        """A new directory in `home`, named after the time."""
        name = time.strftime("%Y%m%d-%H%M%S")
        try:
            home.mkdir(parents=True, exist_ok=True)
            path = next(
                candidate
                for candidate in (home / (name if not again else f"{name}-{again}") for again in range(1000))
                if not candidate.exists()
            )
            run = cls(path)
            # Renamed into place: another run that starts now never finds it missing.
            link = home / f".latest-{path.name}"
            link.symlink_to(path.name)
            link.replace(home / "latest")
        except OSError as error:
            raise BadInput(f"run directory in {home} cannot be made: {error}") from error
        return run

    def begin_job(self, job: str, address: str, version: int) -> None:
        """Notes in `job.json` what runs here; takes the curves of earlier runs of the job, up to where it goes on.

        Args:
            job: Its id.
            address: Of its master.
            version: That it begins with.

        Raises:
            BadInput: it cannot be noted, as on a full disk.
        """
        try:
            (self.path / JOB_FILE).write_text(json.dumps({"address": address, "job": job, "version": version}) + "\n")
        except OSError as error:
            raise BadInput(f"{self.path / JOB_FILE} cannot be written: {error}") from error
        earlier: list[dict[str, object]] = []
        homes = sorted((file.parent for file in self.path.parent.glob(f"*/{JOB_FILE}")), key=_by_age, reverse=True)
        for home in homes if version else []:  # the newest first: a later run took the place of what follows
            try:
                begun = json.loads((home / JOB_FILE).read_text())
                if home.is_symlink() or home == self.path or begun["job"] != job:
                    continue
                lines = [json.loads(line) for line in (home / _METRICS).read_text().splitlines() if line.endswith("}")]
                earlier = [line for line in lines if line["version"] <= version] + earlier
                version = min(version, begun["version"])
            except UNREADABLE as error:
                _log.warning("the curves of %s are left out: %s", home, error)
        for line in earlier:
            values = {name: value for name, value in line.items() if name not in ABOUT and isinstance(value, float)}
            self.curves.note(str(line["kind"]), int(str(line["version"])), values)
        self._lines[:0] = earlier

    def record(self, kind: str, version: int, epoch: int, values: Mapping[str, float]) -> None:
        """Notes metrics at a version, of kind "train", "evaluation" (of that very version) or "epoch"."""
        line = {"kind": kind, "version": version, "epoch": epoch, "seconds": time.monotonic() - self._started, **values}
        self._lines.append(line)
        self.curves.note(kind, version, values)
        try:
            self._metrics.write(json.dumps(line) + "\n")
            for name, value in values.items():
                self._events.add_scalar(f"{kind}/{name}", value, version)
        except _failures() as error:
            self._warn(error)

    def note_bad_events(self, version: int, events: Sequence[BadEvent]) -> None:
        """Appends events of a version that could not be read to `bad-events.jsonl`, so that they outlive a crash.

        Raises:
            BadInput: they cannot be written: what is passed over is to be known.
        """
        lines = [json.dumps({"version": version, **asdict(event)}) + "\n" for event in events]
        try:
            with (self.path / "bad-events.jsonl").open("a") as file:
                file.writelines(lines)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise BadInput(f"run directory {self.path}: bad-events.jsonl cannot be written: {error}") from error

    def _warn(self, error: Exception) -> None:
        if not self._warned:
            self._warned = True
            _log.warning("metrics are not noted in %s for now: %s", self.path, error)

    def finish(self, result: Mapping[str, object]) -> None:
        """Writes `result.json` and the learning curve, and closes all files.

        Raises:
            BadInput: they cannot be written; names the directory and why.
        """
        draft = self.path / ".result.json"
        try:
            draft.write_text(json.dumps(dict(result), indent=2) + "\n")
            draft.rename(self.path / "result.json")
            draw_learning_curve(self._lines, self.path / "learning_curve.png")
        except OSError as error:
            raise BadInput(f"run directory {self.path} cannot be written: {error}") from error
        self.close()

    def close(self) -> None:
        """Closes the files; what was recorded stays. Closing twice is harmless."""
        if not self._closed:
            self._closed = True
            for file in (self._metrics, self._events):
                try:
                    file.close()
                except _failures() as error:
                    self._warn(error)


def _failures() -> tuple[type[Exception], ...]:
    """What a file that cannot be written raises: TensorBoard writes with TensorFlow where that is there."""
    tensorflow = sys.modules.get("tensorflow")
    return (OSError,) if tensorflow is None else (OSError, tensorflow.errors.OpError)


def _by_age(home: Path) -> tuple[str, int]:
    """Sorts directories of runs by when they were made."""
    day, _, rest = home.name.partition("-")
    second, _, again = rest.partition("-")
    return f"{day}-{second}", int(again) if again.isdecimal() else 0


# The picture of a run: loss and metrics over versions


ABOUT = ("kind", "version", "epoch", "seconds")
"""What a line of `metrics.jsonl` has besides metrics."""


def draw_learning_curve(lines: Sequence[Mapping[str, object]], file: Path) -> None:
    """Draws the lines of `metrics.jsonl` as a PNG, one panel a metric.

    Args:
        lines: What `RunDirectory.record` noted.
    """
    from matplotlib.figure import Figure

    names = sorted({name.removeprefix("val_") for line in lines for name in line if name not in ABOUT})
    # Loss first: it is what is looked at first.
    names.sort(key=lambda name: name != "loss")
    across = max(1, len(names))
    figure = Figure(figsize=(5 * across, 3.6))
    panels = figure.subplots(1, across, squeeze=False)
    # As wide as the longest ticks need: what `tight_layout` finds out takes as long as to draw it all.
    figure.subplots_adjust(left=0.75 / (5 * across), right=1 - 0.15 / (5 * across), bottom=0.15, top=0.9, wspace=0.2)
    for panel, name in zip(panels[0], names, strict=False):
        for kind, style, label in (("train", "-", "training, running"), ("epoch", "o-", "training, epoch")):
            _plot(panel, lines, (kind,), name, style, label)
        _plot(panel, lines, ("epoch", "evaluation"), f"val_{name}", "s-", "held out")
        panel.set_title(name)
        panel.set_xlabel("version")
        panel.grid(alpha=0.3)
        if panel.lines:
            panel.legend(fontsize=8)
    figure.savefig(file, dpi=110)


def _plot(
    panel: Axes, lines: Sequence[Mapping[str, object]], kinds: Sequence[str], name: str, style: str, label: str
) -> None:
    # Sorted: an evaluation during training ends when later versions have been noted.
    points = sorted((line["version"], line[name]) for line in lines if line["kind"] in kinds and name in line)
    if points:
        versions, values = zip(*points, strict=True)
        panel.plot(versions, values, style, label=label, markersize=5, linewidth=1.4)
