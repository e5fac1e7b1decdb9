"""Losses and penalties are TensorFlow's, gradients included, also on several workers; exponentials are float64's."""

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array, Int32
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import RangePool
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.knowledge_graphs.graph.sharding import with_inverses
from elastable.replicas.knowledge_graphs.graph_settings import TrainSettings
from elastable.replicas.knowledge_graphs.graph_trainer import GraphTrainer
from elastable.replicas.knowledge_graphs.losses import (
    REGULARIZERS,
    Loss,
    exponentials,
    penalty_gradients,
    row_total,
)
from elastable.replicas.knowledge_graphs.scores.functions import ScoreFunction, Values
from tests.replicas.knowledge_graphs.test_scores import CASES, WITH_NORMS, formula

B, N = 7, 11


def _shares(negative: tf.Variable, counted: tf.Tensor, adversarial: float) -> object:
    shifted = tf.where(counted, adversarial * negative, tf.constant(-np.inf, tf.float64))
    return tf.stop_gradient(tf.where(counted, tf.nn.softmax(shifted, axis=1), tf.zeros_like(negative)))


def _log_sigmoid(p: tf.Variable, n: tf.Variable, counted: object, adversarial: float) -> object:
    shares = _shares(n, counted, adversarial)
    return -(tf.math.log_sigmoid(1.5 + p) + tf.reduce_sum(shares * tf.math.log_sigmoid(-1.5 - n), 1)) / 2


def _margin(p: tf.Variable, n: tf.Variable, counted: tf.Tensor, adversarial: float) -> tf.Tensor:
    return tf.reduce_sum(_shares(n, counted, adversarial) * tf.nn.relu(1.5 - p[:, None] + n), 1)


def _softmax(p: tf.Variable, n: tf.Variable, counted: tf.Tensor, entities: float) -> object:
    counts = tf.reduce_sum(tf.cast(counted, tf.float64), 1, keepdims=True)
    shift = tf.math.log((entities - 1) / counts) if entities else 0.0
    logits = tf.concat([p[:, None], tf.where(counted, n + shift, tf.constant(-np.inf, tf.float64))], 1)
    return -tf.nn.log_softmax(logits)[:, 0]


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize(
    ("loss", "formula", "value"),
    [
        (Loss("log-sigmoid", 1.5, 0.0), _log_sigmoid, 0.0),
        (Loss("log-sigmoid", 1.5, 2.0), _log_sigmoid, 2.0),
        (Loss("margin", 1.5, 0.0), _margin, 0.0),
        (Loss("margin", 1.5, 0.5), _margin, 0.5),
        (Loss("softmax"), _softmax, 0.0),
        (Loss("softmax", entities=100), _softmax, 100.0),
    ],
)
def test_losses_and_gradients_are_tensorflows(
    loss: Loss, formula: Callable[..., object], value: float, masked: bool
) -> None:
    draw = np.random.default_rng(4)
    positive, weight = draw.standard_normal((2, B)).astype(np.float32)
    negative = (3 * draw.standard_normal((B, N))).astype(np.float32)
    counted = draw.random((B, N)) < 0.6 if masked else np.ones((B, N), bool)
    counted[0, 0] = True
    p, n = tf.Variable(positive, dtype=tf.float64), tf.Variable(negative, dtype=tf.float64)
    with tf.GradientTape() as tape:
        total = tf.reduce_sum(formula(p, n, tf.constant(counted), value) * weight)
    to_p, to_n = tape.gradient(total, [p, n])
    pool = RangePool(3)
    value, to_positive, to_negative = loss(positive, negative, weight, counted if masked else None, pool)
    pool.close()
    assert value == pytest.approx(float(total), rel=1e-5)
    np.testing.assert_allclose(to_positive, to_p.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(to_negative, to_n.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [Loss("log-sigmoid", 0.0, 1.0), Loss("margin", 1.0, 1.0), Loss("softmax")])
def test_large_scores_neither_overflow_nor_vanish_and_no_candidates_do_not_count(loss: Loss) -> None:
    positive, negative = np.array([-300.0], np.float32), np.array([[300.0, -300.0]], np.float32)
    value, _, to_negative = loss(positive, negative, np.ones(1, np.float32))
    assert 299 < value < 602
    assert np.isfinite(to_negative).all()
    value, _, to_negative = loss(positive, negative, np.ones(1, np.float32), np.zeros((1, 2), bool))
    assert np.isfinite(value)
    np.testing.assert_array_equal(to_negative, 0)


def test_an_unknown_loss_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="known are log-sigmoid, margin, softmax"):
        Loss("hinge")


def test_exponentials_are_exact_to_two_units_in_the_last_place() -> None:
    draw = np.random.default_rng(0)
    values = np.concatenate([draw.uniform(-87, 0, 100_000), draw.uniform(-1, 0, 100_000), [0.0, -86.99]])
    single = values.astype(np.float32)
    found = np.empty_like(single)
    exponentials(single, np.float32(0), found)
    expected = np.exp(single.astype(np.float64))
    assert (np.abs(found - expected) / expected).max() < 2 * np.finfo(np.float32).eps
    shifted = np.empty_like(single)
    exponentials(single + np.float32(3), np.float32(3), shifted)
    np.testing.assert_allclose(shifted, np.exp((single + np.float32(3) - np.float32(3)).astype(np.float64)), rtol=3e-7)


def test_what_is_far_below_is_zero_and_nan_stays_nan() -> None:
    values = np.array([-87.5, -1e30, -np.inf, np.nan, 0.0], np.float32)
    found = np.empty_like(values)
    exponentials(values, np.float32(0), found)
    np.testing.assert_array_equal(found, np.array([0, 0, 0, np.nan, 1], np.float32))
    exponentials(values, np.float32(np.nan), found)
    assert np.isnan(found).all()


def test_a_row_is_summed() -> None:
    values = np.random.default_rng(1).random(1_001).astype(np.float32)
    np.testing.assert_allclose(row_total(values), values.sum(dtype=np.float64), rtol=1e-6)


@pytest.mark.parametrize("values", ["real", "complex", "phase"])
@pytest.mark.parametrize("kind", ["none", "l2", "n3"])
def test_gradients_of_penalties_are_those_of_the_formula(kind: str, values: Values) -> None:
    rows = np.random.default_rng(0).standard_normal((5, 8)).astype(np.float32)
    x = tf.Variable(rows, dtype=tf.float64)
    with tf.GradientTape() as tape:
        sizes = tf.abs(tf.complex(*tf.split(x, 2, axis=1))) if values == "complex" else tf.abs(x)
        expected = {"none": 0.0 * sizes, "l2": sizes**2, "n3": sizes**3}[kind] * float(values != "phase")
        total = tf.reduce_sum(expected)
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
        total = _loss(trainer.model.score, every, e, r)
        heads_and_tails = tf.gather(e, np.concatenate([every[:, 0], every[:, 2]]))
        total += 0.3 * _penalty(kind, heads_and_tails, model in ("ComplEx", "RotatE")) / len(every)
        if model != "RotatE":  # whose relations are phases
            total += 0.3 * _penalty(kind, tf.gather(r, every[:, 1]), model == "ComplEx") / len(every)
    for name, slope in zip(("entities", "relations"), tape.gradient(total, [e, r]), strict=True):
        np.testing.assert_allclose(start[name] - moved[name], tf.convert_to_tensor(slope), rtol=1e-3, atol=2e-5)


def _loss(score: ScoreFunction, triples: Int32, e: tf.Variable, r: object) -> tf.Tensor:
    shape = [len(triples), ENTITIES]
    given, related = tf.gather(e, triples[:, 0])[:, None], tf.gather(r, triples[:, 1])[:, None]
    parts = [tf.broadcast_to(x, [*shape, x.shape[-1]]) for x in (given, related, e[None])]
    losses = tf.nn.sparse_softmax_cross_entropy_with_logits(triples[:, 2], formula(score, *parts))
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
