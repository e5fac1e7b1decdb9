"""`et.step` in a loop of one's own: the numbers of plain Keras, whatever tapes and losses there are."""

from __future__ import annotations

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import ModelError, Unsupported
from tests.untyped import Keyword

LABELS, DIM, NOISE, BATCH, STEPS = 8, 4, 3, 16, 5
RANDOM = np.random.default_rng(0)
IDS = np.concatenate([np.arange(LABELS), RANDOM.integers(0, LABELS, BATCH - LABELS)])
REAL = RANDOM.normal(size=(BATCH, 2)).astype(np.float32)
Z = [tf.constant(RANDOM.normal(size=(BATCH, NOISE)).astype(np.float32)) for _ in range(STEPS)]
Rows = dict[str, np.ndarray]


def in_store(name: str, **arguments: Keyword) -> keras.layers.Layer:
    """A table in a store."""
    return et.Embedding(LABELS, DIM, name=name, **arguments)


def in_keras(name: str, **arguments: object) -> keras.layers.Layer:
    """The same in plain Keras, with a dense gradient: Keras' Adam takes the sum of an id's gradients then."""
    return keras.layers.Embedding(LABELS, DIM, name=name, **arguments)


def net(embedding: keras.layers.Layer, units: int, inputs: int, seed: int) -> keras.Model:
    """A conditional network: something and a label go in."""
    given, label = keras.Input((inputs,)), keras.Input((), dtype="int64")
    start = keras.initializers.GlorotUniform(seed=seed)
    joined = keras.ops.concatenate([given, embedding(label)], axis=1)
    hidden = keras.layers.Dense(6, "tanh", kernel_initializer=start)(joined)
    return keras.Model([given, label], keras.layers.Dense(units, kernel_initializer=start)(hidden))


class Gan(keras.Model):
    """Two networks, each with a table and an optimizer of its own."""

    def __init__(self, layer: Callable[..., object]) -> None:
        super().__init__()
        self.generator = net(layer("makes"), 2, NOISE, 1)
        self.discriminator = net(layer("judges"), 1, 2, 2)
        self.optimizers = (keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9))

    def losses_of(self, real: tf.Tensor, labels: tf.Tensor, z: tf.Tensor) -> tuple[object, object]:
        """Of the discriminator, and of the generator."""
        real, labels = tf.constant(real), tf.constant(labels)
        made = self.generator([z, labels])
        false, true = self.discriminator([made, labels]), self.discriminator([real, labels])
        judged = tf.reduce_mean(tf.nn.softplus(false)) + tf.reduce_mean(tf.nn.softplus(-true))
        return judged, tf.reduce_mean(tf.nn.softplus(-false))


def same_start(ours: object, plain: object) -> None:
    """Gives the plain model the rows that ours begins with."""
    for name, layer in tables(plain).items():
        layer.set_weights([tables(ours)[name].read_rows(np.arange(LABELS))])


def tables(model: keras.Model) -> dict[str, keras.layers.Layer]:
    """Embedding layers by name."""
    kinds = (et.Embedding, keras.layers.Embedding)
    return {layer.name: layer for layer in model._flatten_layers() if isinstance(layer, kinds)}


def rows(model: keras.Model) -> Rows:
    """All rows of all tables, wherever they are."""
    found = {}
    for name, layer in tables(model).items():
        in_store = isinstance(layer, et.Embedding)
        found[name] = layer.read_rows(np.arange(LABELS)) if in_store else np.asarray(layer.embeddings)
    return found


def assert_same(ours: keras.Model, plain: keras.Model, before: Rows, tolerance: float = 1e-5) -> None:
    """Every row, dense weight and iteration count is that of plain Keras; every table has moved."""
    for name, expected in rows(plain).items():
        assert np.abs(expected - before[name]).max() > 1e-4
        np.testing.assert_allclose(rows(ours)[name], expected, rtol=1e-4, atol=tolerance, err_msg=name)
    for mine, weight in zip(ours.weights, plain.weights, strict=True):
        np.testing.assert_allclose(mine, weight, rtol=1e-4, atol=tolerance)


def test_a_gan_updates_its_networks_in_turn() -> None:
    """The generator's loss is computed with the discriminator's new weights and rows, as in Keras' own example."""
    ours, plain = Gan(in_store), Gan(in_keras)
    same_start(ours, plain)
    before = rows(ours)
    for z in Z:
        with et.step(ours) as step:
            for place, part in ((0, ours.discriminator), (1, ours.generator)):
                with tf.GradientTape() as tape:
                    loss = ours.losses_of(REAL, IDS, z)[place]
                step.apply(tape, loss, of=part, optimizer=ours.optimizers[place])
        for place, part in ((0, plain.discriminator), (1, plain.generator)):
            with tf.GradientTape() as tape:
                loss = plain.losses_of(REAL, IDS, z)[place]
            dense(part, tape.gradient(loss, part.trainable_weights), plain.optimizers[place])
    assert_same(ours, plain, before)
    assert [int(optimizer.iterations) for optimizer in ours.optimizers] == [STEPS, STEPS]


def dense(part: keras.Model, gradients: tf.Tensor, optimizer: keras.optimizers.Optimizer) -> None:
    """Applies gradients as Keras would, those of tables as dense ones."""
    optimizer.apply([tf.convert_to_tensor(gradient) for gradient in gradients], part.trainable_weights)


def test_two_losses_of_one_forward_pass_with_a_persistent_tape() -> None:
    ours, plain = Gan(in_store), Gan(in_keras)
    same_start(ours, plain)
    before = rows(ours)
    for z in Z:
        with et.step(ours) as step, tf.GradientTape(persistent=True) as tape:
            losses = ours.losses_of(REAL, IDS, z)
        step.apply(tape, losses[0], of=[ours.discriminator], optimizer=ours.optimizers[0])
        step.apply(tape, losses[1], of=[ours.generator], optimizer=ours.optimizers[1])
        with tf.GradientTape(persistent=True) as tape:
            losses = plain.losses_of(REAL, IDS, z)
        parts = (plain.discriminator, plain.generator)
        found = [tape.gradient(loss, part.trainable_weights) for loss, part in zip(losses, parts, strict=True)]
        for part, gradients, optimizer in zip(parts, found, plain.optimizers, strict=True):
            dense(part, gradients, optimizer)
    assert_same(ours, plain, before)


def compiled(layer: Callable[[str], object], **arguments: object) -> keras.Model:
    """One network with the optimizer of `compile()`."""
    model = net(layer("judges"), 1, 2, 2)
    model.compile(keras.optimizers.Adagrad(0.1, **arguments), "mse")
    return model


@pytest.mark.parametrize("clipping", [{}, {"global_clipnorm": 0.05}])
def test_the_whole_model_with_the_optimizer_of_compile(clipping: dict[str, float]) -> None:
    ours, plain = compiled(in_store, **clipping), compiled(in_keras, **clipping)
    same_start(ours, plain)
    before = rows(ours)
    for _ in range(STEPS):
        with et.step(ours) as step:
            with tf.GradientTape() as tape:
                loss = ours.compute_loss(y=REAL[:, :1], y_pred=ours([REAL, IDS], training=True))
            step.apply(tape, loss)
        with tf.GradientTape() as tape:
            loss = plain.compute_loss(y=REAL[:, :1], y_pred=plain([REAL, IDS], training=True))
        dense(plain, tape.gradient(loss, plain.trainable_weights), plain.optimizer)
    assert_same(ours, plain, before)
    assert ours.predict([REAL, IDS], verbose=0) == pytest.approx(plain.predict([REAL, IDS], verbose=0), abs=1e-4)


def test_a_frozen_table_stays_and_a_call_of_a_layer_twice_counts_twice() -> None:
    layer, still = in_store("twice"), in_store("still")
    model = keras.Sequential([layer, still])  # a holder of both
    model.compile(keras.optimizers.SGD(1.0))
    still.trainable = False
    before = {each.name: each.read_rows(np.arange(LABELS)) for each in (layer, still)}
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(layer(np.array([1, 2])) + 2.0 * layer(np.array([2, 3])) * still(np.array([0, 0])))
        step.apply(tape, loss)
    moved = before["twice"] - layer.read_rows(np.arange(LABELS))
    factor = 2.0 * before["still"][0]
    np.testing.assert_allclose(moved[:4], [0 * factor, 0 * factor + 1, factor + 1, factor], atol=1e-6)
    np.testing.assert_array_equal(still.read_rows(np.arange(LABELS)), before["still"])


def test_a_table_that_a_loss_does_not_reach_takes_no_step_and_does_not_decay() -> None:
    moved, still = in_store("moved"), in_store("still")
    model = keras.Sequential([moved, still])  # a holder of both
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.5))
    before = [each.read_rows(np.arange(LABELS)) for each in (moved, still)]
    for _ in range(2):
        with et.step(model, lazy=False) as step:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(moved(np.array([1, 2])))
            step.apply(tape, loss)
    assert not np.isclose(moved.read_rows(np.arange(LABELS)), before[0]).any()
    np.testing.assert_array_equal(still.read_rows(np.arange(LABELS)), before[1])


def test_a_loop_goes_on_where_fit_ended_and_fit_where_the_loop_did() -> None:
    made = []
    for _ in range(2):
        keras.utils.set_random_seed(1)
        made.append(compiled(in_store))
    (one, other), x = made, (REAL, IDS)
    et.fit(one, (x, REAL[:, :1]), epochs=3, batch_size=BATCH, shuffle=False, verbose=False)
    et.fit(other, (x, REAL[:, :1]), batch_size=BATCH, shuffle=False, verbose=False)
    with et.step(other) as step:
        with tf.GradientTape() as tape:
            loss = other.compute_loss(y=REAL[:, :1], y_pred=other(x, training=True))
        step.apply(tape, loss)
    et.fit(other, (x, REAL[:, :1]), epochs=3, initial_epoch=2, batch_size=BATCH, shuffle=False, verbose=False)
    np.testing.assert_allclose(rows(other)["judges"], rows(one)["judges"], rtol=1e-5, atol=1e-7)


def test_what_a_step_cannot_honour_is_refused_by_name() -> None:
    with pytest.raises(ModelError, match="has no optimizer"):
        apply_once(net(in_store("judges"), 1, 2, 2))
    model = compiled(in_store)
    with tf.GradientTape() as tape:
        pass
    with pytest.raises(ModelError, match="depends on no variable and on no table"), et.step(model) as step:
        step.apply(tape, tf.constant(1.0))
    apply_once(model)
    with pytest.raises(Unsupported, match=r"is given for other layers than before"):
        apply_once(model, of=model.layers[-1])
    with pytest.raises(Unsupported, match=r"table 'judges' is trained by two optimizers"):
        apply_once(model, optimizer=keras.optimizers.SGD(0.1))
    with pytest.raises(Unsupported, match="embeddings_regularizer out"):
        apply_once(compiled(lambda name: in_store(name, embeddings_regularizer="l2")))
    with pytest.raises(Unsupported, match="without @tf"):
        tf.function(lambda: apply_once(model))()


def apply_once(model: keras.Model, **arguments: object) -> None:
    """One step of `et.step`."""
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model([REAL, IDS]))
        step.apply(tape, loss, **arguments)
