"""One table that several models or optimizers train in turn, and what is loaded meanwhile: as in Keras, or refused."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.one_table import (
    IDS,
    START,
    TARGETS,
    assert_as_in_keras,
    by_batch,
    by_step,
    model_of,
    own_table,
    train,
)

GONE = r"'items': the optimizer '\w+' trained its table before, and another one since"


def pair(table: keras.layers.Layer, optimizer: Callable[[], object]) -> tuple[keras.Model, keras.Model]:
    models = model_of(table, optimizer()), model_of(table, optimizer())
    table.set_weights([START])
    return models


def adam() -> object:
    return keras.optimizers.Adam(0.05)


def sgd() -> object:
    return keras.optimizers.SGD(0.1)


def stepped(model: keras.Model) -> None:
    """A step of the user's own, in which plain Keras has a dense gradient, as `plain_table` does."""
    if isinstance(model.get_layer("items"), et.Embedding):
        by_step(model, lazy=False)
        return
    with tf.GradientTape() as tape:
        loss = tf.reduce_mean((model(tf.constant(IDS), training=True) - TARGETS) ** 2) + sum(model.losses)
    model.optimizer.apply_gradients(
        zip(tape.gradient(loss, model.trainable_variables), model.trainable_variables, strict=True)
    )


WAYS = {"train_on_batch": by_batch, "step": stepped, "fit": train}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("second", WAYS)
@pytest.mark.parametrize("first", WAYS)
def test_a_model_whose_slots_are_gone_is_refused(first: str, second: str) -> None:
    one, other = pair(own_table(), adam)
    WAYS[first](one)
    WAYS[second](other)
    before = one.get_weights()
    with pytest.raises(Unsupported, match=GONE):
        WAYS[first](one)
    for now, then in zip(one.get_weights(), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("way", WAYS)
def test_optimizers_without_slots_train_in_turn(way: str) -> None:
    def program(table: keras.layers.Layer) -> keras.Model:
        one, other = pair(table, sgd)
        for _ in range(3):
            WAYS[way](one)
            WAYS[way](other)
        return one

    assert_as_in_keras(program)


def test_an_optimizer_of_a_step_whose_slots_are_gone_is_refused() -> None:
    model, optimizer = model_of(own_table()), adam()
    by_step(model, optimizer)
    model.compile(sgd(), "mse")
    train(model)  # in a store of its own: rows have no slots there
    with pytest.raises(Unsupported, match=GONE):
        by_step(model, optimizer)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", WAYS)
def test_loaded_slots_stay_when_training_goes_on_at_once(way: str, tmp_path: Path) -> None:
    def program(table: keras.layers.Layer) -> keras.Model:
        model = model_of(table, adam())
        path = tmp_path / f"{model.name}.weights.h5"
        table.set_weights([START])
        WAYS[way](model)
        model.save_weights(path)
        WAYS[way](model)
        model.load_weights(path)
        WAYS[way](model)
        WAYS[way](model)
        train(model)
        return model

    assert_as_in_keras(program)


def test_slots_that_a_callback_loads_stay_in_the_next_fit(tmp_path: Path) -> None:
    class Loads(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            if epoch == 0:
                self.model.save_weights(tmp_path / f"{self.model.name}.weights.h5")
            elif epoch == 1:
                self.model.load_weights(tmp_path / f"{self.model.name}.weights.h5")

    def program(table: keras.layers.Layer) -> keras.Model:
        model = model_of(table)
        table.set_weights([START])
        train(model, epochs=3, callbacks=[Loads()])
        train(model)
        return model

    assert_as_in_keras(program)


@pytest.mark.parametrize("optimizer", [adam, sgd])
@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_batch_end"])
def test_a_table_is_not_trained_by_a_callback_meanwhile(hook: str, optimizer: Callable[[], object]) -> None:
    one, other = pair(own_table(), optimizer)
    callback = keras.callbacks.LambdaCallback(**{hook: lambda *_, **logs: by_batch(other)})
    with pytest.raises(Unsupported, match=r"'items': its table is being trained by fit of model"):
        train(one, callbacks=[callback])
    by_batch(other)


def test_a_callback_that_moves_a_table_is_refused() -> None:
    model = model_of(own_table(None))
    train(model)
    store = et.MemoryStore()
    callback = keras.callbacks.LambdaCallback(on_epoch_begin=lambda *_: model.get_layer("items").attach(store))
    with pytest.raises(Unsupported, match=r"'items': a callback put its table into another store"):
        train(model, callbacks=[callback])
