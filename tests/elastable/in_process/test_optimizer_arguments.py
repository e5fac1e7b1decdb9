"""Gradient accumulation and loss scaling, as Keras optimizers say them, compared with plain Keras."""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import TypeAlias

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.master.model.dense import DenseState
from elastable.master.model.discovery import discover_tables
from elastable.worker.runtime.compute import DenseMirror
from elastable.worker.step.trainable import scale_variables, trained_and_others
from tests.elastable.small_models import (
    DIM,
    USERS,
    WORDS,
    assert_close,
    assert_same,
    clicks,
    model_of,
    plain_model,
    store_model,
    trained_by_tape,
)
from tests.untyped import Keyword, Keywords

BATCH, RECORDS = 8, 64
K = keras.optimizers
Loss: TypeAlias = "Callable[..., object] | keras.losses.Loss | str"


@pytest.mark.parametrize(("names", "offloaded"), [(["^words/embeddings:0$", "bias"], False), (None, True)])
def test_tables_are_excluded_from_weight_decay(names: list[str] | None, offloaded: bool) -> None:
    def made(model: keras.Model) -> keras.Model:
        optimizer = K.SGD(0.5, weight_decay=0.5)
        listed = None if names else [model.get_layer("words").embeddings]
        optimizer.exclude_from_weight_decay(listed, names)
        model.compile(optimizer, "binary_crossentropy")
        return model

    ours, theirs = made(plain_model() if offloaded else store_model()), made(plain_model())
    x, y = clicks(RECORDS)
    et.fit(ours, x, y, batch_size=BATCH, shuffle=False, verbose=0, lazy=False, offload_embeddings_above=1)
    theirs.run_eagerly = True
    theirs.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0)
    assert_same(ours, theirs, rtol=1e-4, atol=1e-6)


def test_a_table_of_a_subclassed_model_has_the_name_of_its_variable() -> None:
    class Model(keras.Model):
        def __init__(self, layer: Callable[..., keras.layers.Layer]) -> None:
            super().__init__(name="mine")
            self.items, self.out = layer(USERS, DIM, name="items"), keras.layers.Dense(1)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.out(self.items(x))

    ours, theirs = Model(et.Embedding), Model(keras.layers.Embedding)
    for model in (ours, theirs):
        model.compile("sgd", "mse")
        model.fit(np.arange(8), np.ones(8, np.float32), verbose=0)
    assert ours.items.variable_name == theirs.items.embeddings.value.name


def fitted(
    model: keras.Model,
    optimizer: keras.optimizers.Optimizer,
    epochs: int = 3,
    loss: Loss = "binary_crossentropy",
    **how: Keyword,
) -> keras.Model:
    model.compile(optimizer, loss)
    how = {"batch_size": BATCH, **how}
    et.fit(model, clicks(RECORDS), epochs=epochs, shuffle=False, verbose=False, **how)
    return model


def by_keras(optimizer: keras.optimizers.Optimizer, loss: Loss = "binary_crossentropy") -> keras.Model:
    """Plain Keras' own train step in a loop, with the gradients of an id summed."""
    return trained_by_tape(optimizer, clicks(RECORDS), BATCH, 3, loss=loss)


def decaying() -> object:
    return K.schedules.PiecewiseConstantDecay([3, 9, 14], [0.5, 0.2, 0.05, 0.3])


class TestAccumulation:
    @pytest.mark.parametrize(
        ("make", "loss", "how"),
        [
            (lambda: K.SGD(decaying(), gradient_accumulation_steps=4), "binary_crossentropy", {"grads_to_wait": 4}),
            (lambda: K.Adagrad(0.1, gradient_accumulation_steps=2, clipnorm=0.02), "binary_crossentropy", {}),
            (
                lambda: K.SGD(0.1, gradient_accumulation_steps=4, global_clipnorm=0.05),
                keras.losses.MeanSquaredError("sum"),
                {},
            ),
        ],
        ids=["schedule, said twice", "clipnorm", "loss that is a sum"],
    )
    def test_the_numbers_are_those_of_keras(
        self, make: Callable[..., object], loss: keras.losses.Loss | str, how: Keywords
    ) -> None:
        ours, theirs = fitted(store_model(), make(), loss=loss, **how), by_keras(make(), loss=loss)
        assert_close(ours, theirs)
        assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations)
        assert int(ours.optimizer._iterations) == int(theirs.optimizer._iterations) == 3 * RECORDS // BATCH

    def test_moments_count_updates_and_not_batches(self) -> None:
        make = partial(K.Adam, 0.05, gradient_accumulation_steps=4)
        users, words = (
            et.Embedding(size, DIM, embeddings_initializer="ones", name=name, lazy=False)
            for size, name in ((USERS, "users"), (WORDS, "words"))
        )
        assert_close(fitted(model_of(users, words), make()), by_keras(make()))

    def test_a_second_fit_goes_on(self) -> None:
        make = partial(K.Adam, decaying(), gradient_accumulation_steps=4)
        once = fitted(store_model(), make(), epochs=4)
        twice = fitted(store_model(), make(), epochs=2)
        et.fit(twice, clicks(RECORDS), epochs=2, batch_size=BATCH, shuffle=False, verbose=False)
        assert_same(twice, once)

    @pytest.mark.parametrize(
        ("steps", "how", "message"),
        [
            (4, {"grads_to_wait": 2}, "gradient_accumulation_steps=4.*grads_to_wait=2.*one of the two"),
            (4, {"average": "sum"}, "average='sum'.*one of the two"),
            (3, {}, r"SGD\(gradient_accumulation_steps=3\): .* has 8 batches, which is not a multiple"),
        ],
    )
    def test_what_contradicts_it_is_refused(self, steps: int, how: Keywords, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            fitted(store_model(), K.SGD(0.5, gradient_accumulation_steps=steps), **how)

    @pytest.mark.parametrize("own", [{"gradient_accumulation_steps": 2}, {"loss_scale_factor": 8.0}])
    def test_it_is_the_models_optimizer_that_says_it(self, own: dict[str, object]) -> None:
        layer = et.Embedding(USERS, DIM, name="users", optimizer=K.SGD(0.1, **own))
        model = model_of(layer, et.Embedding(WORDS, DIM, name="words"))
        with pytest.raises(Unsupported, match=r"'users': SGD\(.*give it to the optimizer of compile"):
            fitted(model, K.SGD(0.5))


@pytest.fixture
def mixed_float16() -> Iterator[None]:
    keras.config.set_dtype_policy("mixed_float16")
    yield
    keras.config.set_dtype_policy("float32")


class TestLossScaling:
    def test_a_constant_factor(self) -> None:
        ours, theirs = (K.SGD(0.5, loss_scale_factor=1024.0, global_clipnorm=0.02) for _ in range(2))
        assert_close(fitted(store_model(), ours), by_keras(theirs))
        assert ours.loss_scale_factor == 1024.0

    def test_a_scale_that_grows(self) -> None:
        def make() -> keras.optimizers.Optimizer:
            return K.LossScaleOptimizer(K.Adagrad(0.1, clipnorm=0.05), initial_scale=4.0, dynamic_growth_steps=5)

        ours, theirs = fitted(store_model(), make()), by_keras(make())
        assert_close(ours, theirs)
        for mine, other in zip(ours.optimizer._variables, theirs.optimizer._variables, strict=True):
            assert float(mine) == float(other), mine.path
        assert float(ours.optimizer.dynamic_scale) == 4.0 * 2**4

    def test_an_overflow_is_no_step_and_halves_the_scale(self) -> None:
        # Gradients of a loss times 2**130 are infinite; Keras halves until they are not.
        def make() -> keras.optimizers.Optimizer:
            return K.LossScaleOptimizer(K.SGD(decaying()), initial_scale=2.0**127, dynamic_growth_steps=4)

        def large(y: tf.Tensor, predicted: object) -> tf.Tensor:
            return keras.ops.mean(keras.ops.square(100.0 * (y[:, None] - predicted))) * 1e-3

        ours, theirs = fitted(store_model(), make(), loss=large), by_keras(make(), loss=large)
        assert_close(ours, theirs)
        steps, scale = int(theirs.optimizer.iterations), float(theirs.optimizer.dynamic_scale)
        assert 0 < steps < 3 * RECORDS // BATCH
        assert (int(ours.optimizer.iterations), float(ours.optimizer.dynamic_scale)) == (steps, scale)

    @pytest.mark.usefixtures("mixed_float16")
    def test_mixed_float16_as_it_is_compiled(self) -> None:
        keras.utils.set_random_seed(1)  # how often eleven bits round apart depends on the weights
        ours, theirs = fitted(store_model(), K.SGD(0.5)), by_keras(K.SGD(0.5))
        assert isinstance(ours.optimizer, K.LossScaleOptimizer)
        assert_close(ours, theirs, 2e-3)
        assert int(ours.optimizer.iterations) == int(theirs.optimizer.iterations) == 3 * RECORDS // BATCH

    def test_micro_batches_overflow_together(self) -> None:
        model = fitted(
            store_model(),
            K.LossScaleOptimizer(K.SGD(0.5), initial_scale=2.0**127),
            loss=lambda y, predicted: keras.ops.mean(keras.ops.square(1e4 * (y - predicted))) * 1e-7,
            batch_size=BATCH // 2,
            grads_to_wait=2,
        )
        versions = 3 * RECORDS // BATCH
        halved = 127 - np.log2(float(model.optimizer.dynamic_scale))
        assert halved > 0
        assert int(model.optimizer.iterations) == versions - halved

    def test_a_worker_elsewhere_computes_at_the_scale_of_the_version(self) -> None:
        master, worker = store_model(), store_model()
        for model in (master, worker):
            model.compile(K.LossScaleOptimizer(K.SGD(0.5), initial_scale=8.0), "mse")
        dense = DenseState(master)
        master.optimizer.dynamic_scale.assign(32.0)
        variables, states = trained_and_others(worker)
        assert states == trained_and_others(worker)[1]
        DenseMirror(variables, states).assign(dense.snapshot(0))
        assert not worker.optimizer.built
        assert float(scale_variables(worker.optimizer)[0]) == 32.0

    def test_rows_that_follow_every_step_are_refused(self) -> None:
        with pytest.raises(Unsupported, match=r"LossScaleOptimizer.*lazy=False.*leave one of them out"):
            fitted(store_model(), K.LossScaleOptimizer(K.Adam(0.1)), lazy=False)

    def test_so_are_those_of_a_table_with_an_optimizer_of_its_own(self) -> None:
        own = K.SGD(0.1, momentum=0.9)
        model = keras.Sequential([et.Embedding(USERS, DIM, name="users", lazy=False, optimizer=own)])
        model.compile(K.LossScaleOptimizer(K.Adam(0.1)), "mse")
        with pytest.raises(Unsupported, match=r"layer 'users': LossScaleOptimizer.*lazy=False"):
            discover_tables(model, 0)
        model.compile(K.Adam(0.1), "mse")
        assert list(discover_tables(model, 0)) == ["users"]


@pytest.mark.parametrize("of", ["table", "dense"])
def test_a_constraint_that_keras_applies_between_two_updates_is_refused(of: str) -> None:
    ids = keras.Input((2,), dtype="int64")
    rows = et.Embedding(8, 2, name="held", embeddings_constraint="non_neg" if of == "table" else None)(ids)
    out = keras.layers.Dense(1, kernel_constraint="non_neg" if of == "dense" else None)
    model = keras.Model(ids, out(keras.layers.Flatten()(rows)))
    model.compile(keras.optimizers.SGD(0.1, gradient_accumulation_steps=2), "mse")
    with pytest.raises(Unsupported, match=r"constraint.*gradient_accumulation_steps.*every batch, and here"):
        et.fit(model, np.zeros((8, 2), np.int64), np.ones((8, 1), np.float32), batch_size=4, verbose=0)


def _again(method: Callable[..., object]) -> Callable[..., object]:
    return lambda *arguments: method(*arguments)


@pytest.mark.parametrize("method", ["apply_gradients", "scale_loss", "finalize_variable_values", "apply of one"])
def test_what_would_not_be_called_of_an_optimizer_is_refused(method: str) -> None:
    method, _, one = method.partition(" of ")
    optimizer = K.SGD(0.1) if one else type("Own", (K.SGD,), {method: _again(getattr(K.SGD, method))})(0.1)
    if one:  # a class's own `apply` is called
        setattr(optimizer, method, _again(getattr(optimizer, method)))
    for table in (et.Embedding(WORDS, DIM, name="words"), et.Embedding(WORDS, DIM, name="words", optimizer=optimizer)):
        model = keras.Sequential(
            [keras.Input((4,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile(optimizer if table.optimizer is None else "sgd", "mse")
        with pytest.raises(Unsupported, match=rf"{method} is the program's own"):
            et.fit(model, np.ones((8, 4), np.int64), np.ones(8), lazy=True, verbose=0)


def test_a_subclass_with_its_own_apply_is_told_what_it_sees(caplog: pytest.LogCaptureFixture) -> None:
    kept = K.SGD.apply
    half = type("Half", (K.SGD,), {"apply": lambda self, g, v: kept(self, [each / 2 for each in g], v)})
    model, (x, y) = store_model(), clicks(RECORDS)
    model.compile(keras.saving.register_keras_serializable("tests")(half)(0.1), "binary_crossentropy")
    with caplog.at_level(logging.WARNING):
        et.fit(model, x, y, lazy=True, verbose=0)
    assert "Half.apply is called for the dense variables together and for each table apart" in caplog.text


@pytest.mark.parametrize("method", ["train_step", "make_train_function", "make_test_function"])
def test_what_would_not_be_called_of_a_model_is_refused(method: str) -> None:
    model, (x, y) = store_model(), clicks(RECORDS)
    model.compile("sgd", "binary_crossentropy")
    setattr(model, method, _again(getattr(model, method)))
    with pytest.raises(Unsupported, match=f"overrides {method}|with et.step"):
        model.fit(x, y, verbose=0)


def test_a_test_step_of_a_models_own_validates_it() -> None:
    seen = []
    for model in (store_model(), plain_model()):
        model.compile(K.SGD(0.1), "binary_crossentropy")
        step, (x, y) = model.test_step, clicks(RECORDS)
        model.test_step = lambda data, step=step: step((data[0], 1 - data[1]))
        seen.append(model.fit(x, y, batch_size=BATCH, shuffle=False, verbose=0, validation_data=(x, y)).history)
    np.testing.assert_allclose(seen[0]["val_loss"], seen[1]["val_loss"], rtol=1e-5)
