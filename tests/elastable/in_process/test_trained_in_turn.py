"""One table under several models, optimizers and hyperparameters, in turn or meanwhile: as in Keras, or refused."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.worker.rows.saved_rows import leaving_rows_out
from tests.elastable.one_table import (
    DIM,
    IDS,
    ROWS,
    START,
    TARGETS,
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


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(3)
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


@pytest.mark.sampled(4)
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


@pytest.mark.sampled(3)
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


# Hyperparameters that are assigned after training began


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


@pytest.mark.sampled(9)
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


@pytest.mark.parametrize(
    ("name", "hook"),
    [
        ("beta_1", "on_train_begin"),
        ("clipvalue", "on_epoch_begin"),
        ("beta_1", "on_epoch_end"),
        ("clipvalue", "on_train_batch_end"),
    ],
)
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


@pytest.mark.sampled(4)
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


# A frozen model that another one's loss calls: a teacher, whose rows are constants


def student_of(teacher: keras.Model, table: keras.layers.Layer) -> keras.Model:
    """A model that learns what the teacher says, too, without holding it."""

    class Student(keras.Model):
        def compute_loss(
            self, x: object = None, y: object = None, y_pred: object = None, sample_weight: object = None,
            training: bool = True,
        ) -> object:  # fmt: skip
            own = super().compute_loss(x, y, y_pred, sample_weight)
            return own + keras.ops.mean((y_pred - teacher(x)) ** 2)

    ids = keras.Input((4,), dtype="int64")
    kernel = keras.initializers.GlorotUniform(seed=2)
    student = Student(ids, keras.layers.Dense(1, kernel_initializer=kernel)(keras.layers.Flatten()(table(ids))))
    table.set_weights([START * 0.5])
    student.compile(keras.optimizers.Adam(0.05), "mse")
    return student


def freeze(model: keras.Model) -> None:
    for layer in model.layers:
        layer.trainable = False


@pytest.mark.sampled(2)
@pytest.mark.parametrize("way", ["fit", "train_on_batch"])
def test_a_frozen_teacher_in_a_closure_is_read_as_it_is(way: str) -> None:
    found = []
    for make in (plain_table, own_table):  # both have the table "items": each reads its own
        teacher = model_of(make())
        teacher.get_layer("items").set_weights([START])
        train(teacher)
        freeze(teacher)
        student = student_of(teacher, make())
        train(student, epochs=2) if way == "fit" else student.train_on_batch(IDS, TARGETS)
        student.evaluate(IDS, TARGETS, verbose=0)
        found.append(student)
    assert_same(found[1], found[0])


def test_one_that_could_be_trained_is_refused() -> None:
    teacher = model_of(et.Embedding(ROWS, DIM, name="teacher"))
    with pytest.raises(ModelError, match=r"'teacher': the model does not know.*or set trainable=False"):
        train(student_of(teacher, own_table()))


def test_one_whose_rows_a_worker_left_out_is_refused() -> None:
    teacher = model_of(et.Embedding(ROWS, DIM, name="teacher"))
    with leaving_rows_out():
        teacher.get_layer("teacher").set_weights([START])
    freeze(teacher)
    with pytest.raises(ModelError, match=r"'teacher': .*a worker of a job has no rows of it"):
        train(student_of(teacher, own_table()))
