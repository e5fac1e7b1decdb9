"""What cannot be used is refused: by name, before anything changes."""

import re
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store import errors
from elastable.embedding_store.contract.arrays import Array
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job, tables_of
from elastable.process.exit_codes import ExitCode, exit_code_of
from tests.elastable.processes import CLICK_JOB
from tests.elastable.small_models import clicks, store_model, tables_and_weights
from tests.untyped import Keyword, Keywords

X, Y = clicks(48)
PRICED = {**X, "price": np.linspace(0, 1, 48, dtype=np.float32)}


DOUBLES = """
import keras, numpy as np
import elastable as et

def model():
    ids = keras.Input((), dtype="int64")
    made = keras.Model(ids, keras.layers.Dense(1)(et.Embedding(None, 2, name="items")(ids)))
    made.compile("sgd", "mse")
    return made

def data(split):
    return et.NumpyReader(np.full(8, 2.0**24 + 1), np.ones(8)) if split == "train" else None
"""


def fit(
    model: keras.Model, x: object, y: object = Y, loss: object = "binary_crossentropy", **more: Keyword
) -> keras.callbacks.History:
    model.compile(keras.optimizers.Adagrad(0.1), loss)
    return et.fit(model, (x, y), batch_size=16, shuffle=False, verbose=False, **more)


def changed(ids: Array, position: int, value: float) -> Array:
    ids = ids.copy()
    ids.flat[position] = value
    return ids


class TestIds:
    @pytest.mark.parametrize("value", [30, -1, 2**40])
    def test_outside_of_a_fixed_table(self, value: int) -> None:
        # Record 37 is position 5 of the third micro-batch.
        x = {**X, "user": changed(X["user"], 37, value)}
        with pytest.raises(errors.IdOutOfRange, match=f"table 'users': id {value} at position 5 .* 0 <= id < 30"):
            fit(store_model(), x)

    def test_a_job_takes_doubles_in_its_first_records(self, tmp_path: Path) -> None:
        (tmp_path / "model.py").write_text(DOUBLES)
        model, tables = tables_of(tmp_path / "model.py")
        assert (model.input.dtype, list(tables)) == ("int64", ["items"])


def exploding(y: object, predicted: keras.KerasTensor) -> object:
    """A loss that is Inf where a label is 7."""
    return keras.ops.where(y == 7, np.inf, 1.0) * keras.ops.square(y - predicted)


class TestNotFinite:
    labels = changed(Y, 20, 7)

    def test_refused_by_name_and_nothing_of_it_is_applied(self) -> None:
        model = with_batch_normalization()
        with pytest.raises(errors.NotFinite, match=r"gradient of variable '.*' holds NaN or Inf") as caught:
            fit(model, PRICED, self.labels, exploding)
        assert exit_code_of(caught.value) is ExitCode.BAD_INPUT
        assert_finite(model)

    def test_in_a_table(self) -> None:
        user = keras.Input((), dtype="int64", name="user")
        made = keras.Model(
            {"user": user}, keras.layers.Activation("sigmoid")(et.Embedding(None, 1, name="users")(user))
        )
        with pytest.raises(errors.NotFinite, match=rf"table 'users': the gradient of id {X['user'][20]} .*column 0"):
            fit(made, {"user": X["user"]}, self.labels[:, np.newaxis], exploding)

    def test_skipped_the_job_goes_on(self) -> None:
        model = with_batch_normalization()
        history = fit(model, PRICED, self.labels, exploding, epochs=3, not_finite="skip")
        assert len(history.history["loss"]) == 3
        assert np.isfinite(history.history["loss"]).all()
        assert_finite(model)
        assert np.abs(tables_and_weights(model)["users"] - 1).max() > 0

    def test_skipped_states_stay_finite(self) -> None:
        # A NaN among the features reaches the moving averages before it reaches the gradient.
        model = with_batch_normalization()
        fit(model, {**X, "price": changed(PRICED["price"], 20, np.nan)}, Y, epochs=2, not_finite="skip")
        assert_finite(model)


def with_batch_normalization() -> keras.Model:
    made = store_model()
    price = keras.Input((), name="price")
    normalized = keras.layers.BatchNormalization()(keras.ops.expand_dims(price, -1) + made.output)
    out = keras.layers.Dense(1, activation="sigmoid", name="last")(normalized)
    return keras.Model([*made.inputs, price], out)


def assert_finite(model: keras.Model) -> None:
    for name, values in tables_and_weights(model).items():
        assert np.isfinite(values).all(), name
    for variable in model.variables:
        assert np.isfinite(np.asarray(variable)).all(), variable.path


class TestStoreOfAnotherJob:
    def test_needs_overwrite_or_resume(self, redis_url: str, tmp_path: Path) -> None:
        options: Keywords = {"model_file": CLICK_JOB, "run_dir": tmp_path, "store": redis_url}
        with prepare_job(JobOptions(**options)).store as store:
            store.reset_version(3)  # there is more in it than tables that were made and never trained
        with pytest.raises(errors.BadInput, match=re.escape("(users, words): go on from its checkpoint with --resume")):
            prepare_job(JobOptions(**options))
        with pytest.raises(errors.BadInput, match="--overwrite"):
            prepare_job(JobOptions(**options, resume=True, checkpoint_dir=tmp_path))
        prepare_job(JobOptions(**options, overwrite=True)).store.close()


NO_IDS = {name: values[:0] for name, values in X.items()}


class TestNoRecords:
    """Refused wherever they are given: Keras' own `fit` warns, and returns a history without a loss."""

    @pytest.mark.parametrize(
        ("x", "more"),
        [
            ((NO_IDS, Y[:0]), {}),
            ({"x": NO_IDS, "y": Y[:0]}, {}),
            (tf.data.Dataset.from_tensor_slices((X, Y)).batch(16).skip(9), {}),
            (tf.data.Dataset.from_tensor_slices((X, Y)).filter(lambda x, y: y > 2).batch(16), {}),
            (iter(()), {"steps_per_epoch": 2}),
            ((X, Y), {"validation_data": (NO_IDS, Y[:0])}),
        ],
        ids=["arrays", "dict", "stream", "filtered", "generator", "validation"],
    )
    @pytest.mark.parametrize("way", [et.fit, keras.Model.fit])
    def test_are_refused(self, way: Callable[..., object], x: object, more: Keywords) -> None:
        model = store_model()
        model.compile("adam", "binary_crossentropy")
        given = x if isinstance(x, tuple) else (x,)
        with pytest.raises(errors.BadInput, match=r"empty|before its first batch|before its batch 0"):
            way(model, *given, verbose=0, **more)
