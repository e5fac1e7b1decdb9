"""Losses and layers whose numbers would depend on the replicas are refused, wherever they are hidden."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import Unsupported
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.training.trainer import ReplicaTrainer
from tests.replicas.training.models import WEIGHTS, perceptron, records, seeded

X, Y = records()


class _Penalised(keras.layers.Layer):
    def __init__(self, penalty: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self._penalty = penalty

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(self._penalty(x))
        return x


def _with(layer: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), layer, keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, p: keras.ops.sum((y - p) ** 2), "is a sum"),
        (lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)), "an unknown number"),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), "how many values count"),
    ],
    ids=["sum", "root", "ignore_class"],
)
def test_a_loss_that_is_no_mean_over_records(loss: object, message: str) -> None:
    classes = isinstance(loss, keras.losses.Loss)
    model = _with(keras.layers.Dense(3)) if not classes else keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(3, "softmax")]
    )  # fmt: skip
    trainer = ReplicaTrainer(model, None, alone())
    trainer.compile("sgd", loss)
    labels = np.arange(len(X)) % 3 if classes else Y
    with pytest.raises(Unsupported, match=message):
        trainer.fit(X, labels, verbose=0)
    with pytest.raises(Unsupported, match=message):
        trainer.evaluate(X, labels)


def test_a_sum_among_the_terms_and_what_is_marked() -> None:
    def fitted(penalty: Callable[[tf.Tensor], tf.Tensor]) -> None:
        trainer = ReplicaTrainer(_with(_Penalised(penalty)), None, alone())
        trainer.compile("sgd", "mse")
        trainer.fit(X, Y, verbose=0)

    with pytest.raises(Unsupported, match="is a sum"):
        fitted(lambda x: 0.1 * keras.ops.sum(x**2))
    fitted(lambda x: 0.1 * keras.ops.mean(x**2))
    fitted(lambda x: et.averaged(keras.ops.sqrt(keras.ops.mean(x**2))))


def test_a_layer_that_changes_its_weights_in_the_forward_pass() -> None:
    def work(group: ReplicaGroup) -> None:
        model = seeded(lambda: _with(keras.layers.SpectralNormalization(keras.layers.Dense(4), name="spectral")))
        trainer = ReplicaTrainer(model, WEIGHTS, group)
        trainer.compile("sgd", "mse")
        if group.size == 1:
            trainer.fit(X, Y, verbose=0)
            return
        with pytest.raises(Unsupported, match=r"changes its weight '.*spectral.*' in the forward pass"):
            trainer.fit(X, Y, verbose=0)

    run_threads(1, work)
    run_threads(2, work)


def test_a_scaled_loss_with_a_host_embedding() -> None:
    rows = et.create_host_embedding("rows", (9, 4), optimizer_spec=et.HostEmbeddingOptimizerSpec(0.1), group=alone())
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows.lookup(ids))))
    trainer = ReplicaTrainer(model, None, rows.table.group)
    trainer.compile(keras.optimizers.SGD(0.1, loss_scale_factor=8.0), "mse")
    with rows.register(), pytest.raises(Unsupported, match=r"loss_scale_factor=8\) with host embedding 'rows'"):
        trainer.fit(np.zeros((4, 3), np.int64), np.zeros((4, 1), np.float32), verbose=0)
    plain = ReplicaTrainer(perceptron(), None, alone())
    plain.compile(keras.optimizers.SGD(0.1, loss_scale_factor=8.0), "mse")
    plain.fit(X, Y, verbose=0)
