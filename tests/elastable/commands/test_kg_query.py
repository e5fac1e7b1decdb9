"""`elastable kg predict` of files, and `export`: read again as other programs read them."""

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pyarrow.parquet
import pytest
from typer.testing import CliRunner

from elastable.command import app
from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.knowledge_graphs.trained_graph import LinkPredictor
from tests.elastable.commands.kg_runs import (
    PEOPLE,
    PLACES,
    complex_rows,
    elastable,
    float64_scores,
    ids_of,
    names_of,
)


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
    elastable("kg", "predict", run, "--queries", tmp_path / "queries.txt", "-k", 4, "--output", tmp_path / "a.parquet")
    rows = pyarrow.parquet.read_table(tmp_path / "a.parquet").to_pylist()
    assert [row["query"] for row in rows] == [place for place in range(len(asked)) for _ in range(4)]
    assert [row["rank"] for row in rows] == [1, 2, 3, 4] * len(asked)
    for row in rows:
        best = output[row["query"]]["answers"][row["rank"] - 1]
        assert (row[row["side"]], row["score"]) == (best["entity"], pytest.approx(best["score"]))


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


def test_export_as_numpy(run: Path, graph: Path, tmp_path: Path) -> None:
    elastable("kg", "export", run, "--format", "numpy", "--output", tmp_path / "out")
    tables = [np.load(tmp_path / "out" / f"{name}.npy") for name in ("entities", "relations")]
    _check(run, graph, tables, [names_of(tmp_path / "out", kind) for kind in ("entities", "relations")])
    about = json.loads((tmp_path / "out" / "model.json").read_text())
    assert about["rows"]["entity"][0] == {"name": "real", "columns": [0, 8], "meaning": ""}
    assert (about["model"], about["inverse_relations"]) == ("ComplEx", True)


def test_export_as_parquet(run: Path, graph: Path, tmp_path: Path) -> None:
    elastable("kg", "export", run, "--format", "parquet", "--output", tmp_path / "out")
    rows, names = [], []
    for table in ("entities", "relations"):
        read = pyarrow.parquet.read_table(tmp_path / "out" / f"{table}.parquet")
        rows.append(np.stack(read["embedding"].to_numpy()))
        names.append(read["name"].to_pylist())
        assert read["id"].to_pylist() == list(range(len(rows[-1])))
    _check(run, graph, rows, names)


@pytest.mark.parametrize("kind", ["numpy", "parquet"])
def test_export_of_further_variables(conve: Path, kind: str, tmp_path: Path) -> None:
    elastable("kg", "export", conve, "--format", kind, "--output", tmp_path / "conve")
    dense = LinkPredictor(conve).trained.model.score.dense
    assert {file.stem for file in (tmp_path / "conve").glob("*.npy")} - {"entities", "relations"} == set(dense)
    for name, value in dense.items():
        np.testing.assert_array_equal(np.load(tmp_path / "conve" / f"{name}.npy"), value)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("predict",), "--queries"),
        (("predict", "--relation", "knows", "--queries", "q"), "--queries"),
        (("predict", "--queries", "q", "--head", "a"), "leave out --head"),
        (("predict", "--relation", "knows", "--head", "person-1", "--output", "f"), "one query is printed"),
        (("predict", "--relation", "knows", "--head", "person-1", "--of-type", "plac"), "'place'"),
        (
            ("predict", "--relation", "knows", "--head", "person-1", "--of-type", "a", "--among", "f"),
            "give one of them",
        ),
    ],
)
def test_what_cannot_be_is_refused(run: Path, words: tuple[str, ...], message: str) -> None:
    done = CliRunner().invoke(app, ["kg", words[0], str(run), *words[1:]])
    assert message in str(done.exception)


def test_export_leaves_what_is_there(run: Path, tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("mine")
    done = CliRunner().invoke(app, ["kg", "export", str(run), "--format", "numpy", "--output", str(tmp_path)])
    assert "exists" in str(done.exception)
    assert [file.name for file in tmp_path.iterdir()] == ["mine.txt"]


def test_a_query_file_names_one_unknown_end(run: Path, tmp_path: Path) -> None:
    for line in ("person-1\tknows\tperson-2", "?\tknows\t?"):
        (tmp_path / "q.txt").write_text(f"person-1\tknows\t?\n{line}\n")
        done = CliRunner().invoke(app, ["kg", "predict", str(run), "--queries", str(tmp_path / "q.txt")])
        assert "q.txt, line 2" in str(done.exception)
