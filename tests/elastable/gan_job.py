"""A GAN whose networks have a table and an optimizer each, and two losses: as jobs, and in plain Keras."""

from collections.abc import Callable
from typing import Any

import keras
import numpy as np
import tensorflow as tf

import elastable as et
from tests.untyped import Keyword

LABELS, DIM, NOISE, RECORDS, MICRO = 8, 4, 3, 40, 4
RANDOM = np.random.default_rng(0)
IDS = np.concatenate([np.arange(LABELS), RANDOM.integers(0, LABELS, RECORDS - LABELS)])
REAL = RANDOM.normal(size=(RECORDS, 2)).astype(np.float32)
Z = RANDOM.normal(size=(RECORDS, NOISE)).astype(np.float32)
DATA = ([Z, IDS], REAL)

Layer = Callable[..., object]


def in_store(name: str, **arguments: Keyword) -> keras.layers.Layer:
    return et.Embedding(LABELS, DIM, name=name, **arguments)


def in_keras(name: str, **arguments: object) -> keras.layers.Layer:
    return keras.layers.Embedding(LABELS, DIM, name=name, **arguments)


def net(embedding: keras.layers.Layer, units: int, inputs: int, seed: int) -> keras.Model:
    """A conditional network: something and a label go in."""
    given, label = keras.Input((inputs,)), keras.Input((), dtype="int64")
    start = keras.initializers.GlorotUniform(seed=seed)
    joined = keras.layers.Concatenate()([given, embedding(label)])
    hidden = keras.layers.Dense(6, "tanh", kernel_initializer=start)(joined)
    return keras.Model([given, label], keras.layers.Dense(units, kernel_initializer=start)(hidden))


class Gan(keras.Model):
    """Written as Keras' own example; `updates` takes the steps of the discriminator and the generator."""

    def __init__(self, layer: Layer, updates: Callable[..., Any], **arguments: object) -> None:
        super().__init__()
        self.updates = updates
        self.generator = net(layer("makes", **arguments), 2, NOISE, 1)
        self.discriminator = net(layer("judges", **arguments), 1, 2, 2)
        self.judged = keras.metrics.Mean(name="judged")
        self.fooled = keras.metrics.Mean(name="fooled")

    def compile(self, judge: keras.optimizers.Optimizer, make: keras.optimizers.Optimizer) -> None:
        super().compile()
        self.judge, self.make = judge, make

    def build(self, shape: object = None) -> None:
        self.built = True

    def judge_loss(self, z: tf.Tensor, labels: tf.Tensor, real: tf.Tensor) -> object:
        false, true = self.discriminator([self.generator([z, labels]), labels]), self.discriminator([real, labels])
        return tf.reduce_mean(tf.nn.softplus(false)) + tf.reduce_mean(tf.nn.softplus(-true))

    def make_loss(self, z: tf.Tensor, labels: tf.Tensor) -> tf.Tensor:
        return tf.reduce_mean(tf.nn.softplus(-self.discriminator([self.generator([z, labels]), labels])))

    def call(self, inputs: tf.Tensor) -> tf.Tensor:
        return self.generator(inputs)

    def train_step(self, data: tuple[tf.Tensor, ...]) -> dict[str, tf.Tensor]:
        (z, labels), real = data[:2]  # `train_on_batch` of Keras adds a sample_weight of None
        judged, fooled = self.updates(self, z, labels, real)
        self.judged.update_state(judged, sample_weight=tf.shape(z)[0])
        self.fooled.update_state(fooled, sample_weight=tf.shape(z)[0])
        return {"judged": self.judged.result(), "fooled": self.fooled.result()}


def tables(model: keras.Model) -> dict[str, keras.layers.Layer]:
    kinds = (et.Embedding, keras.layers.Embedding)
    return {layer.name: layer for layer in model._flatten_layers() if isinstance(layer, kinds)}


def rows(model: keras.Model) -> dict[str, np.ndarray]:
    """All rows of all tables, wherever they are."""
    return {
        name: layer.read_rows(np.arange(LABELS)) if isinstance(layer, et.Embedding) else np.asarray(layer.embeddings)
        for name, layer in tables(model).items()
    }


def same_start(ours: keras.Model, plain: keras.Model) -> None:
    """Gives the plain model the rows that ours begins with."""
    for name, layer in tables(plain).items():
        layer.set_weights([tables(ours)[name].read_rows(np.arange(LABELS))])


def require_same(
    mine: keras.Model, plain: keras.Model, before: dict[str, np.ndarray], moved: tuple[str, ...] = ("makes", "judges")
) -> None:
    """Every row and dense weight is that of plain Keras; these tables have moved, and no others."""
    for name, expected in rows(plain).items():
        assert (np.abs(expected - before[name]).max() > 1e-4) == (name in moved)
        np.testing.assert_allclose(rows(mine)[name], expected, rtol=1e-4, atol=1e-5, err_msg=name)
    for weight, expected in zip(mine.weights, plain.weights, strict=True):
        np.testing.assert_allclose(weight, expected, rtol=1e-4, atol=1e-5, err_msg=weight.path)


def dense(part: keras.Model, tape: Any, loss: tf.Tensor, optimizer: keras.optimizers.Optimizer) -> None:
    """An update in plain Keras, with the gradients of tables as dense ones; unreached variables take no step."""
    gradients = tape.gradient(loss, part.trainable_weights)
    gradients = [None if each is None else tf.convert_to_tensor(each) for each in gradients]
    if not optimizer.built:
        optimizer.build(part.trainable_weights)
    reached = [
        (each, weight) for each, weight in zip(gradients, part.trainable_weights, strict=True) if each is not None
    ]
    optimizer.apply([each for each, _ in reached], [weight for _, weight in reached])


def in_turn(model: keras.Model, z: tf.Tensor, labels: tf.Tensor, real: tf.Tensor) -> object:
    """The generator's loss is computed with the discriminator's new weights: refused in et.fit and in jobs."""
    with et.step(model) as step:
        with tf.GradientTape() as tape:
            judged = model.judge_loss(z, labels, real)
        step.apply(tape, judged, of=model.discriminator, optimizer=model.judge)
        with tf.GradientTape() as tape:
            fooled = model.make_loss(z, labels)
        step.apply(tape, fooled, of=model.generator, optimizer=model.make)
    return judged, fooled


def at_once(model: keras.Model, z: tf.Tensor, labels: tf.Tensor, real: tf.Tensor) -> object:
    """Both gradients at the same weights, as in TensorFlow's DCGAN."""
    with et.step(model) as step:
        with tf.GradientTape() as judging, tf.GradientTape() as making:
            judged, fooled = model.judge_loss(z, labels, real), model.make_loss(z, labels)
        step.apply(judging, judged, of=model.discriminator, optimizer=model.judge)
        step.apply(making, fooled, of=[model.generator], optimizer=model.make)
    return judged, fooled


def at_once_plainly(model: keras.Model, z: tf.Tensor, labels: tf.Tensor, real: tf.Tensor) -> object:
    """`at_once` in plain Keras."""
    with tf.GradientTape() as judging, tf.GradientTape() as making:
        judged, fooled = model.judge_loss(z, labels, real), model.make_loss(z, labels)
    dense(model.discriminator, judging, judged, model.judge)
    dense(model.generator, making, fooled, model.make)
    return judged, fooled


def model(layer: Layer = in_store, updates: Callable[..., Any] = at_once) -> Gan:
    """The model of the job; its tables begin alike wherever they are."""

    def seeded(name: str) -> keras.layers.Layer:
        return layer(name, embeddings_initializer=keras.initializers.RandomUniform(-0.5, 0.5, seed=len(name)))

    made = Gan(seeded, updates)
    made.compile(keras.optimizers.Adam(0.02), keras.optimizers.SGD(0.1, momentum=0.9))
    return made


def data(split: str) -> object:
    return et.NumpyReader(*DATA) if split == "train" else None
