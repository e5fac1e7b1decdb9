"""`elastable kg evaluate`, `score`, `classify`, `predict` and `export`, against float64 scores and other programs."""

import io
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from rich.console import Console
from typer.testing import CliRunner

from elastable.command import app
from elastable.commands.kg_query import rank_table
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation import read_triple_candidates
from elastable.replicas.knowledge_graphs.graph.knowledge_graph import load_graph
from elastable.replicas.knowledge_graphs.graph_run import GraphCheckpoints
from elastable.replicas.knowledge_graphs.trained_graph import TrainedGraph
from tests.elastable.commands.kg_runs import (
    PEOPLE,
    PLACES,
    complex_rows,
    elastable,
    float64_scores,
    ids_of,
    names_of,
    write_graph,
)
from tests.untyped import Keywords

_SIDES = ("head", "tail")


def _ranks(run: Path, graph: Path, side: str, *, filtered: bool = True, among: Array | None = None) -> Array:
    """float64 `[N]`: ranks of the test triples, one by one."""
    every = np.concatenate([ids_of(run, graph / f"{split}.txt") for split in ("train", "valid", "test")])
    test = ids_of(run, graph / "test.txt")
    answer, given = (2, 0) if side == "tail" else (0, 2)
    found = []
    for scores, triple in zip(float64_scores(run, side, test), test, strict=True):
        competes = np.ones(len(scores), bool) if among is None else np.isin(np.arange(len(scores)), among)
        if filtered:
            competes[every[(every[:, given] == triple[given]) & (every[:, 1] == triple[1])][:, answer]] = False
        competes[triple[answer]] = False
        found.append(1 + (scores[competes] > scores[triple[answer]]).sum())
    return np.array(found, np.float64)


@pytest.mark.parametrize("filtered", [True, False])
def test_metrics_are_those_of_float64_ranks(run: Path, graph: Path, filtered: bool) -> None:
    words = ("--at", "1,2,5", "--json", *(() if filtered else ("--raw",)))
    output = json.loads(elastable("kg", "evaluate", run, *words).output)
    for side in ("head", "tail"):
        ranks = _ranks(run, graph, side, filtered=filtered)
        assert output["metrics"][f"{side}_mrr"] == pytest.approx((1 / ranks).mean())
        for k in (1, 2, 5):
            assert output["metrics"][f"{side}_hits@{k}"] == pytest.approx((ranks <= k).mean())
    assert output["filtered"] is filtered
    result = json.loads((run / "result.json").read_text())["metrics"]
    if filtered:
        assert output["metrics"]["mrr"] == pytest.approx(result["mrr"])


def test_every_query_has_its_row_in_the_file_of_ranks(run: Path, graph: Path, tmp_path: Path) -> None:
    file = tmp_path / "ranks.parquet"
    elastable("kg", "evaluate", run, "--ranks", file)
    table = pyarrow.parquet.read_table(file)
    lines = (graph / "test.txt").read_text().splitlines()
    assert table.schema.metadata[b"split"] == b"test"
    for side in ("head", "tail"):
        rows = [row for row in table.to_pylist() if row["side"] == side]
        assert [f"{row['head']}\t{row['relation']}\t{row['tail']}" for row in rows] == lines
        np.testing.assert_array_equal([row["rank"] for row in rows], _ranks(run, graph, side))
        test = ids_of(run, graph / "test.txt")
        true = float64_scores(run, side, test)[np.arange(len(test)), test[:, 2 if side == "tail" else 0]]
        np.testing.assert_allclose([row["score"] for row in rows], true, rtol=1e-4, atol=1e-5)
        assert all(row["optimistic"] <= row["rank"] <= row["pessimistic"] for row in rows)


def test_candidates_are_listed_for_each_triple_by_a_file(run: Path, graph: Path, tmp_path: Path) -> None:
    count, test, file = len(names_of(run)), ids_of(run, graph / "test.txt"), tmp_path / "listed.npz"
    lists = {side: np.random.default_rng(1 + k).integers(0, count, (len(test), 4)) for k, side in enumerate(_SIDES)}
    np.savez(file, head_neg=lists["head"], tail_neg=lists["tail"])
    output = json.loads(elastable("kg", "evaluate", run, "--listed", file, "--raw", "--json").output)["metrics"]
    for side, answer in (("head", 0), ("tail", 2)):
        ranks = []
        for scores, row, triple in zip(float64_scores(run, side, test), lists[side], test, strict=True):
            ranks.append(1 + sum(scores[e] > scores[triple[answer]] for e in row if e != triple[answer]))
        assert output[f"{side}_mrr"] == pytest.approx((1 / np.array(ranks)).mean())


def test_lists_of_ogb_count_ids_within_types(run: Path, graph: Path, tmp_path: Path) -> None:
    draw, home = np.random.default_rng(4), tmp_path / "ogb"
    home.mkdir()
    kinds, counts = np.array(["drug", "gene"]), np.array([5, 7])
    triples = np.stack([draw.integers(0, 5, 30), draw.integers(0, 2, 30), draw.integers(0, 7, 30)])
    triples[[0, 2], 0] = 4, 6  # so that there are as many entities
    typed: Keywords = {"head_type": np.repeat(kinds[0], 30), "tail_type": np.repeat(kinds[1], 30)}
    lists: Keywords = {"head_neg": draw.integers(0, 5, (30, 3)), "tail_neg": draw.integers(0, 7, (30, 3))}
    for split in ("train", "valid", "test"):
        np.savez(home / f"{split}.npz", head=triples[0], relation=triples[1], tail=triples[2], **typed, **lists)
    read = load_graph(f"ogb:{home}")
    found = read_triple_candidates(home / "test.npz", read)
    first = {kind: next(k for k, name in enumerate(read.entities) if name.startswith(kind)) for kind in kinds}
    np.testing.assert_array_equal(found.heads, lists["head_neg"] + first["drug"])
    np.testing.assert_array_equal(found.tails, lists["tail_neg"] + first["gene"])
    assert len(read.entities) == counts.sum()
    np.savez(home / "wrong.npz", **typed, **{**lists, "head_neg": lists["head_neg"] + 3})
    with pytest.raises(BadInput, match="an id is beyond its type's entities"):
        read_triple_candidates(home / "wrong.npz", read)
    with pytest.raises(BadInput, match=r"wrong\.npz: cannot be read .*the graph has none"):
        read_triple_candidates(home / "wrong.npz", replace(read, types=None))


def test_candidates_are_those_of_a_file_or_of_the_answers_type(run: Path, graph: Path, tmp_path: Path) -> None:
    some = [f"place-{k}" for k in range(PLACES)] + ["person-3"]
    (tmp_path / "some.txt").write_text("".join(f"{name}\n" for name in some))
    output = json.loads(elastable("kg", "evaluate", run, "--among", tmp_path / "some.txt", "--json").output)
    ids = np.array([names_of(run).index(name) for name in some])
    for side in ("head", "tail"):
        assert output["metrics"][f"{side}_mrr"] == pytest.approx((1 / _ranks(run, graph, side, among=ids)).mean())

    output = json.loads(elastable("kg", "evaluate", run, "--of-type", "--json").output)
    names, heads = names_of(run), ids_of(run, graph / "test.txt")[:, 0]
    people = np.array([k for k, name in enumerate(names) if name.startswith("person")])
    assert np.isin(heads, people).all()
    ranks = _ranks(run, graph, "head", among=people)
    assert output["metrics"]["head_mrr"] == pytest.approx((1 / ranks).mean())


def test_metrics_are_broken_down(run: Path, graph: Path) -> None:
    test = ids_of(run, graph / "test.txt")
    both = np.concatenate([_ranks(run, graph, side) for side in ("head", "tail")])
    relations = names_of(run, "relations")
    output = json.loads(elastable("kg", "evaluate", run, "--by", "relation", "--json").output)
    for group in output["groups"]:
        mine = np.tile(test[:, 1] == relations.index(group["name"]), 2)
        assert group["queries"] == mine.sum()
        assert group["metrics"]["mrr"] == pytest.approx((1 / both[mine]).mean())
    assert {group["name"] for group in output["groups"]} == {relations[k] for k in test[:, 1]}
    output = json.loads(elastable("kg", "evaluate", run, "--by", "side", "--json").output)
    assert [group["name"] for group in output["groups"]] == ["head", "tail"]
    output = json.loads(elastable("kg", "evaluate", run, "--by", "category", "--json").output)
    assert {group["name"]: group["queries"] for group in output["groups"]} == {"N-N": 10, "N-1": 2}
    assert "N-N" in elastable("kg", "evaluate", run, "--by", "category").output


def test_triples_are_scored(run: Path, graph: Path) -> None:
    test = ids_of(run, graph / "test.txt")
    for side, answer in (("tail", 2), ("head", 0)):
        expected = float64_scores(run, side, test)[np.arange(len(test)), test[:, answer]]
        lines = elastable("kg", "score", run, graph / "test.txt", "--side", side).output.splitlines()
        assert [line.rpartition("\t")[0] for line in lines] == (graph / "test.txt").read_text().splitlines()
        np.testing.assert_allclose([float(line.rpartition("\t")[2]) for line in lines], expected, rtol=1e-4, atol=1e-5)


def test_triples_are_classified_by_thresholds_of_validation(run: Path, graph: Path) -> None:
    output = json.loads(elastable("kg", "classify", run, "--json").output)
    parts = {}
    for split in ("valid", "test"):
        files = (graph / f"{split}.txt", graph / f"{split}_negatives.txt")
        triples = np.concatenate([ids_of(run, file) for file in files])
        scores = float64_scores(run, "tail", triples)[np.arange(len(triples)), triples[:, 2]]
        parts[split] = triples[:, 1], scores, np.arange(len(triples)) < len(triples) / 2
    relation, scores, labels = parts["test"]
    predicted = np.zeros(len(scores), bool)
    for each in np.unique(relation):
        mine = parts["valid"][0] == each
        cuts = [np.inf, *sorted(parts["valid"][1][mine], reverse=True)]
        right = [((parts["valid"][1][mine] >= cut) == parts["valid"][2][mine]).sum() for cut in cuts]
        best = int(np.argmax(right))
        lower = [cut for cut in cuts if cut < cuts[best]]
        threshold = np.inf if best == 0 else -np.inf if not lower else (cuts[best] + lower[0]) / 2
        predicted[relation == each] = scores[relation == each] >= threshold
    assert output["triples"] == len(labels)
    assert output["accuracy"] == pytest.approx((predicted == labels).mean())
    assert output["recall"] == pytest.approx((predicted & labels).sum() / labels.sum())
    assert "accuracy" in elastable("kg", "classify", run).output


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict",), "--queries"),
        (("predict", "--relation", "knows", "--queries", "q"), "--queries"),
        (("predict", "--queries", "q", "--head", "a"), "leave out --head"),
        (("predict", "--relation", "knows", "--head", "person-1", "--of-type", "plac"), "'place'"),
        (
            ("predict", "--relation", "knows", "--head", "person-1", "--of-type", "a", "--among", "f"),
            "give one of them",
        ),
        (("evaluate", "--listed", "x.npz", "--of-type"), "give one of them"),
        (("evaluate", "--at", "1,x"), "--at 1,x"),
        (("evaluate", "--at", "0"), "numbers from 1"),
        (("evaluate", "--of-type", "--among", "f"), "give one of them"),
        (("evaluate", "--graph", "nowhere"), "nowhere: no such folder"),
        (("evaluate", "--among", "nowhere.txt"), "no such file"),
        (("evaluate", "--listed", "{}/bad"), "cannot be read as candidates"),
        (("score", "nowhere.txt"), "no such file"),
        (("score", "{}/unknown"), "unknown: no entity 'persn-3' among 20; alike are 'person-3'"),
        (("predict", "--queries", "{}/known"), "known, line 2"),
        (("predict", "--queries", "{}/nothing"), "nothing, line 2"),
        (("export", "--format", "numpy", "--output", "{}"), "exists"),
        (("classify", "--test-negatives", "nowhere.txt"), "no such file"),
    ],
)
def test_what_cannot_be_is_refused(run: Path, tmp_path: Path, words: tuple[str, ...], message: str) -> None:
    (tmp_path / "bad").write_bytes(b"no archive")
    (tmp_path / "unknown").write_text("persn-3\tknows\tperson-2\n")
    (tmp_path / "known").write_text("person-1\tknows\t?\nperson-1\tknows\tperson-2\n")
    (tmp_path / "nothing").write_text("person-1\tknows\t?\n?\tknows\t?\n")
    done = CliRunner().invoke(app, ["kg", words[0], str(run), *(word.format(tmp_path) for word in words[1:])])
    assert isinstance(done.exception, BadInput)
    assert message in str(done.exception)
    assert len(list(tmp_path.iterdir())) == 4  # an export leaves what is there


def test_long_names_are_shown_whole_in_a_narrow_terminal() -> None:
    name = "/location/country/form_of_government/of/a/long/time/ago/and/far/away"
    metrics = {"mrr": 0.5, "hits@1": 0.25, "mean_rank": 2.0}
    group = {"name": name, "queries": 4, "metrics": metrics}
    report = {
        "triples": 2, "split": "test", "filtered": True, "metrics": metrics, "by": "relation", "groups": [group],
    }  # fmt: skip
    console = Console(width=60, record=True, file=io.StringIO())
    console.print(rank_table(report, [1]))
    columns = [line.split("│")[1].strip() for line in console.export_text().splitlines() if line.count("│") > 2]
    assert name in "".join(columns)


# `elastable kg predict` of files, and `export`: read again as other programs read them


@pytest.fixture(scope="module")
def conve(graph: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("conve")
    elastable("kg", "train", graph, "--model", "ConvE", "--dim", 16, "--epochs", 1, "--run-dir", home)
    return (home / "latest").resolve()


def _scores(relation: Array, head: Array, tail: Array) -> Array:
    """ComplEx of rows, in float64."""
    h, r, t = (complex_rows(np.asarray(x, np.float64)) for x in (head, relation, tail))
    return np.asarray((h * r * t.conj()).sum(axis=1).real)


def test_a_file_of_queries_is_answered_in_its_order(run: Path, graph: Path, tmp_path: Path) -> None:
    names, test = names_of(run), ids_of(run, graph / "test.txt")
    lines = [line.split("\t") for line in (graph / "test.txt").read_text().splitlines()]
    asked = [(h, r, "?") if place % 2 else ("?", r, t) for place, (h, r, t) in enumerate(lines)]
    (tmp_path / "queries.txt").write_text("".join("\t".join(query) + "\n" for query in asked))
    output = [
        json.loads(line)
        for line in elastable("kg", "predict", run, "--queries", tmp_path / "queries.txt", "-k", 4).output.splitlines()
    ]
    for place, (query, answer) in enumerate(zip(asked, output, strict=True)):
        side = "tail" if place % 2 else "head"
        scores = float64_scores(run, side, test[place : place + 1])[0]
        assert [each["entity"] for each in answer["answers"]] == [names[k] for k in np.argsort(-scores)[:4]]
        assert answer["head" if side == "tail" else "tail"] == query[0 if side == "tail" else 2]


def test_answers_are_of_a_type_or_of_a_file(run: Path, tmp_path: Path) -> None:
    asked = ("kg", "predict", run, "--head", "person-3", "--relation", "knows", "-k", 50, "--json")
    places = json.loads(elastable(*asked, "--of-type", "place").output)
    assert sorted(each["entity"] for each in places) == [f"place-{k}" for k in range(PLACES)]
    (tmp_path / "some.txt").write_text("person-4\nperson-6\nplace-1\n")
    some = json.loads(elastable(*asked, "--among", tmp_path / "some.txt").output)
    assert {each["entity"] for each in some} == {"person-4", "person-6", "place-1"}
    new = json.loads(elastable(*asked, "--of-type", "person", "--new").output)
    assert "person-4" not in {each["entity"] for each in new}
    assert len(new) == PEOPLE - 3


def _check(run: Path, graph: Path, rows: Sequence[Array], named: Sequence[list[str]]) -> None:
    """Rows by name give the scores of the model."""
    (entities, relations), (names, kinds) = rows, named
    lines = [line.split("\t") for line in (graph / "test.txt").read_text().splitlines()]
    h, t = (entities[[names.index(line[place]) for line in lines]] for place in (0, 2))
    test = ids_of(run, graph / "test.txt")
    for side, suffix, (first, last) in (("tail", "", (h, t)), ("head", " (inverse)", (t, h))):
        r = relations[[kinds.index(line[1] + suffix) for line in lines]]
        true = float64_scores(run, side, test)[np.arange(len(test)), test[:, 2 if side == "tail" else 0]]
        np.testing.assert_allclose(_scores(r, first, last), true, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("form", ["numpy", "parquet"])
def test_export(run: Path, graph: Path, tmp_path: Path, form: str) -> None:
    elastable("kg", "export", run, "--format", form, "--output", tmp_path / "out")
    rows, names = [], []
    for table in ("entities", "relations"):
        if form == "numpy":
            rows.append(np.load(tmp_path / "out" / f"{table}.npy"))
            names.append(names_of(tmp_path / "out", table))
            continue
        read = pyarrow.parquet.read_table(tmp_path / "out" / f"{table}.parquet")
        rows.append(np.stack(read["embedding"].to_numpy()))
        names.append(read["name"].to_pylist())
        assert read["id"].to_pylist() == list(range(len(rows[-1])))
    _check(run, graph, rows, names)
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["rows"]["entity"][0] == {"name": "real", "columns": [0, 8], "meaning": ""}
    assert (about["model"], about["inverse_relations"]) == ("ComplEx", True)


def test_export_of_further_variables(conve: Path, tmp_path: Path) -> None:
    elastable("kg", "export", conve, "--format", "parquet", "--output", tmp_path / "conve")
    dense = TrainedGraph(conve).model.score.dense
    assert {file.stem for file in (tmp_path / "conve").glob("*.npy")} - {"entities", "relations"} == set(dense)
    for name, value in dense.items():
        np.testing.assert_array_equal(np.load(tmp_path / "conve" / f"{name}.npy"), value)


# A graph in another program's files is trained, remembered by its absolute path, and evaluated from anywhere


def test_a_foreign_graph_is_trained_and_evaluated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    graph, home = load_graph(write_graph(tmp_path / "text")), tmp_path / "foreign"
    home.mkdir()
    for split in ("train", "valid", "test"):
        head, relation, tail = np.array(getattr(graph, split)).T
        np.savez(home / f"{split}.npz", head=head, relation=relation, tail=tail)
    monkeypatch.chdir(tmp_path)
    options = ("--dim", 8, "--epochs", 2, "--batch", 32, "--evaluate-every", 1)
    elastable("kg", "train", "ogb:foreign", *options, "--run-dir", "runs")
    elastable("kg", "train", "text", *options, "--run-dir", "text-runs")
    monkeypatch.chdir(tmp_path.parent)
    run, same = (tmp_path / name / "latest" for name in ("runs", "text-runs"))
    assert str(tmp_path) in str(GraphCheckpoints(run / "checkpoints").best().graph["source"])
    metrics = [json.loads(elastable("kg", "evaluate", each, "--json").output)["metrics"] for each in (run, same)]
    assert metrics[0] == metrics[1]  # the same ids, so the same model


def test_a_header_that_is_named_is_remembered_by_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = write_graph(tmp_path / "graph")
    plain = load_graph(home)
    for file in (home / f"{split}.txt" for split in ("train", "valid", "test")):
        file.write_text("Kopf\tBeziehung\tEnde\n" + file.read_text())
    monkeypatch.chdir(tmp_path)
    options = ("--dim", 8, "--epochs", 1, "--batch", 32, "--evaluate-every", 1, "--run-dir", "runs")
    elastable("kg", "train", "graph?header=yes", *options)
    monkeypatch.chdir(tmp_path.parent)
    run = tmp_path / "runs" / "latest"
    assert (run / "entities.txt").read_text().splitlines() == list(plain.entities)
    found = json.loads(elastable("kg", "evaluate", run, "--json").output)
    assert found["triples"] == len(plain.test)
    elastable("kg", "classify", run)  # finds the false triples in the folder, header or not
