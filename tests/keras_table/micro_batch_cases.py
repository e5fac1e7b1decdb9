"""What a program trains to when each of its batches is computed in two micro-batches (`grads_to_wait=2`)."""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable
from typing import TypeAlias

import keras
import numpy as np

from elastable.master.backend.lazy import tf
from tests.keras_table.case import Case, Side, flat, small, trained
from tests.keras_table.compile_cases import two_outputs
from tests.untyped import Keyword

ops = keras.ops
Loss: TypeAlias = "Callable[[tf.Tensor, tf.Tensor], tf.Tensor]"


def _trained(
    side: Side, model: keras.Model | None = None, fit: dict[str, object] | None = None, **options: object
) -> object:
    """Batches of 10, 10 and 4 records; with tables in a store in micro-batches of 5, 5, 5, 5 and 4."""
    return trained(
        side,
        model,
        fit={"batch_size": 10, "grads_to_wait": 2, "epochs": 2, **(fit or {})},
        **{"optimizer": keras.optimizers.SGD(0.02), "run_eagerly": False, "y": _y(side), **options},
    )


def _y(side: Side) -> np.ndarray:
    """Labels, -1 for none; the first micro-batch has hardly any, and the second large ones."""
    y = np.where(np.arange(len(side.y))[:, None] % 3 == 0, -1.0, np.abs(side.y))
    y[:4], y[5:10] = -1.0, 5 * y[5:10]
    return y.astype(np.float32)


def _known(y: tf.Tensor) -> tf.Tensor:
    return y > -0.5


def _loss(name: str, loss: Loss | keras.losses.Loss, weighted: bool = False, only: str = "", **options: object) -> Case:
    def program(side: Side) -> object:
        return _trained(side, loss=loss, fit={"sample_weight": side.weights} if weighted else {}, **options)

    return Case(f"`loss=` {name}", program, only=only)


def _classes(name: str, loss: keras.losses.Loss, sparse: bool = False) -> Case:
    def program(side: Side) -> object:
        classes = side.x[:, 0] % 3
        y = classes if sparse else np.eye(3, dtype=np.float32)[classes]
        return _trained(side, small(side, 3, "softmax"), loss=loss, y=y)

    return Case(f"`loss=` {name}", program)


def _metric(name: str, metric: Callable[[], object]) -> Case:
    return Case(f"`metrics=` {name}", lambda side: _trained(side, metrics=[metric()]))


class _Adds(keras.layers.Layer):
    def __init__(self, loss: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__(name="adds")
        self.loss = loss

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        self.add_loss(self.loss(inputs))
        return inputs


class _Centred(keras.layers.Layer):
    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return inputs - ops.mean(inputs, axis=0, keepdims=True)


class _Kept(keras.metrics.Metric):
    """A total and a count, from a function of the batch."""

    def __init__(self, added: Loss, count: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__(name="kept")
        self.added, self.counted = added, count
        self.total = self.add_weight(name="total", initializer="zeros")
        self.count = self.add_weight(name="count", initializer="zeros")

    def update_state(self, y: tf.Tensor, predicted: tf.Tensor, sample_weight: object = None) -> None:
        self.total.assign_add(self.added(y, predicted))
        self.count.assign_add(self.counted(predicted))

    def result(self) -> tf.Tensor:
        return self.total / self.count


def _adds(name: str, loss: Callable[[tf.Tensor], tf.Tensor], only: str = "") -> Case:
    return Case(f"`add_loss({name})`", lambda side: _trained(side, flat(side, _Adds(loss)), loss="mse"), only=only)


def _normalized(side: Side) -> object:
    """Whether the layer was named; plain Keras says nothing."""
    handler = logging.handlers.BufferingHandler(1_000)
    log = logging.getLogger("elastable.worker.user_model.build")
    log.addHandler(handler)
    try:
        _trained(side, flat(side, keras.layers.BatchNormalization(name="normal")), loss="mse")
    finally:
        log.removeHandler(handler)
    warned = any("BatchNormalization ('normal')" in record.getMessage() for record in handler.buffer)
    return [float(warned or not side.stored)]


def _regularized(side: Side, **options: Keyword) -> object:
    """Every row once a batch, so that plain Keras penalises the same ones."""
    every = Side(stored=side.stored, every_row=True)
    model = small(every, embeddings_regularizer=keras.regularizers.L2(0.3))
    return trained(
        every, model, optimizer=keras.optimizers.SGD(0.02), run_eagerly=False, fit={"grads_to_wait": 2, "epochs": 2}
    )


def _two(side: Side, **losses: object) -> object:
    return _trained(side, two_outputs(side), y={"one": _y(side), "two": side.y}, loss=losses, metrics={"one": ["mae"]})


def _squares(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    return ops.square(y - predicted)


def _masked(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
    return tf.reduce_mean(tf.boolean_mask(_squares(y, predicted), _known(y)))


def _records(predicted: tf.Tensor) -> tf.Tensor:
    return ops.cast(ops.shape(predicted)[0], "float32")


CASES = [
    _loss("a mean over a boolean mask", _masked, only="tensorflow"),
    _loss(
        "a mean over `gather_nd(..., where(...))`",
        lambda y, p: tf.reduce_mean(tf.gather_nd(_squares(y, p), tf.where(_known(y)))),
        only="tensorflow",
    ),
    _loss(
        "a mean over `unique(...)`",
        lambda y, p: tf.reduce_mean(tf.unique(tf.round(y[:, 0]))[0]) * tf.reduce_mean(_squares(y, p)),
        only="tensorflow",
    ),
    _loss(
        "a sum over a mask divided by its number",
        lambda y, p: ops.divide_no_nan(
            ops.sum(_squares(y, p) * ops.cast(_known(y), "float32")), ops.sum(ops.cast(_known(y), "float32"))
        ),
    ),
    _loss(
        "`mean(square(a @ a.T - b @ b.T))`",
        lambda y, p: ops.mean(_squares(ops.matmul(y, ops.transpose(y)), ops.matmul(p, ops.transpose(p)))),
    ),
    _loss("values less the batch's mean", lambda y, p: _squares(y - ops.mean(y), p - ops.mean(p))),
    _loss("the three largest of a batch", lambda y, p: ops.mean(ops.top_k(ops.reshape(_squares(y, p), (-1,)), 2)[0])),
    _loss("`softmax(axis=0)`", lambda y, p: -y * ops.log_softmax(p, axis=0)),
    _loss("neighbours in the batch", lambda y, p: ops.mean(_squares(p[1:], p[:-1])) + ops.mean(_squares(y, p))),
    _loss("a difference that broadcasts `[n, 1] - [n]`", lambda y, p: _squares(y, p[:, 0])),
    _loss("a root of a mean", lambda y, p: ops.sqrt(ops.mean(_squares(y, p)))),
    _loss("a sum divided by records less one", lambda y, p: ops.sum(_squares(y, p)) / (_records(p) - 1)),
    _loss("a mean that the function takes, with `sample_weight`", lambda y, p: ops.mean(_squares(y, p)), weighted=True),
    _loss(
        "a quantile loss, with `sample_weight`", lambda y, p: ops.maximum(0.3 * (y - p), 0.7 * (p - y)), weighted=True
    ),
    _loss("`MeanSquaredError(reduction='sum')`", keras.losses.MeanSquaredError(reduction="sum")),
    _classes(
        "`SparseCategoricalCrossentropy(ignore_class=1)`",
        keras.losses.SparseCategoricalCrossentropy(ignore_class=1),
        sparse=True,
    ),
    _classes("`Dice()`", keras.losses.Dice()),
    _classes("`Circle()`", keras.losses.Circle(), sparse=True),
    Case(
        "`loss={'one': a sum, 'two': 'mae'}`",
        lambda side: _two(side, one=keras.losses.MeanSquaredError(reduction="sum"), two="mae"),
    ),
    Case(
        "`loss={'one': a mean over a mask, 'two': 'mae'}`",
        lambda side: _two(side, one=_masked, two="mae"),
        only="tensorflow",
    ),
    _adds(
        "a mean over positive activations",
        lambda x: 0.1 * tf.reduce_mean(tf.boolean_mask(ops.square(x), x > 0)),
        only="tensorflow",
    ),
    _adds("a penalty on covariances", lambda x: 0.1 * ops.mean(ops.square(ops.matmul(ops.transpose(x), x)))),
    _metric("a function that gives a value per record", lambda: _squares),
    _metric("a function that gives the batch's mean", lambda: lambda y, p: ops.mean(_squares(y, p))),
    _metric("a function that gives the batch's maximum", lambda: lambda y, p: ops.max(p)),
    _metric(
        "a class that adds sums and numbers of records", lambda: _Kept(lambda y, p: ops.sum(_squares(y, p)), _records)
    ),
    _metric("a class that adds the batch's maximum, and 1", lambda: _Kept(lambda y, p: ops.max(p), lambda p: 1.0)),
    Case(
        "`BatchNormalization`, in micro-batches",
        _normalized,
        "",
        "the statistics are those of a micro-batch, and a warning names the layer",
    ),
    Case(
        "a layer that subtracts the batch's mean",
        lambda side: _trained(side, flat(side, _Centred(name="centred")), loss="mse"),
    ),
    Case(
        "`LayerNormalization`", lambda side: _trained(side, flat(side, keras.layers.LayerNormalization()), loss="mse")
    ),
    Case("`Embedding(embeddings_regularizer=L2(0.3))`, each batch with every row", _regularized),
]
