"""A knowledge-graph run: what it trains, where it saves, and how it begins, on every worker of a group."""

from __future__ import annotations

import hashlib
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.evaluation.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph import GraphSource, KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import (
    GraphCheckpoint,
    GraphCheckpoints,
    RunProgress,
)
from elastable.replicas.knowledge_graphs.training.training_loop import ProgressListener, TrainingLoop

__all__ = ["GraphRun", "graph_identity", "train_graph"]


@dataclass(frozen=True)
class GraphRun:
    """A run over a graph.

    Attributes:
        graph: The graph.
        source: Where the graph came from, as the user wrote it.
        settings: The run's settings.
        home: The run directory; checkpoints are in its folder `checkpoints`.
        begin: The checkpoint to resume; None: start from scratch.
        checkpoint_minutes: Time between checkpoints, besides those at evaluations.
        stop: Set in any process to make the run save and return.
        clock: Seconds, for checkpoints by time and the budget.
        began: When the time of the budget began, by `clock`; None: with the training.
    """

    graph: KnowledgeGraph
    source: str
    settings: TrainSettings
    home: Path
    begin: GraphCheckpoint | None = None
    checkpoint_minutes: float = 5.0
    stop: threading.Event = field(default_factory=threading.Event)
    clock: Callable[[], float] = time.monotonic
    began: float | None = None

    @property
    def checkpoints(self) -> GraphCheckpoints:
        return GraphCheckpoints(self.home / "checkpoints")


def graph_identity(graph: KnowledgeGraph, source: str) -> dict[str, object]:
    """Identifies a graph: its sizes, and a checksum of its names and training triples."""
    digest = hashlib.sha256("\n".join([*graph.entities, *graph.relations]).encode())
    digest.update(np.ascontiguousarray(graph.train).tobytes())
    return {
        "name": graph.name,
        "source": str(GraphSource.parse(source).absolute()),
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
        Metrics of the test triples and the run's progress; `split` is "valid" if there are no test triples, or if the
        budget ended before they were ranked. `stopped` instead of metrics if `run.stop` was set, after which the newest
        checkpoint holds everything so far.

    Raises:
        BadInput: the checkpoint belongs to another graph, types are needed and missing, or the budget is shorter than
            an evaluation.
        NotFinite: the loss of a step is NaN or Inf.
        CheckpointError: a checkpoint cannot be written.
    """
    trainer, evaluation = _prepared(group, run)
    identity = graph_identity(run.graph, run.source)
    place, best = _begun(run, trainer, identity)
    if group.rank == 0:
        trainer.sharding.save(run.home / "sharding.npz")
    return TrainingLoop(run, trainer, evaluation, tell, identity, place, best).train()


def _prepared(group: ReplicaGroup, run: GraphRun) -> tuple[GraphTrainer, Evaluation]:
    graph, settings = run.graph, run.settings
    if settings.candidates == "typed" and graph.entity_types is None:
        raise BadInput(
            f"{run.source} has no entity_types.txt (entity and type, one per line), which typed candidates need"
        )
    pool, relations = RangePool(max(1, available_cores() // group.size)), len(graph.relations)
    trainer = GraphTrainer(
        group, settings, len(graph.entities), relations, graph.train, pool, graph.entity_types, graph.further_types
    )
    known = (graph.train, graph.valid, graph.test)
    return trainer, Evaluation(trainer.model, settings.reciprocal, relations, *known, pool=pool)


def _begun(
    run: GraphRun, trainer: GraphTrainer, identity: Mapping[str, object]
) -> tuple[RunProgress, Mapping[str, Array]]:
    """The run's initial progress, and the best state so far; a resumed run keeps both in its own directory."""
    begin = run.begin
    if begin is None:
        return RunProgress(steps_per_epoch=trainer.steps_per_epoch), trainer.state()
    if begin.graph["checksum"] != identity["checksum"]:
        raise BadInput(
            f"checkpoint {begin.address} is of graph {begin.graph['name']!r} with {begin.graph['entities']} entities; "
            f"{run.source} is another, with {identity['entities']}"
        )
    best = GraphCheckpoints(Path(begin.address).parent).best()
    state, place = _rescaled(begin, trainer.steps_per_epoch)
    best_state, best_place = _rescaled(best, trainer.steps_per_epoch)
    trainer.restore(state)
    if best.place.step == begin.place.best_step:
        place = replace(place, best_step=best_place.step)
    if trainer.group.rank == 0:
        run.checkpoints.write(best_state, run.settings, best_place, identity)
        run.checkpoints.write(state, run.settings, place, identity)
    return place, best_state


def _rescaled(found: GraphCheckpoint, steps: int) -> tuple[Mapping[str, Array], RunProgress]:
    """Its state and progress where epochs have another number of steps, as with another number of workers."""
    place = found.place
    before = place.steps_per_epoch or steps

    def rescaled(step: int) -> int:
        epochs, within = divmod(step, before)
        return epochs * steps + within * steps // before

    place = replace(
        place, step=rescaled(place.step), evaluated_step=rescaled(place.evaluated_step), steps_per_epoch=steps
    )
    return {**found.state, "step": np.array([place.step], np.int64)}, place
