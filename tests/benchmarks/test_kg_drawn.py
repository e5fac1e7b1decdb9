"""Drawn knowledge graphs: their sizes, what they are drawn from, and the bound that their model sets."""

from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from benchmarks.graphs import kg_drawn, kg_quality
from benchmarks.graphs.kg_beyond_memory import trial
from benchmarks.graphs.kg_bounds import product_row, row_reads_row
from benchmarks.graphs.kg_drawn import DrawnSize, HiddenModel, drawn_graph
from elastable.embedding_store.errors import BadInput

SIZE = DrawnSize(entities=1_500, relations=30, train=4_500, valid=100, test=120)


@pytest.fixture(scope="module")
def model() -> HiddenModel:
    return HiddenModel(SIZE, seed=3)


def test_a_graph_has_its_size_and_names_every_entity_in_training(model: HiddenModel) -> None:
    graph = drawn_graph(model, seed=5)
    assert (len(graph.train), len(graph.valid), len(graph.test)) == (SIZE.train, SIZE.valid, SIZE.test)
    triples = np.concatenate([graph.train, graph.valid, graph.test])
    assert len(np.unique(triples, axis=0)) == SIZE.triples
    assert set(graph.train[:, [0, 2]].ravel().tolist()) == set(range(SIZE.entities))
    assert set(graph.train[:, 1].tolist()) == set(range(SIZE.relations))
    np.testing.assert_array_equal(model.types[triples[:, [0, 2]]], model.ends[triples[:, 1]])
    np.testing.assert_array_equal(drawn_graph(model, seed=5).valid, graph.valid)
    assert not np.array_equal(drawn_graph(model, seed=6).valid, graph.valid)


def test_the_bound_is_the_filtered_mrr_of_the_odds(model: HiddenModel) -> None:
    graph = drawn_graph(model, seed=5)
    known = {tuple(triple) for part in (graph.train, graph.valid, graph.test) for triple in part.tolist()}
    numbers = model.entities.astype(np.float64) @ np.vstack([np.eye(8), 1j * np.eye(8)])
    factors = model.relations.astype(np.float64) @ np.vstack([np.eye(8), 1j * np.eye(8)])
    total = 0.0
    for head, relation, tail in graph.valid.tolist():
        for end in (0, 2):
            others = np.flatnonzero(model.types == model.ends[relation, end // 2])
            heads, tails = (others, np.array([tail])) if end == 0 else (np.array([head]), others)
            scores = (numbers[heads] * factors[relation] * numbers[tails].conj()).sum(1).real
            odds = scores + model.popularity[heads] + model.popularity[tails]
            answer = odds[others == (head, relation, tail)[end]]
            triples = np.broadcast_arrays(heads, relation, tails)
            unknown = np.array([triple not in known for triple in zip(*(ids.tolist() for ids in triples), strict=True)])
            total += 1 / (1 + int((odds[unknown] > answer).sum()))
    assert model.mrr(graph) == pytest.approx(total / (2 * len(graph.valid)), abs=1e-4)


def test_a_graph_that_has_no_room_is_refused() -> None:
    full = HiddenModel(DrawnSize(entities=200, relations=24, train=9_000, valid=1, test=1), seed=0)
    with pytest.raises(BadInput, match="9,002 triples are too many"):
        drawn_graph(full, seed=0)


def test_likelier_triples_are_drawn_more_often(model: HiddenModel) -> None:
    graph = drawn_graph(model, seed=5)
    relation = int(np.bincount(graph.train[:, 1]).argmax())
    heads, tails = model.members(relation)
    odds = model.log_odds(relation, heads, tails)
    drawn = graph.train[graph.train[:, 1] == relation]
    taken = odds[np.searchsorted(heads, drawn[:, 0]), np.searchsorted(tails, drawn[:, 2])]
    assert taken.mean() > odds.mean() + odds.std()


def test_a_drawn_case_is_trained_by_processor_time_and_compared_with_its_bound(
    model: HiddenModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(kg_drawn.DRAWN, "small-drawn", SIZE)
    monkeypatch.setenv("ELASTABLE_BUDGET", "10m")
    monkeypatch.setenv("ELASTABLE_CLOCK", "processor")
    case = kg_quality.Case("small-drawn", "ComplEx", None, None, {"epochs": 2, "dim": 16}, budget_minutes=40.0)
    row = kg_quality._row("small-drawn", case, Path(), Console(quiet=True))
    hidden = HiddenModel(SIZE, 0)
    assert row.reference == hidden.mrr(drawn_graph(hidden, 0))
    assert row.value is not None
    assert row.ratio == row.value / row.reference
    assert 0 < row.ratio < 1
    assert "2 epochs, budget 10 min by processor time" in row.name


def test_entities_in_files_are_trained_to_the_same_bits(tmp_path: Path) -> None:
    # The trial compares losses, entities and relations itself; of 40,000 rows, a budget of 1.3 MiB holds a quarter.
    rows = trial(tmp_path, entities=40_000, relations=5, count=20_000, steps=15, dim=16)
    assert [row.unit for row in rows] == ["steps/s", "MiB"]
    assert sum(file.stat().st_size for file in (tmp_path / "rows").rglob("*") if file.is_file()) > 1 << 20


def test_a_step_is_compared_with_what_it_cannot_avoid() -> None:
    row = product_row(entities=500, dim=8, steps=1, rounds=1)
    # The scores, and the gradients of queries and of candidates.
    assert "against their 3 products" in row.name
    assert row.ratio is not None
    assert row_reads_row(entities=500, dim=8, steps=1, rounds=1).ratio is not None
