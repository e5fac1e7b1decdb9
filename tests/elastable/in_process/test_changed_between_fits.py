"""What a program assigns between two trainings without `compile`: Keras trains on with the trace of the first."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.one_table import DIM, IDS, ROWS, START, TARGETS, assert_same, own_table
from tests.untyped import Keyword

WEIGHT = [1.0]
GLOBALS = SimpleNamespace(slope=0.5)
LABELS = (TARGETS > 0).astype(np.float32)


def scaled(x: tf.Tensor) -> tf.Tensor:
    return GLOBALS.slope * x


def plain_table() -> keras.layers.Layer:
    return keras.layers.Embedding(ROWS, DIM, name="items")


def loss_of(weight: list[float]) -> Callable[..., tf.Tensor]:
    return lambda y, p: weight[0] * tf.reduce_mean(tf.square(y - p), axis=-1)


def model_of(table: keras.layers.Layer, **compiled: object) -> keras.Model:
    ids = keras.Input((4,), dtype="int64")
    x = keras.layers.Flatten()(table(ids))
    x = keras.layers.BatchNormalization(name="norm")(keras.layers.Dropout(0.1, name="drop")(x))
    kernel = {"kernel_initializer": keras.initializers.GlorotUniform(seed=1)}
    x = keras.layers.Dense(3, "relu", kernel_regularizer=keras.regularizers.L2(0.1), name="hidden", **kernel)(x)
    model = keras.Model(ids, keras.layers.Dense(1, scaled, name="out", **kernel)(x))
    model.compile(keras.optimizers.SGD(0.05), **{"loss": loss_of(WEIGHT), **compiled})
    table.set_weights([START])
    return model


def of_layer(name: str, attribute: str, value: object) -> Callable[[keras.Model], None]:
    return lambda model: setattr(model.get_layer(name), attribute, value)


CHANGES: dict[str, Callable[[keras.Model], None]] = {
    "layer 'drop'.rate": of_layer("drop", "rate", 0.9),
    "layer 'norm'.momentum": of_layer("norm", "momentum", 0.1),
    "layer 'hidden'.activation": of_layer("hidden", "activation", keras.activations.tanh),
    "layer 'hidden'.kernel_regularizer.l2": lambda model: setattr(
        model.get_layer("hidden").kernel_regularizer, "l2", 0.9
    ),
    "'GLOBALS' in layer 'out'.activation.slope": lambda model: setattr(GLOBALS, "slope", 0.1),
    "'weight' in loss": lambda model: WEIGHT.__setitem__(0, 0.1),
}


def fit(model: keras.Model, by: Callable[..., object] = keras.Model.fit, **how: Keyword) -> None:
    by(model, IDS, LABELS, batch_size=8, shuffle=False, verbose=0, **how)


et_fit = partial(fit, by=et.fit, lazy=None)
offloaded = partial(et_fit, offload_embeddings_above=9)


def by_batch(model: keras.Model) -> None:
    model.train_on_batch(IDS, LABELS)


WAYS: dict[str, tuple[Callable[[], keras.layers.Layer], Callable[..., None], Callable[..., None]]] = {
    "fit": (own_table, fit, fit),
    "et.fit": (own_table, et_fit, et_fit),
    "offloaded": (plain_table, offloaded, offloaded),
    "Keras, then offloaded": (plain_table, fit, offloaded),
    "batch, then fit": (own_table, by_batch, fit),
    "fit, then batch": (own_table, fit, by_batch),
}


@pytest.fixture(autouse=True)
def start() -> None:
    GLOBALS.slope, WEIGHT[0] = 0.5, 1.0


@pytest.mark.sampled(15)
@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_is_refused_by_name(name: str, way: str) -> None:
    table, first, second = WAYS[way]
    model = model_of(table())
    first(model)
    CHANGES[name](model)
    with pytest.raises(Unsupported, match=r"was changed from .* Keras would train on with .*: call model.c") as error:
        second(model)
    assert name in str(error.value)


@pytest.mark.sampled(12)
@pytest.mark.parametrize(("eager", "way"), [(False, by_batch), (True, fit), (True, by_batch)])
@pytest.mark.parametrize("name", CHANGES)
def test_kept_traces_and_eager_models_as_in_keras(name: str, eager: bool, way: Callable[[keras.Model], None]) -> None:
    models = []
    for table in (plain_table(), own_table()):
        GLOBALS.slope, WEIGHT[0] = 0.5, 1.0
        keras.utils.set_random_seed(1)
        model = model_of(table, run_eagerly=eager)
        way(model)
        if name != "layer 'drop'.rate":  # draws are not Keras' in number
            CHANGES[name](model)
        way(model)
        models.append(model)
    assert_same(models[1], models[0])


@pytest.mark.parametrize("way", [fit, offloaded])
def test_after_compile_it_is_as_in_keras(way: Callable[[keras.Model], None]) -> None:
    models = []
    for table, train in ((plain_table, fit), (own_table, fit) if way is fit else (plain_table, way)):
        model = model_of(table())
        model.get_layer("drop").rate = 0.0
        for rate in (0.1, 0.9):
            CHANGES["layer 'hidden'.kernel_regularizer.l2"](model)
            model.get_layer("norm").momentum = rate
            model.compile(model.optimizer, model.loss)
            train(model)
        models.append(model)
    assert_same(models[1], models[0])


def test_settings_of_losses_and_metrics_are_refused() -> None:
    smooth = keras.losses.BinaryCrossentropy(from_logits=True)
    accuracy = keras.metrics.BinaryAccuracy(threshold=0.5)
    model = model_of(own_table(), loss=smooth, metrics=[accuracy])
    fit(model)
    fit(model)
    smooth._fn_kwargs["label_smoothing"] = 0.3
    with pytest.raises(Unsupported, match="label_smoothing"):
        fit(model)
    model.compile(model.optimizer, smooth, metrics=[accuracy])
    fit(model)
    accuracy._fn_kwargs["threshold"] = 0.9
    with pytest.raises(Unsupported, match="threshold"):
        fit(model)


def test_a_new_train_function_within_a_fit_is_refused_with_other_values() -> None:
    model = model_of(own_table())

    def change(epoch: int, logs: object) -> None:
        model.get_layer("norm").momentum = 0.5
        model.make_train_function(force=True)

    callback = keras.callbacks.LambdaCallback(on_epoch_end=change)
    with pytest.raises(Unsupported, match=r"'norm'.momentum was changed from 0.99 to 0.5"):
        model.fit(IDS, LABELS, epochs=2, verbose=0, callbacks=[callback])


def test_a_hyperparameter_changed_between_keras_own_fit_and_an_offloaded_one_is_refused() -> None:
    model = model_of(plain_table())
    fit(model)
    model.optimizer.learning_rate = 0.01
    offloaded(model)
    model = model_of(plain_table())
    fit(model)
    model.optimizer.clipvalue = 0.5
    with pytest.raises(Unsupported, match=r"clipvalue of the optimizer .* from None to 0.5 after training began: call"):
        offloaded(model)
