"""`elastable kg train` as one call: workers, run directory, progress, table."""

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

from rich.console import Console
from rich.live import Live
from rich.table import Table
from rich.text import Text

from elastable.embedding_store.contract.malformed import Document, DocumentFields
from elastable.embedding_store.errors import BadInput
from elastable.output.run_directory import RunDirectory
from elastable.process.stopping import stopping_on_signals
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.groups.world import replica_group, started_by_mpi
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoint, GraphRun, RunProgress, train_graph
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings

_DEADLINE_S = 600.0  # a worker waits while another one evaluates, or writes a checkpoint
_SHOWN = ("mrr", "hits@1", "hits@3", "hits@10", "mean_rank")


def run_graph(
    source: str,
    settings: TrainSettings,
    workers: int,
    run_dir: Path,
    console: Console,
    begin: GraphCheckpoint | None = None,
    checkpoint_minutes: float = 5.0,
    notes: Sequence[str] = (),
    clock: Callable[[], float] = time.monotonic,
) -> Document:
    """Trains a model of a graph, on threads of this process or as one of MPI's.

    Args:
        source: A folder of triples, or `ogb:FOLDER`.
        settings: All that the model's numbers depend on.
        workers: Of the group; of MPI's, as many as were started.
        run_dir: Home of run directories.
        console: For people.
        begin: A checkpoint to go on from.
        checkpoint_minutes: Time between checkpoints, besides those at evaluations.
        notes: What else to tell people at the start.
        clock: Seconds, for checkpoints by time and the budget.

    Returns:
        What `result.json` of the run holds.
        After Ctrl-C or SIGTERM, once everything is saved: `stopped`, the reason; no `result.json` is written.

    Raises:
        BadInput: the graph, the settings or the number of workers cannot be.
    """
    stop, began = _Stop(), clock()
    with stopping_on_signals(stop, console, "this step"):
        graph = load_graph(source)
        group = replica_group(_DEADLINE_S) if started_by_mpi() else None
        run = GraphRun(graph, source, settings, Path(), begin, checkpoint_minutes, stop, clock, began)
        if group is not None and group.rank:
            train_graph(group, run, lambda kind, place, values: None)
            return {}
        workers = workers if group is None else group.size
        if workers > len(graph.entities):
            raise BadInput(f"{len(graph.entities)} entities of {source} cannot be spread over {workers} workers")
        directory = RunDirectory.create(run_dir)
        progress = TrainingProgress(directory, settings, console)
        try:
            graph.save_names(directory.path, settings.reciprocal)
            for note in (*graph.notes, *notes):
                console.print(note, highlight=False, soft_wrap=True)
            run, started = replace(run, home=directory.path), time.perf_counter()

            def work(member: ReplicaGroup) -> Document:
                return train_graph(member, run, progress)

            found = run_threads(workers, work, _DEADLINE_S)[0] if group is None else work(group)
            progress.close()
            if found.get("stopped"):
                console.print(_how_to_go_on(found, source, directory.path, workers), soft_wrap=True, highlight=False)
                return {**found, "stopped": stop.reason}
            result = {
                **found,
                "graph": graph.name,
                "unseen": graph.unseen,
                "trained_on": graph.trained_on,
                "workers": workers,
                "seconds": time.perf_counter() - started,
                "triples_per_second": progress.triples / max(1e-9, progress.seconds),
                "settings": settings.as_json(),
            }
            directory.finish(result)
        finally:
            progress.close()
            directory.close()
    console.print(_table(result, directory.path))
    return result


class _Stop(threading.Event):
    """Set by a signal, with its reason."""

    reason = ""

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.set()


def _how_to_go_on(found: DocumentFields, source: str, home: Path, workers: int) -> str:
    more = "" if workers == 1 or started_by_mpi() else f" --workers {workers}"
    command = f"elastable kg train {shlex.quote(source)} --resume {shlex.quote(str(home))}{more}"
    return f"stopped after {found['epochs']} epochs, at step {found['steps']}; all is saved. Continue with:\n{command}"


def _table(result: DocumentFields, home: Path) -> Table:
    settings, metrics = result["settings"], result["metrics"]
    table = Table(title=f"{settings['model']} on {result['graph']}", title_justify="left")
    for column in ("", "both", "heads", "tails"):
        table.add_column(column, justify="left" if not column else "right")
    for name in _SHOWN:
        if name in metrics:
            values = [metrics[name], metrics.get(f"head_{name}"), metrics.get(f"tail_{name}")]
            digits = 1 if name == "mean_rank" else 4
            table.add_row(name, *("" if value is None else f"{value:.{digits}f}" for value in values))
    table.add_row("best validation MRR", f"{result['best_validation_mrr']:.4f}")
    for name in ("epochs", "workers"):
        table.add_row(name, str(result[name]))
    table.add_row("seconds", f"{result['seconds']:.1f}")
    table.add_row("triples/s", f"{result['triples_per_second']:,.0f}")
    table.caption = f"{home}"
    if result["split"] == "valid" and settings["budget_minutes"] is not None:
        table.caption += (
            "\nof the validation triples: the time ended before test triples were ranked (elastable kg evaluate)"
        )
    return table


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
            trained = values["triples"] - self._epoch_triples
            self.triples, self.seconds = self.triples + trained, self.seconds + passed
            self._epoch_triples, self._epoch_seconds = values["triples"], self._epoch_seconds + passed
            self._epoch_steps += 1
            if self._console.is_terminal:
                if self._live is None:
                    self._live = Live(console=self._console, refresh_per_second=2, transient=True)
                    self._live.start()
                self._live.update(Text(self._line(place, values["loss"]), no_wrap=True, overflow="ellipsis"))
            elif now - self._shown >= _EVERY_S:
                self._shown = now
                self._console.print(self._line(place, values["loss"]), highlight=False, soft_wrap=True)
        elif kind == "epoch":
            speed = self._epoch_triples / max(1e-9, self._epoch_seconds)
            self._note("epoch", place, {"loss": values["loss"]}, f"loss {values['loss']:.4f}  {speed:,.0f} triples/s")
            self._epoch_triples, self._epoch_seconds, self._epoch_steps = 0.0, 0.0, 0
            self._shown = self._last
        elif kind == "evaluation":
            noted = {name: value for name, value in values.items() if name in _NOTED}
            line = "  ".join(f"{name.removeprefix('val_')} {values[name]:.4f}" for name in ("val_mrr", "val_hits@10"))
            self._note(kind, place, noted, f"{line}  best {place.best_mrr:.4f}")

    def close(self) -> None:
        """Removes the moving line. Closing twice is harmless."""
        if self._live is not None:
            self._live.stop()
            self._live = None

    def _line(self, place: RunProgress, loss: float) -> str:
        done = place.step - place.epochs * place.steps_per_epoch
        a_step = self._epoch_seconds / max(1, self._epoch_steps)
        epoch_left = timedelta(seconds=round(a_step * (place.steps_per_epoch - done)))
        run_left = a_step * (self._settings.epochs * place.steps_per_epoch - place.step)
        if self._settings.budget_minutes is not None:
            run_left = min(run_left, max(0.0, 60 * self._settings.budget_minutes - place.seconds))
        speed = self._epoch_triples / max(1e-9, self._epoch_seconds)
        return (
            f"epoch {place.epochs + 1}/{self._settings.epochs}  {done / place.steps_per_epoch:.0%}  loss {loss:.4f}  "
            f"{speed:,.0f} triples/s  {epoch_left} left in the epoch, "
            f"at most {timedelta(seconds=round(run_left))} in all"
        )

    def _note(self, kind: str, place: RunProgress, noted: Mapping[str, float], line: str) -> None:
        self._directory.record(kind, place.step, place.epochs, dict(noted))
        self._console.print(f"epoch {place.epochs}/{self._settings.epochs}  {line}", highlight=False, soft_wrap=True)
