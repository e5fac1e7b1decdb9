"""Scores with all entities: ranks and best answers as the whole score matrix gives them, in any windows and shards."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.evaluation import (
    AllScores,
    Candidates,
    Evaluation,
    QueryBatches,
    QueryRanks,
    TripleCandidates,
)
from elastable.replicas.knowledge_graphs.graph import KnownTriples, Side
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.model import ShardedModel
from elastable.replicas.knowledge_graphs.settings import TrainSettings, settings_of
from tests.replicas.knowledge_graphs.graphs import scores_of
from tests.replicas.knowledge_graphs.test_scores import CASES, FORMULAS, WITH_NORMS

ENTITIES, RELATIONS = 50, 4
TRIPLES = np.random.default_rng(3).integers(0, [ENTITIES, RELATIONS, ENTITIES], (80, 3)).astype(np.int32)


def _scores(model: str, side: Side) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
    """`[80, 50]`, by one process that holds all."""
    settings = TrainSettings(model=model, dim=12, reciprocal=False, loss="log-sigmoid")

    def work(group: ReplicaGroup) -> np.ndarray[tuple[int, ...], np.dtype[np.float32]]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        table = made.sharding.whole_table(made.entities[None])
        relations = made.relations[TRIPLES[:, 1]]
        return scores_of(made.score, table[TRIPLES[:, 0 if side == "tail" else 2]], relations, table, side)

    return run_threads(1, work)[0]


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize("model", ["TransE", "PairRE", "ComplEx"])
@pytest.mark.parametrize(("workers", "window"), [(1, 1 << 20), (3, 100), (2, 1)])
def test_ranks_and_best_answers_are_those_of_the_whole(model: str, side: Side, workers: int, window: int) -> None:
    settings = TrainSettings(model=model, dim=12, reciprocal=False, loss="log-sigmoid")
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)

    def work(group: ReplicaGroup) -> dict[int, tuple[float, tuple[int, ...], tuple[int, ...]]]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        scores, found = AllScores(made, window), {}
        batches = QueryBatches(TRIPLES, made.sharding, side, 7)
        for index in range(batches.batches):
            queries = batches.batch(index, group.rank)
            ranks = scores.ranks(queries, known).average
            best, new = scores.top(queries, 3).entities, scores.top(queries, 3, known).entities
            for place in np.flatnonzero(queries.mask):
                found[int(queries.triple[place])] = (ranks[place], tuple(best[place]), tuple(new[place]))
        return found

    found = {triple: told for part in run_threads(workers, work) for triple, told in part.items()}
    whole = _scores(model, side)
    asked, given = (2, 0) if side == "tail" else (0, 2)
    for place, triple in enumerate(TRIPLES):
        row = whole[place].astype(np.float64)
        same = TRIPLES[(TRIPLES[:, given] == triple[given]) & (TRIPLES[:, 1] == triple[1])][:, asked]
        others = np.delete(row, same)
        rank, best, new = found[place]
        assert rank == 1 + (others > row[triple[asked]]).sum()
        assert list(best) == sorted(range(ENTITIES), key=lambda e: (-row[e], e))[:3]
        assert list(new) == sorted((e for e in range(ENTITIES) if e not in same), key=lambda e: (-row[e], e))[:3]


@pytest.mark.parametrize("model", ["TransE", "RotatE", "DistMult", "ComplEx", "ConvE"])
@pytest.mark.parametrize(("workers", "window"), [(1, 1 << 20), (3, 500), (2, 1)])
def test_a_collapsed_model_ranks_in_the_middle(model: str, workers: int, window: int) -> None:
    """All entities score the same; a matrix product that sums in another order makes no order of them."""
    settings = TrainSettings(model=model, dim=64, reciprocal=model == "ConvE", loss="log-sigmoid")

    def work(group: ReplicaGroup) -> list[float]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        made.entities[:] = np.random.default_rng(5).normal(size=made.entities.shape[1])
        scores, found = AllScores(made, window), list[float]()
        batches = QueryBatches(TRIPLES, made.sharding, "tail", 7)
        for index in range(batches.batches):
            queries = batches.batch(index, group.rank)
            found += scores.ranks(queries).average[queries.mask].tolist()
        return found

    ranks = [rank for part in run_threads(workers, work) for rank in part]
    assert ranks == [(ENTITIES + 1) / 2] * len(TRIPLES)


@pytest.mark.parametrize("side", ["head", "tail"])
@pytest.mark.parametrize(("workers", "window"), [(1, 1 << 20), (3, 100), (2, 1)])
def test_candidates_are_a_list_or_of_the_answers_type(side: Side, workers: int, window: int) -> None:
    settings = TrainSettings(model="TransE", dim=12, reciprocal=False, loss="log-sigmoid")
    listed, types = np.array([3, 4, 5, 9, 20, 21, 40, 49, 3]), np.arange(ENTITIES) % 3
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)

    def work(group: ReplicaGroup) -> dict[int, tuple[float, float, tuple[int, ...]]]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        scores, found = AllScores(made, window), {}
        batches = QueryBatches(TRIPLES, made.sharding, side, 7)
        of_list, of_type = Candidates.of_list(listed, ENTITIES), Candidates.of_types(types, ENTITIES)
        for index in range(batches.batches):
            queries = batches.batch(index, group.rank)
            among = scores.ranks(queries, known, of_list).average, scores.ranks(queries, known, of_type).average
            best = scores.top(queries, 10, known, of_list)
            for place in np.flatnonzero(queries.mask):
                answers = best.entities[place][best.scores[place] > -np.inf]
                found[int(queries.triple[place])] = (*(part[place] for part in among), tuple(answers))
        return found

    found = {triple: told for part in run_threads(workers, work) for triple, told in part.items()}
    whole = _scores("TransE", side)
    asked, given = (2, 0) if side == "tail" else (0, 2)
    for place, triple in enumerate(TRIPLES):
        same = TRIPLES[(TRIPLES[:, given] == triple[given]) & (TRIPLES[:, 1] == triple[1])][:, asked]
        row, answer = whole[place], triple[asked]
        others = np.setdiff1d(listed, same)
        alike = np.setdiff1d(np.flatnonzero(types == types[answer]), same)
        assert found[place][0] == 1 + (row[others] > row[answer]).sum()
        assert found[place][1] == 1 + (row[alike] > row[answer]).sum()
        assert list(found[place][2]) == sorted(others, key=lambda e: (-row[e], e))


@pytest.mark.parametrize(("model", "reciprocal"), [("TransE", False), ("ComplEx", True)])
@pytest.mark.parametrize("workers", [1, 3])
def test_candidates_may_be_listed_for_each_triple(model: str, reciprocal: bool, workers: int) -> None:
    draw = np.random.default_rng(8)
    heads, tails = draw.integers(-1, ENTITIES, (len(TRIPLES), 9)), draw.integers(0, ENTITIES, (len(TRIPLES), 5))
    heads[:, 0], tails[3] = TRIPLES[:, 0], TRIPLES[3, 2]  # an answer does not compete with itself
    settings = TrainSettings(model=model, dim=12, reciprocal=reciprocal, loss="log-sigmoid")

    def work(group: ReplicaGroup) -> tuple[QueryRanks, QueryRanks, list[QueryRanks]]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        among = TripleCandidates.of(heads, tails, ENTITIES)
        filtered, raw = (
            Evaluation(made, reciprocal, RELATIONS, *known, among=among).ranks(TRIPLES) for known in ((TRIPLES,), ())
        )
        with pytest.raises(BadInput, match="listed for 80 triples; 79 are ranked"):
            Evaluation(made, reciprocal, RELATIONS, among=among).ranks(TRIPLES[1:])
        every = [Evaluation(made, reciprocal, RELATIONS, among=Candidates.of_list([e], ENTITIES)).ranks(TRIPLES)
                 for e in range(ENTITIES)]  # fmt: skip
        return filtered, raw, every

    for filtered, raw, every in run_threads(workers, work):
        for query in range(2 * len(TRIPLES)):
            triple, side = int(raw.triple[query]), int(raw.side[query])
            given, answer = ((2, 0), (0, 2))[side]
            h = TRIPLES[triple]
            known = set(TRIPLES[(TRIPLES[:, given] == h[given]) & (TRIPLES[:, 1] == h[1])][:, answer].tolist())
            listed = [int(e) for e in (heads, tails)[side][triple] if e >= 0 and e != h[answer]]
            # How much each candidate alone raises the rank, by the ranks among all others of one entity.
            more = {e: every[e].ranks.average[query] - 1 for e in listed}
            assert raw.ranks.average[query] == 1 + sum(more[e] for e in listed)
            assert filtered.ranks.average[query] == 1 + sum(more[e] for e in listed if e not in known)


@pytest.mark.parametrize("workers", [1, 3])
def test_all_scores_are_those_of_the_whole(workers: int) -> None:
    settings = TrainSettings(model="PairRE", dim=12, reciprocal=False, loss="log-sigmoid")

    def work(group: ReplicaGroup) -> dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        batches = QueryBatches(TRIPLES, made.sharding, "head", 7)
        found = dict[int, np.ndarray[tuple[int, ...], np.dtype[np.float32]]]()
        for index in range(batches.batches):
            queries = batches.batch(index, group.rank)
            rows = AllScores(made, 64).scores(queries)
            found |= {int(queries.triple[place]): rows[place] for place in np.flatnonzero(queries.mask)}
        return found

    found = {triple: row for part in run_threads(workers, work) for triple, row in part.items()}
    np.testing.assert_allclose(np.stack([found[k] for k in range(len(TRIPLES))]), _scores("PairRE", "head"), rtol=1e-5)


@pytest.mark.parametrize("workers", [1, 3])
def test_ranks_of_every_query_come_in_the_order_of_triples(workers: int) -> None:
    settings = TrainSettings(model="TransE", dim=12, reciprocal=False, loss="log-sigmoid")

    def work(group: ReplicaGroup) -> tuple[QueryRanks, dict[str, float]]:
        made = GraphTrainer(group, settings, ENTITIES, RELATIONS, TRIPLES).model
        evaluation = Evaluation(made, False, RELATIONS, TRIPLES)
        return evaluation.ranks(TRIPLES), evaluation.metrics(TRIPLES)

    for ranks, metrics in run_threads(workers, work):
        assert ranks.triple.tolist() == [*range(len(TRIPLES))] * 2
        assert ranks.side.tolist() == [0] * len(TRIPLES) + [1] * len(TRIPLES)
        assert ranks.metrics() == pytest.approx(metrics)
        for place, side in enumerate(("head", "tail")):
            whole, mine = _scores("TransE", "head" if place == 0 else "tail"), ranks.part(ranks.side == place)
            asked, given = (2, 0) if side == "tail" else (0, 2)
            for k, triple in enumerate(TRIPLES):
                same = TRIPLES[(TRIPLES[:, given] == triple[given]) & (TRIPLES[:, 1] == triple[1])][:, asked]
                assert mine.ranks.average[k] == 1 + (np.delete(whole[k], same) > whole[k][triple[asked]]).sum()


def test_candidates_that_are_no_entities_are_refused() -> None:
    for given, told in (([], "at least 1"), ([1, 50], "50 entities"), ([-1], "50 entities"), ([0.5], "global id")):
        with pytest.raises(BadInput, match=told):
            Candidates.of_list(given, ENTITIES)
    with pytest.raises(BadInput, match="types of candidates"):
        Candidates.of_types([1, 2], ENTITIES)
    for heads, tails, told in (
        ([[1], [50]], [[1], [2]], "candidates of heads, triple 1: 50 is not one of 50 entities"),
        ([[1], [2]], [[1], [-2]], "candidates of tails, triple 1: -2"),
        ([1, 2], [[1], [2]], "a list for each triple"),
        ([[1.0]], [[1]], "must be integers"),
        ([[1]], [[1], [2]], "for 1 heads and 2 tails"),
    ):
        with pytest.raises(BadInput, match=told):
            TripleCandidates.of(heads, tails, ENTITIES)


def test_more_answers_than_entities_are_refused() -> None:
    def work(group: ReplicaGroup) -> None:
        made = GraphTrainer(group, TrainSettings(dim=4), ENTITIES, RELATIONS, TRIPLES).model
        with pytest.raises(BadInput, match="ask for 1 to 50"):
            AllScores(made).top(QueryBatches(TRIPLES, made.sharding, "tail", 2).batch(0, 0), 51)
        with pytest.raises(BadInput, match="at least 1 score"):
            AllScores(made, 0)

    run_threads(1, work)


MANY = 5_000


def _exact_ranks(made: ShardedModel, triples: Int32, model: str, norm: int) -> Array:
    """By the formula of the score, all in float64."""
    table = tf.constant(made.sharding.whole_table(made.entities[None]), tf.float64)
    ranks = []
    for head, relation, tail in triples:
        parts = (table[head][None], tf.constant(made.relations[relation][None], tf.float64), table)
        scores = FORMULAS[model](*(tf.broadcast_to(x, [MANY, x.shape[-1]]) for x in parts), norm).numpy()
        others = np.delete(scores, tail)
        ranks.append(1 + (others > scores[tail]).sum() + (others == scores[tail]).sum() / 2)
    return np.array(ranks)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("model", "norm"), [case for case in CASES if case[0] != "ConvE"])
def test_ranks_are_those_of_double_precision(model: str, norm: int) -> None:
    """Among 5,000 entities with embeddings drawn at random, whose float32 errors do change ranks."""
    draw = np.random.default_rng(8)
    triples = draw.integers(0, [MANY, RELATIONS, MANY], (60, 3)).astype(np.int32)
    settings = TrainSettings(
        model=model,
        dim=16 if model == "TuckER" else 64,  # its formula costs the cube of it
        norm=norm if model in WITH_NORMS else None,
        reciprocal=False,
        loss="log-sigmoid",
        spread=0.3,
    )

    def work(group: ReplicaGroup) -> tuple[Array, Array]:
        made = GraphTrainer(group, settings, MANY, RELATIONS, triples).model
        queries = QueryBatches(triples, made.sharding, "tail", len(triples)).batch(0, 0)
        found = np.empty(len(triples))
        found[queries.triple] = AllScores(made, 100_000).ranks(queries).average
        return found, _exact_ranks(made, triples, model, norm)

    found, expected = run_threads(1, work)[0]
    np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize("model", ["ComplEx", "TransE"])
def test_ranks_of_a_trained_model_are_those_of_double_precision(model: str) -> None:
    draw = np.random.default_rng(8)
    triples = np.minimum(draw.zipf(1.3, (3_000, 3)) - 1, [MANY - 1, RELATIONS - 1, MANY - 1]).astype(np.int32)
    settings = settings_of(model, {"dim": 32, "reciprocal": False, "epochs": 2, "batch": 256})

    def work(group: ReplicaGroup) -> tuple[Array, Array]:
        trainer = GraphTrainer(group, settings, MANY, RELATIONS, triples)
        trainer.run_epoch()
        asked = triples[::10]
        queries = QueryBatches(asked, trainer.sharding, "tail", len(asked)).batch(0, 0)
        found = np.empty(len(asked))
        found[queries.triple] = AllScores(trainer.model).ranks(queries).average
        return found, _exact_ranks(trainer.model, asked, model, settings.norm or 1)

    found, expected = run_threads(1, work)[0]
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
