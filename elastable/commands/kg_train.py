"""`elastable kg train` as one call: workers, run directory, progress, table."""

from __future__ import annotations

import shlex
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from elastable.commands.knowledge_graphs.progress import TrainingProgress
from elastable.embedding_store.contract.malformed import Document, DocumentFields
from elastable.embedding_store.errors import BadInput
from elastable.output.run_directory import RunDirectory
from elastable.process.stopping import stopping_on_signals
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph import load_graph
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training import (
    GraphCheckpoint,
    GraphCheckpoints,
    GraphRun,
    RunProgress,
    train_graph,
)
from elastable.replicas.processes.world import replica_group, started_by_mpi

__all__ = ["newest_checkpoint_of", "run_graph"]

_DEADLINE_S = 600.0  # a worker waits while another one evaluates, or writes a checkpoint
_SHOWN = ("mrr", "hits@1", "hits@3", "hits@10", "mean_rank")


def newest_checkpoint_of(run: Path) -> GraphCheckpoint:
    """The newest checkpoint of a run directory.

    Raises:
        BadInput: there is none.
        CheckpointError: it cannot be read.
    """
    return GraphCheckpoints(run / "checkpoints").newest()


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
        if started_by_mpi():
            group = replica_group(_DEADLINE_S)
            if group.rank:
                run = GraphRun(graph, source, settings, Path(), begin, checkpoint_minutes, stop.asked, clock)
                train_graph(group, run, _nothing)
                return {}
            workers = group.size
        if workers > len(graph.entities):
            raise BadInput(f"{len(graph.entities)} entities of {source} cannot be spread over {workers} workers")
        directory = RunDirectory.create(run_dir)
        progress = TrainingProgress(directory, settings, console)
        try:
            graph.save_names(directory.path, settings.reciprocal)
            for note in (*graph.notes, *notes):
                console.print(note, highlight=False, soft_wrap=True)
            home = directory.path
            run = GraphRun(graph, source, settings, home, begin, checkpoint_minutes, stop.asked, clock, began)
            started = time.perf_counter()

            def work(member: ReplicaGroup) -> Document:
                return train_graph(member, run, progress)

            found = work(group) if started_by_mpi() else run_threads(workers, work, _DEADLINE_S)[0]
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


class _Stop:
    """Called by a signal with its reason."""

    def __init__(self) -> None:
        self.asked, self.reason = threading.Event(), ""

    def __call__(self, reason: str) -> None:
        self.reason = reason
        self.asked.set()


def _how_to_go_on(found: DocumentFields, source: str, home: Path, workers: int) -> str:
    more = "" if workers == 1 or started_by_mpi() else f" --workers {workers}"
    command = f"elastable kg train {shlex.quote(source)} --resume {shlex.quote(str(home))}{more}"
    return f"stopped after {found['epochs']} epochs, at step {found['steps']}; all is saved. Continue with:\n{command}"


def _nothing(kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
    """Other ranks than 0 tell nothing."""


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
