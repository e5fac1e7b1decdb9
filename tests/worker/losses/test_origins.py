"""What a loss was divided by is read from its graph, or it is unknown: nothing that joins records of a batch passes."""

import re
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32
from elastable.master.api import DivisorKind
from elastable.worker.losses.loss_terms import LossTerm, LossTerms
from elastable.worker.losses.origins import Origins
from elastable.worker.losses.recording import recording

Loss = Callable[[tf.Tensor, tf.Tensor], tf.Tensor]
ops = keras.ops
RANDOM = np.random.default_rng(3)
#: Two parts of a batch that differ: most of the first is not known (-1), the second is large.
PARTS: list[tuple[Float32, Float32]] = [
    (
        np.array([[-1, -1, 0.5, -1]] * 2 + [[-1, 0.2, 0.1, -1]] * 3, np.float32),
        RANDOM.normal(size=(5, 4)).astype(np.float32),
    ),
    (RANDOM.uniform(0.7, 7, (3, 4)).astype(np.float32), RANDOM.normal(size=(3, 4)).astype(np.float32)),
]
WHOLE = [np.concatenate(arrays) for arrays in zip(*PARTS, strict=True)]


def squares(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    return tf.square(y - p)


def known(y: tf.Tensor) -> tf.Tensor:
    return y > -0.5


def records(y: tf.Tensor) -> tf.Tensor:
    return tf.cast(tf.shape(y)[0], tf.float32)


def of_label(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    """The element of each record that `argmax(y)` names, by its place in the batch."""
    return tf.gather_nd(p, tf.stack([tf.range(tf.shape(p)[0]), tf.argmax(y, 1, tf.int32)], 1))


def masked_twice(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    mask = known(y)
    return tf.reduce_mean(squares(tf.boolean_mask(y, mask), tf.boolean_mask(p, mask)))


def attention(y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
    """Of each record's own elements."""
    parts = tf.reshape(p, [-1, 2, 2])
    mixed = tf.matmul(tf.nn.softmax(tf.matmul(parts, parts, transpose_b=True)), parts)
    return tf.reduce_mean(squares(y, tf.reshape(mixed, [tf.shape(y)[0], 4])))


MEANS: dict[str, Loss] = {
    "mean": lambda y, p: tf.reduce_mean(squares(y, p)),
    "mean of records' maxima": lambda y, p: ops.mean(ops.max(squares(y, p), axis=-1)),
    "sum by records": lambda y, p: tf.reduce_sum(squares(y, p)) / records(p),
    "sum by twice the elements": lambda y, p: tf.reduce_sum(squares(y, p)) / tf.cast(2 * tf.size(p), tf.float32),
    "mean by axis, then sum": lambda y, p: tf.reduce_sum(tf.reduce_mean(squares(y, p), 0) * [1.0, 2.0, 3.0, 4.0]),
    "flattened": lambda y, p: tf.reduce_mean(squares(tf.reshape(y, [-1]), tf.reshape(p, [-1]))),
    "transposed": lambda y, p: tf.reduce_mean(tf.reduce_max(squares(tf.transpose(y), tf.transpose(p)), 0)),
    "each record's own element": lambda y, p: tf.reduce_mean(of_label(y, p)),
    "each record's own softmax": lambda y, p: tf.reduce_mean(y * tf.nn.log_softmax(p)),
    "each record's own attention": attention,
    "one after the other": lambda y, p: tf.reduce_mean(tf.concat([squares(y, p), tf.abs(p)], 0)),
    "tiled constants": lambda y, p: tf.reduce_mean(squares(y, p) * tf.tile([[1.0, 2, 3, 4]], [tf.shape(y)[0], 1])),
    "einsum": lambda y, p: tf.reduce_mean(tf.einsum("ni,nj->nij", y, p)),
}
AMOUNTS: dict[str, Loss] = {
    "boolean mask": lambda y, p: tf.reduce_mean(tf.boolean_mask(squares(y, p), known(y))),
    "boolean mask of records": lambda y, p: tf.reduce_mean(tf.boolean_mask(squares(y, p), y[:, 1] > 0)),
    "the same mask twice": masked_twice,
    "where": lambda y, p: tf.reduce_mean(tf.gather_nd(squares(y, p), tf.where(known(y)))),
    "gathered records": lambda y, p: tf.reduce_mean(tf.gather(squares(y, p), tf.where(y[:, 1] > 0)[:, 0])),
    "sum by number of mask": lambda y, p: (
        tf.reduce_sum(tf.where(known(y), squares(y, p), 0.0)) / tf.reduce_sum(tf.cast(known(y), tf.float32))
    ),
    "mean by mean of mask": lambda y, p: (
        tf.reduce_mean(tf.where(known(y), squares(y, p), 0.0)) / tf.reduce_mean(tf.cast(known(y), tf.float32))
    ),
    "partition": lambda y, p: tf.reduce_mean(
        tf.dynamic_partition(squares(y, p)[:, 0], tf.cast(y[:, 1] > 0, tf.int32), 2)[1]
    ),
}
SUMS: dict[str, Loss] = {
    "sum": lambda y, p: ops.sum(squares(y, p)),
    "sum of a mask": lambda y, p: tf.reduce_sum(tf.boolean_mask(squares(y, p), known(y))),
    "product over records": lambda y, p: tf.reduce_sum(tf.matmul(y, p, transpose_a=True)),
    "tensordot": lambda y, p: tf.tensordot(y[:, 0], p[:, 0], 1),
    "einsum": lambda y, p: tf.einsum("ni,ni->", y, p),
    "half of the squares": lambda y, p: tf.nn.l2_loss(y - p),
    "sums by key": lambda y, p: tf.reduce_sum(tf.math.unsorted_segment_sum(p[:, 0], tf.cast(y[:, 1] > 0, tf.int32), 2)),
}
JOINED: dict[str, Loss] = {
    "pairs": lambda y, p: tf.reduce_mean(squares(y @ tf.transpose(y), p @ tf.transpose(p))),
    "pairs by einsum": lambda y, p: tf.reduce_mean(tf.einsum("ni,mi->nm", y, p)),
    "pairs by broadcasting": lambda y, p: tf.reduce_mean(squares(y[:, :1], p[:, 0])),
    "values per record from pairs": lambda y, p: squares(y[:, :1], p[:, 0]),
    "squares of a covariance": lambda y, p: tf.reduce_mean(tf.square(tf.matmul(y, p, transpose_a=True))),
    "less the mean": lambda y, p: tf.reduce_mean(squares(y, p - tf.reduce_mean(p, 0))),
    "by the standard deviation": lambda y, p: squares(y, p / ops.std(p)),
    "softmax of the batch": lambda y, p: y * tf.nn.log_softmax(p, axis=0),
    "maximum": lambda y, p: tf.reduce_max(squares(y, p)),
    "root of the mean": lambda y, p: tf.sqrt(tf.reduce_mean(squares(y, p))),
    "norm": lambda y, p: ops.norm(y - p),
    "unique": lambda y, p: tf.reduce_mean(tf.cast(tf.unique(tf.cast(y[:, 0], tf.int32))[0], tf.float32)),
    "the largest": lambda y, p: tf.reduce_mean(tf.math.top_k(squares(y, p)[:, 0], 2)[0]),
    "sorted": lambda y, p: tf.sort(squares(y, p), axis=0),
    "running sums": lambda y, p: tf.cumsum(squares(y, p)),
    "neighbours": lambda y, p: tf.reduce_mean(squares(p[1:], p[:-1])),
    "the first": lambda y, p: tf.reduce_mean(squares(y, p)) + p[0, 0],
    "rolled": lambda y, p: squares(y, tf.roll(p, 1, 0)),
    "reversed": lambda y, p: squares(y, tf.reverse(p, [0])),
    "shuffled": lambda y, p: squares(y, tf.random.shuffle(p)),
    "by place": lambda y, p: squares(y, p) * tf.cast(tf.range(tf.shape(p)[0]), tf.float32)[:, tf.newaxis],
    "in-batch negatives": lambda y, p: keras.losses.sparse_categorical_crossentropy(
        tf.range(tf.shape(p)[0]), y @ tf.transpose(p), from_logits=True
    ),
    "means by key": lambda y, p: tf.reduce_mean(
        tf.math.unsorted_segment_mean(p[:, 0], tf.cast(y[:, 1] > 0, tf.int32), 2)
    ),
    "records folded in twos": lambda y, p: tf.reduce_mean(tf.reduce_max(tf.reshape(p, [-1, 8]), 1)),
    "records less one": lambda y, p: tf.reduce_sum(squares(y, p)) / (records(p) - 1),
    "root of the records": lambda y, p: tf.reduce_sum(squares(y, p)) / tf.sqrt(records(p)),
    "at least one": lambda y, p: tf.reduce_sum(squares(y, p)) / tf.maximum(tf.reduce_sum(tf.abs(y)), 1.0),
    "weights by their mean": lambda y, p: tf.reduce_mean(squares(y, p) * y / tf.reduce_mean(y)),
    "another function": tf.function(lambda y, p: squares(y, p), autograph=False),
    "code without a graph": lambda y, p: squares(
        y, tf.ensure_shape(tf.numpy_function(np.copy, [p], p.dtype), [None, 4])
    ),
    "a loop": lambda y, p: squares(y, tf.map_fn(lambda row: row * 2, p)),
    "two masks": lambda y, p: tf.reduce_mean(tf.boolean_mask(y, y > 0) - tf.boolean_mask(p, p > 0)),
}


class OfFunction(keras.losses.Loss):
    """A loss given by a function, as `compile()` makes it."""

    def __init__(self, function: Loss) -> None:
        super().__init__()
        self.function = function

    def call(self, y: tf.Tensor, p: tf.Tensor) -> tf.Tensor:
        return self.function(y, p)


def terms_of(loss: Loss | keras.losses.Loss) -> tuple[list[LossTerm], Callable[..., list[list[tf.Tensor]]]]:
    """The terms of a loss that Keras reduces, and a function that computes their values and amounts of a batch."""
    found: list[LossTerm] = []

    def step(y: tf.Tensor, p: tf.Tensor) -> list[list[tf.Tensor]]:
        with recording() as recorded:
            value = (loss if isinstance(loss, keras.losses.Loss) else OfFunction(loss))(y, p)
        found[:] = LossTerms(recorded.losses, Origins((p, y), (), recorded.calls)).of(value)
        return [[term.value, tf.constant(0.0) if term.amount is None else term.amount] for term in found]

    step = tf.autograph.experimental.do_not_convert(step)
    traced = tf.function(step, input_signature=[tf.TensorSpec([None, 4])] * 2).get_concrete_function()
    return found, traced


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((name, DivisorKind.RECORDS) for name in MEANS),
        *((name, DivisorKind.AMOUNT) for name in AMOUNTS),
        *((name, DivisorKind.NOTHING) for name in SUMS),
    ],
)
def test_parts_of_a_batch_weighed_by_their_divisor_give_the_value_of_the_whole(name: str, kind: DivisorKind) -> None:
    losses = {DivisorKind.RECORDS: MEANS, DivisorKind.AMOUNT: AMOUNTS, DivisorKind.NOTHING: SUMS}[kind]
    terms, compute = terms_of(losses[name])
    assert {term.kind for term in terms} == {kind}
    parts = [compute(*map(tf.constant, part)) for part in PARTS]
    of_kind: dict[DivisorKind, list[list[float]]] = {
        DivisorKind.RECORDS: [[len(y)] * len(terms) for y, _ in PARTS],
        DivisorKind.AMOUNT: [[float(amount) for _, amount in part] for part in parts],
        DivisorKind.NOTHING: [[1] * len(terms)] * 2,
    }
    weights = of_kind[kind]
    total = 0.0
    for term in range(len(terms)):
        shares = [weight[term] for weight in weights]
        value = sum(share * float(part[term][0]) for share, part in zip(shares, parts, strict=True))
        total += value if kind is DivisorKind.NOTHING else value / sum(shares)
    whole = sum(float(value) for value, _ in compute(*map(tf.constant, WHOLE)))
    assert total == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("name", JOINED)
def test_what_joins_records_is_unknown_and_named_with_its_line(name: str) -> None:
    terms, _ = terms_of(JOINED[name])
    unknown = [term for term in terms if term.kind is None]
    assert unknown
    assert all(term.mixes for term in unknown)
    line = " " if name == "another function" else r" \(test_origins\.py:\d+\)"
    assert all(re.search(line, term.where) for term in unknown), [term.where for term in unknown]


@pytest.mark.parametrize("name", ["Circle", "Dice", "Tversky"])
def test_losses_of_keras_that_join_records_are_unknown(name: str) -> None:
    terms, _ = terms_of(getattr(keras.losses, name)())
    assert [term.kind for term in terms if term.kind is None] == [None]


def test_flat_values_of_a_ragged_batch_are_weighed_by_their_number() -> None:
    found: list[LossTerm] = []

    @tf.autograph.experimental.do_not_convert
    def step(ragged: tf.RaggedTensor) -> tf.Tensor:
        with recording() as recorded:
            loss = tf.reduce_mean(tf.square(ragged.flat_values))
        found[:] = LossTerms(recorded.losses, Origins((ragged,), (), recorded.calls)).of(loss)
        return found[0].amount

    spec = tf.RaggedTensorSpec([None, None], tf.float32, 1)
    traced = tf.function(step, input_signature=[spec])
    assert float(traced(tf.ragged.constant([[1.0], [2.0, 3.0]]))) == 3.0
    assert found[0].kind is DivisorKind.AMOUNT


class TestLayers:
    """Calls of Keras' layers keep records apart; what is inside of others is read."""

    @staticmethod
    def mixes(layer: Callable[[tf.Tensor], tf.Tensor]) -> bool:
        terms, _ = terms_of(lambda y, p: squares(y, layer(p)))
        return any(term.kind is None for term in terms)

    def test_those_of_keras(self) -> None:
        assert not self.mixes(keras.layers.Dense(4))
        assert not self.mixes(keras.Sequential([keras.layers.Reshape((2, 2)), keras.layers.LSTM(4)]))
        assert self.mixes(keras.layers.UnitNormalization(axis=0))

    def test_one_that_returns_what_it_was_given(self) -> None:
        """Its output is no new tensor, and its mask is older than its input."""

        dropout = keras.layers.Dropout(0.5)

        def masked(p: tf.Tensor) -> tf.Tensor:
            mask = tf.reduce_any(p > 0, 1)
            hidden = p * tf.cast(mask, tf.float32)[:, tf.newaxis]
            hidden._keras_mask = mask
            return dropout(hidden, training=False)

        assert not self.mixes(masked)
        assert not self.mixes(keras.layers.Dropout(0.5))

    def test_those_of_the_user(self) -> None:
        class Scaled(keras.layers.Layer):
            def call(self, inputs: tf.Tensor) -> tf.Tensor:
                return ops.tanh(inputs) * 2

        class Centred(keras.layers.Layer):
            def call(self, inputs: tf.Tensor) -> tf.Tensor:
                return inputs - ops.mean(inputs, axis=0)

        assert not self.mixes(Scaled())
        assert self.mixes(Centred())
        assert self.mixes(keras.Sequential([Centred(), keras.layers.Dense(4)]))
        assert not self.mixes(keras.layers.Dense(4, activation=lambda x: x * tf.sigmoid(x)))
        assert self.mixes(keras.layers.Dense(4, activation=lambda x: x / tf.reduce_max(x)))

    @pytest.mark.parametrize("joins", [False, True])
    def test_cells_of_the_user_in_the_loop_of_keras(self, joins: bool) -> None:
        class Cell(keras.layers.Layer):
            state_size = 4

            def call(self, inputs: tf.Tensor, states: list[tf.Tensor]) -> tuple[tf.Tensor, list[tf.Tensor]]:
                state = tf.concat([inputs, inputs], -1) + states[0]
                state = state - tf.reduce_mean(state, 0) if joins else tf.tanh(state)
                return state, [state]

        model = keras.Sequential([keras.layers.Reshape((2, 2)), keras.layers.RNN(Cell())])
        assert self.mixes(model) is joins

    def test_a_variable_that_was_assigned_from_the_batch(self) -> None:
        class Centre(keras.layers.Layer):
            def build(self, shape: object) -> None:
                self.centre = self.add_weight(shape=(4,), initializer="zeros", trainable=False)

            def call(self, inputs: tf.Tensor) -> tf.Tensor:
                self.centre.assign(ops.mean(inputs, axis=0))
                return inputs - self.centre

        layer = Centre()
        layer.build((None, 4))
        assert self.mixes(layer)
