"""The loop of a knowledge-graph run: steps, checkpoints, evaluations, early stopping, and stopping by request."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from enum import IntEnum
from typing import TYPE_CHECKING

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import RunProgress

if TYPE_CHECKING:
    from elastable.replicas.knowledge_graphs.training.graph_run import GraphRun

__all__ = ["ProgressListener", "TrainingLoop"]

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
        self._began = (run.clock() if run.began is None else run.began) - place.seconds
        self._saved_at, self._saved_step = run.clock(), place.step
        self._time_is_up = False
        self._best_metrics: dict[str, float] = {}  # of the validation triples
        self._ranking_s = 0.0  # of a triple
        self._loss, self._triples = 0.0, 0

    def train(self) -> dict[str, object]:
        """Trains to the end, and tests; or returns earlier, see `graph_run.train_graph`."""
        self._time_evaluations()
        while not self._over():
            done = self._evaluate() if self._evaluation_is_due() else self._run_epoch()
            if not done:
                return self._stopped()
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
        """With a budget: measures what ranking a triple takes, kernels that are compiled first left out.

        Raises:
            BadInput: ranking the validation triples once takes longer than the budget.
        """
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
            self._place = _judged(self._place, found["mrr"], self._run.settings.patience)
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
