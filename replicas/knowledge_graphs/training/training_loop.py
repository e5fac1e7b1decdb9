"""The loop of a knowledge-graph run: steps, checkpoints, evaluations, early stopping, and stopping by request."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.knowledge_graphs.evaluation.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import RunProgress

if TYPE_CHECKING:
    from elastable.replicas.knowledge_graphs.training.graph_run import GraphRun

__all__ = ["ProgressListener", "TrainingLoop"]

ProgressListener = Callable[[str, RunProgress, Mapping[str, float]], None]
"""Called on rank 0 with the progress and values: "step" and "epoch" (loss, triples: of the epoch so far), "evaluation"
(val_mrr, ...), "checkpoint" (nothing)."""


class _Wish(IntEnum):
    """What a member wants after a step; the members do the largest."""

    NOTHING = 0
    CHECKPOINT = 1
    TIME_IS_UP = 2
    STOP = 3


class TrainingLoop:
    """One worker's part in a run, from a point of it to its end; every member of the group has one.

    Args:
        run: The same on every member.
        trainer: This worker's trainer, at the point where the run begins.
        evaluation: Ranks triples with the trainer's model.
        tell: Called on rank 0.
        identity: The graph's, for checkpoints.
        place: The run's progress.
        best: The best state so far.
    """

    def __init__(
        self,
        run: GraphRun,
        trainer: GraphTrainer,
        evaluation: Evaluation,
        tell: ProgressListener,
        identity: Mapping[str, object],
        place: RunProgress,
        best: Mapping[str, Array],
    ) -> None:
        self._run, self._trainer, self._evaluation, self._tell, self._identity = (
            run,
            trainer,
            evaluation,
            tell,
            identity,
        )
        self._place, self._best = place, best
        self._first = trainer.group.rank == 0
        self._began = run.clock() - place.seconds
        self._saved_at, self._saved_step = run.clock(), place.step
        self._time_is_up = False
        self._loss, self._triples = 0.0, 0

    def train(self) -> dict[str, object]:
        """Trains to the end, and tests; or returns earlier, see `graph_run.train_graph`."""
        while not self._over():
            done = self._evaluate() if self._evaluation_is_due() else self._run_epoch()
            if not done:
                return self._stopped()
        graph = self._run.graph
        self._trainer.restore(self._best)
        reported = graph.test if len(graph.test) else graph.valid
        metrics = self._evaluation.metrics(reported, self._run.stop.is_set) if len(reported) else {}
        if len(reported) and not metrics:
            return self._counts() | {"stopped": True}
        return {"metrics": metrics, "best_validation_mrr": self._place.best_mrr} | self._counts()

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
        graph = self._run.graph
        found = self._evaluation.metrics(graph.valid, self._run.stop.is_set) if len(graph.valid) else {}
        if len(graph.valid) and not found:
            return False
        state = self._trainer.state()
        self._place = replace(self._place, evaluated_step=self._place.step, seconds=self._run.clock() - self._began)
        if found:
            self._place = _judged(self._place, found["mrr"], self._run.settings.patience)
            self._report("evaluation", {f"val_{name}": value for name, value in found.items()})
        if self._place.best_step == self._place.step or not found:
            self._best = state
        self._save(state)
        return True

    def _wish(self) -> _Wish:
        run = self._run
        if run.stop.is_set():
            return _Wish.STOP
        if not self._first:
            return _Wish.NOTHING
        now, budget = run.clock(), run.settings.budget_minutes
        if budget is not None and now - self._began >= 60 * budget:
            return _Wish.TIME_IS_UP
        return _Wish.CHECKPOINT if now - self._saved_at >= 60 * run.checkpoint_minutes else _Wish.NOTHING

    def _stopped(self) -> dict[str, object]:
        """Saves what is not saved yet."""
        if self._saved_step != self._place.step:
            self._save(self._trainer.state())
        return self._counts() | {"stopped": True}

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


def _judged(place: RunProgress, mrr: float, patience: int) -> RunProgress:
    """The progress after an evaluation, with early stopping."""
    if mrr > place.best_mrr:
        return replace(place, best_mrr=mrr, best_step=place.step, waited=0)
    waited = place.waited + 1
    return replace(place, waited=waited, stopped=0 < patience <= waited)
