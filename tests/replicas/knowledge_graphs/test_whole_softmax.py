"""Cross-entropy over all entities: as TensorFlow computes it in one process, over any number of workers."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph import PartitionedTriples, Sharding, Side
from elastable.replicas.knowledge_graphs.sampling import RigidSampler
from elastable.replicas.knowledge_graphs.schemes import StepGradients, WholeSoftmax
from elastable.replicas.knowledge_graphs.scores import score_function

ENTITIES, RELATIONS, DIM = 41, 3, 8


@pytest.mark.parametrize("sides", [("tail",), ("head", "tail")])
@pytest.mark.parametrize("workers", [1, 2, 3])
def test_loss_and_gradients_are_those_of_the_whole(workers: int, sides: tuple[Side, ...]) -> None:
    draw = np.random.default_rng(0)
    score = score_function("DistMult", DIM)
    triples = np.stack([draw.integers(0, m, 60) for m in (ENTITIES, RELATIONS, ENTITIES)], axis=1)
    entities = draw.standard_normal((ENTITIES, DIM)).astype(np.float32)
    relations = draw.standard_normal((RELATIONS, DIM)).astype(np.float32)
    sharding = Sharding.create(ENTITIES, workers)
    partition = PartitionedTriples.create(triples, sharding)
    sampler = RigidSampler(partition, 12)

    def work(group: ReplicaGroup) -> tuple[float, StepGradients]:
        batch = sampler.batch(0, group.rank)
        scheme = WholeSoftmax(group, score, int(sharding.counts[group.rank]), sides)
        return scheme.step(batch, sharding.shard_table(entities, group.rank), relations, batch.weight)

    found = run_threads(workers, work)
    batches = [sampler.batch(0, worker) for worker in range(workers)]
    met = np.concatenate([partition.triples[batch.triple.reshape(-1)] for batch in batches])
    weights = np.concatenate([batch.weight.reshape(-1) for batch in batches])
    e, r = tf.Variable(entities, dtype=tf.float64), tf.Variable(relations, dtype=tf.float64)
    with tf.GradientTape() as tape:
        total: tf.Tensor | float = 0.0
        for side in sides:
            given, answer = (0, 2) if side == "tail" else (2, 0)
            logits = tf.matmul(tf.gather(e, met[:, given]) * tf.gather(r, met[:, 1]), e, transpose_b=True)
            losses = tf.nn.sparse_softmax_cross_entropy_with_logits(met[:, answer], logits)
            total += tf.reduce_sum(losses * weights)
    to_e, to_r = (tf.convert_to_tensor(gradient).numpy() for gradient in tape.gradient(total, [e, r]))
    assert sum(loss for loss, _ in found) == pytest.approx(float(total), rel=1e-5)
    mine = np.zeros_like(to_e)
    for worker, (_, gradients) in enumerate(found):
        mine[sharding.entity_at[worker, gradients.rows]] = gradients.entities
    np.testing.assert_allclose(mine, to_e, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(sum(gradients.relations for _, gradients in found), to_r, rtol=1e-4, atol=1e-5)
