"""Penalties: as their formulas say, with TensorFlow's gradients, and the way that a step takes with them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from elastable.replicas.groups.group import Array, ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.knowledge_graphs.graph.batch import Int32
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.losses.regularizer import penalty, penalty_gradients
from elastable.replicas.knowledge_graphs.settings import TrainSettings


@pytest.mark.parametrize("complex_numbers", [False, True])
@pytest.mark.parametrize("kind", ["none", "l2", "n3"])
def test_penalties_and_gradients_are_those_of_the_formula(kind: str, complex_numbers: bool) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    x = tf.Variable(rows, dtype=tf.float64)
    with tf.GradientTape() as tape:
        sizes = tf.abs(tf.complex(*tf.split(x, 2, axis=1))) if complex_numbers else tf.abs(x)
        expected = {"none": 0.0 * sizes, "l2": sizes**2, "n3": sizes**3}[kind]
        total = tf.reduce_sum(expected)
    np.testing.assert_allclose(penalty(kind, rows, complex_numbers), tf.reduce_sum(expected, 1), rtol=1e-5)
    np.testing.assert_allclose(penalty_gradients(kind, rows, complex_numbers), tape.gradient(total, x), rtol=1e-5)


@pytest.mark.parametrize("loss", ["whole-softmax", "softmax"])
@pytest.mark.parametrize("workers", [1, 3])
def test_a_step_takes_the_gradient_of_the_penalty_of_its_triples(loss: str, workers: int) -> None:
    triples: Int32 = np.random.default_rng(1).integers(0, [20, 2, 20], (30, 3)).astype(np.int32)

    def state(group: ReplicaGroup, weight: float, rate: float) -> dict[str, Array]:
        settings = TrainSettings(
            model="DistMult", dim=4, loss=loss, batch=1000, optimizer="sgd", learning_rate=rate, spread=1.0,
            reciprocal=False, regularizer="n3", regularization=weight, negatives=6, shared=False,
        )  # fmt: skip
        trainer = GraphTrainer(group, settings, 20, 2, triples)
        trainer.run_step()
        return trainer.state()

    start = run_threads(workers, lambda group: state(group, 0.0, 0.0))[0]
    without = run_threads(workers, lambda group: state(group, 0.0, 1.0))[0]
    with_it = run_threads(workers, lambda group: state(group, 0.3, 1.0))[0]
    for name, columns in (("entities", (0, 2)), ("relations", (1,))):
        slope = penalty_gradients("n3", np.asarray(start[name], np.float32), complex_numbers=False)
        times = np.bincount(triples[:, columns].reshape(-1), minlength=len(slope))
        expected = 0.3 * slope * times[:, None] / len(triples)
        np.testing.assert_allclose(without[name] - with_it[name], expected, rtol=1e-3, atol=1e-4)
