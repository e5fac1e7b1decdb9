"""A knowledge-graph run on every worker: how it begins, trains, evaluates, saves and stops; its checkpoints."""

import hashlib
import math
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from enum import IntEnum
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.contract.malformed import MALFORMED
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.embedding_store.native.range_pool import RangePool, available_cores
from elastable.master.api import JobSpec
from elastable.master.checkpoints.checkpoint import open_named
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.checkpoints.storage.checkpoint_locations import checkpoint_names, version_named
from elastable.master.checkpoints.writing import write_tensors
from elastable.master.tasks.progress import Progress
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.knowledge_graphs.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import GraphSource, KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer

_KIND = "knowledge graph"


@dataclass(frozen=True, slots=True)
class RunProgress:
    """The progress of a run.

    Attributes:
        epochs: Epochs completed.
        step: Steps completed.
        best_mrr: Best validation MRR so far; -1 before any.
        best_step: Step of its checkpoint.
        waited: Evaluations since then.
        stopped: Whether early stopping has ended training.
        steps_per_epoch: Steps of an epoch, which depend on the number of workers; 0: before the first step.
        seconds: Time spent so far.
    """

    epochs: int = 0
    step: int = 0
    best_mrr: float = -1.0
    best_step: int = 0
    waited: int = 0
    stopped: bool = False
    evaluated_step: int = 0
    steps_per_epoch: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        """Raises TypeError for a manifest with anything but whole numbers."""
        for name in ("epochs", "step", "best_step", "waited", "evaluated_step", "steps_per_epoch"):
            if type(getattr(self, name)) is not int:
                raise TypeError(f"{name} is {getattr(self, name)!r}, not a whole number")


@dataclass(frozen=True, slots=True)
class GraphCheckpoint:
    """A checkpoint that was read: the model's state by global id, and the run that it belongs to."""

    state: Mapping[str, Array]
    settings: TrainSettings
    place: RunProgress
    graph: Mapping[str, object]
    address: str = ""


class GraphCheckpoints:
    """The checkpoints of one run, in the format of a job's (docs/checkpoints.md); the newest and the best are kept."""

    def __init__(self, home: Path) -> None:
        self._files = LocalFiles(home)

    def write(
        self, state: Mapping[str, Array], settings: TrainSettings, place: RunProgress, graph: Mapping[str, object]
    ) -> str:
        """Writes one atomically, deletes those that are neither newest nor best, and returns its address.

        Args:
            state: From `GraphTrainer.state`.

        Raises:
            CheckpointError: it cannot be written; no earlier one has changed.
        """
        about = {"settings": settings.as_json(), "place": asdict(place), "graph": dict(graph)}
        address = write_tensors(self._files, state, JobSpec(job=_KIND), Progress(place.step, hooks=about), keep=0)
        names = self.names()
        for old in names:
            if old not in (names[-1], _of_step(names, place.best_step)):
                self._files.remove(old)
        return address

    def names(self) -> list[str]:
        """Names of all complete ones, the oldest first."""
        return checkpoint_names(self._files)

    def newest(self) -> GraphCheckpoint:
        """The newest one. Raises as `read`."""
        names = self.names()
        if not names:
            raise BadInput(f"there is no checkpoint in {self._files.address}")
        return self.read(names[-1])

    def best(self) -> GraphCheckpoint:
        """The one with the best validation MRR, or the newest if none was validated. Raises as `read`."""
        newest = self.newest()
        name = _of_step(self.names(), newest.place.best_step)
        return newest if name is None else self.read(name)

    def read(self, name: str) -> GraphCheckpoint:
        """Reads one and verifies its checksums. Raises CheckpointError if it is unreadable or damaged."""
        found = open_named(self._files, name)
        try:
            if found.job.get("job") != _KIND:
                raise CheckpointError(
                    f"checkpoint {found.address} is of job {found.job.get('job')!r}, and not of a {_KIND}"
                )
            about = found.progress().hooks
            settings, place = TrainSettings.from_json(about["settings"]), RunProgress(**about["place"])
            return GraphCheckpoint(found.dense(), settings, place, about["graph"], found.address)
        except MALFORMED as error:
            raise CheckpointError(f"checkpoint {found.address} cannot be read: {error}") from error


def _of_step(names: Sequence[str], step: int) -> str | None:
    """The last checkpoint of a step; None: there is none."""
    return next((name for name in reversed(names) if (version_named(name) or (None,))[0] == step), None)


@dataclass(frozen=True)
class GraphRun:
    """A run over a graph.

    Attributes:
        source: Where the graph came from, as the user wrote it.
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


def train_graph(group: ReplicaGroup, run: GraphRun, tell: "ProgressListener") -> dict[str, object]:
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
    return _TrainingLoop(group, run, tell).train()


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


_TIMED = 128  # triples that are ranked to see how long evaluations take
_MARGIN = 1.2  # of the time that the last evaluation and the test are expected to take
_CLOSING = 0.02  # of the budget: kept for the last checkpoint and all else

ProgressListener = Callable[[str, RunProgress, Mapping[str, float]], None]
"""Called on rank 0 with the progress and values: "step" and "epoch" (loss, triples: of the epoch so far), "evaluation"
(val_mrr, ...), "checkpoint" (nothing)."""


class _Wish(IntEnum):
    """What a member wants after a step; the members do the largest."""

    NOTHING = 0
    CHECKPOINT = 1
    TIME_IS_UP = 2
    STOP = 3


class _TrainingLoop:
    """One worker's part in a run, from a point of it to its end; every member of the group has one."""

    def __init__(self, group: ReplicaGroup, run: GraphRun, tell: ProgressListener) -> None:
        graph, settings, relations = run.graph, run.settings, len(run.graph.relations)
        if settings.candidates == "typed" and graph.entity_types is None:
            raise BadInput(
                f"{run.source} has no entity_types.txt (entity and type, one per line), which typed candidates need"
            )
        pool, types = RangePool(max(1, available_cores() // group.size)), (graph.entity_types, graph.further_types)
        self._run, self._tell, self._first = run, tell, group.rank == 0
        self._trainer = GraphTrainer(group, settings, len(graph.entities), relations, graph.train, pool, *types)
        self._evaluation = Evaluation(self._trainer.model, graph.train, graph.valid, graph.test, pool=pool)
        self._identity = graph_identity(graph, run.source)
        self._place, self._best = _begun(run, self._trainer, self._identity)
        if self._first:
            self._trainer.sharding.save(run.home / "sharding.npz")
        self._began = (run.clock() if run.began is None else run.began) - self._place.seconds
        self._saved_at, self._saved_step = run.clock(), self._place.step
        self._time_is_up = False
        self._best_metrics: dict[str, float] = {}  # of the validation triples
        self._ranking_s = 0.0  # of a triple
        self._loss, self._triples = 0.0, 0

    def train(self) -> dict[str, object]:
        """Trains to the end, and tests; or returns earlier, see `train_graph`."""
        self._time_evaluations()
        while not self._over():
            done = self._evaluate() if self._evaluation_is_due() else self._run_epoch()
            if not done:
                if self._saved_step != self._place.step:
                    self._save(self._trainer.state())
                return self._counts() | {"stopped": True}
        graph = self._run.graph
        self._trainer.restore(self._best)
        split, reported = ("test", graph.test) if len(graph.test) else ("valid", graph.valid)
        metrics = self._ranked(reported)
        if metrics is None:
            return self._counts() | {"stopped": True}
        if len(reported) and not metrics:  # the time ended meanwhile
            split, metrics = "valid", self._best_metrics
        return {"metrics": metrics, "split": split, "best_validation_mrr": self._place.best_mrr} | self._counts()

    def _time_evaluations(self) -> None:
        """With a budget: measures what ranking a triple takes, kernels that are compiled first left out."""
        run, valid = self._run, self._run.graph.valid
        budget, timed = run.settings.budget_minutes, valid[:_TIMED] if len(valid) else run.graph.test[:_TIMED]
        if budget is None or not len(timed):
            return
        self._evaluation.metrics(timed)
        began = run.clock()
        self._evaluation.metrics(timed)
        measured = self._trainer.group.all_reduce(np.array([run.clock() - began]), "max")[0]
        self._ranking_s = float(measured) / len(timed)
        if self._ranking_s * len(valid) > 60 * budget:
            raise BadInput(
                f"--budget of {60 * budget:g} s: ranking the {len(valid)} validation triples among "
                f"{len(run.graph.entities)} entities takes about {self._ranking_s * len(valid):.0f} s on this machine, "
                "and a run ranks them once at least; give a longer time, or fewer triples in valid.txt"
            )

    def _ranked(self, triples: Int32) -> dict[str, float] | None:
        """Their metrics; {}: there are none, or the time is up and an earlier evaluation is there; None: stopped."""
        if not len(triples):
            return {}
        run, late = self._run, self._first and self._run.settings.budget_minutes is not None and self._best_metrics
        began = run.clock()
        metrics = self._evaluation.metrics(
            triples, lambda: run.stop.is_set() or bool(late and run.clock() >= self._deadline())
        )
        if metrics:
            self._ranking_s = (run.clock() - began) / len(triples)
            return metrics
        return None if self._trainer.group.all_reduce(np.array([int(run.stop.is_set())]), "max")[0] else {}

    def _deadline(self) -> float:
        """When the run is to have its result."""
        budget = self._run.settings.budget_minutes
        return math.inf if budget is None else self._began + 60 * budget

    def _over(self) -> bool:
        place = self._place
        ended = self._time_is_up or place.epochs >= self._run.settings.epochs
        return place.stopped or (ended and place.evaluated_step == place.step)

    def _evaluation_is_due(self) -> bool:
        place, settings = self._place, self._run.settings
        if place.evaluated_step == place.step:
            return False
        if self._time_is_up:
            return True
        at_end = place.step == place.epochs * self._trainer.steps_per_epoch
        return at_end and (place.epochs % settings.evaluate_every == 0 or place.epochs >= settings.epochs)

    def _run_epoch(self) -> bool:
        """The remaining steps of an epoch, or until time is up; False: asked to stop."""
        trainer, every = self._trainer, self._trainer.steps_per_epoch
        while trainer.step < (self._place.epochs + 1) * every:
            loss, present = trainer.run_step(self._wish())
            self._loss, self._triples = self._loss + loss * present, self._triples + present
            self._place = replace(self._place, step=trainer.step, seconds=self._run.clock() - self._began)
            self._report("step", {"loss": self._loss / max(1, self._triples), "triples": float(self._triples)})
            if trainer.wish == _Wish.STOP:
                break
            if trainer.wish == _Wish.TIME_IS_UP:
                self._time_is_up = True
                break
            if trainer.wish == _Wish.CHECKPOINT:
                self._save(trainer.state())
        if trainer.step == (self._place.epochs + 1) * every:
            self._place = replace(self._place, epochs=self._place.epochs + 1)
            self._report("epoch", {"loss": self._loss / max(1, self._triples), "triples": float(self._triples)})
            self._loss, self._triples = 0.0, 0
        return trainer.wish != _Wish.STOP

    def _evaluate(self) -> bool:
        """Evaluates, judges and saves; False: asked to stop before it was done."""
        found = self._ranked(self._run.graph.valid)
        if found is None:
            return False
        state = self._trainer.state()
        self._place = replace(self._place, evaluated_step=self._place.step, seconds=self._run.clock() - self._began)
        if found:
            better, waited = found["mrr"] > self._place.best_mrr, self._place.waited + 1
            if better:
                self._place = replace(self._place, best_mrr=found["mrr"], best_step=self._place.step, waited=0)
            else:
                self._place = replace(self._place, waited=waited, stopped=0 < self._run.settings.patience <= waited)
            self._report("evaluation", {f"val_{name}": value for name, value in found.items()})
        elif len(self._run.graph.valid):
            self._time_is_up = True
        if self._place.best_step == self._place.step or not len(self._run.graph.valid):
            self._best, self._best_metrics = state, found
        self._save(state)
        return True

    def _wish(self) -> _Wish:
        run = self._run
        if run.stop.is_set():
            return _Wish.STOP
        if not self._first:
            return _Wish.NOTHING
        now, to_rank = run.clock(), len(run.graph.valid) + len(run.graph.test)
        kept_s = _MARGIN * self._ranking_s * to_rank + _CLOSING * 60 * (run.settings.budget_minutes or 0.0)
        if now + kept_s >= self._deadline():
            return _Wish.TIME_IS_UP
        return _Wish.CHECKPOINT if now - self._saved_at >= 60 * run.checkpoint_minutes else _Wish.NOTHING

    def _save(self, state: Mapping[str, Array]) -> None:
        if self._first:
            self._run.checkpoints.write(state, self._run.settings, self._place, self._identity)
            self._report("checkpoint", {})
        self._saved_at, self._saved_step = self._run.clock(), self._place.step

    def _counts(self) -> dict[str, object]:
        return {"epochs": self._place.epochs, "steps": self._place.step}

    def _report(self, kind: str, values: Mapping[str, float]) -> None:
        if self._first:
            self._tell(kind, self._place, values)
