"""`trainable` of layers with tables in a store, and of dense layers next to them: as in plain Keras."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

import elastable as et
from elastable.callbacks.freezing import Freezing
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.master.model.dense import dense_part
from tests.untyped import Keyword, Keywords, Parsed

ROWS, DIM, BATCH, EPOCHS = 30, 3, 16, 4
Arrays = dict[str, Array]
Program = Callable[[keras.Model, Callable[..., object]], object]
"""A program that trains a model by the `fit` that it is given."""


def records() -> tuple[dict[str, Array], Array]:
    random = np.random.default_rng(0)
    x = {"user": random.integers(0, ROWS, (52, 1)), "word": random.integers(0, ROWS, (52, 2))}
    return x, random.random((52, 1)).astype(np.float32)


def built(embedding: Callable[..., keras.layers.Layer], **user: object) -> keras.Model:
    """Two tables, a part of the model with layers of its own, and layers above."""
    users = keras.Input((1,), dtype="int64", name="user")
    words = keras.Input((2,), dtype="int64", name="word")
    inner_in = keras.Input((1,), dtype="int64")
    flat = keras.layers.Flatten()(embedding("users", **user)(inner_in))
    inner = keras.Model(inner_in, dense("low", 4)(flat), name="tower")
    joined = keras.layers.Concatenate()([inner(users), keras.layers.Flatten()(embedding("words")(words))])
    out = dense("out", 1)(keras.layers.BatchNormalization(name="norm")(dense("mid", 6)(joined)))
    return keras.Model([users, words], out)


def dense(name: str, units: int) -> keras.layers.Layer:
    return keras.layers.Dense(units, name=name, kernel_initializer=keras.initializers.GlorotUniform(seed=len(name)))


def in_store(name: str, **settings: Keyword) -> keras.layers.Layer:
    return et.Embedding(output_dim=DIM, input_dim=ROWS, embeddings_initializer="ones", name=name, **settings)


def plain(name: str, **settings: object) -> keras.layers.Embedding:
    # A regularizer that adds nothing makes the gradient dense: Keras squares un-summed slices (docs/fit.md).
    settings.setdefault("embeddings_regularizer", keras.regularizers.L2(0.0))
    return keras.layers.Embedding(ROWS, DIM, "ones", name=name, **settings)


def optimizer() -> keras.optimizers.Optimizer:
    """Moves rows without a gradient, too: by momentum and by weight decay."""
    return keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1)


def layer_of(model: keras.Model, name: str) -> keras.layers.Layer:
    return next(layer for layer in model._flatten_layers() if layer.name == name)


def state_of(model: keras.Model) -> Arrays:
    found = {}
    for layer in model._flatten_layers():
        if isinstance(layer, et.Embedding) or getattr(layer, "source", None) is not None:
            found[layer.name] = layer.read_rows(np.arange(ROWS))
        elif not isinstance(layer, keras.Model):
            found |= {f"{layer.name} {at}": each for at, each in enumerate(layer.get_weights())}
            if isinstance(layer, keras.layers.Embedding):
                found[layer.name] = found.pop(f"{layer.name} 0")
    return found


def run(program: Program, by_keras: bool, **user: object) -> tuple[keras.Model, list[dict[str, Array]]]:
    model, states = built(plain if by_keras else in_store, **user), [Parsed()]
    model.compile(optimizer(), "mse")
    x, y = records()

    def fit(epochs: int = 1, *callbacks: object) -> None:
        note = keras.callbacks.LambdaCallback(on_epoch_end=lambda *_: states.append(state_of(model)))
        settings: Keywords = {"epochs": epochs, "batch_size": BATCH, "shuffle": False, "callbacks": [*callbacks, note]}
        if by_keras:
            model.fit(x, y, verbose=0, **settings)
        else:
            et.fit(model, (x, y), verbose=False, lazy=False, **settings)

    program(model, fit)
    return model, states[1:]


def assert_equal(ours: list[Arrays], theirs: list[Arrays]) -> None:
    assert len(ours) == len(theirs)
    for epoch, (mine, others) in enumerate(zip(ours, theirs, strict=True)):
        assert mine.keys() == others.keys()
        for name, values in others.items():
            np.testing.assert_allclose(mine[name], values, rtol=2e-4, atol=2e-5, err_msg=f"{name}, epoch {epoch}")


class Flags(keras.callbacks.Callback):
    """Sets `trainable` at the beginning of epochs: epoch -> (layer, value)."""

    def __init__(self, flags: dict[int, tuple[str, bool]], force: bool = True) -> None:
        super().__init__()
        self.flags, self.force = flags, force

    def on_epoch_begin(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if epoch in self.flags:
            name, value = self.flags[epoch]
            layer_of(self.model, name).trainable = value
            if self.force:
                self.model.make_train_function(force=True)


def freeze(name: str) -> Program:
    def program(model: keras.Model, fit: Callable[..., object]) -> None:
        (model if name == "model" else layer_of(model, name)).trainable = False
        fit(2)

    return program


def callback(flags: dict[int, tuple[str, bool]], force: bool = True) -> Program:
    return lambda model, fit: fit(EPOCHS, Flags(flags, force))


def between(compiled: str) -> Program:
    """Freezes the table of users after a first fit, and un-freezes it after a second."""

    def program(model: keras.Model, fit: Callable[..., object]) -> None:
        for trainable in (True, False, True):
            layer_of(model, "users").trainable = trainable
            if compiled:
                model.compile(optimizer() if compiled == "anew" else model.optimizer, "mse")
            fit()

    return program


PROGRAMS: dict[str, Program] = {
    "a table": freeze("users"),
    "a part of the model, and the table in it": freeze("tower"),
    "a dense layer": freeze("mid"),
    "batch normalization": freeze("norm"),
    "a callback freezes a table": callback({2: ("users", False)}),
    "a callback freezes a part, and un-freezes it": callback({1: ("tower", False), 3: ("tower", True)}),
    "a callback freezes dense layers": callback({1: ("mid", False), 2: ("norm", False), 3: ("mid", True)}),
    "a callback before the first batch": callback({0: ("users", False)}, force=False),
    "a callback without a new train function has no effect": callback({1: ("users", False)}, force=False),
    "between fits, compiled with the same optimizer": between("same"),
    "between fits, compiled with a new optimizer": between("anew"),
    "between fits, not compiled: no effect": between(""),
}


@pytest.mark.sampled(6)
@pytest.mark.parametrize("name", PROGRAMS)
def test_as_in_keras(name: str) -> None:
    _, theirs = run(PROGRAMS[name], by_keras=True)
    _, ours = run(PROGRAMS[name], by_keras=False)
    assert_equal(ours, theirs)


def test_what_is_trained_is_kept_where_no_epoch_is_left_and_whatever_a_callback_says_before_the_next() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(3), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    model.optimizer.build(model.trainable_variables)
    model.layers[0].trainable = False
    before = Freezing(model, dense_part(model, None))
    before.begin()
    before.look()
    state = before.state()
    assert "00" in state
    model.layers[0].trainable = True
    after = Freezing(model, dense_part(model, None))
    after.begin(state)
    assert after.state() == state
    model.layers[0].trainable = True  # as a callback may, when an epoch begins: without effect, as in Keras
    after.look()
    assert after.state() == state


def test_frozen_rows_keep_every_bit() -> None:
    _, states = run(callback({1: ("users", False), 3: ("users", True)}), by_keras=False)
    first, second, third, last = (state["users"] for state in states)
    np.testing.assert_array_equal(second, first)
    np.testing.assert_array_equal(third, first)
    assert np.abs(last - first).max() > 1e-3


def test_the_penalty_of_a_frozen_layer_is_no_part_of_the_loss() -> None:
    losses = {}
    for by_keras in (True, False):
        model = built(plain if by_keras else in_store, embeddings_regularizer="l2")
        layer_of(model, "users").trainable = False
        model.compile(keras.optimizers.SGD(0.05), "mse")
        settings: Keywords = {"epochs": 2, "batch_size": BATCH, "shuffle": False}
        x, y = records()
        ran = model.fit(x, y, verbose=0, **settings) if by_keras else et.fit(model, (x, y), verbose=False, **settings)
        losses[by_keras] = ran.history["loss"]
    np.testing.assert_allclose(losses[False], losses[True], rtol=1e-5)


def test_nothing_is_trained_and_no_step_is_counted() -> None:
    def program(model: keras.Model, fit: Callable[..., object]) -> None:
        model.trainable = False
        fit(2)

    model, (first, last) = run(program, by_keras=False)
    for name, values in first.items():
        if not name.startswith("norm"):
            np.testing.assert_array_equal(values, last[name], err_msg=name)
    assert int(model.optimizer.iterations) == 0  # as of Keras


@pytest.mark.slow
def test_eager_models_are_read_with_every_batch() -> None:
    states: dict[bool, list[Arrays]] = {}
    for by_keras in (True, False):

        def program(model: keras.Model, fit: Callable[..., object]) -> None:
            model.compile(optimizer(), "mse", run_eagerly=True)
            fit(2, Flags({1: ("users", False)}, force=False))

        _, states[by_keras] = run(program, by_keras)
    assert_equal(states[False], states[True])


def test_a_table_shared_by_a_frozen_layer_and_another_is_refused() -> None:
    ids = keras.Input((1,), dtype="int64")
    parts = [in_store("one", table="t", trainable=False)(ids), in_store("two", table="t")(ids)]
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(keras.layers.Concatenate()(parts))))
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"'one' \(trainable=False\) and 'two' \(trainable=True\) share the table 't'"):
        et.fit(model, (np.zeros((4, 1), np.int64), np.zeros((4, 1), np.float32)), verbose=False)


def test_compiling_in_a_callback_is_refused() -> None:
    def program(model: keras.Model, fit: Callable[..., object]) -> None:
        again = keras.callbacks.LambdaCallback(on_epoch_begin=lambda epoch, _: epoch and model.compile("sgd", "mse"))
        fit(2, again)

    with pytest.raises(Unsupported, match="make_train_function"):
        run(program, by_keras=False)


def test_what_the_optimizer_was_not_built_for_is_refused() -> None:
    def program(model: keras.Model, fit: Callable[..., object]) -> None:
        layer_of(model, "mid").trainable = False
        fit()
        layer_of(model, "mid").trainable = True
        model.compile(model.optimizer, "mse")
        fit()

    with pytest.raises(ValueError, match="Unknown variable"):
        run(program, by_keras=True)
    with pytest.raises(Unsupported, match=r"mid/kernel.*new optimizer"):
        run(program, by_keras=False)


WAYS: dict[str, Callable[[keras.Model], None]] = {
    "fit": lambda model: model.fit(*records(), batch_size=26, shuffle=False, verbose=0),
    "fit in other batches": lambda model: model.fit(*records(), batch_size=13, shuffle=False, verbose=0),
    "fit with weights": lambda model: model.fit(*records(), 26, sample_weight=np.ones(52), shuffle=False, verbose=0),
    "train_on_batch": lambda model: model.train_on_batch(*records()),
}


@pytest.mark.parametrize(
    ("first", "second"),
    [("fit", "fit"), ("fit in other batches", "fit"), ("fit with weights", "fit"), ("fit", "train_on_batch")],
)
def test_a_change_that_counts_for_one_of_two_ways_is_refused(first: str, second: str) -> None:
    """Keras traces each of them by itself."""

    def program(model: keras.Model) -> keras.Model:
        model.compile(optimizer(), "mse")
        WAYS[first](model)
        layer_of(model, "users").trainable = False
        WAYS[second](model)
        return model

    if first == second:
        ours, theirs = program(built(in_store)), program(built(plain))
        assert_equal([state_of(ours)], [state_of(theirs)])
        return
    with pytest.raises(Unsupported, match=r"trainable of 'users' was changed after training.*model.compile"):
        program(built(in_store))


def test_after_compile_both_ways_go_by_the_new_value() -> None:
    model = built(in_store)
    model.compile(optimizer(), "mse")
    WAYS["fit"](model)
    layer_of(model, "users").trainable = False
    model.compile(model.optimizer, "mse")
    before = state_of(model)["users"]
    for way in ("fit", "train_on_batch"):
        WAYS[way](model)
    np.testing.assert_array_equal(state_of(model)["users"], before)
