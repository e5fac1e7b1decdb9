"""Penalties: as their formulas say, with TensorFlow's gradients, and the way that a step takes with them."""

from __future__ import annotations

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.knowledge_graphs.graph import with_inverses
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.losses import REGULARIZERS, penalty, penalty_gradients
from elastable.replicas.knowledge_graphs.scores import Values
from elastable.replicas.knowledge_graphs.settings import TrainSettings
from tests.replicas.knowledge_graphs.test_scores import CASES, FORMULAS, WITH_NORMS


@pytest.mark.parametrize("values", ["real", "complex", "phase"])
@pytest.mark.parametrize("kind", ["none", "l2", "n3"])
def test_penalties_and_gradients_are_those_of_the_formula(kind: str, values: Values) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    x = tf.Variable(rows, dtype=tf.float64)
    with tf.GradientTape() as tape:
        sizes = tf.abs(tf.complex(*tf.split(x, 2, axis=1))) if values == "complex" else tf.abs(x)
        expected = {"none": 0.0 * sizes, "l2": sizes**2, "n3": sizes**3}[kind] * float(values != "phase")
        total = tf.reduce_sum(expected)
    np.testing.assert_allclose(penalty(kind, rows, values), tf.reduce_sum(expected, 1), rtol=1e-5)
    np.testing.assert_allclose(penalty_gradients(kind, rows, values), tape.gradient(total, x), rtol=1e-5)


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
        slope = penalty_gradients("n3", np.asarray(start[name], np.float32))
        times = np.bincount(triples[:, columns].reshape(-1), minlength=len(slope))
        expected = 0.3 * slope * times[:, None] / len(triples)
        np.testing.assert_allclose(without[name] - with_it[name], expected, rtol=1e-3, atol=1e-4)


ENTITIES, RELATIONS, DIM = 12, 2, 8


@pytest.mark.parametrize("kind", REGULARIZERS)
@pytest.mark.parametrize(("model", "norm"), CASES)
def test_a_step_of_every_score_and_norm_takes_the_gradient_of_loss_and_penalty(
    model: str, norm: int, kind: str
) -> None:
    """Against autodiff in float64: entities, relations and phases alike."""
    settings = TrainSettings(
        model=model, dim=DIM, norm=norm if model in WITH_NORMS else None, loss="whole-softmax", batch=1000,
        optimizer="sgd", learning_rate=1.0, spread=0.5, regularizer=kind, regularization=0.3,
    )  # fmt: skip
    triples: Int32 = np.random.default_rng(2).integers(0, [ENTITIES, RELATIONS, ENTITIES], (9, 3)).astype(np.int32)
    trainer = GraphTrainer(alone(), settings, ENTITIES, RELATIONS, triples)
    start = trainer.state()
    trainer.run_step()
    moved = trainer.state()
    every = with_inverses(triples, RELATIONS)
    e, r = (tf.Variable(start[name], dtype=tf.float64) for name in ("entities", "relations"))
    with tf.GradientTape() as tape:
        total = _loss(model, norm, every, e, r)
        heads_and_tails = tf.gather(e, np.concatenate([every[:, 0], every[:, 2]]))
        total += 0.3 * _penalty(kind, heads_and_tails, model in ("ComplEx", "RotatE")) / len(every)
        if model != "RotatE":  # whose relations are phases
            total += 0.3 * _penalty(kind, tf.gather(r, every[:, 1]), model == "ComplEx") / len(every)
    for name, slope in zip(("entities", "relations"), tape.gradient(total, [e, r]), strict=True):
        np.testing.assert_allclose(start[name] - moved[name], tf.convert_to_tensor(slope), rtol=1e-3, atol=2e-5)


def _loss(model: str, norm: int, triples: Int32, e: tf.Variable, r: object) -> tf.Tensor:
    shape = [len(triples), ENTITIES]
    given, related = tf.gather(e, triples[:, 0])[:, None], tf.gather(r, triples[:, 1])[:, None]
    parts = [tf.broadcast_to(x, [*shape, x.shape[-1]]) for x in (given, related, e[None])]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(triples[:, 2], FORMULAS[model](*parts, norm))
    return tf.reduce_mean(losses)


def _penalty(kind: str, rows: object, complex_numbers: bool) -> tf.Tensor:
    sizes = tf.abs(tf.complex(*tf.split(rows, 2, axis=1))) if complex_numbers else tf.abs(rows)
    return tf.reduce_sum({"none": 0.0 * sizes, "l2": sizes**2, "n3": sizes**3}[kind])


@pytest.mark.parametrize("dim", [6, 10])
def test_an_odd_number_of_phases_is_no_obstacle(dim: int) -> None:
    settings = TrainSettings(model="RotatE", dim=dim, loss="whole-softmax", regularizer="n3", regularization=0.1)
    triples: Int32 = np.random.default_rng(2).integers(0, [ENTITIES, RELATIONS, ENTITIES], (9, 3)).astype(np.int32)
    loss, _ = GraphTrainer(alone(), settings, ENTITIES, RELATIONS, triples).run_step()
    assert np.isfinite(loss)
