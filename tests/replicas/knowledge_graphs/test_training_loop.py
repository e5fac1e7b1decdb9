"""Runs that are stopped, saved by time and ended by a budget: resumed, they are the runs that were never broken."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import count
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.evaluation import Evaluation
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import KnowledgeGraph
from elastable.replicas.knowledge_graphs.graph.triple_files import Names
from elastable.replicas.knowledge_graphs.graph_run import (
    GraphCheckpoint,
    GraphCheckpoints,
    GraphRun,
    RunProgress,
    train_graph,
)
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from tests.untyped import Keyword, Parsed

ENTITIES = 40
SETTINGS = TrainSettings(
    model="ComplEx", dim=8, batch=16, epochs=4, evaluate_every=2, optimizer="adam", learning_rate=0.01, patience=0
)


def _graph() -> KnowledgeGraph:
    triples = np.random.default_rng(0).integers(0, [ENTITIES, 2, ENTITIES], (120, 3)).astype(np.int32)
    names = Names([f"e{k}" for k in range(ENTITIES)])
    return KnowledgeGraph("drawn", names, Names(["r", "s"], "relation"), triples[:100], triples[100:110], triples[110:])


GRAPH = _graph()


class _Reports:
    """What a run reports; sets its `stop` at a given step."""

    def __init__(self, stop: threading.Event, kind: str = "", step: int = 0) -> None:
        self._stop, self._at = stop, (kind, step)
        self.kinds: list[tuple[str, int]] = []
        self.values: list[Mapping[str, float]] = []

    def __call__(self, kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
        self.kinds.append((kind, place.step))
        self.values.append(values)
        if (kind, place.step) == self._at:
            self._stop.set()


def _run(home: Path, workers: int = 1, stop_at: tuple[str, int] = ("", 0), **more: Keyword) -> tuple[Parsed, _Reports]:
    home.mkdir()
    run = GraphRun(GRAPH, "drawn", more.pop("settings", SETTINGS), home, **more)
    reports = _Reports(run.stop, *stop_at)
    return run_threads(workers, lambda group: train_graph(group, run, reports))[0], reports


def _newest(home: Path) -> GraphCheckpoint:
    newest = GraphCheckpoints(home / "checkpoints").newest()
    assert newest is not None
    return newest


def _same(one: Mapping[str, Array], other: Mapping[str, Array]) -> None:
    assert set(one) == set(other)
    for name, value in one.items():
        np.testing.assert_array_equal(value, other[name])


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("kind", ["step", "epoch"])
def test_a_run_that_is_stopped_and_resumed_is_the_run_that_was_never_stopped(
    tmp_path: Path, workers: int, kind: str
) -> None:
    """In the middle of an epoch, and before an evaluation at its end is done."""
    straight, reports = _run(tmp_path / "straight", workers)
    at = next(step for name, step in reports.kinds if name == "epoch" and step) * 2 - (3 if kind == "step" else 0)
    stopped, _ = _run(tmp_path / "stopped", workers, (kind, at))
    end = at if kind == "epoch" else at + 1  # asked for in a step, it comes after the next one
    assert stopped == {"epochs": 2 if kind == "epoch" else 1, "steps": end, "stopped": True}
    saved = _newest(tmp_path / "stopped")
    assert saved.place.step == end
    resumed, again = _run(tmp_path / "resumed", workers, begin=saved)
    assert resumed == straight
    _same(_newest(tmp_path / "resumed").state, _newest(tmp_path / "straight").state)
    evaluations = [step for name, step in reports.kinds if name == "evaluation"]
    assert [step for name, step in again.kinds if name == "evaluation"] == evaluations


def test_a_run_that_is_stopped_twice_keeps_its_best_model(tmp_path: Path) -> None:
    straight, reports = _run(tmp_path / "straight")
    first = next(step for name, step in reports.kinds if name == "evaluation")
    _run(tmp_path / "one", stop_at=("step", first + 1))
    assert len(GraphCheckpoints(tmp_path / "one" / "checkpoints").names()) == 2
    _run(tmp_path / "two", stop_at=("step", first + 4), begin=_newest(tmp_path / "one"))
    kept = GraphCheckpoints(tmp_path / "two" / "checkpoints").best()
    assert kept.place.step == first
    resumed, _ = _run(tmp_path / "three", begin=_newest(tmp_path / "two"))
    assert resumed == straight


def test_another_number_of_workers_goes_on_at_the_same_part_of_the_epoch(tmp_path: Path) -> None:
    _, reports = _run(tmp_path / "whole")
    steps = next(step for name, step in reports.kinds if name == "epoch")
    _run(tmp_path / "stopped", stop_at=("step", steps + steps // 2 - 1))
    saved = _newest(tmp_path / "stopped")
    assert (saved.place.epochs, saved.place.steps_per_epoch) == (1, steps)
    _, more = _run(tmp_path / "resumed", 3, begin=saved)
    place = _newest(tmp_path / "resumed").place
    assert place.epochs == SETTINGS.epochs
    assert place.steps_per_epoch != steps  # so that a step is another part of an epoch
    assert place.step == place.epochs * place.steps_per_epoch
    taken = [step for name, step in more.kinds if name == "step"]
    assert taken[0] == place.steps_per_epoch + place.steps_per_epoch * (steps // 2) // steps + 1


def test_checkpoints_are_written_by_time_too(tmp_path: Path) -> None:
    clock = count(0, 20)  # each look at it is 20 s later
    _, reports = _run(tmp_path / "run", clock=lambda: float(next(clock)), checkpoint_minutes=2.0)
    saved = [step for name, step in reports.kinds if name == "checkpoint"]
    evaluated = [step for name, step in reports.kinds if name == "evaluation"]
    within = [step for step in saved if step not in evaluated]
    assert len(within) >= 4
    assert set(evaluated) <= set(saved)
    _, reports = _run(tmp_path / "seldom", clock=lambda: 0.0)
    assert [step for name, step in reports.kinds if name == "checkpoint"] == evaluated


class _Clock:
    """A step takes a second, ranking a triple two."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, ranking_s: Callable[[], float] = lambda: 2.0) -> None:
        self.now, self.ranked, ranked_by = 0.0, list[int](), Evaluation.metrics

        def metrics(evaluation: Evaluation, triples: Int32, stop: Callable[[], bool] = bool) -> dict[str, float]:
            self.ranked.append(len(triples))
            self.now += ranking_s() * len(triples)
            return ranked_by(evaluation, triples, stop)

        monkeypatch.setattr(Evaluation, "metrics", metrics)

    def __call__(self) -> float:
        return self.now

    def step(self, kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
        self.now += kind == "step"


def _timed(home: Path, clock: _Clock, **settings: Keyword) -> tuple[Parsed, _Reports]:
    home.mkdir()
    run = GraphRun(GRAPH, "drawn", replace(SETTINGS, epochs=10**6, evaluate_every=10**6, **settings), home, clock=clock)
    reports = _Reports(run.stop)

    def tell(kind: str, place: RunProgress, values: Mapping[str, float]) -> None:
        clock.step(kind, place, values)
        reports(kind, place, values)

    return run_threads(1, lambda group: train_graph(group, run, tell))[0], reports


def test_a_budget_holds_the_last_evaluation_and_the_test(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = _Clock(monkeypatch)
    found, reports = _timed(tmp_path / "run", clock, budget_minutes=5.0)
    assert found["split"] == "test"
    assert found["metrics"]["mrr"] > 0
    assert clock.ranked[-2:] == [len(GRAPH.valid), len(GRAPH.test)]
    assert 280 < clock.now <= 300  # of the five minutes, measuring and ranking included
    assert [name for name, _ in reports.kinds[-2:]] == ["evaluation", "checkpoint"]


def test_where_ranking_becomes_slower_the_result_is_that_of_the_last_evaluation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = _Clock(monkeypatch, lambda: 2.0 if clock.now < 200 else 9.0)
    found, reports = _timed(tmp_path / "run", clock, budget_minutes=5.0)
    (evaluated,) = (
        values for (name, _), values in zip(reports.kinds, reports.values, strict=True) if name == "evaluation"
    )
    assert found["split"] == "valid"
    assert found["metrics"] == {name.removeprefix("val_"): value for name, value in evaluated.items()}
    assert found["best_validation_mrr"] == evaluated["val_mrr"]


def test_a_run_whose_time_is_used_up_has_a_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A step takes longer than the budget: the first evaluation is made in any case."""
    clock = _Clock(monkeypatch)
    monkeypatch.setattr(clock, "step", lambda *_: setattr(clock, "now", clock.now + 1_000.0))
    found, _ = _timed(tmp_path / "run", clock, budget_minutes=1.0)
    assert (found["split"], found["steps"]) == ("valid", 1)
    assert found["metrics"]["mrr"] == found["best_validation_mrr"] > 0


def test_a_budget_shorter_than_an_evaluation_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(BadInput, match="ranking the 10 validation triples among 40 entities takes about 20 s"):
        _timed(tmp_path / "run", _Clock(monkeypatch), budget_minutes=0.1)


def test_the_loss_and_the_triples_of_an_epoch_are_reported_at_every_step(tmp_path: Path) -> None:
    _, reports = _run(tmp_path / "run")
    steps = [values for (name, _), values in zip(reports.kinds, reports.values, strict=True) if name == "step"]
    epochs = [values for (name, _), values in zip(reports.kinds, reports.values, strict=True) if name == "epoch"]
    assert [values["triples"] for values in epochs] == [200.0] * SETTINGS.epochs  # both directions
    assert steps[len(steps) // SETTINGS.epochs - 1] == epochs[0]
    assert 0 < steps[0]["triples"] < 200
    assert all(np.isfinite(values["loss"]) for values in steps)
