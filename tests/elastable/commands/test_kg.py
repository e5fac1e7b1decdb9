"""`elastable kg`: trained, resumed, asked, and refused."""

import json
import signal
import tomllib
from collections.abc import Callable
from dataclasses import replace
from io import StringIO
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console
from typer.testing import CliRunner

from elastable.command import app
from elastable.commands.kg_train import TrainingProgress
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.master.api import JobSpec
from elastable.master.checkpoints.writing import write_tensors
from elastable.master.tasks.progress import Progress
from elastable.output.run_directory import RunDirectory
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints, RunProgress
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings, default_settings, settings_of
from elastable.replicas.knowledge_graphs.scores.functions import SCORES
from elastable.replicas.knowledge_graphs.trained_graph import Query, TrainedGraph
from tests.elastable.commands.kg_runs import elastable as succeeding
from tests.elastable.processes import elastable, succeeded, wait_until
from tests.master.checkpoints.jobs import flip

CITIES = 24
PUBLISHED = Path(__file__).parents[3] / "examples" / "knowledge_graphs"
QUICK = ("--dim", "32", "--epochs", "40", "--batch", "32", "--learning-rate", "0.3", "--regularization", "0.001")


def kg(*words: object) -> str:
    """What a command that must succeed prints."""
    return succeeding("kg", *words).output


@pytest.fixture(scope="module")
def graph(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Cities on a ring: next to each other, and opposite."""
    home = tmp_path_factory.mktemp("ring")
    lines = [f"city-{k}\tnext\tcity-{(k + 1) % CITIES}" for k in range(CITIES)]
    lines += [f"city-{k}\topposite\tcity-{(k + CITIES // 2) % CITIES}" for k in range(CITIES)]
    held_out = set(lines[CITIES + 3 : CITIES + 9])  # their other direction stays
    (home / "train.txt").write_text("\n".join(line for line in lines if line not in held_out) + "\n")
    (home / "valid.txt").write_text("\n".join(sorted(held_out)[:3]) + "\n")
    (home / "test.txt").write_text("\n".join(sorted(held_out)[3:]) + "\n")
    return home


@pytest.fixture(scope="module")
def run(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("runs")
    assert "ComplEx on" in kg("train", graph, *QUICK, "--workers", "2", "--run-dir", home)
    return (home / "latest").resolve()


def test_a_run_leaves_its_report(run: Path) -> None:
    result = json.loads((run / "result.json").read_text())
    assert result["metrics"]["mrr"] > 0.4  # 0.16 by chance
    assert result["workers"] == 2
    assert TrainSettings.from_json(result["settings"]).model == "ComplEx"
    for name in ("learning_curve.png", "metrics.jsonl", "sharding.npz", "entities.txt", "relations.txt"):
        assert (run / name).stat().st_size
    kinds = {json.loads(line)["kind"] for line in (run / "metrics.jsonl").read_text().splitlines()}
    assert kinds == {"epoch", "evaluation"}


def test_questions_are_answered_by_names(run: Path) -> None:
    model, after, before = TrainedGraph(run), Query("next", head="city-4"), Query("next", tail="city-4")
    (tails,) = model.answer([after], k=3)
    assert tails[0].entity == "city-5"
    assert tails[0].score > tails[1].score > tails[2].score
    assert model.answer([before], k=1)[0][0].entity == "city-3"
    (new,) = model.answer([after], k=CITIES, new=True)
    assert len(new) == CITIES - 1
    assert "city-5" not in [answer.entity for answer in new]
    assert len(model.answer([after], k=100)[0]) == CITIES  # all there are
    output = kg("predict", run, "--head", "city-4", "--relation", "next", "--json")
    assert json.loads(output)[0] == {"entity": "city-5", "score": pytest.approx(tails[0].score)}
    table = kg("predict", run, "--tail", "city-4", "--relation", "next", "-k", "2")
    assert "(?, next, city-4)" in table
    assert "city-3" in table


@pytest.mark.parametrize(
    ("ask", "message"),
    [
        (lambda run: TrainedGraph(run).answer([Query("next", head="citi-4")]), "city-4"),
        (lambda run: TrainedGraph(run).answer([Query("nest", head="city-4")]), "next"),
        (lambda run: TrainedGraph(run).answer([Query("next", head="city-1")], k=0), "ask for at least 1"),
        (lambda run: TrainedGraph(run.parent), "not a run directory"),
        (lambda run: Query("next"), "neither"),
        (lambda run: Query("next", head="city-1", tail="city-2"), "head 'city-1' and tail 'city-2'"),
    ],
)
def test_what_cannot_be_answered_is_refused_by_name(run: Path, ask: Callable[[Path], object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        ask(run)


def test_resuming_gives_the_run_that_was_never_broken(graph: Path, tmp_path: Path) -> None:
    options = ("--dim", "8", "--batch", "32", "--evaluate-every", "2", "--workers", "2", "--patience", "0")

    def trained(home: Path, *more: str) -> dict[str, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        kg("train", graph, *more, "--run-dir", home)
        return dict(GraphCheckpoints(home / "latest" / "checkpoints").newest().state)

    straight = trained(tmp_path / "straight", *options, "--epochs", "6")
    trained(tmp_path / "broken", *options, "--epochs", "6")
    # As if it had been killed after the evaluation of epoch 4: its settings, and the state that stood then.
    first = trained(tmp_path / "first", *options, "--epochs", "4")
    settings = settings_of("ComplEx", {"dim": 8, "batch": 32, "evaluate_every": 2, "patience": 0, "epochs": 6})
    stood = GraphCheckpoints(tmp_path / "first" / "latest" / "checkpoints").newest()
    killed = tmp_path / "killed"
    GraphCheckpoints(killed / "checkpoints").write(first, settings, RunProgress(4, stood.place.step), stood.graph)
    resumed = trained(tmp_path / "resumed", "--resume", str(killed), "--workers", "2")
    assert set(resumed) == set(straight)
    for name, value in straight.items():
        np.testing.assert_array_equal(resumed[name], value)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_saves_and_says_how_to_continue(graph: Path, tmp_path: Path, number: signal.Signals) -> None:
    train = ("kg", "train", graph, "--dim", "8", "--batch", "16", "--workers", "2")
    endless = ("--epochs", "1000000", "--evaluate-every", "1000000")
    with elastable(tmp_path, *train, *endless, "--run-dir", tmp_path / "runs") as running:
        wait_until(lambda: "epoch 2/" in running.out or running.process.poll() is not None, "an epoch", running)
        running.signal(number)
        assert running.wait() == 128 + number, running.out + running.err
    home = (tmp_path / "runs" / "latest").resolve()
    saved = GraphCheckpoints(home / "checkpoints").newest().place
    assert saved.epochs >= 2
    assert f"stopped after {saved.epochs} epochs, at step {saved.step}; all is saved" in running.out
    command = running.out.split("Continue with:")[1].split()
    assert command == ["elastable", "kg", "train", str(graph), "--resume", str(home), "--workers", "2"]
    assert not (home / "result.json").exists()


def test_progress_within_an_epoch_says_loss_speed_and_time_left(tmp_path: Path) -> None:
    directory, clock, shown = RunDirectory(tmp_path / "run"), iter(range(0, 1000, 20)), StringIO()
    settings = settings_of("ComplEx", {"epochs": 3})
    progress = TrainingProgress(directory, settings, Console(file=shown, width=200), clock=lambda: float(next(clock)))
    place = RunProgress(steps_per_epoch=10)
    for step in range(1, 11):
        progress("step", replace(place, step=step), {"loss": 2.5, "triples": 100.0 * step})
    progress("epoch", replace(place, step=10, epochs=1), {"loss": 2.5, "triples": 1000.0})
    progress.close()
    directory.close()
    lines = shown.getvalue().splitlines()
    assert lines[0] == "epoch 1/3  20%  loss 2.5000  5 triples/s  0:02:40 left in the epoch, at most 0:09:20 in all"
    assert lines[-1] == "epoch 1/3  loss 2.5000  5 triples/s"
    assert len(lines) == 6
    assert json.loads((tmp_path / "run" / "metrics.jsonl").read_text())["kind"] == "epoch"


def test_processes_over_mpi_train_the_model_of_threads(graph: Path, tmp_path: Path) -> None:
    options = ("--dim", "8", "--batch", "32", "--epochs", "2", "--evaluate-every", "2")
    succeeded("replicas", "-n", "2", "elastable", "kg", "train", graph, *options, "--run-dir", tmp_path / "processes")
    kg("train", graph, *options, "--run-dir", tmp_path / "threads", "--workers", "2")
    processes, threads = (
        GraphCheckpoints(tmp_path / kind / "latest" / "checkpoints").newest().state for kind in ("processes", "threads")
    )
    for name, value in threads.items():
        np.testing.assert_array_equal(processes[name], value)


def test_training_stops_early_when_nothing_gets_better(graph: Path, tmp_path: Path) -> None:
    options = ("--dim", "8", "--epochs", "50", "--evaluate-every", "1", "--patience", "2", "--learning-rate", "0")
    kg("train", graph, *options, "--run-dir", tmp_path)
    assert json.loads((tmp_path / "latest" / "result.json").read_text())["epochs"] == 3


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("{small}", "--resume", "{run}"), "is of graph"),
        (("{graph}", "--resume", "{run}", "--dim", "9"), "leave out --dim"),
        (("{graph}", "--workers", "25"), "24 entities"),
        (("{bad}",), "train.txt, line 2"),
        *((("{graph}", "--budget", budget), "say a time such as 40m") for budget in ("40", "m", "-4m", "soon")),
    ],
)
def test_what_cannot_be_trained_is_refused(
    graph: Path, run: Path, tmp_path: Path, words: tuple[str, ...], message: str
) -> None:
    places = {"graph": graph, "run": run, "small": tmp_path / "small", "bad": tmp_path / "bad"}
    for name, text in (("small", "a\tr\tb\nb\tr\tc\n"), ("bad", "a\tr\tb\nb\tr\n")):
        places[name].mkdir()
        (places[name] / "train.txt").write_text(text)
    words = tuple(word.format(**places) for word in words)
    done = CliRunner().invoke(app, ["kg", "train", *words, "--run-dir", str(tmp_path)])
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)


def test_a_checkpoint_whose_bytes_changed_is_refused(run: Path, tmp_path: Path) -> None:
    found = GraphCheckpoints(run / "checkpoints").newest()
    copy = GraphCheckpoints(tmp_path)
    address = Path(copy.write(found.state, found.settings, found.place, found.graph))
    file = address / "dense.safetensors"
    flip(file, -1)
    with pytest.raises(CheckpointError, match=r"dense.safetensors: its bytes are not the ones that were written"):
        copy.newest()
    manifest = address / "manifest.json"
    manifest.write_text(manifest.read_text().replace('"epochs": ', '"epochs": 1'))
    with pytest.raises(CheckpointError, match="its bytes are not the ones that were written"):
        copy.newest()


def test_a_checkpoint_of_a_job_is_refused(tmp_path: Path) -> None:
    write_tensors(tmp_path, {"entities": np.zeros(2, np.float32)}, JobSpec(job="clicks"), Progress(1))
    with pytest.raises(CheckpointError, match="is of job 'clicks', and not of a knowledge graph"):
        GraphCheckpoints(tmp_path).newest()


def test_the_newest_and_the_best_checkpoint_stay(tmp_path: Path) -> None:
    checkpoints, settings = GraphCheckpoints(tmp_path), TrainSettings()
    for step, best in ((1, 1), (2, 2), (3, 2), (4, 2)):
        state = {"entities": np.full((2, 2), step, np.float32)}
        checkpoints.write(state, settings, RunProgress(step, step, 0.5, best), {})
    assert checkpoints.names() == ["ckpt-0000000002", "ckpt-0000000004"]
    assert checkpoints.best().state["entities"][0, 0] == 2
    assert checkpoints.newest().place.step == 4


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"negatives": 64}, "negatives=64 has no effect on the loss whole-softmax"),
        ({"margin": 2.0, "loss": "softmax"}, "margin=2.0 has no effect on the loss softmax"),
        ({"corruption": "h"}, "corruption='h' has no effect with reciprocal relations"),
        ({"regularizer": "none", "regularization": 0.1}, "without a regularizer"),
        ({"norm": 2}, "norm 2 of ComplEx: its score is a product"),
    ],
)
def test_a_setting_without_effect_is_refused(given: dict[str, object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        settings_of("ComplEx", given)


def test_every_model_has_defaults_that_can_be() -> None:
    for name in SCORES:
        assert settings_of(name, {}).model == name
    with pytest.raises(BadInput, match="known are TransE"):
        default_settings("Nothing")


def test_a_budget_ends_training_and_is_reported(graph: Path, tmp_path: Path) -> None:
    options = ("--dim", "8", "--epochs", "1000000", "--evaluate-every", "1000000", "--budget", "1s")
    kg("train", graph, *options, "--run-dir", tmp_path)
    result = json.loads((tmp_path / "latest" / "result.json").read_text())
    assert result["settings"]["budget_minutes"] == pytest.approx(1 / 60)
    assert result["epochs"] < 1_000_000
    assert result["split"] in ("test", "valid")
    assert result["metrics"]["mrr"] > 0


@pytest.mark.parametrize("file", sorted(PUBLISHED.glob("*.toml")), ids=lambda file: file.stem)
def test_published_settings_are_files_of_options(file: Path, graph: Path, tmp_path: Path) -> None:
    options = ("--config", str(file), "--dim", "8", "--epochs", "1", "--run-dir", str(tmp_path))
    kg("train", graph, *options)
    said = tomllib.loads(file.read_text())["kg"]["train"]
    settings = json.loads((tmp_path / "latest" / "result.json").read_text())["settings"]
    assert {name: settings[name] for name in said} == said
