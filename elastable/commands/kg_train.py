"""`elastable kg train` as one call: workers, run directory, progress, table."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from elastable.embedding_store.errors import BadInput
from elastable.output.run_directory import RunDirectory
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import (
    GraphCheckpoint,
    GraphCheckpoints,
    RunProgress,
)
from elastable.replicas.knowledge_graphs.training.graph_run import GraphRun, train_graph
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
) -> dict[str, Any]:
    """Trains a model of a graph, on threads of this process or as one of MPI's.

    Args:
        source: A folder of triples, or the name of an installed graph.
        settings: All that the model's numbers depend on.
        workers: Of the group; of MPI's, as many as were started.
        run_dir: Home of run directories.
        console: For people.
        begin: A checkpoint to go on from.

    Returns:
        What `result.json` of the run holds.

    Raises:
        BadInput: the graph, the settings or the number of workers cannot be.
    """
    graph = load_graph(source)
    if started_by_mpi():
        group = replica_group(_DEADLINE_S)
        if group.rank:
            train_graph(group, GraphRun(graph, source, settings, Path(), begin), _nothing)
            return {}
        workers = group.size
    if workers > len(graph.entities):
        raise BadInput(f"{len(graph.entities)} entities of {source} cannot be spread over {workers} workers")
    directory = RunDirectory.create(run_dir)
    try:
        graph.save_names(directory.path)
        run = GraphRun(graph, source, settings, directory.path, begin)
        started, progress = time.perf_counter(), _Progress(directory, settings.epochs, console)

        def work(member: ReplicaGroup) -> dict[str, Any]:
            return train_graph(member, run, progress)

        found = work(group) if started_by_mpi() else run_threads(workers, work, _DEADLINE_S)[0]
        result = {
            **found,
            "graph": graph.name,
            "unseen": graph.unseen,
            "workers": workers,
            "seconds": time.perf_counter() - started,
            "triples_per_second": progress.triples / max(1e-9, progress.seconds),
            "settings": settings.as_json(),
        }
        directory.finish(result)
    finally:
        directory.close()
    console.print(_table(result, directory.path))
    return result


def _nothing(kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
    """Other ranks than 0 tell nothing."""


class _Progress:
    """Notes what happens in the run directory, and shows it."""

    def __init__(self, directory: RunDirectory, epochs: int, console: Console) -> None:
        self._directory, self._epochs, self._console = directory, epochs, console
        self._last = time.perf_counter()
        self.triples, self.seconds = 0.0, 0.0

    def __call__(self, kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
        now = time.perf_counter()
        if kind == "epoch":
            self.triples += values["triples"]
            self.seconds += now - self._last
            line = f"loss {values['loss']:.4f}  {values['triples'] / (now - self._last):,.0f} triples/s"
            noted = {"loss": values["loss"]}
        else:
            line = "  ".join(f"{name.removeprefix('val_')} {values[name]:.4f}" for name in ("val_mrr", "val_hits@10"))
            noted = {name: value for name, value in values.items() if name in ("val_mrr", "val_hits@1", "val_hits@10")}
            line += f"  best {place.best_mrr:.4f}"
        self._directory.record(kind, place.step, place.epochs, noted)
        self._console.print(f"epoch {place.epochs}/{self._epochs}  {line}", highlight=False, soft_wrap=True)
        self._last = time.perf_counter()


def _table(result: Mapping[str, Any], home: Path) -> Table:
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
    return table
