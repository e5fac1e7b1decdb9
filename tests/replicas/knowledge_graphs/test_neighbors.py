"""The nearest entities: those of distances computed one by one, whoever else is asked about."""

from __future__ import annotations

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.evaluation.candidates import Candidates
from elastable.replicas.knowledge_graphs.scores import score_function
from elastable.replicas.knowledge_graphs.trained.neighbors import nearest_neighbors
from elastable.replicas.knowledge_graphs.trained.trained_graph import TrainedGraph

ENTITIES, DIM = 50, 16


def trained(spread: float) -> tuple[TrainedGraph, np.ndarray[tuple[int, ...], np.dtype[np.float64]]]:
    """Entities around one point far from 0, and their distances."""
    draw = np.random.default_rng(0)
    table = (20 * draw.normal(size=DIM) + spread * draw.normal(size=(ENTITIES, DIM))).astype(np.float32)
    found = SimpleNamespace(
        entities=range(ENTITIES),
        embeddings=lambda entities: table[np.asarray(entities)],
        model=SimpleNamespace(score=score_function("DistMult", DIM)),
    )
    apart = table[:, None].astype(np.float64) - table[None]
    return cast(TrainedGraph, found), np.sqrt((apart**2).sum(axis=2))


@pytest.mark.parametrize("spread", [1.0, 0.01])
def test_the_nearest_are_nearest_also_where_all_are_far_from_zero(spread: float) -> None:
    graph, distances = trained(spread)
    np.fill_diagonal(distances, np.inf)
    near = nearest_neighbors(graph, np.arange(ENTITIES), 5, "euclidean")
    np.testing.assert_array_equal(near.entities, np.argsort(distances, axis=1)[:, :5])
    np.testing.assert_allclose(-near.similarities, np.sort(distances, axis=1)[:, :5], rtol=1e-5)


def test_an_entity_that_is_a_candidate_takes_no_neighbour_from_another() -> None:
    graph, _ = trained(1.0)
    among = Candidates.of_list([3, 7], ENTITIES)
    alone = nearest_neighbors(graph, [5], 5, "dot", among)
    near = nearest_neighbors(graph, [3, 5], 5, "dot", among)
    assert near.entities[1].tolist() == alone.entities[0].tolist()
    assert sorted(alone.entities[0].tolist()) == [3, 7]
    assert near.entities[0, 0] == 7
    assert near.similarities[0, 1] == -np.inf
    assert nearest_neighbors(graph, [3, 5], 5, "dot", Candidates.of_list([3], ENTITIES)).entities[1].tolist() == [3]
    with pytest.raises(BadInput, match="nobody else"):
        nearest_neighbors(graph, [3], 5, "dot", Candidates.of_list([3], ENTITIES))
