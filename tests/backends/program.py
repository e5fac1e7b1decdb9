"""Run by a process on a backend: Elastable's numbers against those of plain Keras on the same one.

Each function `check_...` is a test (`test_numbers.py`). How it fails is printed: a line for each, as JSON.
"""

import json
import logging
import re
import sys
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import keras
import numpy as np

import elastable as et
from elastable.worker.keras.keras_methods import rows_unlisted
from elastable.worker.runtime.worker_measures import StepProfile
from tests.untyped import Keywords

ROWS, DIM, BATCH, LENGTH = 12, 4, 16, 6
FAR = 2**40
OPTIMIZERS = {
    "sgd": lambda: keras.optimizers.SGD(0.2),
    "adagrad": lambda: keras.optimizers.Adagrad(0.1),
    "adam": lambda: keras.optimizers.Adam(0.01),
    "undecayed": lambda: undecayed_rows(),
}
FITS: dict[str, Callable[..., keras.callbacks.History]] = {"et.fit": et.fit, "model.fit": keras.Model.fit}


def undecayed_rows() -> keras.Optimizer:
    """An optimizer that leaves tables out of its weight decay."""
    optimizer = keras.optimizers.SGD(0.2, weight_decay=0.1)
    optimizer.exclude_from_weight_decay(var_names=["embeddings"])
    return optimizer


def records(batches: int = 6) -> tuple[np.ndarray, np.ndarray]:
    """Batches with every id eight times, so that plain Keras updates no other rows than the store, and targets."""
    random = np.random.default_rng(0)
    ids = [random.permutation(np.repeat(np.arange(ROWS), BATCH * LENGTH // ROWS)) for _ in range(batches)]
    x = np.concatenate(ids).reshape(-1, LENGTH)
    return x, np.sin(x.sum(axis=1, keepdims=True)).astype("float32")


def model_of(rows: Callable[[keras.KerasTensor], keras.KerasTensor], optimizer: str) -> keras.Model:
    """A model over a function from ids `[LENGTH]` to one tensor a record."""
    ids = keras.Input((LENGTH,), dtype="int64")
    hidden = keras.layers.Dense(8, "tanh", kernel_initializer=keras.initializers.GlorotUniform(1))(rows(ids))
    model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))(hidden))
    model.compile(OPTIMIZERS[optimizer](), "mse", metrics=["mae"])
    return model


def in_a_row(layer: keras.layers.Layer) -> Callable[[keras.KerasTensor], keras.KerasTensor]:
    """The rows of a record after one another."""
    flat = keras.layers.Flatten()
    return lambda ids: flat(layer(ids))


def assert_close(ours: object, theirs: object) -> None:
    np.testing.assert_allclose(np.asarray(ours), np.asarray(theirs), rtol=1e-4, atol=1e-5)


@contextmanager
def refusing(words: str) -> Iterator[None]:
    """The block ends with an error of ours that says these; there is no pytest in a user's environment."""
    said = "nothing"
    try:
        yield
    except et.ElastableError as error:
        said = str(error)
    assert words in said, f"{said} was said, and not {words}"


def assert_as_in_keras(optimizer: str) -> None:
    x, y = records()
    table = np.random.default_rng(1).normal(size=(ROWS, DIM)).astype("float32")
    settings: Keywords = {"epochs": 3, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    settings["validation_data"] = (x[:24], y[:24])
    theirs = model_of(in_a_row(keras.layers.Embedding(ROWS, DIM, weights=[table])), optimizer)
    history = theirs.fit(x, y, **settings).history
    assert history["loss"][-1] < 0.9 * history["loss"][0]
    for fit in FITS.values():
        ours = model_of(in_a_row(et.Embedding(ROWS, DIM, weights=table, name="items")), optimizer)
        found = fit(ours, x, y, **settings).history
        assert found.keys() == history.keys()
        for name, values in history.items():
            assert_close(found[name], values)
        for weight, expected in zip(ours.get_weights(), theirs.get_weights(), strict=True):
            assert_close(weight, expected)
        assert_close(ours.predict(x[:20], batch_size=8, verbose=0), theirs.predict(x[:20], batch_size=8, verbose=0))
        scores = [each.evaluate(x, y, batch_size=20, verbose=0, return_dict=True) for each in (ours, theirs)]
        assert scores[0].keys() == scores[1].keys()
        assert_close(list(scores[0].values()), list(scores[1].values()))


def check_adagrad() -> None:
    assert_as_in_keras("adagrad")


def check_adam() -> None:
    assert_as_in_keras("adam")


def check_excluded_from_weight_decay() -> None:
    assert_as_in_keras("undecayed")


def check_far_ids_with_padding() -> None:
    """Ids that 32 bits do not hold, some of them equal in their last 32, and the id 0 as padding."""
    x, y = records()
    far = np.where(x == 0, 0, np.where(x % 2, x + FAR, x - 1 + 2 * FAR))
    assert len(np.unique(far)) == ROWS
    assert len(np.unique(far & 0xFFFFFFFF)) == 1 + ROWS // 2
    places = np.unique(far, return_inverse=True)[1].reshape(far.shape)  # that of 0 is 0
    settings: Keywords = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    for combiner in ("sum", "mean"):

        def pooled(ids: keras.KerasTensor, combiner: str = combiner) -> keras.KerasTensor:
            kept = keras.ops.expand_dims(keras.ops.cast(ids != 0, "float32"), -1)
            total = keras.ops.sum(keras.layers.Embedding(ROWS, DIM, "ones", name="items")(ids) * kept, axis=-2)
            return total if combiner == "sum" else total / keras.ops.maximum(keras.ops.sum(kept, axis=-2), 1)

        theirs = model_of(pooled, "adagrad")
        layer = et.Embedding(None, DIM, "ones", combiner=combiner, mask_zero=True, name="items")
        ours = model_of(layer, "adagrad")
        history = theirs.fit(places, y, **settings).history
        assert_close(ours.fit(far, y, **settings).history["loss"], history["loss"])
        expected = np.asarray(keras.ops.convert_to_numpy(theirs.get_layer("items").embeddings))
        assert_close(layer.read_rows(np.unique(far))[1:], expected[1:])
        assert np.ptp(expected[1:], axis=0).max() > 0.01
        assert_close(ours.predict(far[:8], verbose=0), theirs.predict(places[:8], verbose=0))


def check_computed_ids_beyond_32_bits() -> None:
    """A cross of two columns: exact for a table of any id; of a vocabulary plain Keras on JAX has other ids."""
    random = np.random.default_rng(0)
    x, y = [random.integers(0, 5000, 64), random.integers(0, 9, 64)], np.ones((64, 1), "float32")

    def crossed(layer: keras.layers.Layer, most: int | None = None) -> keras.Model:
        inputs = [keras.Input((), dtype="int64"), keras.Input((), dtype="int64")]
        ids = inputs[0] * 2**20 + inputs[1]
        ids = ids if most is None else ids % most
        model = keras.Model(inputs, keras.layers.Dense(1)(layer(ids)))
        model.compile("sgd", "mse")
        return model

    layer = et.Embedding(None, DIM, name="items")
    model = crossed(layer)
    et.fit(model, x, y, batch_size=BATCH, verbose=0)
    kernel, bias = model.layers[-1].get_weights()
    expected = layer.read_rows(x[0] * 2**20 + x[1]) @ kernel + bias
    assert_close(model.predict(x, verbose=0), expected)
    assert_close(keras.ops.convert_to_numpy(model(x)), expected)
    assert_close(model.evaluate(x, y, verbose=0), np.mean((expected - 1) ** 2))
    if keras.config.backend() == "jax":
        with refusing("which has 32 bits on JAX"):
            et.fit(crossed(et.Embedding(1000, DIM), 1000), x, y, batch_size=BATCH, verbose=0)


def check_lists() -> None:
    """Lists of any length, weighted ones and sparse records: they are padded where the layer leaves the padding out."""
    random, (x, y) = np.random.default_rng(0), records(4)
    lengths = random.integers(0, LENGTH + 1, len(x))
    kept = np.arange(LENGTH) < lengths[:, None]
    ids, scales = np.where(kept, x + 1 + FAR, 0), np.where(kept, random.uniform(0.5, 2, x.shape), 0).astype("float32")
    of_ids, of_scales = (np.empty(len(x), object) for _ in range(2))
    for record, length in enumerate(lengths):
        of_ids[record], of_scales[record] = ids[record, :length], scales[record, :length]
    splits = np.concatenate([[0], np.cumsum(lengths)])
    sparse = et.SparseArray(np.nonzero(kept)[1][:, None], ids[kept], splits, (LENGTH,))
    settings: Keywords = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    for combiner in ("sum", "mean"):
        found = []
        for given in ((ids, scales), (of_ids, of_scales), (sparse, of_scales)):
            inputs = [keras.Input((None,), dtype="int64"), keras.Input((None,))]
            layer = et.Embedding(None, DIM, "ones", mask_zero=True, combiner=combiner, name="items")
            dense = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(2))
            model = keras.Model(inputs, dense(layer(inputs[0], weights=inputs[1])))
            model.compile(OPTIMIZERS["adagrad"](), "mse")
            history = et.fit(model, list(given), y, validation_data=(list(given), y), **settings).history
            found.append([history["loss"], history["val_loss"], layer.read_rows(np.unique(ids)[1:])])
        for other in found[1:]:
            for one, expected in zip(other, found[0], strict=True):
                assert_close(one, expected)
    for layers, refused in (
        ([keras.Input((None,), dtype="int64"), et.Embedding(None, DIM, mask_zero=True, combiner="sum")], False),
        ([keras.Input((None,), dtype="int64"), et.Embedding(None, DIM, combiner="sum")], True),
        ([et.Embedding(None, DIM, mask_zero=True, combiner="sum")], True),
    ):
        model = keras.Sequential([*layers, keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        with (
            refusing("keras.Input((None,)) goes to et.Embedding layers with mask_zero=True")
            if refused
            else nullcontext()
        ):
            et.fit(model, of_ids, y, **settings)


def check_masks_reach_the_next_layer() -> None:
    """`mask_zero` of a layer without a combiner: an average over what is no padding."""
    x, y = records()
    settings: Keywords = {"epochs": 2, "batch_size": BATCH, "shuffle": False, "verbose": 0}
    pooling = keras.layers.GlobalAveragePooling1D
    theirs = model_of(lambda ids: pooling()(keras.layers.Embedding(ROWS, DIM, "ones", mask_zero=True)(ids)), "adagrad")
    layer = et.Embedding(None, DIM, "ones", mask_zero=True, name="items")
    ours = model_of(lambda ids: pooling()(layer(ids)), "adagrad")
    far = np.where(x == 0, 0, x + FAR)
    assert_close(ours.fit(far, y, **settings).history["loss"], theirs.fit(x, y, **settings).history["loss"])
    assert_close(ours.predict(far[:8], verbose=0), theirs.predict(x[:8], verbose=0))


def check_weights_of_values_with_masks() -> None:
    """Weighted metrics of an output with a mask."""
    x, y = records()[0], np.zeros((6 * BATCH, LENGTH, 1))
    weights, losses = np.linspace(0.1, 1, x.size).reshape(x.shape), []
    for kind in (keras.layers.Embedding, et.Embedding):
        layers = [
            keras.Input((LENGTH,), dtype="int64"),
            kind(ROWS, DIM, "ones", mask_zero=True),
            keras.layers.Dense(1, kernel_initializer="ones"),
        ]
        model = keras.Sequential(layers)
        model.compile("sgd", "mse", weighted_metrics=["mae"])
        seen = model.fit(x, y, sample_weight=weights, batch_size=BATCH, epochs=2, shuffle=False, verbose=0).history
        losses.append(seen["loss"] + seen["mae"])
    assert_close(losses[1], losses[0])


def check_micro_batches() -> None:
    """Two micro-batches make the version of a batch with all their records."""
    x, y = records()
    settings: Keywords = {"epochs": 2, "shuffle": False, "verbose": 0}
    models = []
    for batch, combined in ((BATCH, 1), (BATCH // 2, 2)):
        model = model_of(in_a_row(et.Embedding(ROWS, DIM, "ones", name="items")), "adam")
        et.fit(model, x, y, batch_size=batch, grads_to_wait=combined, **settings)
        models.append(model)
    for one, other in zip(*(each.get_weights() for each in models), strict=True):
        assert_close(one, other)
    losses, metrics, ops = keras.losses, keras.metrics, keras.ops

    class Own(keras.losses.Loss):
        def call(self, y: keras.KerasTensor, found: keras.KerasTensor) -> keras.KerasTensor:
            return ops.log1p(ops.square(y - found))

    def quantile(y: keras.KerasTensor, found: keras.KerasTensor) -> keras.KerasTensor:
        return ops.maximum(0.3 * (y - found), 0.7 * (found - y))

    # Other numbers where records had another weight in a smaller micro-batch, or in the last one.
    x, y, weights = x[:40], y[:40], np.linspace(0.5, 2, 40, dtype="float32")
    for loss, metric, weighted in (
        (quantile, quantile, True),
        (Own(), None, True),
        (Own(reduction="sum"), None, True),
        (losses.MeanSquaredError("sum"), "mae", True),
        (losses.MeanSquaredError("mean_with_sample_weight"), None, False),
        (lambda y, found: ops.mean(ops.abs(y - found)), None, False),
    ):
        models, histories = [], []
        for batch, combined in ((BATCH, 1), (BATCH // 2, 2)):
            model = model_of(in_a_row(et.Embedding(ROWS, DIM, "ones", name="items")), "sgd")
            model.compile(keras.optimizers.SGD(0.01), loss, weighted_metrics=[metric] if metric else None)
            given: Keywords = {**settings, "sample_weight": weights if weighted else None}
            fitted = et.fit(model, x, y, batch_size=batch, grads_to_wait=combined, **given)
            models.append(model)
            histories.append(fitted.history)
        for one, other in zip(*(each.get_weights() for each in models), strict=True):
            assert_close(one, other)
        assert histories[0].keys() == histories[1].keys()
        for name, values in histories[0].items():
            assert_close(histories[1][name], values)

    class Mean(keras.losses.Loss):
        def call(self, y: keras.KerasTensor, found: keras.KerasTensor) -> keras.KerasTensor:
            return ops.mean(ops.abs(y - found))

    for loss, metric, layer in (
        (Mean(reduction="sum"), None, None),
        ("dice", None, None),
        (losses.CosineSimilarity(axis=0), None, None),
        ("mse", losses.tversky, None),
        ("mse", metrics.CosineSimilarity(axis=0), None),
        ("mse", metrics.PearsonCorrelation(axis=0), None),
        ("mse", None, keras.layers.UnitNormalization(axis=-2)),
        ("mse", None, keras.layers.Softmax(axis=0)),
        ("mse", None, keras.layers.Reshape(())),
        (lambda y, found: ops.square(y - found[:, 0]), None, None),
        (lambda y, found: ops.square(y - ops.mean(found)), None, None),
        (lambda y, found: ops.sqrt(ops.mean(ops.square(y - found))), None, None),
        (lambda y, found: ops.mean(ops.square(y - found), axis=0), None, None),
        (lambda y, found: ops.mean(ops.square(found[1:] - found[:-1])), None, None),
        ("mse", lambda y, found: ops.mean(ops.abs(y - found)), None),
    ):
        model = model_of(in_a_row(et.Embedding(ROWS, DIM, "ones", name="items")), "sgd")
        if layer is not None:
            model = keras.Model(model.input, layer(model.output))
        model.compile("sgd", loss, metrics=[metric] if metric is not None else None)
        with refusing("every term of the loss needs a known divisor"):
            et.fit(model, x, y, batch_size=BATCH // 2, grads_to_wait=2, **settings)
    for loss in (lambda y, found: ops.mean(ops.abs(y - found)), losses.MeanSquaredError("mean_with_sample_weight")):
        model = model_of(in_a_row(et.Embedding(ROWS, DIM, "ones", name="items")), "sgd")
        model.compile("sgd", loss)
        with refusing("every term of the loss needs a known divisor"):
            et.fit(model, x, y, batch_size=BATCH // 2, grads_to_wait=2, sample_weight=weights, **settings)


def check_profile_is_refused() -> None:
    with refusing("--profile"):
        StepProfile(Path("none"))


def check_steps_of_ones_own() -> None:
    """A `train_step` that computes its loss, without one of compile(); on JAX it is refused."""
    x, y = records(2)

    class Own(keras.Model):
        def train_step(self, batch: tuple[object, object]) -> dict[str, object]:
            with et.step(self) as step:
                step.apply(keras.ops.mean(keras.ops.square(self(batch[0], training=True) - batch[1])))
            return {}

    rows: Keywords = {"embeddings_initializer": "ones", "name": "items"}
    theirs = model_of(in_a_row(keras.layers.Embedding(ROWS, DIM, **rows)), "sgd")
    base = model_of(in_a_row(et.Embedding(ROWS, DIM, **rows)), "sgd")
    ours = Own(base.input, base.output)
    ours.compile(OPTIMIZERS["sgd"]())
    settings: Keywords = {"batch_size": BATCH, "shuffle": False, "verbose": 0}
    if keras.config.backend() == "jax":
        with refusing("overrides train_step"):
            et.fit(ours, x, y, **settings)
        return
    theirs.fit(x, y, **settings)
    et.fit(ours, x, y, **settings)
    for one, other in zip(ours.get_weights(), theirs.get_weights(), strict=True):
        assert_close(one, other)


def check_an_embedding_in_what_is_repeated_for_each_record() -> None:
    """It is refused by name, wherever its ids are known in there alone."""
    x, y = records(2)

    class Mapped(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows = et.Embedding(ROWS, DIM)

        def call(self, ids: keras.KerasTensor) -> keras.KerasTensor:
            return keras.ops.map(lambda of_one: keras.ops.sum(self.rows(of_one), keepdims=True), ids)

    model = Mapped()
    model.compile("sgd", "mse")
    with refusing("keras.ops.map, scan"):
        et.fit(model, x, y, batch_size=BATCH, verbose=0)


def check_a_loop_that_leaves_the_table_out() -> None:
    """Rows of a call outside of a step are constants: a gradient of what it computed is refused, not half of one."""
    x, y = records(1)
    model = model_of(in_a_row(et.Embedding(ROWS, DIM, "ones", name="items")), "sgd")
    if keras.config.backend() == "torch":
        loss = keras.ops.mean(keras.ops.square(model(x) - keras.ops.convert_to_tensor(y)))
        with refusing("et.step"):
            loss.backward()
        model.get_layer("items").trainable = False
        keras.ops.mean(model(x)).backward()
        return
    import jax

    def loss_of(values: list[object]) -> object:
        states = [variable.value for variable in model.non_trainable_variables]
        return keras.ops.mean(model.stateless_call(values, states, x)[0])

    dense = [each.value for each in model.trainable_variables if not hasattr(each, "table_name")]
    with rows_unlisted():
        jax.jit(loss_of)(dense)
        for gradient in (jax.grad(loss_of), jax.jit(jax.grad(loss_of)), jax.grad(jax.jit(loss_of))):
            with refusing("et.fit"):
                gradient(dense)


class Keeping(keras.layers.Layer):
    """Gives what it is given, which is its state, too."""

    def build(self, shape: tuple[int | None, ...]) -> None:
        self.last = self.add_weight(shape=(BATCH, *shape[1:]), initializer="zeros", trainable=False, name="last")

    def call(self, rows: keras.KerasTensor) -> keras.KerasTensor:
        if rows.shape[0] == BATCH:  # not of a model that is only built, or planned
            self.last.assign(rows)
        return rows


def check_rows_are_assigned_what_is_computed_from_them() -> None:
    layer = et.Embedding(ROWS, DIM, "ones", name="items")
    layer.build()
    layer.embeddings.assign(layer.embeddings * 0.5)
    assert_close(layer.embeddings, np.full((ROWS, DIM), 0.5))
    layer.embeddings.assign_sub(layer.embeddings * 0.5)
    assert_close(layer.embeddings, np.full((ROWS, DIM), 0.25))


def check_rows_that_a_layer_keeps() -> None:
    """They stay those of their step, whatever memory the rows of the next one come in."""
    x, y = records(4)
    for eagerly in (False, True):
        kept = Keeping()
        model = model_of(in_a_row(keras.Sequential([et.Embedding(ROWS, DIM, name="items"), kept])), "sgd")
        model.compile(keras.optimizers.SGD(0.2), "mse", run_eagerly=eagerly)
        seen: list[tuple[np.ndarray, np.ndarray]] = []

        class Watch(keras.callbacks.Callback):
            def on_train_batch_end(
                self,
                batch: int,
                logs: object = None,
                kept: Keeping = kept,
                seen: list[tuple[np.ndarray, np.ndarray]] = seen,
            ) -> None:
                found = keras.ops.convert_to_numpy(kept.last.value)
                seen.append((found, found.copy()))

        et.fit(model, x, y, batch_size=BATCH, verbose=0, callbacks=[Watch()])
        assert len({copy.tobytes() for _, copy in seen}) == len(x) // BATCH
        for found, copy in seen:
            np.testing.assert_array_equal(found, copy)


def check_one_seed_is_one_result() -> None:
    """To the bit, with Dropout, also in two calls."""
    x, y = records(3)
    found = []
    for calls in ([(0, 4)], [(0, 2), (2, 4)]):
        rows = et.Embedding(ROWS, DIM, "ones", name="items")
        model = model_of(keras.Sequential([rows, keras.layers.Flatten(), keras.layers.Dropout(0.4)]), "adam")
        for first, epochs in calls:
            keras.random.dropout(keras.ops.ones(first + 1), 0.5)  # what a program draws itself changes nothing
            et.fit(model, x, y, epochs=epochs, initial_epoch=first, batch_size=BATCH, seed=3, verbose=0)
        found.append(model.get_weights())
    for one, other in zip(*found, strict=True):
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@contextmanager
def compilations() -> Iterator[list[str]]:
    """What JAX says of each compilation of a function of ours within the block."""
    import jax

    said: list[str] = []

    class Kept(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            if (text := record.getMessage()).startswith("Compiling jit(pure)"):
                said.append(text)

    log, kept = logging.getLogger("jax"), Kept()
    log.addHandler(kept)
    jax.config.update("jax_log_compiles", True)  # of all threads: plans are made by one of their own
    try:
        yield said
    finally:
        jax.config.update("jax_log_compiles", False)
        log.removeHandler(kept)


def check_compilations() -> None:
    """Of the step: once for a width, and once more for a smaller last batch, whichever ids a batch has.

    Of the plan as often where ids are computed, and where they are a part of a column never.
    """
    if keras.config.backend() != "jax":
        return
    random, y = np.random.default_rng(2), records()[1]
    for last, widths in ((0, [BATCH]), (5, [5, BATCH])):
        for computed in (False, True):
            layer = et.Embedding(None, DIM, combiner="sum", embeddings_regularizer="l2", name="items")

            def rows(
                ids: keras.KerasTensor, of: keras.layers.Layer = layer, computed: bool = computed
            ) -> keras.KerasTensor:
                return of(keras.ops.concatenate([ids[:, 2:], ids[:, :2]], axis=1) if computed else ids)

            model = model_of(rows, "adagrad")
            for batches in (4, 5):
                x, target = random.integers(0, 40, (batches * BATCH + last, LENGTH)), y[: batches * BATCH + last]
                with compilations() as said:
                    et.fit(model, x, target, epochs=2, batch_size=BATCH, verbose=0)
                plans = [text for text in said if "types (ShapedArray(int64" in text]
                steps = [text for text in said if f",{LENGTH},{DIM}]" in text]
                if batches == 4:
                    # Two records: which calls there are.
                    assert sorted(map(_width, plans)) == (sorted([2, *widths]) if computed else []), said
                    assert sorted(map(_width, steps)) == widths, said
                    assert len(said) == len(plans) + len(steps) + 1, said  # and the update
                else:
                    assert not said


def check_ids_that_are_parts_of_columns() -> None:
    """Slices, of either end, and reshaped ones: without a computation, the ids that the layers are called with."""
    x, y = records(2)
    found = []
    for copied in (False, True):
        ids = keras.Input((LENGTH,), dtype="int64")
        parts = [ids[:, 1], ids[:, -3:], keras.layers.Reshape((2, LENGTH // 2))(ids)[:, ::2, 1:]]
        rows = []
        for number, part in enumerate(parts):
            part = keras.ops.maximum(part, 0) if copied else part
            rows.append(keras.layers.Flatten()(et.Embedding(ROWS, DIM, "ones", name=f"items_{number}")(part)))
        joined = keras.ops.concatenate(rows, axis=-1)
        model = keras.Model(ids, keras.layers.Dense(1, kernel_initializer="zeros")(joined))
        model.compile(OPTIMIZERS["adam"](), "mse")
        et.fit(model, x, y, batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
        found.append(model.get_weights())
    assert np.ptp(found[0][-2]) > 0
    for one, other in zip(*found, strict=True):
        np.testing.assert_array_equal(one, other)


def _width(text: str) -> int:
    """The number of records of the only array with ids or rows."""
    return int(re.findall(rf"\[(\d+),{LENGTH}[],]", text)[0])


def main() -> None:
    for name, check in globals().copy().items():
        if name.startswith("check_"):
            failed = ""
            try:
                check()
            except Exception:  # noqa: BLE001 - it is told where the test is
                failed = traceback.format_exc()
            print(json.dumps([name, failed]), flush=True)
    others = {"tensorflow", "jax", "torch"} - {keras.config.backend()}
    print(json.dumps(["imported", sorted(others & sys.modules.keys())]))


if __name__ == "__main__":
    main()
