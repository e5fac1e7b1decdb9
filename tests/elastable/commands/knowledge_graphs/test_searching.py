"""`elastable kg search`: trials, a table, a plot; interrupted trials go on; what was tried does not depend on it."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from optuna import Study
from optuna.trial import FrozenTrial, TrialState
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
from elastable.replicas.knowledge_graphs.search.search import Search
from elastable.replicas.knowledge_graphs.search.search_space import SearchSpace, default_space
from elastable.replicas.knowledge_graphs.trained.trained_graph import TrainedGraph
from elastable.replicas.knowledge_graphs.training.graph_checkpoints import GraphCheckpoints
from tests.elastable.commands.knowledge_graphs.kg_runs import elastable
from tests.untyped import Keyword

SPACE = {
    "learning_rate": {"low": 0.01, "high": 0.5, "log": True},
    "dim": [4, 8],
    "batch": {"low": 16, "high": 32, "step": 8},
}
FIXED = {"epochs": 3, "evaluate_every": 1, "regularization": 0.001}


def _search(graph: Path, home: Path, **more: Keyword) -> Search:
    return Search(
        load_graph(graph), str(graph), "ComplEx", FIXED, SearchSpace(SPACE), home, prune=False, seed=3, **more
    )


def test_the_command_tries_shows_and_goes_on(graph: Path, tmp_path: Path) -> None:
    (tmp_path / "space.json").write_text(json.dumps(SPACE))
    start = ("kg", "search", graph, "--space", tmp_path / "space.json", "--search-dir", tmp_path / "s", "--epochs", 2)
    words = (*start, "--evaluate-every", 1)
    told = elastable(*words, "--trials", 2).output
    assert "2 trials" in told
    again = elastable(*words, "--trials", 3).output
    assert "trial 2  " in again
    assert "trial 1  " not in again  # what is done is not done again
    rows = list(csv.DictReader((tmp_path / "s/trials.csv").read_text().splitlines()))
    assert [row["trial"] for row in rows] == ["0", "1", "2"]
    assert (tmp_path / "s/search.png").read_bytes().startswith(b"\x89PNG")
    for row in rows:
        run = TrainedGraph(tmp_path / "s" / row["run"])
        assert run.settings.learning_rate == pytest.approx(float(row["learning_rate"]))
        assert (run.settings.dim, run.settings.batch, run.settings.epochs) == (int(row["dim"]), int(row["batch"]), 2)
        best = GraphCheckpoints(tmp_path / "s" / row["run"] / "checkpoints").newest().place.best_mrr
        assert float(row["validation_mrr"]) == pytest.approx(best)
    other = CliRunner().invoke(app, [*map(str, words), "--trials", "4", "--dim", "8"])
    assert "cannot be fixed and tried" in str(other.exception)
    other = CliRunner().invoke(app, [*map(str, words), "--trials", "4", "--seed", "9"])
    assert "holds a search of another" in str(other.exception)


def test_an_interrupted_trial_goes_on_to_the_result_that_it_would_have_had(graph: Path, tmp_path: Path) -> None:
    ended: list[FrozenTrial] = []
    straight = _search(graph, tmp_path / "straight").run(2, ended.append)
    assert [trial.number for trial in ended] == [0, 1]

    broken = _search(graph, tmp_path / "broken")
    steps = 0

    def stop_within(trial: FrozenTrial) -> None:
        raise AssertionError("the trial must not end")

    original = Search._trained

    def trained(self: Search, study: Study, trial: Any, values: Mapping[str, object]) -> bool:
        nonlocal steps
        report = trial.report

        def reported(value: float, step: int) -> None:
            nonlocal steps
            steps += 1
            report(value, step)
            self.stop.set()  # as a signal does, after the first evaluation

        trial.report = reported
        return original(self, study, trial, values)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Search, "_trained", trained)
        study = broken.run(2, stop_within)
    assert steps == 1
    assert [trial.state for trial in study.trials] == [TrialState.RUNNING]
    newest = GraphCheckpoints(tmp_path / "broken/trial-0000/checkpoints").newest().place
    assert newest.epochs < FIXED["epochs"]

    again = _search(graph, tmp_path / "broken").run(1, lambda trial: None)
    assert [trial.state for trial in again.trials] == [TrialState.FAIL, TrialState.COMPLETE]
    assert again.trials[1].params == straight.trials[0].params
    assert again.trials[1].value == straight.trials[0].value
    assert not (tmp_path / "broken/trial-0001").exists()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # numbers overflow
def test_a_trial_that_cannot_be_or_diverges_fails_and_the_search_goes_on(graph: Path, tmp_path: Path) -> None:
    space = SearchSpace({"dim": [7]})  # ComplEx needs an even number
    study = Search(load_graph(graph), str(graph), "ComplEx", FIXED, space, tmp_path / "a").run(1, lambda trial: None)
    assert study.trials[0].state == TrialState.FAIL
    assert "must be even" in study.trials[0].user_attrs["error"]
    fixed = {**FIXED, "optimizer": "sgd", "dim": 8}
    space = SearchSpace({"learning_rate": [1e30]})
    study = Search(load_graph(graph), str(graph), "DistMult", fixed, space, tmp_path / "b").run(2, lambda trial: None)
    assert [trial.state for trial in study.trials] == [TrialState.FAIL] * 2
    assert "loss of step" in study.trials[0].user_attrs["error"]


def test_bad_trials_are_pruned(graph: Path, tmp_path: Path) -> None:
    space = SearchSpace({"learning_rate": [0.0, 0.3]})
    search = Search(load_graph(graph), str(graph), "ComplEx", {**FIXED, "dim": 16, "epochs": 6}, space, tmp_path)
    study = search.run(10, lambda trial: None)
    states = {trial.state for trial in study.trials if trial.params["learning_rate"] == 0.0}
    assert TrialState.PRUNED in states
    assert study.best_trial.params["learning_rate"] == 0.3


@pytest.mark.parametrize(
    ("values", "told"),
    [
        ({}, "at least one setting"),
        ({"dims": [3]}, "no setting 'dims'"),
        ({"model": ["TransE"]}, "no setting 'model'"),
        ({"dim": []}, "must be at least 1"),
        ({"dim": [0]}, "must be at least 1"),
        ({"dim": 3}, "needs a list"),
        ({"dim": {"low": 3}}, "needs a list"),
        ({"dim": {"low": 3, "high": 2}}, "from 3 to 2"),
        ({"dim": {"low": "3", "high": 4}}, "two numbers"),
        ({"learning_rate": {"low": 0, "high": 1, "log": True}}, "starts above 0"),
        ({"learning_rate": {"low": 0.1, "high": 1, "steps": 3}}, "needs a list"),
    ],
)
def test_spaces_that_cannot_be(values: dict[str, object], told: str) -> None:
    with pytest.raises(BadInput, match=told):
        SearchSpace(values)


def test_files_of_spaces_default_spaces_and_graphs_without_validation(graph: Path, tmp_path: Path) -> None:
    for content in ("{", "[1]"):
        (tmp_path / "space.json").write_text(content)
        with pytest.raises(BadInput, match=r"space\.json"):
            SearchSpace.load(tmp_path / "space.json")
    assert set(default_space("ComplEx", {"batch": 64}).values) == {"learning_rate", "dim", "regularization"}
    assert "negatives" in default_space("TransE", {}).values
    (tmp_path / "train.txt").write_text("a\tr\tb\n")
    with pytest.raises(BadInput, match="no validation triples"):
        _search(tmp_path, tmp_path / "s")
