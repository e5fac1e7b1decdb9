"""Thresholds of triple classification against every possible one; categories of relations against their definition."""

import numpy as np
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.classification import (
    ClassificationMetrics,
    Thresholds,
    best_threshold,
)
from elastable.replicas.knowledge_graphs.trained.rank_report import CATEGORIES, relation_categories


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
    found = Thresholds.choose(np.array([0, 0, 1, 1]), scores, np.array([False, True, False, True]), 3)
    assert found.of_relation.tolist() == [0.5, 4.5, found.common]
    assert found.predict(np.array([0, 1, 2]), np.array([1, 4, 9], np.float32)).tolist() == [True, False, True]
    with pytest.raises(BadInput, match="there are none"):
        Thresholds.choose(np.array([], int), np.array([], np.float32), np.array([], bool), 3)


def test_metrics_of_predictions() -> None:
    labels = np.array([True, True, True, False])
    found = ClassificationMetrics.of(np.array([True, True, False, True]), labels)
    assert (found.accuracy, found.precision, found.recall, found.f1) == (0.5, 2 / 3, 2 / 3, pytest.approx(2 / 3))
    assert ClassificationMetrics.of(~labels, labels).f1 == 0
    with pytest.raises(BadInput, match="no triples"):
        ClassificationMetrics.of(labels[:0], labels[:0])


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
