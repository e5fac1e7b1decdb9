"""A second fit goes on with the traces of the first, and traces again what reads other variables since."""

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from tests.elastable.one_table import DIM, IDS, ROWS, TARGETS, assert_same, own_table


class Calls:
    """How often a layer's code was run: by Keras' build, and by every trace."""

    count = 0


CALLS = Calls()


class Traced(keras.layers.Layer):
    """Counts how often its code is run."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        CALLS.count += 1
        return 2.0 * x


class Noise(keras.layers.Layer):
    """Draws from Keras' global generator."""

    def call(self, x: tf.Tensor) -> tf.Tensor:
        CALLS.count += 1
        return x + keras.random.normal(tf.shape(x), 0.0, 0.1, x.dtype)


def model_of(table: keras.layers.Layer, layer: type[keras.layers.Layer] = Traced, **compiled: object) -> keras.Model:
    ids = keras.Input((4,), dtype="int64")
    x = keras.layers.BatchNormalization()(keras.layers.Flatten()(table(ids)))
    out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
    model = keras.Model(ids, out(layer(name="traced")(x)))
    model.compile(keras.optimizers.Adagrad(0.05), "mse", **compiled)
    return model


def fit(model: keras.Model, **how: object) -> int:
    """How often the model's code was run by a fit."""
    CALLS.count = 0
    et.fit(model, IDS, TARGETS, batch_size=8, verbose=0, seed=1, **how)  # type: ignore[arg-type]
    return CALLS.count


def test_a_second_fit_traces_nothing_and_trains_on() -> None:
    model, other = model_of(own_table()), model_of(own_table())
    assert fit(model) > 0
    assert fit(model) == 0
    fit(other)
    other.compile(other.optimizer, "mse")
    assert fit(other) > 0  # compiled again: traced again
    for one, two in zip(model.get_weights(), other.get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_another_train_function_and_another_size_of_batches_are_traced_anew() -> None:
    model = model_of(own_table())
    fit(model)
    model.make_train_function(force=True)
    assert fit(model) > 0
    CALLS.count = 0
    et.fit(model, IDS, TARGETS, batch_size=4, verbose=0, seed=1)
    assert CALLS.count > 0
    assert fit(model) == 0


def test_training_goes_on_with_its_trace_where_validation_comes_and_goes() -> None:
    model = model_of(own_table())
    counts = [
        fit(model, **how) for how in ({}, {"validation_data": (IDS, TARGETS)}, {}, {"validation_data": (IDS, TARGETS)})
    ]
    assert counts[1] in range(1, counts[0])
    assert counts[2:] == [0, 0]


def test_states_that_the_last_callback_sets_stay() -> None:
    model = model_of(own_table())
    (norm,) = [layer for layer in model.layers if isinstance(layer, keras.layers.BatchNormalization)]

    class Sets(keras.callbacks.Callback):
        def on_epoch_end(self, epoch: int, logs: object = None) -> None:
            norm.moving_variance.assign(keras.ops.full_like(norm.moving_variance, 0.7))

    fit(model, callbacks=[Sets()], epochs=2)
    np.testing.assert_array_equal(norm.moving_variance.numpy(), np.float32(0.7))


def test_other_batches_and_other_ways_to_sum_are_traced_apart() -> None:
    model = model_of(own_table())
    fit(model)
    assert fit(model, sample_weight=np.ones(len(IDS), np.float32)) > 0
    assert fit(model, grads_to_wait=2) > 0
    assert fit(model) == 0
    assert fit(model, validation_data=(IDS, TARGETS)) > 0
    assert fit(model, validation_data=(IDS, TARGETS)) == 0


def test_an_eager_model_keeps_none() -> None:
    model = model_of(own_table(), run_eagerly=True)
    fit(model)
    assert fit(model) > 0


def test_a_seed_that_is_set_again_is_drawn_from() -> None:
    """Its generator is another one then; as if each fit had traced the step itself."""
    models = []
    for compiles in (False, True):
        keras.utils.set_random_seed(3)
        model = model_of(own_table(), Noise)
        for seed in (5, 5):
            if compiles:
                model.compile(model.optimizer, "mse")
            keras.utils.set_random_seed(seed)
            et.fit(model, IDS, TARGETS, batch_size=8, shuffle=False, verbose=0)
        models.append(model)
    for one, two in zip(models[0].get_weights(), models[1].get_weights(), strict=True):
        np.testing.assert_array_equal(one, two)


def test_states_that_were_loaded_between_fits_stay_where_the_second_fails_at_once() -> None:
    model = model_of(own_table())
    fit(model)
    norm = model.layers[3]
    norm.set_weights([each + 1.0 for each in norm.get_weights()])
    before = norm.get_weights()

    class Fails(keras.callbacks.Callback):
        def on_train_begin(self, logs: object = None) -> None:
            raise RuntimeError("no")

        def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
            raise RuntimeError("no")

    with pytest.raises(RuntimeError, match="no"):
        fit(model, callbacks=[Fails()])
    for one, two in zip(norm.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, two)


def test_a_plain_table_that_moves_to_the_store_is_traced_again() -> None:
    plain, ours = (
        model_of(keras.layers.Embedding(ROWS, DIM, name="items", embeddings_initializer="ones")) for _ in range(2)
    )
    for model, above in ((plain, 0), (ours, 9)):
        model.compile(keras.optimizers.SGD(0.05), "mse")
        model.fit(IDS, TARGETS, batch_size=8, shuffle=False, verbose=0)
        if above:
            et.fit(model, IDS, TARGETS, batch_size=8, shuffle=False, verbose=0, lazy=None, offload_embeddings_above=9)
            CALLS.count = 0
            et.fit(model, IDS, TARGETS, batch_size=8, shuffle=False, verbose=0, lazy=None, offload_embeddings_above=9)
            assert CALLS.count == 0
        else:
            model.fit(IDS, TARGETS, batch_size=8, epochs=2, shuffle=False, verbose=0)
    assert_same(ours, plain)


@pytest.mark.parametrize("given", [False, True])
def test_a_table_that_was_dropped_between_two_fits_begins_anew(given: bool) -> None:
    """As the refusal of a store with rows of others says how to begin anew."""
    model, store = model_of(table := own_table()), et.MemoryStore() if given else None
    fit(model, store=store)
    ids = {table.table_name: np.unique(IDS)}
    before = table.source.lookup(ids)[table.table_name]
    table.source.drop_table(table.table_name)
    fit(model, store=store)
    assert table.source.row_count(table.table_name) == len(np.unique(IDS))
    assert not np.array_equal(table.source.lookup(ids)[table.table_name], before)
