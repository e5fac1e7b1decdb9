"""What a person sees while a job runs, and at its end."""

import contextlib
import time
from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from elastable.embedding_store.contract.malformed import Document, DocumentFields
from elastable.master.api import JobStatus
from elastable.process.stopping import OutputConsole


class JobConsole(OutputConsole):
    """A console that loses lines where they cannot be written: a full disk behind standard output ends no job."""

    def print(self, *objects: object, **settings: Any) -> None:
        """Prints like `rich.console.Console`; raises no `OSError`."""
        with contextlib.suppress(OSError):
            super().print(*objects, **settings)


class _Rate(ProgressColumn):
    """Examples a second, over the last stretch."""

    def render(self, task: Task) -> Text:
        speed = task.speed or 0.0
        return Text(f"{speed:,.0f} examples/s", style="cyan")


class JobProgress(Progress):
    """One live line: examples/s, loss, version, workers, time left.

    Where there is no terminal, a line of plain text every ten seconds. The speed is that of the time since the line
    before.

    Args:
        examples: That the whole job trains, earlier runs of it included; 0: it has no end.
        trained: Of them, by earlier runs.
    """

    def __init__(self, console: Console, examples: int, trained: int = 0) -> None:
        self._said: float | None = None
        self._trained = trained
        self._refused: dict[tuple[str, str], int] = {}
        self._since = time.monotonic()
        super().__init__(
            TextColumn("[bold]epoch {task.fields[epoch]}[/bold]"),
            BarColumn(bar_width=24),
            _Rate(),
            TextColumn("{task.fields[metrics]}"),
            TextColumn("version {task.fields[version]}"),
            TextColumn("[green]{task.fields[workers]} workers[/green]"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._job = self.add_task(
            "train", total=examples or None, completed=trained, epoch="1", metrics="", version="0", workers=0
        )

    def show(self, status: JobStatus) -> None:
        """Shows how far the job is."""
        self._show_refusals(status)
        metrics = "  ".join(f"{name} {value:.4f}" for name, value in list(status.metrics.items())[:3])
        fields: Document = {
            # A stream has no end; behind the last epoch there is none.
            "epoch": f"{min(status.epoch + 1, status.epochs)}/{status.epochs}" if status.epochs else status.epoch + 1,
            "metrics": f"{metrics}  [yellow]{status.state}[/yellow]" if status.state != "training" else metrics,
            "version": f"{status.version:,}" + (f"/{status.versions_total:,}" if status.versions_total else ""),
            "workers": len(status.workers),
        }
        self.update(self._job, completed=status.records_trained, **fields)
        now = time.monotonic()
        if self.disable and (self._said is None or now - self._said >= 10.0):
            rate = (status.records_trained - self._trained) / max(1e-9, now - self._since)
            self._said = self._since = now
            self._trained = status.records_trained
            self.console.print(
                f"epoch {fields['epoch']}  version {fields['version']}  {rate:,.0f} examples/s  {metrics}  "
                f"{fields['workers']} workers  {status.state}",
                highlight=False,
                soft_wrap=True,
            )

    def _show_refusals(self, status: JobStatus) -> None:
        """A lasting line for every worker that failed, and what is waited for where none can."""
        for refusal in status.refusals:
            reason = refusal.error, refusal.message
            if self._refused.get(reason) == refusal.count:
                continue
            self._refused[reason] = refusal.count
            who = f"worker pid {refusal.worker.pid} on {refusal.worker.host}" if refusal.worker.host else "a worker"
            often = f" ({refusal.count} workers so far)" if refusal.count > 1 else ""
            waits = "" if status.workers or status.state != "waiting" else "; waiting for one that can"
            line = f"{who} failed{often}: {refusal.error}: {refusal.message}{waits}"
            self.console.print(f"[yellow]{escape(line)}[/yellow]", highlight=False, soft_wrap=True)

    def epoch(self, epochs: int, epoch: int, logs: Mapping[str, float]) -> None:
        """A lasting line for an epoch of so many that is over."""
        line = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        of = f"/{epochs}" if epochs else ""  # a stream has no end
        self.console.print(f"epoch {epoch + 1}{of}  {line}", highlight=False, soft_wrap=True)

    def evaluation(self, version: int, logs: Mapping[str, float]) -> None:
        """A lasting line for a version that was evaluated during training."""
        line = "  ".join(f"{name} {value:.4f}" for name, value in logs.items())
        self.console.print(f"version {version:,}  {line}", highlight=False, soft_wrap=True)


def summary_table(result: DocumentFields, metrics: Mapping[str, float], paths: Mapping[str, str]) -> Table:
    """The table at the end of a run."""
    table = Table(title="Elastable", show_header=False, title_justify="left")
    table.add_column(style="bold")
    table.add_column()
    for name, value in metrics.items():
        table.add_row(name, f"{value:.4f}")
    table.add_row("examples", f"{result['examples']:,}")
    table.add_row("seconds", f"{result['seconds']:.1f}")
    table.add_row("examples/s", f"{result['examples_per_second']:,.0f}")
    for name in ("version", "workers", "store"):
        table.add_row(name, str(result[name]))
    if result["stopped"]:
        table.add_row("stopped", escape(result["stopped"]))
    for name, path in paths.items():
        table.add_row(name, path)
    return table
