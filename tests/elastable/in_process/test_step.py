"""`et.step` in a loop of one's own: the numbers of plain Keras, whatever tapes and losses there are."""

from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import ModelError, Unsupported
from tests.elastable.gan_job import LABELS, NOISE, Gan, dense, in_keras, in_store, net, require_same, rows, same_start

BATCH, STEPS = 16, 5
RANDOM = np.random.default_rng(0)
IDS = np.concatenate([np.arange(LABELS), RANDOM.integers(0, LABELS, BATCH - LABELS)])
REAL = RANDOM.normal(size=(BATCH, 2)).astype(np.float32)
Z = [tf.constant(RANDOM.normal(size=(BATCH, NOISE)).astype(np.float32)) for _ in range(STEPS)]


def gan(layer: Callable[..., object]) -> Gan:
    """Two networks, each with a table and an optimizer."""
    model = Gan(layer, lambda *_: None)
    model.compile(keras.optimizers.Adam(0.01), keras.optimizers.SGD(0.1, momentum=0.9))
    return model


def losses_of(
    model: Gan, z: tf.Tensor
) -> list[tuple[keras.Model, keras.optimizers.Optimizer, Callable[[], tf.Tensor]]]:
    """Of the discriminator, and of the generator: what is trained, by which optimizer, by which loss."""
    labels, real = tf.constant(IDS), tf.constant(REAL)
    return [
        (model.discriminator, model.judge, lambda: model.judge_loss(z, labels, real)),
        (model.generator, model.make, lambda: model.make_loss(z, labels)),
    ]


def test_a_gan_updates_its_networks_in_turn() -> None:
    """The generator's loss is computed with the discriminator's new weights and rows, as in Keras' own example."""
    ours, plain = gan(in_store), gan(in_keras)
    same_start(ours, plain)
    before = rows(ours)
    for z in Z:
        with et.step(ours) as step:
            for part, optimizer, loss in losses_of(ours, z):
                with tf.GradientTape() as tape:
                    found = loss()
                step.apply(tape, found, of=part, optimizer=optimizer)
        for part, optimizer, loss in losses_of(plain, z):
            with tf.GradientTape() as tape:
                found = loss()
            dense(part, tape, found, optimizer)
    require_same(ours, plain, before)
    assert [int(optimizer.iterations) for optimizer in (ours.judge, ours.make)] == [STEPS, STEPS]


def test_two_losses_of_one_forward_pass_with_a_persistent_tape() -> None:
    ours, plain = gan(in_store), gan(in_keras)
    same_start(ours, plain)
    before = rows(ours)
    for z in Z:
        with et.step(ours) as step, tf.GradientTape(persistent=True) as tape:
            losses = [(part, optimizer, loss()) for part, optimizer, loss in losses_of(ours, z)]
        for part, optimizer, found in losses:
            step.apply(tape, found, of=[part], optimizer=optimizer)
        with tf.GradientTape(persistent=True) as tape:
            losses = [(part, optimizer, loss()) for part, optimizer, loss in losses_of(plain, z)]
        gradients = [tape.gradient(found, part.trainable_weights) for part, _, found in losses]
        for (part, optimizer, _), each in zip(losses, gradients, strict=True):
            optimizer.apply(list(map(tf.convert_to_tensor, each)), part.trainable_weights)
    require_same(ours, plain, before)


def compiled(layer: Callable[[str], object], **arguments: object) -> keras.Model:
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
        dense(plain, tape, loss, plain.optimizer)
    require_same(ours, plain, before)
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
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean(model([REAL, IDS]))
        step.apply(tape, loss, **arguments)
