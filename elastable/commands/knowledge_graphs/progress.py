"""What `elastable kg train` shows and notes while it trains: a line that moves, or one every half minute."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping

from rich.console import Console
from rich.live import Live
from rich.text import Text

from elastable.output.run_directory import RunDirectory
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training import RunProgress

__all__ = ["TrainingProgress"]

_EVERY_S = 30.0  # between lines, where the output is not a terminal
_NOTED = ("val_mrr", "val_hits@1", "val_hits@10")


class TrainingProgress:
    """Notes epochs and evaluations in the run directory, and shows loss, speed and the time left.

    Args:
        directory: The run's.
        settings: The run's.
        console: For people.
        clock: Seconds.

    Attributes:
        triples: Trained so far in this process.
        seconds: Spent on them, without evaluations.
    """

    def __init__(
        self,
        directory: RunDirectory,
        settings: TrainSettings,
        console: Console,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._directory, self._settings, self._console, self._clock = directory, settings, console, clock
        self.triples, self.seconds = 0.0, 0.0
        self._epoch_triples, self._epoch_seconds, self._epoch_steps = 0.0, 0.0, 0
        self._last = self._shown = clock()
        self._live: Live | None = None

    def __call__(self, kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
        """As `ProgressListener`."""
        now = self._clock()
        passed, self._last = now - self._last, now
        if kind == "step":
            self._step(place, values, passed, now)
        elif kind == "epoch":
            self._epoch(place, values)
        elif kind == "evaluation":
            noted = {name: value for name, value in values.items() if name in _NOTED}
            line = "  ".join(f"{name.removeprefix('val_')} {values[name]:.4f}" for name in ("val_mrr", "val_hits@10"))
            self._note(kind, place, noted, f"{line}  best {place.best_mrr:.4f}")

    def close(self) -> None:
        """Removes the moving line. Closing twice is harmless."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _step(self, place: RunProgress, values: Mapping[str, float], passed: float, now: float) -> None:
        trained = values["triples"] - self._epoch_triples
        self.triples, self.seconds = self.triples + trained, self.seconds + passed
        self._epoch_triples, self._epoch_seconds = values["triples"], self._epoch_seconds + passed
        self._epoch_steps += 1
        if self._console.is_terminal:
            self._show(self._line(place, values["loss"]))
        elif now - self._shown >= _EVERY_S:
            self._shown = now
            self._console.print(self._line(place, values["loss"]), highlight=False, soft_wrap=True)

    def _line(self, place: RunProgress, loss: float) -> str:
        done = place.step - place.epochs * place.steps_per_epoch
        a_step = self._epoch_seconds / max(1, self._epoch_steps)
        epoch_left = a_step * (place.steps_per_epoch - done)
        run_left = a_step * (self._settings.epochs * place.steps_per_epoch - place.step)
        if self._settings.budget_minutes is not None:
            run_left = min(run_left, max(0.0, 60 * self._settings.budget_minutes - place.seconds))
        speed = self._epoch_triples / max(1e-9, self._epoch_seconds)
        return (
            f"epoch {place.epochs + 1}/{self._settings.epochs}  {done / place.steps_per_epoch:.0%}  loss {loss:.4f}  "
            f"{speed:,.0f} triples/s  {_duration(epoch_left)} left in the epoch, at most {_duration(run_left)} in all"
        )

    def _epoch(self, place: RunProgress, values: Mapping[str, float]) -> None:
        speed = self._epoch_triples / max(1e-9, self._epoch_seconds)
        self._note("epoch", place, {"loss": values["loss"]}, f"loss {values['loss']:.4f}  {speed:,.0f} triples/s")
        self._epoch_triples, self._epoch_seconds, self._epoch_steps = 0.0, 0.0, 0
        self._shown = self._last

    def _note(self, kind: str, place: RunProgress, noted: Mapping[str, float], line: str) -> None:
        self._directory.record(kind, place.step, place.epochs, dict(noted))
        self._console.print(f"epoch {place.epochs}/{self._settings.epochs}  {line}", highlight=False, soft_wrap=True)

    def _show(self, line: str) -> None:
        if self._live is None:
            self._live = Live(console=self._console, refresh_per_second=2, transient=True)
            self._live.start()
        self._live.update(Text(line, no_wrap=True, overflow="ellipsis"))


def _duration(seconds: float) -> str:
    """ "45 s", "12 min", "3 h 05 min"."""
    if seconds < 60:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"
