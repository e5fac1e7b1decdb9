"""A knowledge-graph run: epochs, evaluations, checkpoints and early stopping, on every worker of a group."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.replicas.groups.group import Array, ReplicaGroup
from elastable.replicas.knowledge_graphs.evaluation.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import (
    GraphCheckpoint,
    GraphCheckpoints,
    RunProgress,
)

__all__ = ["GraphRun", "ProgressListener", "graph_identity", "train_graph"]

ProgressListener = Callable[[str, RunProgress, Mapping[str, float]], None]
"""Called on rank 0 with "epoch" (loss) or "evaluation" (val_mrr, ...), the progress and the values."""


@dataclass(frozen=True)
class GraphRun:
    """A run over a graph.

    Attributes:
        graph: The graph.
        source: Where the graph came from, as the user wrote it.
        settings: The run's settings.
        home: The run directory; checkpoints are in its folder `checkpoints`.
        begin: The checkpoint to resume; None: start from scratch.
    """

    graph: KnowledgeGraph
    source: str
    settings: TrainSettings
    home: Path
    begin: GraphCheckpoint | None = None

    @property
    def checkpoints(self) -> GraphCheckpoints:
        return GraphCheckpoints(self.home / "checkpoints")


def graph_identity(graph: KnowledgeGraph, source: str) -> dict[str, object]:
    """Identifies a graph: its sizes, and a checksum of its names and training triples."""
    digest = hashlib.sha256("\n".join([*graph.entities, *graph.relations]).encode())
    digest.update(np.ascontiguousarray(graph.train).tobytes())
    return {
        "name": graph.name,
        "source": os.path.abspath(source) if os.path.isdir(source) else source,
        "entities": len(graph.entities),
        "relations": len(graph.relations),
        "train": len(graph.train),
        "checksum": digest.hexdigest(),
    }


def train_graph(group: ReplicaGroup, run: GraphRun, tell: ProgressListener) -> dict[str, object]:
    """Trains on one worker; every member of the group calls it.

    The final model is the one with the best validation MRR.

    Args:
        group: Worker and shard are a member's rank.
        run: The same on every member.
        tell: Called on rank 0.

    Returns:
        Metrics of the test triples (or of validation, if there are none), and the run's progress.

    Raises:
        BadInput: the checkpoint belongs to another graph, or types are needed and missing.
        NotFinite: the loss of a step is NaN or Inf.
        CheckpointError: a checkpoint cannot be written.
    """
    graph, settings = run.graph, run.settings
    trainer, evaluation = _prepared(group, run)
    identity = graph_identity(graph, run.source)
    place, best = _begun(run, trainer, identity)
    if group.rank == 0:
        trainer.sharding.save(run.home / "sharding.npz")
    while place.epochs < settings.epochs and not place.stopped:
        loss = trainer.run_epoch()
        place = replace(place, epochs=place.epochs + 1, step=trainer.step)
        if group.rank == 0:
            tell("epoch", place, {"loss": loss.loss, "triples": float(loss.triples)})
        if place.epochs % settings.evaluate_every and place.epochs < settings.epochs:
            continue
        state = trainer.state()
        if len(graph.valid):
            found = evaluation.metrics(graph.valid)
            place = _judged(place, found["mrr"], settings.patience)
            if group.rank == 0:
                tell("evaluation", place, {f"val_{name}": value for name, value in found.items()})
        if place.best_step == place.step or not len(graph.valid):
            best = state
        if group.rank == 0:
            run.checkpoints.write(state, settings, place, identity)
    trainer.restore(best)
    reported = graph.test if len(graph.test) else graph.valid
    metrics = evaluation.metrics(reported) if len(reported) else {}
    return {"metrics": metrics, "best_validation_mrr": place.best_mrr, "epochs": place.epochs, "steps": place.step}


def _prepared(group: ReplicaGroup, run: GraphRun) -> tuple[GraphTrainer, Evaluation]:
    graph, settings = run.graph, run.settings
    if settings.candidates == "typed" and graph.entity_types is None:
        raise BadInput(
            f"{run.source} has no entity_types.txt (entity and type, one per line), which typed candidates need"
        )
    pool, relations = RangePool(max(1, available_cores() // group.size)), len(graph.relations)
    trainer = GraphTrainer(group, settings, len(graph.entities), relations, graph.train, pool, graph.entity_types)
    known = (graph.train, graph.valid, graph.test)
    return trainer, Evaluation(trainer.model, settings.reciprocal, relations, *known, pool=pool)


def _begun(
    run: GraphRun, trainer: GraphTrainer, identity: Mapping[str, object]
) -> tuple[RunProgress, Mapping[str, Array]]:
    """The run's initial progress, and the best state so far."""
    begin = run.begin
    if begin is None:
        return RunProgress(), trainer.state()
    if begin.graph["checksum"] != identity["checksum"]:
        raise BadInput(
            f"checkpoint {begin.address} is of graph {begin.graph['name']!r} with {begin.graph['entities']} entities; "
            f"{run.source} is another, with {identity['entities']}"
        )
    home = Path(begin.address).parent
    best = GraphCheckpoints(home).best().state
    trainer.restore(begin.state)
    return begin.place, best


def _judged(place: RunProgress, mrr: float, patience: int) -> RunProgress:
    """The progress after an evaluation, with early stopping."""
    if mrr > place.best_mrr:
        return replace(place, best_mrr=mrr, best_step=place.step, waited=0)
    waited = place.waited + 1
    return replace(place, waited=waited, stopped=0 < patience <= waited)
