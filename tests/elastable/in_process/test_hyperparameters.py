"""Hyperparameters of an optimizer that are assigned after training began: refused, and as in Keras after `compile`."""

from collections.abc import Callable
from pathlib import Path

import keras
import pytest

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.one_table import (
    START,
    assert_as_in_keras,
    assert_same,
    by_batch,
    by_step,
    model_of,
    own_table,
    plain_table,
    train,
)
from tests.untyped import Keywords

K = keras.optimizers
Optimizer = Callable[[], object]

CHANGES: dict[str, tuple[Optimizer, Callable[[keras.Optimizer], None]]] = {}


def change(name: str, optimizer: Optimizer, value: object) -> None:
    CHANGES[name] = (optimizer, lambda it: setattr(it, name, value))


change("beta_1", lambda: K.Adam(0.05), 0.5)
change("epsilon", lambda: K.Adam(0.05), 0.3)
change("clipvalue", lambda: K.SGD(0.1), 0.01)
change("clipnorm", lambda: K.SGD(0.1), 0.01)
change("global_clipnorm", lambda: K.SGD(0.1), 0.01)
change("momentum", lambda: K.SGD(0.05, momentum=0.5), 0.9)
change("weight_decay", lambda: K.SGD(0.05, weight_decay=0.1), None)
change("learning_rate", lambda: K.SGD(K.schedules.CosineDecay(0.1, 9)), K.schedules.ExponentialDecay(0.1, 2, 0.5))
CHANGES["the schedule"] = (
    lambda: K.SGD(K.schedules.CosineDecay(0.1, 9)),
    lambda it: setattr(it._learning_rate, "decay_steps", 5),
)
CHANGES["exclude_from_weight_decay"] = (
    lambda: K.SGD(0.05, weight_decay=0.1),
    lambda it: it.exclude_from_weight_decay(var_names=["kernel"]),
)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("eager", [False, True])
@pytest.mark.parametrize("way", [train, by_batch])
@pytest.mark.parametrize("name", CHANGES)
def test_a_change_between_two_trainings_is_refused(name: str, way: Callable[[keras.Model], None], eager: bool) -> None:
    optimizer, assign = CHANGES[name]
    model = model_of(own_table(), optimizer(), run_eagerly=eager)
    way(model)
    assign(model.optimizer)
    before = model.get_weights()
    with pytest.raises(Unsupported, match=rf"{name}.* was changed from .* after training began: call model.compile"):
        way(model)
    assert all((now == then).all() for now, then in zip(model.get_weights(), before, strict=True))


@pytest.mark.parametrize("hook", ["on_train_begin", "on_epoch_begin", "on_epoch_end", "on_train_batch_end"])
@pytest.mark.parametrize("name", ["beta_1", "clipvalue"])
def test_a_change_in_a_callback_is_refused(name: str, hook: str) -> None:
    optimizer, assign = CHANGES[name]
    model = model_of(own_table(), optimizer())
    callback = keras.callbacks.LambdaCallback(**{hook: lambda *_, **logs: assign(model.optimizer)})
    with pytest.raises(Unsupported, match=rf"{name} of the optimizer .* after training began: compile it anew between"):
        train(model, epochs=2, callbacks=[callback])


def test_a_change_in_a_loop_of_steps_is_refused() -> None:
    model = model_of(own_table())
    by_step(model)
    model.optimizer.learning_rate = 0.01
    by_step(model)
    model.optimizer.beta_2 = 0.9
    with pytest.raises(Unsupported, match=r"beta_2 of the optimizer .* from 0.999 to 0.9 .*: take a new optimizer"):
        by_step(model)


def test_that_of_a_tables_own_optimizer_is_refused() -> None:
    model = model_of(et.Embedding(12, 3, name="items", optimizer=K.Adagrad(0.1)))
    train(model)
    model.get_layer("items").optimizer.learning_rate = 0.2
    train(model)
    model.get_layer("items").optimizer.epsilon = 0.5
    with pytest.raises(Unsupported, match=r"epsilon of the optimizer 'adagrad"):
        train(model)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in CHANGES if name != "exclude_from_weight_decay"])
def test_after_compile_they_are_as_in_keras_and_slots_stay(name: str) -> None:
    optimizer, assign = CHANGES[name]

    def program(table: keras.layers.Layer) -> keras.Model:
        model = model_of(table, optimizer())
        table.set_weights([START])
        train(model)
        assign(model.optimizer)
        model.compile(model.optimizer, "mse")
        train(model)
        return model

    assert_as_in_keras(program)


def test_slots_that_the_optimizer_does_not_have_are_refused() -> None:
    model = model_of(own_table(), K.SGD(0.1))
    train(model)
    model.optimizer.momentum = 0.9
    model.compile(model.optimizer, "mse")
    with pytest.raises(Unsupported, match=r"'items'.*needs slots that it does not have"):
        train(model)


def test_slots_are_loaded_into_other_hyperparameters_as_in_keras(tmp_path: Path) -> None:
    models = []
    for number, table in enumerate((plain_table, own_table)):
        first, second = (model_of(table(), K.Adam(0.05, **other)) for other in (Keywords(), Keywords(beta_1=0.5)))
        for model in (first, second):
            model.get_layer("items").set_weights([START])
            train(model)
        first.save_weights(tmp_path / f"{number}.weights.h5")
        second.load_weights(tmp_path / f"{number}.weights.h5")
        train(second)
        models.append(second)
    assert_same(models[1], models[0])


def test_before_training_began_they_may_be_assigned() -> None:
    model = model_of(own_table(), K.Adam(0.05, use_ema=True))
    with pytest.raises(Unsupported, match="use_ema=True"):
        train(model)
    model.optimizer.use_ema = False
    train(model)
