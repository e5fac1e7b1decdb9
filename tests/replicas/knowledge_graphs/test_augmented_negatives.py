"""KvsAll, label smoothing, dropout, and the tails of other triples as candidates: as one process computes them."""

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph.batch import Side, StepBatch
from elastable.replicas.knowledge_graphs.graph.sharding import KnownTriples, PartitionedTriples, Sharding
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.losses import Loss
from elastable.replicas.knowledge_graphs.samplers import AugmentedNegatives, RigidSampler
from elastable.replicas.knowledge_graphs.schemes import (
    CandidateScheme,
    Dropout,
    EmbeddingMoving,
    KvsAll,
    Scored,
    ScoreMoving,
    StepGradients,
    WholeSoftmax,
    distinct_queries,
)
from elastable.replicas.knowledge_graphs.scores.functions import score_function
from tests.replicas.knowledge_graphs.graphs import received
from tests.untyped import Keyword, Keywords

ENTITIES, RELATIONS, DIM, DRAWN = 40, 3, 8, 5


TRIPLES = np.unique(np.random.default_rng(2).integers(0, [ENTITIES, RELATIONS, ENTITIES], (150, 3)), axis=0).astype(
    np.int32
)


@pytest.mark.parametrize("filtered", [False, True])
@pytest.mark.parametrize("kind", [ScoreMoving, EmbeddingMoving])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_every_triple_is_scored_with_the_tails_of_the_others(
    kind: type[CandidateScheme], workers: int, filtered: bool
) -> None:
    draw, score = np.random.default_rng(1), score_function("DistMult", DIM)
    entities = draw.standard_normal((ENTITIES, DIM)).astype(np.float32)
    relations = draw.standard_normal((RELATIONS, DIM)).astype(np.float32)
    sharding = Sharding.create(ENTITIES, workers)
    partition = PartitionedTriples.create(TRIPLES, sharding)
    known = KnownTriples.create(ENTITIES, RELATIONS, TRIPLES)
    drawn = AugmentedNegatives(sharding, -(-DRAWN // workers), seed=4, known=known if filtered else None, total=DRAWN)
    sampler = RigidSampler(partition, 12, negatives=drawn)

    def work(group: ReplicaGroup) -> tuple[StepBatch, Scored]:
        batch = sampler.batch(0, group.rank)
        return batch, kind(group, score, Loss("softmax")).forward(
            batch, sharding.shard_table(entities, group.rank), relations
        )

    found = run_threads(workers, work)
    step = np.concatenate([partition.triples[batch.triple[batch.mask]] for batch, _ in found])
    batches, surplus = [batch for batch, _ in found], workers * drawn.count - DRAWN
    for batch, scored in found:
        assert scored.counted is not None
        candidates = received(sharding, batches, batch.worker)[0]
        # The last ones of each shard are random, one fewer where shards take turns.
        random = [mine[len(mine) - drawn.count : len(mine) - (k < surplus)] for k, mine in enumerate(candidates)]
        assert sum(map(len, random)) == DRAWN
        every = [*step[:, 2].tolist(), *np.concatenate(random).tolist()]
        for b, (h, r, t) in enumerate(partition.triples[batch.triple.reshape(-1)]):
            true = TRIPLES[(TRIPLES[:, 0] == h) & (TRIPLES[:, 1] == r), 2] if filtered else [t]
            counts = candidates.reshape(-1)[scored.counted[b]]
            assert sorted(counts.tolist()) == sorted(each for each in every if each not in true)
            products = entities[counts] @ (entities[h] * relations[r])
            np.testing.assert_allclose(scored.negative[b][scored.counted[b]], products, rtol=1e-4, atol=1e-5)


def _moved(**settings: Keyword) -> tuple[float, Array]:
    """The loss of one step of SGD, and how far it moves the relations."""
    made = TrainSettings(
        model="DistMult", dim=DIM, negatives=8, batch=32, optimizer="sgd", learning_rate=1.0, **settings
    )

    def work(group: ReplicaGroup) -> tuple[float, Array]:
        trainer = GraphTrainer(group, made, ENTITIES, RELATIONS, TRIPLES)
        before = trainer.model.relations.copy()
        return trainer.run_step()[0], before - trainer.model.relations

    return run_threads(1, work)[0]


@pytest.mark.parametrize("loss", ["softmax", "whole-softmax", "kvsall"])
def test_the_scale_of_the_loss_scales_loss_and_gradients_and_not_the_penalty(loss: str) -> None:
    penalty: Keywords = {"regularizer": "l2", "regularization": 0.3}
    (one, moved), (four, moved_by_four) = (_moved(loss=loss, loss_scale=scale, **penalty) for scale in (1.0, 4.0))
    assert four == pytest.approx(4 * one, rel=1e-5)
    np.testing.assert_allclose(moved_by_four - moved, 3 * _moved(loss=loss)[1], rtol=1e-3, atol=1e-6)


def _triples() -> Array:
    draw = np.random.default_rng(0)
    triples = np.stack([draw.integers(0, m, 90) for m in (9, RELATIONS, ENTITIES)], axis=1)
    return np.unique(triples, axis=0).astype(np.int32)[draw.permutation(len(np.unique(triples, axis=0)))]


@pytest.mark.parametrize("share", [0.0, 0.4])
@pytest.mark.parametrize("smoothing", [0.0, 0.3])
@pytest.mark.parametrize(("loss", "sides"), [("kvsall", "t"), ("whole-softmax", "t"), ("whole-softmax", "ht")])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loss_and_gradients_are_those_of_the_whole(
    workers: int, loss: str, sides: str, smoothing: float, share: float
) -> None:
    draw, score, triples = np.random.default_rng(1), score_function("DistMult", DIM), _triples()
    entities = draw.standard_normal((ENTITIES, DIM)).astype(np.float32)
    relations = draw.standard_normal((RELATIONS, DIM)).astype(np.float32)
    sharding, known = Sharding.create(ENTITIES, workers), KnownTriples.create(ENTITIES, RELATIONS, triples)
    partition = PartitionedTriples.create(distinct_queries(triples) if loss == "kvsall" else triples, sharding)
    sampler, dropout = RigidSampler(partition, 12), Dropout(share, 3) if share else None
    asked: tuple[Side, ...] = ("tail",) if sides == "t" else ("head", "tail")

    def work(group: ReplicaGroup) -> tuple[float, StepGradients]:
        batch = sampler.batch(0, group.rank)
        scheme: WholeSoftmax
        if loss == "kvsall":
            scheme = KvsAll(group, score, sharding, asked, smoothing, known=known, dropout=dropout)
        else:
            scheme = WholeSoftmax(group, score, sharding, asked, smoothing, dropout=dropout)
        return scheme.step(batch, sharding.shard_table(entities, group.rank), relations, batch.weight)

    found = run_threads(workers, work)
    batches = [sampler.batch(0, worker) for worker in range(workers)]
    met = np.concatenate([partition.triples[batch.triple.reshape(-1)] for batch in batches])
    weights = np.concatenate([batch.weight.reshape(-1) for batch in batches])
    ones = np.ones((len(met) // workers, DIM), np.float32)
    e, r = tf.Variable(entities, dtype=tf.float64), tf.Variable(relations, dtype=tf.float64)
    with tf.GradientTape() as tape:
        total: tf.Tensor | float = 0.0
        for side in asked:
            known_end, answer = (0, 2) if side == "tail" else (2, 0)
            given, relation = tf.gather(e, met[:, known_end]), tf.gather(r, met[:, 1])
            if dropout:
                masks = [dropout.masks(batch, side, ones, ones) for batch in batches]
                given *= np.concatenate([each for each, _ in masks])
                relation *= np.concatenate([each for _, each in masks])
            logits = tf.matmul(given * relation, e, transpose_b=True)
            labels = np.eye(ENTITIES)[met[:, answer]]
            if loss == "kvsall":
                for b, (h, k, _) in enumerate(met):
                    labels[b, triples[(triples[:, 0] == h) & (triples[:, 1] == k), 2]] = 1
            labels = (1 - smoothing) * labels + smoothing / ENTITIES
            if loss == "kvsall":
                losses = tf.reduce_sum(tf.nn.sigmoid_cross_entropy_with_logits(labels, logits), 1)
            else:
                losses = tf.nn.softmax_cross_entropy_with_logits(labels, logits)
            total += tf.reduce_sum(losses * weights)
    to_e, to_r = (tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(total, [e, r]))
    assert sum(part for part, _ in found) == pytest.approx(float(total), rel=1e-5)
    mine = np.zeros_like(to_e)
    for worker, (_, gradients) in enumerate(found):
        mine[sharding.entity_at[worker, gradients.rows]] = gradients.entities
    np.testing.assert_allclose(mine, to_e, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sum(gradients.relations for _, gradients in found), to_r, rtol=1e-4, atol=1e-5)


def test_an_epoch_visits_every_query_once() -> None:
    triples = _triples()
    queries = distinct_queries(triples)
    assert (
        len({tuple(query[:2]) for query in queries.tolist()}) == len(queries) == len(np.unique(triples[:, :2], axis=0))
    )
    settings = TrainSettings(model="DistMult", dim=DIM, loss="kvsall", batch=16, epochs=1, learning_rate=0.05)

    def work(group: ReplicaGroup) -> int:
        trainer = GraphTrainer(group, settings, ENTITIES, RELATIONS, triples)
        return sum(trainer.run_step()[1] for _ in range(trainer.steps_per_epoch))

    both = np.concatenate([triples, triples[:, ::-1] + [0, RELATIONS, 0]])
    assert run_threads(2, work)[0] == len(np.unique(both[:, :2], axis=0))


def test_dropout_keeps_the_expectation_and_differs_by_step_worker_and_side() -> None:
    sampler = RigidSampler(PartitionedTriples.create(_triples(), Sharding.create(ENTITIES, 2)), 12)
    rows, dropout = np.ones((400, 50), np.float32), Dropout(0.25, 7)
    first, again = (dropout.masks(sampler.batch(0, 0), "tail", rows, rows) for _ in range(2))
    np.testing.assert_array_equal(first[0], again[0])
    assert set(np.unique(first[0])) == {np.float32(0), np.float32(4 / 3)}
    assert first[0].mean() == pytest.approx(1, abs=0.02)
    others = [
        dropout.masks(sampler.batch(1, 0), "tail", rows, rows)[0],
        dropout.masks(sampler.batch(0, 1), "tail", rows, rows)[0],
        dropout.masks(sampler.batch(0, 0), "head", rows, rows)[0],
        Dropout(0.25, 8).masks(sampler.batch(0, 0), "tail", rows, rows)[0],
        first[1],
    ]
    assert all((other != first[0]).any() for other in others)
