"""`model.fit` and `et.fit` take what Keras' own takes, with Keras' numbers: each compared with plain Keras."""

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, ModelError, Unsupported
from tests.elastable.small_models import clicks, store_model, tables_and_weights
from tests.untyped import Keyword, Keywords

ROWS, DIM, BATCH = 50, 4, 16
Layer = Callable[..., keras.layers.Layer]


def program(
    layer: Layer, dropout: float = 0.0, loss: object = "binary_crossentropy", **compiled: object
) -> keras.Model:
    """The same program for either layer: one seed, nothing else given."""
    keras.utils.set_random_seed(7)
    model = keras.Sequential([
        keras.Input((3,), dtype="int64"),
        layer(ROWS, DIM),
        keras.layers.Flatten(),
        keras.layers.Dense(8, activation="relu"),
        keras.layers.Dropout(dropout),
        keras.layers.Dense(1, activation="sigmoid"),
    ])  # fmt: skip
    model.compile(compiled.pop("optimizer", None) or keras.optimizers.SGD(0.5), loss, **compiled)
    model.run_eagerly = layer is keras.layers.Embedding  # for a few steps, a graph costs more
    return model


def records(count: int = 72, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    ids = random.integers(0, ROWS, (count, 3))
    return ids, (ids[:, 0] % 2 == 0).astype(np.float32)


def both(fit: Callable[..., object], **made: Keyword) -> tuple[object, object, object, object]:
    """The program with our layer and with Keras', each trained by `fit`."""
    ours, theirs = program(et.Embedding, **made), program(keras.layers.Embedding, **made)
    return ours, theirs, fit(ours), fit(theirs)


def assert_same(
    ours: keras.Model,
    theirs: keras.Model,
    history: keras.callbacks.History | None = None,
    expected: keras.callbacks.History | None = None,
) -> None:
    for mine, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-5, atol=1e-6)
    if history is not None:
        assert expected is not None
        assert history.epoch == expected.epoch
        assert history.history.keys() == expected.history.keys()
        for name, values in expected.history.items():
            np.testing.assert_allclose(history.history[name], values, rtol=1e-5, err_msg=name)


X, Y = records()
HELD_OUT = records(40, seed=1)


class Batches(keras.utils.PyDataset):
    """Five batches, of which the fourth cannot be read."""

    def __len__(self) -> int:
        return 5

    def __getitem__(self, number: int) -> tuple[np.ndarray, np.ndarray]:
        if number == 3:
            raise LookupError("the fourth")
        return X[:BATCH], Y[:BATCH]


class Stumbling(keras.layers.Layer):
    """Names the thread that it is called by, and cannot go on in the fourth call that trains."""

    def __init__(self) -> None:
        super().__init__()
        self.threads: list[str] = []

    def call(self, inputs: tf.Tensor, training: bool = False) -> tf.Tensor:
        if training and tf.executing_eagerly():
            self.threads.append(threading.current_thread().name)
            if len(self.threads) > 3:
                raise ZeroDivisionError("mine")
        return inputs


def test_an_error_of_the_data_is_raised_as_it_is() -> None:
    with pytest.raises(LookupError, match="the fourth"):
        program(et.Embedding).fit(Batches(workers=0), verbose=0)


def test_steps_run_in_the_thread_that_calls_fit_and_their_errors_are_raised_as_they_are() -> None:
    stumbling = Stumbling()
    flat, dense = keras.layers.Flatten(), keras.layers.Dense(1)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), et.Embedding(ROWS, DIM), stumbling, flat, dense])
    model.compile("sgd", "mse", run_eagerly=True)
    with pytest.raises(ZeroDivisionError, match="mine"):
        model.fit(X, Y, batch_size=BATCH, verbose=0)
    assert stumbling.threads == [threading.current_thread().name] * 4


WEIGHTS = np.random.default_rng(5).random(len(Y)).astype(np.float32)


def fitted(**arguments: Keyword) -> Callable[[keras.Model], keras.callbacks.History]:
    return lambda model: model.fit(X, Y, BATCH, shuffle=False, verbose=0, **arguments)


# tests/keras_table runs every argument of `fit` by itself.
@pytest.mark.parametrize(
    ("arguments", "batches"),
    [
        ({"epochs": 5, "steps_per_epoch": 2}, 5),
        ({"epochs": 2, "validation_data": HELD_OUT, "validation_steps": 9}, 3),
    ],
)
def test_data_that_ends_early_ends_as_in_keras(arguments: dict[str, Keyword], batches: int) -> None:
    """Epochs of five batches' data end within a pass, go on with its rest, and are short where it ends."""

    def fit(model: keras.Model) -> keras.callbacks.History:
        with pytest.warns(UserWarning, match=rf"ran out of data|data ends after {batches} batches"):
            return fitted(**arguments)(model)

    assert_same(*both(fit))


def test_arguments_come_by_position_as_in_keras() -> None:
    given = (X, Y, BATCH, 2, 0, None, 0.25, None, False)
    ours, theirs, *histories = both(lambda model: model.fit(*given))
    assert_same(ours, theirs, *histories)
    again = program(et.Embedding)
    assert_same(again, theirs, et.fit(again, *given), histories[1])


# Of an id that comes twice in a batch Keras squares each gradient, and we their sum: here none does.
DISTINCT = np.concatenate([np.random.default_rng(i).permutation(ROWS)[: 3 * BATCH].reshape(-1, 3) for i in range(4)])


def test_a_second_fit_goes_on_as_in_keras() -> None:
    """Slots, step counts and all; a model that is compiled anew begins with new ones. Untouched rows move."""
    y = Y[: len(DISTINCT)]

    def fit(model: keras.Model) -> keras.callbacks.History:
        for _ in range(2):
            model.fit(DISTINCT, y, BATCH, epochs=2, shuffle=False, verbose=0)
        model.compile("adam", "mse")
        return model.fit(DISTINCT, y, BATCH, shuffle=False, verbose=0)

    ours, theirs, *histories = both(fit, optimizer="adam")
    assert_same(ours, theirs, *histories)


def test_what_has_other_numbers_than_keras_is_refused_until_one_says_so() -> None:
    def fitted(**layer: Keyword) -> keras.callbacks.History:
        model = program(lambda *size: et.Embedding(*size, **layer), optimizer="lion")
        return model.fit(X, Y, BATCH, verbose=0)

    with pytest.raises(Unsupported, match=r"'lion' has no.*model.fit takes lazy=False.*lazy=True on the layer"):
        fitted()
    assert np.isfinite(fitted(lazy=True).history["loss"][0])


def test_initial_epoch_goes_on_with_the_next_order() -> None:
    def trained(*epochs: tuple[int, int]) -> Array:
        model = store_model()
        model.compile(keras.optimizers.Adam(0.05), "binary_crossentropy")
        for initial, end in epochs:
            how: Keywords = {"epochs": end, "initial_epoch": initial, "batch_size": 16, "seed": 3}
            assert et.fit(model, clicks(64), verbose=0, **how).epoch == list(range(initial, end))
        return np.concatenate([values.ravel() for values in tables_and_weights(model).values()])

    np.testing.assert_array_equal(trained((0, 2), (2, 4)), trained((0, 4)))
    assert not np.array_equal(trained((0, 2), (0, 2)), trained((0, 4)))


def test_dropout_and_initial_values_are_keras_own_draws() -> None:
    """One seed in the program, none at the layers: every random number is Keras'."""
    assert_same(*both(fitted(epochs=3, validation_data=HELD_OUT), dropout=0.5))


def test_numbers_drawn_without_a_seed_in_inference_too_are_keras_own() -> None:
    class Noise(keras.layers.Layer):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return x + keras.random.normal((3, DIM)) * 0.1

    def noisy(layer: Layer) -> keras.Model:
        class Subclassed(keras.Model):
            def __init__(self) -> None:
                super().__init__()
                self.parts = [layer(ROWS, DIM), Noise(), keras.layers.Flatten(), keras.layers.Dense(1)]

            def call(self, x: tf.Tensor) -> tf.Tensor:
                for part in self.parts:
                    x = part(x)
                return x

        keras.utils.set_random_seed(7)
        model = Subclassed()
        model.compile(keras.optimizers.SGD(0.1), "mse")
        return model

    found = []
    for layer in (et.Embedding, keras.layers.Embedding):
        model = noisy(layer)
        fits = [model.fit(X, Y, batch_size=24, validation_data=HELD_OUT, shuffle=False, verbose=0) for _ in range(2)]
        found.append([[*fit.history["loss"], *fit.history["val_loss"]] for fit in fits])
    np.testing.assert_allclose(found[0], found[1], rtol=1e-5)


def test_what_an_evaluation_changes_in_a_state_is_dropped_and_logged(caplog: pytest.LogCaptureFixture) -> None:
    class Counting(keras.layers.Layer):
        def build(self, input_shape: object) -> None:
            self.calls = self.add_weight(shape=(), initializer="zeros", trainable=False, name="calls")
            self.seen = keras.metrics.Mean(name="seen")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            self.calls.assign_add(1.0)
            self.seen.update_state(x)
            return x

    counting = Counting(name="counting")
    model = keras.Sequential([
        keras.Input((3,), dtype="int64"),
        et.Embedding(ROWS, DIM),
        keras.layers.Flatten(),
        counting,
        keras.layers.BatchNormalization(),
        keras.layers.Dense(1),
    ])  # fmt: skip
    model.compile("sgd", "mse")
    model.fit(X, Y, batch_size=24, epochs=2, validation_data=HELD_OUT, verbose=0)
    assert float(counting.calls) == 6
    assert "counting/calls' changes in inference, too" in caplog.text
    assert "moving_mean" not in caplog.text
    assert "seen" not in caplog.text


@pytest.mark.parametrize("eager", [False, True])
def test_variables_and_draws_of_the_program_change_as_often_as_in_keras(eager: bool) -> None:
    class Noise(keras.layers.Layer):
        def call(self, x: tf.Tensor, training: bool = False) -> tf.Tensor:
            return x + np.float32(np.random.normal()) if training and eager else x

    def fit(layer: Layer) -> list[np.ndarray]:
        keras.utils.set_random_seed(7)
        losses, metrics = tf.Variable(0.0), keras.Variable(0.0)

        def loss(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
            losses.assign_add(1.0)
            return tf.reduce_mean((tf.cast(y, tf.float32) - tf.reduce_sum(predicted, axis=-1)) ** 2) / (1.0 + losses)

        def metric(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
            metrics.assign_add(1.0)
            return tf.reduce_mean(predicted, axis=-1) + metrics.value

        embedding = layer(ROWS, DIM, weights=[np.full((ROWS, DIM), 0.1, np.float32)])
        model = keras.Sequential([keras.Input((3,), dtype="int64"), embedding, keras.layers.Flatten(), Noise()])
        model.compile(keras.optimizers.SGD(0.5), loss, metrics=[metric], run_eagerly=eager)
        history = fitted(epochs=2)(model).history
        model.train_on_batch(X, Y)
        return [np.array(each) for each in (losses, metrics, history["loss"], history["metric"])]

    for ours, theirs in zip(fit(et.Embedding), fit(keras.layers.Embedding), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5)


def test_a_loss_that_changes_python_values_or_runs_for_micro_batches_is_named(caplog: pytest.LogCaptureFixture) -> None:
    calls, ran = [0], tf.Variable(0.0)

    def counting(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        calls[0] += 1
        return (tf.cast(y, tf.float32) - predicted) ** 2

    def running(y: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        ran.assign_add(1.0)
        return tf.cast(y, tf.float32) - predicted

    fitted()(program(et.Embedding, loss=counting))
    assert "its own code changes 'calls' in loss[0], and is called here before training" in caplog.text
    for compiled in ({"loss": running}, {"metrics": [running]}):
        with pytest.raises(
            Unsupported, match=r"AssignAddVariableOp .*test_model_fit.py:\d+\) changes .*grads_to_wait=1"
        ):
            et.fit(program(et.Embedding, **compiled), X, Y, batch_size=BATCH, grads_to_wait=2, verbose=False)


def test_steps_per_execution_changes_when_callbacks_are_called_and_no_number() -> None:
    def fit(model: keras.Model) -> object:
        seen = []
        note = keras.callbacks.LambdaCallback(
            on_train_batch_begin=lambda batch, logs: seen.append(("begin", batch)),
            on_train_batch_end=lambda batch, logs: seen.append(("end", batch, round(logs["loss"], 4))),  # type: ignore[arg-type]
        )
        model.fit(X, Y, BATCH, epochs=2, shuffle=False, verbose=0, callbacks=note)
        return seen

    ours, theirs, mine, others = both(fit, steps_per_execution=2)
    assert mine == others
    assert_same(ours, theirs)


@pytest.mark.parametrize("together", [1, 2])
def test_what_a_callback_assigns_before_and_after_a_batch_is_trained_with(together: int) -> None:
    class Assigns(keras.callbacks.Callback):
        def on_train_batch_begin(self, batch: int, logs: dict[str, float] | None = None) -> None:
            self.model.optimizer.learning_rate = 0.3 / (1 + batch)
            if batch == 2:
                dense = self.model.layers[-1]
                dense.set_weights([0.5 * weight for weight in dense.get_weights()])

        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            self.model.layers[-1].bias.assign(0.9 * self.model.layers[-1].bias + 0.1)

    assert_same(*both(fitted(epochs=2, callbacks=[Assigns()]), steps_per_execution=together))


def test_a_callback_that_stops_training_within_an_epoch_ends_it_there() -> None:
    class Stop(keras.callbacks.Callback):
        def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            self.model.stop_training = batch == 1

    assert_same(*both(fitted(epochs=3, callbacks=[Stop()], validation_data=HELD_OUT)))


def test_several_inputs_and_outputs_with_weights() -> None:
    def made(layer: Layer) -> keras.Model:
        keras.utils.set_random_seed(3)
        inputs = [keras.Input((), dtype="int64", name=name) for name in ("user", "film")]
        rows = keras.layers.Concatenate()([layer(ROWS, DIM)(each) for each in inputs])
        outputs = [keras.layers.Dense(1, name=name)(rows) for name in ("stars", "time")]
        model = keras.Model(inputs, outputs)
        model.compile(keras.optimizers.SGD(0.1), ["mse", "mae"])
        return model

    stars, time = Y, Y * 2
    forms = [
        (({"user": X[:, 0], "film": X[:, 1]}, [stars, time]), {}),
        (([X[:, 0], X[:, 1]], [stars, time]), {"sample_weight": WEIGHTS}),
        (((X[:, 0], X[:, 1]), (stars, time)), {"sample_weight": (WEIGHTS, WEIGHTS[::-1].copy())}),
    ]  # fmt: skip
    ours, theirs = made(et.Embedding), made(keras.layers.Embedding)
    theirs.run_eagerly = True
    for (x, y), more in forms:
        histories = [model.fit(x, y, BATCH, shuffle=False, verbose=0, **more) for model in (ours, theirs)]  # type: ignore[arg-type]
        np.testing.assert_allclose(histories[0].history["loss"], histories[1].history["loss"], rtol=1e-5)
        for mine, other in zip(ours.predict(x, verbose=0), theirs.predict(x, verbose=0), strict=True):
            np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)


def test_a_model_without_such_layers_is_left_to_keras() -> None:
    model = keras.Sequential([keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    assert np.isfinite(model.train_on_batch(np.ones((4, 2)), np.ones(4)))
    assert model.fit(np.ones((4, 2)), np.ones(4), verbose=0).history["loss"]


@pytest.fixture(scope="module")
def refusing() -> keras.Model:
    """What is refused leaves it as it was."""
    return program(et.Embedding)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"x": None}, "x=None: give the records"),
        ({"y": Y[:5]}, r"one length, but x has 72, y has 5 records"),
        ({"sample_weight": WEIGHTS, "class_weight": {0: 1}}, "class_weight and sample_weight"),
        ({"class_weight": [1, 2]}, r"class_weight=\[1, 2\]: give a dict"),
        ({"batch_size": 0}, "batch_size=0: need an integer"),
        ({"steps_per_epoch": 1.5}, "steps_per_epoch=1.5: need an integer"),
        ({"validation_split": 1.0}, "validation_split=1.0: need a share"),
        ({"validation_split": 0.99}, "validation_split=0.99 of 72 records leaves"),
        ({"validation_data": HELD_OUT * 2}, "validation_data is a tuple of 4"),
        ({"validation_steps": 3}, "validation_steps=3: there is no validation_data"),
        ({"validation_freq": 0}, "validation_freq=0: need a number of epochs"),
        ({"epochs": 0}, "initial_epoch=0, epochs=0"),
        ({"verbose": 3}, "verbose=3: need 0"),
        ({"x": tf.data.Dataset.from_tensor_slices((X, Y)).batch(8)}, "y=: _BatchDataset as x gives"),
    ],
    ids=str,
)  # fmt: skip
def test_what_cannot_be_used_is_refused_by_its_name(
    refusing: keras.Model, arguments: dict[str, object], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        refusing.fit(**{"x": X, "y": Y, "verbose": 0, **arguments})


def test_a_shuffle_of_batches_is_refused(refusing: keras.Model) -> None:
    with pytest.raises(Unsupported, match='shuffle="batch"'):
        refusing.fit(X, Y, shuffle="batch")


def test_a_distribution_strategy_is_refused() -> None:
    with tf.distribute.MirroredStrategy(["/cpu:0"]).scope():
        model = program(et.Embedding)
    with pytest.raises(Unsupported, match=r"tf.distribute's MirroredStrategy.* outside the strategy's scope"):
        model.fit(X, Y, verbose=0)


class TestSeeds:
    def test_one_seed_of_keras_is_one_result(self) -> None:
        """Shuffled, with dropout, and a table of any ids that is never drawn whole."""

        def trained() -> tuple[list[list[float]], Array, list[Array]]:
            keras.utils.set_random_seed(11)
            model = keras.Sequential(
                [keras.Input((3,), dtype="int64"), et.Embedding(None, DIM, name="any"), keras.layers.Flatten()]
            )
            model.add(keras.layers.Dropout(0.4))
            model.add(keras.layers.Dense(1, activation="sigmoid"))
            model.compile("sgd", "mse")
            losses = [model.fit(X, Y, BATCH, epochs=2, verbose=0).history["loss"] for _ in range(2)]
            return losses, model.layers[0].read_rows(np.arange(ROWS)), model.layers[-1].get_weights()

        (losses, rows, weights), (others, other_rows, other_weights) = trained(), trained()
        assert losses == others
        assert losses[0] != losses[1]
        np.testing.assert_array_equal(rows, other_rows)
        for mine, other in zip(weights, other_weights, strict=True):
            np.testing.assert_array_equal(mine, other)

    def test_rows_that_no_batch_has_touched_stay_what_they_were(self) -> None:
        keras.utils.set_random_seed(3)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), et.Embedding(None, DIM), keras.layers.Flatten()])
        model.compile("sgd", "mse")
        far = np.array([10**12, -5])
        before = model.layers[0].read_rows(far)
        for seed in (None, 4, 5):
            et.fit(model, X, np.zeros((len(X), 12)), verbose=0, seed=seed)
            if seed is None:
                np.testing.assert_array_equal(model.layers[0].read_rows(far), before)
            before = model.layers[0].read_rows(far) if seed is None else before
            np.testing.assert_array_equal(model.layers[0].read_rows(far), before)

    def test_initial_rows_are_the_same_in_whatever_thread_they_are_read(self) -> None:
        """Keras keeps its global seed for each thread, and a graph reads rows in threads of TensorFlow."""
        keras.utils.set_random_seed(9)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), et.Embedding(None, DIM, name="any")])
        model.compile("sgd", "mse")
        rows = np.asarray(model.layers[0](X))
        np.testing.assert_array_equal(model.predict(X, verbose=0), rows)
        with ThreadPoolExecutor(1) as pool:
            np.testing.assert_array_equal(
                pool.submit(model.layers[0].read_rows, X.reshape(-1)).result(), rows.reshape(-1, DIM)
            )
        keras.utils.set_random_seed(10)  # as in Keras, it changes no layer that was made before
        far = np.array([[10**12, -5, 7 * 10**15]])
        before = model.predict(far, verbose=0)
        model.fit(X, np.zeros((len(X), 3, DIM)), verbose=0)
        np.testing.assert_array_equal(model.predict(far, verbose=0), before)

    def test_et_step_goes_on_with_the_rows_of_a_fit(self) -> None:
        model = keras.Sequential([keras.Input((3,), dtype="int64"), et.Embedding(None, DIM, name="any")])
        model.compile("sgd", "mse")
        et.fit(model, X, np.zeros((len(X), 3, DIM)), verbose=0, seed=3)
        far = np.array([[10**12, -5, 7 * 10**15]])
        before = model.predict(far, verbose=0)
        with et.step(model) as step:
            with tf.GradientTape() as tape:
                loss = tf.reduce_sum(model(X[:2], training=True))
            step.apply(tape, loss)
        np.testing.assert_array_equal(model.predict(far, verbose=0), before)

    def test_a_fit_with_a_seed_says_what_the_seed_does_not_reach(self, caplog: pytest.LogCaptureFixture) -> None:
        model = program(et.Embedding)
        et.fit(model, X, Y, verbose=0, seed=3)
        assert "set_random_seed" not in caplog.text  # the program called it
        keras.src.backend.common.global_state.set_global_attribute("global_random_seed", None)
        model = keras.Sequential([keras.Input((3,), dtype="int64"), et.Embedding(ROWS, DIM), keras.layers.Flatten()])
        model.add(keras.layers.Dense(1, name="drawn"))
        model.compile("sgd", "mse")
        et.fit(model, X, Y, verbose=0, seed=3)
        assert "layer 'drawn'" in caplog.text
        assert "keras.utils.set_random_seed(3) before" in caplog.text


class TestStores:
    def test_rows_of_an_earlier_program_are_refused_and_then_attached(self, tmp_path: Path) -> None:
        url = f"file://{tmp_path}/rows"
        ours = program(et.Embedding)
        layer = ours.layers[0]
        with et.open_store(url) as earlier:
            et.fit(ours, X, Y, BATCH, verbose=0, store=earlier)
        keras.backend.clear_session()
        again = program(lambda *size: et.Embedding(*size, table=layer.table_name))  # type: ignore[misc]
        with pytest.raises(
            BadInput, match=r"holds 50 rows of table .* which this model has not read.*open_store, call layer\.attach"
        ):
            et.fit(again, X, Y, BATCH, verbose=0, store=url)
        with et.open_store(url) as store:  # which the refusal has closed
            name, ids = layer.table_name, np.arange(ROWS)
            again.layers[0].attach(store)
            before = again.layers[0].read_rows(ids)
            np.testing.assert_array_equal(before, store.lookup({name: ids})[name])
            et.fit(again, X, Y, BATCH, verbose=0, store=store)
            assert (store.lookup({name: ids})[name] != before).any()

    def test_a_store_by_url(self, redis_url: str) -> None:
        ours, expected = program(et.Embedding), program(et.Embedding)
        for _ in range(2):  # the second goes on there
            et.fit(ours, X, Y, BATCH, shuffle=False, verbose=0, store=redis_url)
            et.fit(expected, X, Y, BATCH, shuffle=False, verbose=0)
        rows = [model.layers[0].read_rows(np.arange(ROWS)) for model in (ours, expected)]
        np.testing.assert_array_equal(*rows)
        ours.layers[0].source.close()
        another = program(et.Embedding)
        et.fit(another, X, Y, BATCH, verbose=0, store=redis_url)  # which is opened anew
        another.layers[0].source.close()  # the interpreter would close it when its Redis is gone, and wait for that

    @pytest.mark.parametrize(
        ("store", "message"),
        [(3, "store=3: a int is no store"), ("postgres://h", "'postgres://h' is unknown"), ({}, "store={}")],
    )
    def test_what_is_no_store_is_refused(self, refusing: keras.Model, store: Any, message: str) -> None:
        with pytest.raises(BadInput, match=message):
            et.fit(refusing, X, Y, verbose=0, store=store)


class Noisy(keras.Model):
    """Random numbers without a seed of their own: Keras' global generator draws them."""

    def __init__(self, layer: Layer) -> None:
        super().__init__()
        self.embedding, self.out = layer(ROWS, DIM, name="ids"), keras.layers.Dense(1)

    def call(self, ids: tf.Tensor, training: bool = False) -> tf.Tensor:
        rows = keras.ops.sum(self.embedding(ids), axis=1)
        return self.out(rows + keras.random.normal((DIM,)) if training else rows)


def test_a_seed_of_the_job_decides_what_the_global_generator_draws() -> None:
    trained = []
    for _ in range(2):
        keras.utils.set_random_seed(7)
        model = Noisy(et.Embedding)
        model.compile(keras.optimizers.SGD(0.1), "mse")
        keras.random.normal((2,))  # whatever it has drawn before
        trained.append(et.fit(model, X, Y, BATCH, epochs=2, seed=3, verbose=0).history["loss"])
    assert trained[0] == trained[1]


def test_a_layer_that_the_model_does_not_know_is_refused() -> None:
    hidden = et.Embedding(ROWS, DIM)
    model = keras.Sequential([keras.Input((3,), dtype="int64"), et.Embedding(ROWS, DIM), keras.layers.Flatten()])
    inputs = model.inputs[0]
    called = keras.layers.Lambda(lambda ids: keras.ops.sum(hidden(ids), axis=1), output_shape=(DIM,))(inputs)
    model = keras.Model(inputs, keras.layers.Concatenate()([model.outputs[0], called]))
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"the model does not know the layer.* make it an attribute"):
        model.fit(X, np.zeros((len(X), 16)), verbose=0)


@keras.saving.register_keras_serializable("tests")
class _Pair(keras.metrics.Mean):
    def result(self) -> dict[str, tf.Tensor]:
        return {"half": super().result() / 2, "whole": super().result()}

    def update_state(self, y: tf.Tensor, predicted: tf.Tensor, sample_weight: tf.Tensor | None = None) -> None:
        super().update_state(predicted, sample_weight)


def test_a_metric_of_several_names_has_these_and_one_with_one_value_in_an_array_its_own() -> None:
    data: Keywords = {"batch_size": BATCH, "shuffle": False, "verbose": 0, "validation_data": (X, Y[:, None])}
    ours, theirs = (
        program(kind, metrics=[_Pair(name="pair"), keras.metrics.F1Score(threshold=0.5, name="f1")])
        .fit(X, Y[:, None], **data)
        .history
        for kind in (et.Embedding, keras.layers.Embedding)
    )
    assert ours.keys() == theirs.keys() > {"half", "val_whole", "f1", "val_f1"}
    for name, values in theirs.items():
        np.testing.assert_allclose(ours[name], np.ravel(values), rtol=1e-5)


# Ids beyond 2^53 stay what they are on every way into `model.fit`: no float lies between


IDS = (2**53 + 1, 2**62 + 3)
NEIGHBOURS = (2**53, 2**53 + 2, 2**62 + 4)  # what floats would make of them
LABEL = np.ones((1, 1), np.float32)


def _frame() -> object:
    import pandas as pd

    return pd.DataFrame({name: np.array([value], np.int64) for name, value in zip("ab", IDS, strict=True)})


@pytest.mark.parametrize(
    "data",
    [
        lambda: (np.array([IDS], np.uint64), LABEL),
        lambda: (_frame(), LABEL),
        lambda: (tf.data.Dataset.from_tensor_slices((np.array([IDS]), LABEL)).batch(1),),
    ],
    ids=["uint64", "pandas", "tf.data"],
)
def test_the_rows_of_these_ids_are_trained_and_no_others(data: Callable[[], tuple[object, ...]]) -> None:
    ids = keras.Input((2,), dtype="int64")
    layer = et.Embedding(None, 4, name="items", combiner="mean")
    model = keras.Model(ids, keras.layers.Dense(1)(layer(ids)))
    model.compile("sgd", "mse")
    before = layer.read_rows(np.array(IDS + NEIGHBOURS))
    model.fit(*data(), verbose=0)
    changed = (layer.read_rows(np.array(IDS + NEIGHBOURS)) != before).any(axis=1)
    assert changed.tolist() == [True, True, False, False, False]
