"""Losses against TensorFlow's own functions in float64, and their gradients."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.range_pool import RangePool
from elastable.replicas.knowledge_graphs.losses import (
    LogSigmoid,
    Loss,
    MarginRanking,
    SampledSoftmax,
    loss_function,
)

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
        (LogSigmoid(1.5, 0.0), _log_sigmoid, 0.0),
        (LogSigmoid(1.5, 2.0), _log_sigmoid, 2.0),
        (MarginRanking(1.5, 0.0), _margin, 0.0),
        (MarginRanking(1.5, 0.5), _margin, 0.5),
        (SampledSoftmax(), _softmax, 0.0),
        (SampledSoftmax(entities=100), _softmax, 100.0),
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
    found = loss(positive, negative, weight, counted if masked else None, pool)
    pool.close()
    assert found.total == pytest.approx(float(total), rel=1e-5)
    np.testing.assert_allclose(found.positive, to_p.numpy(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(found.negative, to_n.numpy(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("loss", [LogSigmoid(1.0, 1.0), MarginRanking(1.0), SampledSoftmax(entities=10)])
def test_a_triple_without_candidates_has_a_finite_loss(loss: Loss) -> None:
    found = loss(np.zeros(1, np.float32), np.zeros((1, 3), np.float32), np.ones(1, np.float32), np.zeros((1, 3), bool))
    assert np.isfinite(found.total)
    np.testing.assert_array_equal(found.negative, 0)


def test_large_scores_neither_overflow_nor_vanish() -> None:
    positive, negative = np.array([-300.0], np.float32), np.array([[300.0, -300.0]], np.float32)
    for loss in (LogSigmoid(0.0, 1.0), MarginRanking(1.0, 1.0), SampledSoftmax()):
        found = loss(positive, negative, np.ones(1, np.float32))
        assert 299 < found.total < 602
        assert np.isfinite(found.negative).all()


def test_an_unknown_loss_is_refused_with_those_there_are() -> None:
    with pytest.raises(BadInput, match="known are log-sigmoid, margin, softmax"):
        loss_function("hinge", 1.0, 0.0)
