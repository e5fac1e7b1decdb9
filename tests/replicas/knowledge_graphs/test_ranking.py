"""Known triples, queries, ranks and metrics, against a ranking worked by hand and one by brute force."""

from collections.abc import Callable
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, IdOutOfRange
from elastable.replicas.knowledge_graphs.evaluation import query_batches
from elastable.replicas.knowledge_graphs.graph import sharding as sharding_module
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Side
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, Sharding
from elastable.replicas.knowledge_graphs.ranking import (
    CATEGORIES,
    QueryRanks,
    RankCounts,
    Ranks,
    best_threshold,
    choose_thresholds,
    classification_metrics,
    relation_categories,
)
from tests.replicas.knowledge_graphs.graphs import ENTITIES, RELATIONS, SHARDS, is_known, random_triples, typed_sharding

TRIPLES = random_triples()


def counter(true: Array) -> RankCounts:
    """Of scores that are exact as they are."""
    return RankCounts(true.astype(np.float64), np.zeros(len(true)))


def add(counts: RankCounts, scores: Array, counted: Array | None = None) -> None:
    every = np.ones(scores.shape, np.bool_) if counted is None else counted
    counts.add(scores, every, lambda query, column: scores[query, column].astype(np.float64))


def queries(tails: int, heads: int, optimistic: list[int], pessimistic: list[int]) -> QueryRanks:
    """Ranks of tail queries, then of head queries."""
    side = np.repeat([SIDES.index("tail"), SIDES.index("head")], [tails, heads])
    return QueryRanks(np.arange(tails + heads), side, Ranks(np.array(optimistic), np.array(pessimistic)))


def test_metrics_by_hand() -> None:
    """Tail queries rank 1, 4 and 2.5, head queries 3 and 12."""
    tail, both = queries(3, 0, [1, 2, 2], [1, 6, 3]), queries(3, 2, [1, 2, 2, 3, 12], [1, 6, 3, 3, 12])
    result = tail.metrics((1, 3, 10))
    assert result["tail_mrr"] == pytest.approx((1 + 1 / 4 + 1 / 2.5) / 3)
    assert result["mrr"] == result["tail_mrr"]
    assert result["tail_mean_rank"] == pytest.approx(2.5)
    assert (result["tail_hits@1"], result["tail_hits@3"], result["tail_hits@10"]) == pytest.approx((1 / 3, 2 / 3, 1))
    result = both.metrics((1, 3, 10))
    assert result["head_mrr"] == pytest.approx((1 / 3 + 1 / 12) / 2)
    assert result["mrr"] == pytest.approx((result["head_mrr"] + result["tail_mrr"]) / 2)
    assert result["hits@10"] == pytest.approx((1 / 2 + 1) / 2)
    assert tail.metrics(ties="optimistic")["mrr"] == pytest.approx((1 + 1 / 2 + 1 / 2) / 3)
    assert tail.metrics(ties="pessimistic")["mrr"] == pytest.approx((1 + 1 / 6 + 1 / 3) / 3)


@given(st.integers(0, 2**32), st.integers(1, 7), st.integers(1, 30), st.integers(1, 9))
def test_windows_and_masks_change_nothing(seed: int, queries: int, candidates: int, window: int) -> None:
    rng = np.random.default_rng(seed)
    scores = rng.integers(4, size=(queries, candidates)).astype(np.float32)
    true = rng.integers(4, size=queries).astype(np.float32)
    counted = rng.random(scores.shape) < 0.6
    counts = counter(true)
    for begin in range(0, candidates, window):
        part = slice(begin, begin + window)
        add(counts, scores[:, part], counted[:, part])
    np.testing.assert_array_equal(counts.greater, ((scores > true[:, None]) & counted).sum(1))
    np.testing.assert_array_equal(counts.equal, ((scores == true[:, None]) & counted).sum(1))


def test_nan_ranks_last() -> None:
    counts = counter(np.array([np.nan, 1.0], np.float32))
    scores = np.array([[0.0, np.inf, np.nan], [0.0, np.nan, 2.0]], np.float32)
    add(counts, scores)
    assert counts.greater.tolist() == [3, 2]
    add(counts, np.full((2, 1), np.nan, np.float32), np.zeros((2, 1), np.bool_))
    assert counts.greater.tolist() == [3, 2]


def test_known_triples() -> None:
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES[:1200], TRIPLES[900:])  # 300 are given twice
    assert len(known.tails.answers) == len(known.heads.answers) == len(TRIPLES)
    assert is_known(known, TRIPLES).all()
    true = {tuple(triple) for triple in TRIPLES.tolist()}
    rng = np.random.default_rng(1)
    others = np.stack([rng.integers(high, size=3000) for high in (ENTITIES, RELATIONS, ENTITIES)], 1).astype(np.int32)
    others = np.concatenate([others, TRIPLES[:5]])
    np.testing.assert_array_equal(is_known(known, others), [tuple(triple) in true for triple in others.tolist()])
    nothing = KnownTriples.create(ENTITIES, RELATIONS)
    assert not is_known(nothing, TRIPLES).any()
    with pytest.raises(BadInput, match=r"triple \d+: relation \d+ is not one of 5"):
        KnownTriples.create(ENTITIES, 5, TRIPLES)


@pytest.mark.parametrize("side", SIDES)
def test_every_query_comes_once_to_the_worker_of_what_is_given(side: Side) -> None:
    sharding = typed_sharding()
    given_end, asked = (0, 2) if side == "tail" else (2, 0)
    met, counts = [], set()
    for worker in range(SHARDS):
        batches = list(query_batches(TRIPLES, sharding, side, 100, worker))
        counts.add(len(batches))
        for queries in batches:
            assert queries.row.shape == queries.relation.shape == queries.answer.shape == (100,)
            there = queries.mask
            triples = TRIPLES[queries.triple[there]]
            np.testing.assert_array_equal(sharding.entity_at[worker, queries.row], queries.given)
            np.testing.assert_array_equal(queries.given[there], triples[:, given_end])
            np.testing.assert_array_equal(queries.relation[there], triples[:, 1])
            np.testing.assert_array_equal(queries.answer[there], triples[:, asked])
            assert (queries.answer[~there] == -1).all()
            assert (queries.triple[~there] == -1).all()
            met.append(queries.triple[there])
    np.testing.assert_array_equal(np.sort(np.concatenate(met)), np.arange(len(TRIPLES)))
    assert len(counts) == 1


def test_queries_without_an_answer() -> None:
    sharding, asked = Sharding.create(10, 2), [[3, 0, -1], [4, 1, -1]]
    found = [next(query_batches(asked, sharding, "tail", 4, worker)) for worker in range(2)]
    assert sorted(int(g) for queries in found for g in queries.given[queries.mask]) == [3, 4]
    assert not list(query_batches(np.empty((0, 3), np.int32), sharding, "tail", 4, 0))
    with pytest.raises(IdOutOfRange, match="triple 0: tail -1"):
        next(query_batches(asked, sharding, "head", 4, 0))


@pytest.mark.parametrize("at_once", [1, 500, 1 << 20])
def test_known_answers_of_a_hub_are_cut_to_the_window(monkeypatch: pytest.MonkeyPatch, at_once: int) -> None:
    """Nearly every entity is an answer of a hub, read some queries at a time; other queries have few, or none."""
    monkeypatch.setattr(sharding_module, "_ANSWERS_AT_ONCE", at_once)
    sharding, pairs = typed_sharding(), []
    known = KnownTriples.create(ENTITIES, 2, [[3, 0, tail] for tail in range(400)], [[9, 1, 7], [9, 1, 7], [9, 1, 6]])
    asked = np.array([3, 9, 3, 9]), np.array([0, 0, 0, 1])
    for shard in range(SHARDS):
        found = [known.answers_on("tail", *asked, sharding, shard, (low, low + 30)) for low in range(0, 101, 30)]
        for low, (query, row) in zip(range(0, 101, 30), found, strict=True):
            assert (np.diff(query * sharding.rows + row) > 0).all()
            assert ((row >= low) & (row < low + 30)).all()
            pairs += [(int(q), int(e)) for q, e in zip(query, sharding.entity_at[shard, row], strict=True)]
        query, _ = known.answers_on("tail", *asked, sharding, shard)
        assert len(query) == sum(len(part) for part, _ in found)
    assert sorted(pairs) == [(q, e) for q in (0, 2) for e in range(400)] + [(3, 6), (3, 7)]


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: counter(np.zeros((2, 2))), r"true scores must be \[q\]"),
        (lambda: RankCounts(np.zeros(2), np.array([0.0, -1.0])), "none below 0"),
        (lambda: add(counter(np.zeros(2)), np.zeros((3, 4))), r"must be \[2, c\]"),
        (lambda: queries(1, 0, [1], [1]).metrics(ties="mean"), "known are average"),
        (lambda: queries(1, 0, [1], [1]).metrics(hits=(0,)), "k counts from 1"),
        (lambda: queries(0, 0, [], []).metrics(), "no queries at all"),
        (lambda: add(counter(np.zeros(2)), np.zeros((2, 4)), np.ones((2, 3), np.bool_)), r"and \[2, 3\]"),
        (lambda: next(query_batches(TRIPLES, typed_sharding(), "both", 4, 0)), "not for 'both'"),  # type: ignore[arg-type]
        (lambda: next(query_batches(TRIPLES, typed_sharding(), "tail", 0, 0)), "at least 1 query"),
    ],
)
def test_mismatched_arguments_are_refused(make: Callable[[], object], reason: str) -> None:
    with pytest.raises(BadInput, match=reason):
        make()


def test_near_candidates_are_decided_by_their_exact_scores() -> None:
    """Scores in float32 that say nothing within the tolerance; a candidate that does not count stays out."""
    rng = np.random.default_rng(4)
    exact = rng.integers(5, size=(6, 40)).astype(np.float64)
    shown = exact + rng.uniform(-1.5, 1.5, exact.shape)
    true = exact[:, 0]
    counted = rng.random(exact.shape) < 0.7
    counts = RankCounts(true, np.full(6, 1.6))
    for begin in (0, 15, 30):
        part = slice(begin, begin + 15)
        counts.add(
            shown[:, part], counted[:, part], partial(lambda first, query, column: exact[query, first + column], begin)
        )
    np.testing.assert_array_equal(counts.greater, ((exact > true[:, None]) & counted).sum(1))
    np.testing.assert_array_equal(counts.equal, ((exact == true[:, None]) & counted).sum(1))


@pytest.mark.parametrize("seed", range(20))
def test_no_threshold_is_more_accurate(seed: int) -> None:
    draw = np.random.default_rng(seed)
    scores = (draw.integers(0, 6, 15) / 4).astype(np.float32)  # with ties
    labels = draw.random(15) < 0.5 + 0.4 * (scores > 0.6)
    found = best_threshold(scores, labels)
    every = [-np.inf, np.inf, *(np.unique(scores) + 0.01), *(np.unique(scores) - 0.01)]
    best = max(((scores >= each) == labels).mean() for each in every)
    assert ((scores >= found) == labels).mean() == best


def test_only_true_or_only_false_triples() -> None:
    scores = np.array([1.0, 2.0], np.float32)
    assert best_threshold(scores, np.array([True, True])) == -np.inf
    assert best_threshold(scores, np.array([False, False])) == np.inf


def test_relations_without_validation_triples_have_the_common_threshold() -> None:
    scores = np.array([0, 1, 4, 5], np.float32)
    found = choose_thresholds(np.array([0, 0, 1, 1]), scores, np.array([False, True, False, True]), 3)
    assert found.tolist() == [0.5, 4.5, best_threshold(scores, np.array([False, True, False, True]))]
    with pytest.raises(BadInput, match="there are none"):
        choose_thresholds(np.array([], int), np.array([], np.float32), np.array([], bool), 3)


def test_metrics_of_predictions() -> None:
    labels = np.array([True, True, True, False])
    found = classification_metrics(np.array([True, True, False, True]), labels)
    third = pytest.approx(2 / 3)
    assert found == {"accuracy": 0.5, "precision": 2 / 3, "recall": 2 / 3, "f1": third, "triples": 4}
    assert classification_metrics(~labels, labels)["f1"] == 0
    with pytest.raises(BadInput, match="no triples"):
        classification_metrics(labels[:0], labels[:0])


def test_categories_are_those_of_averages_over_distinct_pairs() -> None:
    draw = np.random.default_rng(2)
    triples = draw.integers(0, [9, 7, 9], (120, 3))
    found = relation_categories(np.concatenate([triples, triples]), 8)  # repeated triples count once
    for relation in range(7):
        mine = {tuple(triple) for triple in triples.tolist() if triple[1] == relation}
        heads_of_a_tail = len(mine) / len({tail for _, _, tail in mine})
        tails_of_a_head = len(mine) / len({head for head, _, _ in mine})
        name = ("N" if heads_of_a_tail >= 1.5 else "1") + "-" + ("N" if tails_of_a_head >= 1.5 else "1")
        assert CATEGORIES[found[relation]] == name
    assert found[7] == -1
    assert [CATEGORIES[k] for k in relation_categories([[0, 0, 1], [0, 0, 2], [1, 1, 0], [2, 1, 0]], 2)] == [
        "1-N",
        "N-1",
    ]
