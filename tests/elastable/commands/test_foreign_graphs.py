"""A graph in another program's files is trained, remembered by its absolute path, and evaluated from anywhere.

So is one whose header had to be named.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints
from tests.elastable.commands.kg_runs import elastable, write_graph


@pytest.mark.parametrize("kind", ["ogb", "csv"])
def test_a_foreign_graph_is_trained_and_evaluated(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, home = load_graph(write_graph(tmp_path / "text")), tmp_path / "foreign"
    home.mkdir()
    for split in ("train", "valid", "test"):
        triples = getattr(graph, split).tolist()
        if kind == "ogb":
            head, relation, tail = np.array(triples).T
            np.savez(home / f"{split}.npz", head=head, relation=relation, tail=tail)
        else:
            rows = [f"{graph.relations[r]},{graph.entities[h]},{graph.entities[t]}" for h, r, t in triples]
            (home / f"{split}.csv").write_text("".join(f"{row}\n" for row in ["p,s,o", *rows]))
    monkeypatch.chdir(tmp_path)
    source = "ogb:foreign" if kind == "ogb" else "foreign?head=s&relation=p&tail=o"
    options = ("--dim", 8, "--epochs", 2, "--batch", 32, "--evaluate-every", 1)
    elastable("kg", "train", source, *options, "--run-dir", "runs")
    elastable("kg", "train", "text", *options, "--run-dir", "text-runs")
    monkeypatch.chdir(tmp_path.parent)
    run, same = (tmp_path / name / "latest" for name in ("runs", "text-runs"))
    assert str(tmp_path) in str(GraphCheckpoints(run / "checkpoints").best().graph["source"])
    metrics = [json.loads(elastable("kg", "evaluate", each, "--json").output)["metrics"] for each in (run, same)]
    if kind == "ogb":  # the same ids, so the same model
        assert metrics[0] == metrics[1]
    assert metrics[0]["mrr"] > 0


def test_a_header_that_is_named_is_remembered_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write_graph(tmp_path / "graph")
    plain = load_graph(home)
    for file in (home / f"{split}.txt" for split in ("train", "valid", "test")):
        file.write_text("Kopf\tBeziehung\tEnde\n" + file.read_text())
    monkeypatch.chdir(tmp_path)
    options = ("--dim", 8, "--epochs", 1, "--batch", 32, "--evaluate-every", 1, "--run-dir", "runs")
    elastable("kg", "train", "graph", *options, "--header", "yes")
    monkeypatch.chdir(tmp_path.parent)
    run = tmp_path / "runs" / "latest"
    assert (run / "entities.txt").read_text().splitlines() == list(plain.entities)
    found = json.loads(elastable("kg", "evaluate", run, "--json").output)
    assert found["triples"] == len(plain.test)
    elastable("kg", "classify", run)  # finds the false triples in the folder, header or not
    wrong = CliRunner().invoke(app, ["kg", "train", f"{home}?header=no", "--header", "yes"])
    assert wrong.exit_code != 0
    assert "says header=no" in wrong.output + str(wrong.exception)
