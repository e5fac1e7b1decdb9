"""Scores with all entities: ranks and best answers as the whole score matrix gives them, in any windows and shards."""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.knowledge_graphs.evaluation import (
    AllScores,
    Candidates,
    Evaluation,
    TripleCandidates,
    query_batches,
)
from elastable.replicas.knowledge_graphs.graph.batch import SIDES, Queries, Side
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings, settings_of
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer, ShardedModel
from elastable.replicas.knowledge_graphs.ranking import QueryRanks
from tests.replicas.knowledge_graphs.graphs import run_epoch, scores_of
from tests.replicas.knowledge_graphs.test_scores import CASES, WITH_NORMS, formula
from tests.untyped import Keyword

ENTITIES, RELATIONS = 50, 4
TRIPLES = np.random.default_rng(3).integers(0, [ENTITIES, RELATIONS, ENTITIES], (80, 3)).astype(np.int32)


def _settings(model: str, **more: Keyword) -> TrainSettings:
    return TrainSettings(**{"model": model, "dim": 12, "reciprocal": False, "loss": "log-sigmoid", **more})


def _scores(model: str, side: Side) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """`[80, 50]`, by one process that holds all."""
    made = GraphTrainer(alone(), _settings(model), ENTITIES, RELATIONS, TRIPLES).model
    table, relations = made.sharding.whole_table(made.entities[None]), made.relations[TRIPLES[:, 1]]
    return scores_of(made.score, table[TRIPLES[:, 0 if side == "tail" else 2]], relations, table, side)


def _by_triple(
    workers: int, settings: TrainSettings, side: Side, of: Callable[[ShardedModel, Queries], Any]
) -> dict[int, Any]:
    """What `of` gives for the query of each triple; every worker asks its own, some at a time."""

    def work(group: ReplicaGroup) -> dict[int, Any]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        found = dict[int, Any]()
        for queries in query_batches(TRIPLES, made.sharding, side, 7, group.rank):
            values = of(made, queries)
            found |= {int(queries.triple[place]): values[place] for place in np.flatnonzero(queries.mask)}
        return found

    return {triple: value for part in run_threads(workers, work) for triple, value in part.items()}


def _answers(triple: Int32, side: Side) -> Int32:
    asked, given = (2, 0) if side == "tail" else (0, 2)
    return TRIPLES[(TRIPLES[:, given] == triple[given]) & (TRIPLES[:, 1] == triple[1])][:, asked]


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize("model", ["TransE", "PairRE", "ComplEx"])
@pytest.mark.parametrize(("workers", "window"), [(1, 1 << 20), (3, 100), (2, 1)])
def test_ranks_and_best_answers_are_those_of_the_whole(model: str, side: Side, workers: int, window: int) -> None:
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)

    def of(made: ShardedModel, queries: Queries) -> list[Any]:
        scores = AllScores(made, window)
        best, new = (scores.top(queries, 3, left_out)[0] for left_out in (None, known))
        return list(zip(scores.ranks(queries, known).average, best.tolist(), new.tolist(), strict=True))

    found, whole = _by_triple(workers, _settings(model), side, of), _scores(model, side)
    for place, triple in enumerate(TRIPLES):
        row, same = whole[place].astype(np.float64), _answers(triple, side)
        rank, best, new = found[place]
        assert rank == 1 + (np.delete(row, same) > row[triple[2 if side == "tail" else 0]]).sum()
        assert best == sorted(range(ENTITIES), key=lambda e: (-row[e], e))[:3]
        assert new == sorted((e for e in range(ENTITIES) if e not in same), key=lambda e: (-row[e], e))[:3]


@pytest.mark.parametrize("model", ["TransE", "RotatE", "DistMult", "ComplEx", "ConvE"])
@pytest.mark.parametrize(("workers", "window"), [(1, 1 << 20), (3, 500), (2, 1)])
def test_a_collapsed_model_ranks_in_the_middle(model: str, workers: int, window: int) -> None:
    """All entities score the same; a matrix product that sums in another order makes no order of them."""

    def of(made: ShardedModel, queries: Queries) -> Sequence[float]:
        made.entities[:] = np.random.default_rng(5).normal(size=made.entities.shape[1])
        return AllScores(made, window).ranks(queries).average.tolist()

    found = _by_triple(workers, _settings(model, dim=64, reciprocal=model == "ConvE"), "tail", of)
    assert list(found.values()) == [(ENTITIES + 1) / 2] * len(TRIPLES)


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize(("workers", "window"), [(1, 1 << 20), (3, 100), (2, 1)])
def test_candidates_are_a_list_or_of_the_answers_type(side: Side, workers: int, window: int) -> None:
    listed, types = np.array([3, 4, 5, 9, 20, 21, 40, 49, 3]), np.arange(ENTITIES) % 3
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)

    def of(made: ShardedModel, queries: Queries) -> list[Any]:
        scores = AllScores(made, window)
        of_list, of_type = Candidates.of_list(listed, ENTITIES), Candidates.of_types(types, ENTITIES)
        ranks = (scores.ranks(queries, known, among).average for among in (of_list, of_type))
        best = zip(*scores.top(queries, 10, known, of_list), strict=True)
        answers = (row[score > -np.inf].tolist() for row, score in best)
        return list(zip(*ranks, answers, strict=True))

    found, whole = _by_triple(workers, _settings("TransE"), side, of), _scores("TransE", side)
    for place, triple in enumerate(TRIPLES):
        same, row, answer = _answers(triple, side), whole[place], triple[2 if side == "tail" else 0]
        others = np.setdiff1d(listed, same)
        alike = np.setdiff1d(np.flatnonzero(types == types[answer]), same)
        assert found[place][0] == 1 + (row[others] > row[answer]).sum()
        assert found[place][1] == 1 + (row[alike] > row[answer]).sum()
        assert found[place][2] == sorted(others, key=lambda e: (-row[e], e))


@pytest.mark.parametrize(("model", "reciprocal"), [("TransE", False), ("ComplEx", True)])
@pytest.mark.parametrize("workers", [1, 3])
def test_candidates_may_be_listed_for_each_triple(model: str, reciprocal: bool, workers: int) -> None:
    draw = np.random.default_rng(8)
    heads, tails = draw.integers(-1, ENTITIES, (len(TRIPLES), 9)), draw.integers(0, ENTITIES, (len(TRIPLES), 5))
    heads[:, 0], tails[3] = TRIPLES[:, 0], TRIPLES[3, 2]  # an answer does not compete with itself

    def work(group: ReplicaGroup) -> tuple[QueryRanks, QueryRanks, list[QueryRanks]]:
        made = GraphTrainer(group, _settings(model, reciprocal=reciprocal), ENTITIES, RELATIONS, TRIPLES).model
        among = TripleCandidates.of(heads, tails, ENTITIES)
        filtered, raw = (Evaluation(made, *known, among=among).ranks(TRIPLES) for known in ((TRIPLES,), ()))
        with pytest.raises(BadInput, match="listed for 80 triples; 79 are ranked"):
            Evaluation(made, among=among).ranks(TRIPLES[1:])
        every = [Evaluation(made, among=Candidates.of_list([e], ENTITIES)).ranks(TRIPLES)
                 for e in range(ENTITIES)]  # fmt: skip
        return filtered, raw, every

    for filtered, raw, every in run_threads(workers, work):
        for query in range(2 * len(TRIPLES)):
            triple, side = int(raw.triple[query]), int(raw.side[query])
            h = TRIPLES[triple]
            known, answer = set(_answers(h, SIDES[side]).tolist()), (0, 2)[side]
            listed = [int(e) for e in (heads, tails)[side][triple] if e >= 0 and e != h[answer]]
            # How much each candidate alone raises the rank, by the ranks among all others of one entity.
            more = {e: every[e].ranks.average[query] - 1 for e in listed}
            assert raw.ranks.average[query] == 1 + sum(more[e] for e in listed)
            assert filtered.ranks.average[query] == 1 + sum(more[e] for e in listed if e not in known)


@pytest.mark.parametrize("workers", [1, 3])
def test_all_scores_are_those_of_the_whole(workers: int) -> None:
    found = _by_triple(workers, _settings("PairRE"), "head", lambda made, queries: AllScores(made, 64).scores(queries))
    np.testing.assert_allclose(np.stack([found[k] for k in range(len(TRIPLES))]), _scores("PairRE", "head"), rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 3])
def test_ranks_of_every_query_come_in_the_order_of_triples(workers: int) -> None:

    def work(group: ReplicaGroup) -> tuple[QueryRanks, dict[str, float]]:
        made = GraphTrainer(group, _settings("TransE"), ENTITIES, RELATIONS, TRIPLES).model
        evaluation = Evaluation(made, TRIPLES)
        return evaluation.ranks(TRIPLES), evaluation.metrics(TRIPLES)

    for ranks, metrics in run_threads(workers, work):
        assert ranks.triple.tolist() == [*range(len(TRIPLES))] * 2
        assert ranks.side.tolist() == [0] * len(TRIPLES) + [1] * len(TRIPLES)
        assert ranks.metrics() == pytest.approx(metrics)
        for place, side in enumerate(SIDES):
            whole, mine = _scores("TransE", side), ranks.part(ranks.side == place)
            for k, triple in enumerate(TRIPLES):
                others, answer = np.delete(whole[k], _answers(triple, side)), triple[2 if side == "tail" else 0]
                assert mine.ranks.average[k] == 1 + (others > whole[k][answer]).sum()


def test_candidates_that_are_no_entities_are_refused() -> None:
    for given, message in (([], "at least 1"), ([1, 50], "50 entities"), ([-1], "50 entities"), ([0.5], "global id")):
        with pytest.raises(BadInput, match=message):
            Candidates.of_list(given, ENTITIES)
    with pytest.raises(BadInput, match="types of candidates"):
        Candidates.of_types([1, 2], ENTITIES)
    for heads, tails, message in (
        ([[1], [50]], [[1], [2]], "candidates of heads, triple 1: 50 is not one of 50 entities"),
        ([[1], [2]], [[1], [-2]], "candidates of tails, triple 1: -2"),
        ([1, 2], [[1], [2]], "a list for each triple"),
        ([[1.0]], [[1]], "must be integers"),
        ([[1]], [[1], [2]], "for 1 heads and 2 tails"),
    ):
        with pytest.raises(BadInput, match=message):
            TripleCandidates.of(heads, tails, ENTITIES)


def test_more_answers_than_entities_are_refused() -> None:
    made = GraphTrainer(alone(), TrainSettings(dim=4), ENTITIES, RELATIONS, TRIPLES).model
    with pytest.raises(BadInput, match="ask for 1 to 50"):
        AllScores(made).top(next(query_batches(TRIPLES, made.sharding, "tail", 2, 0)), 51)
    with pytest.raises(BadInput, match="at least 1 score"):
        AllScores(made, 0)


MANY = 5_000


def _ranks(made: ShardedModel, triples: Int32, window: int) -> Array:
    queries = next(query_batches(triples, made.sharding, "tail", len(triples), 0))
    found = np.empty(len(triples))
    found[queries.triple] = AllScores(made, window).ranks(queries).average
    return found


def _exact_ranks(made: ShardedModel, triples: Int32) -> Array:
    table = tf.constant(made.sharding.whole_table(made.entities[None]), tf.float64)
    ranks = []
    for head, relation, tail in triples:
        parts = (table[head][None], tf.constant(made.relations[relation][None], tf.float64), table)
        scores = formula(made.score, *(tf.broadcast_to(x, [MANY, x.shape[-1]]) for x in parts)).numpy()
        others = np.delete(scores, tail)
        ranks.append(1 + (others > scores[tail]).sum() + (others == scores[tail]).sum() / 2)
    return np.array(ranks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "norm"), [case for case in CASES if case[0] != "ConvE"])
def test_ranks_are_those_of_double_precision(model: str, norm: int) -> None:
    """Among 5,000 entities with embeddings drawn at random, whose float32 errors do change ranks."""
    draw = np.random.default_rng(8)
    triples = draw.integers(0, [MANY, RELATIONS, MANY], (60, 3)).astype(np.int32)
    dim = 16 if model == "TuckER" else 64  # its formula costs the cube of it
    settings = _settings(model, dim=dim, norm=norm if model in WITH_NORMS else None, spread=0.3)
    made = GraphTrainer(alone(), settings, MANY, RELATIONS, triples).model
    np.testing.assert_array_equal(_ranks(made, triples, 100_000), _exact_ranks(made, triples))


@pytest.mark.parametrize("model", ["ComplEx", "TransE"])
def test_ranks_of_a_trained_model_are_those_of_double_precision(model: str) -> None:
    draw = np.random.default_rng(8)
    triples = np.minimum(draw.zipf(1.3, (3_000, 3)) - 1, [MANY - 1, RELATIONS - 1, MANY - 1]).astype(np.int32)
    settings = settings_of(model, {"dim": 32, "reciprocal": False, "epochs": 2, "batch": 256})

    trainer = GraphTrainer(alone(), settings, MANY, RELATIONS, triples)
    run_epoch(trainer)
    found = _ranks(trainer.model, triples[::10], 1 << 22)
    expected = _exact_ranks(trainer.model, triples[::10])
    assert (found != expected).mean() <= 0.001
    assert len(set(found)) > 50  # it is not collapsed


def test_entities_that_share_one_of_several_types_compete() -> None:
    types, further = [0, 1, 1, 2], np.array([[0, 2], [3, 9]], np.int32)
    among = Candidates.of_types(types, 4, further)
    counted = among.counted(np.array([0, 1, 3]), np.arange(4))
    assert counted is not None
    assert counted.tolist() == [
        [True, False, False, True], [False, True, True, False], [True, False, False, True]
    ]  # fmt: skip
