"""Kinds of models, their methods, and models that override parts of a step."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.master.backend.lazy import tf
from tests.keras_table.case import BATCH, DIM, LENGTH, Case, MeanError, Outcome, Side, outcome, small, trained


@keras.saving.register_keras_serializable("keras_table")
class Subclassed(keras.Model):
    def __init__(self, vocabulary: int, **options: object) -> None:
        super().__init__(**options)
        self.vocabulary = vocabulary
        self.items = keras.layers.Embedding(vocabulary, DIM, name="items")
        self.flat = keras.layers.Flatten()
        self.out = keras.layers.Dense(1, name="out")

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return self.out(self.flat(self.items(inputs)))

    def get_config(self) -> dict[str, object]:
        return {**super().get_config(), "vocabulary": self.vocabulary}


class SubclassedOwnLoss(MeanError, Subclassed):
    pass


class OwnMetrics(Subclassed):
    def compute_metrics(self, x: object, y: object, y_pred: keras.KerasTensor, sample_weight: object = None) -> object:
        self.distance.update_state(y, y_pred * 2)
        return {**self.get_metrics_result(), "distance": self.distance.result()}

    def __init__(self, vocabulary: int, **options: object) -> None:
        super().__init__(vocabulary, **options)
        self.distance = keras.metrics.MeanAbsoluteError(name="distance")


class OwnTrainStep(Subclassed):
    def train_step(self, *given: object) -> object:  # JAX gives the state, too
        return super().train_step(*given)


class OwnTestStep(Subclassed):
    def test_step(self, *given: object) -> object:
        return super().test_step(*given)


class OwnPredictStep(Subclassed):
    def predict_step(self, *given: object) -> object:
        found = super().predict_step(*given)
        return (found[0] * 2, *found[1:]) if isinstance(found, tuple) else found * 2


class LossInCall(Subclassed):
    def call(self, inputs: object) -> object:
        rows = self.items(inputs)
        self.add_loss(keras.ops.mean(keras.ops.square(rows)))
        return self.out(self.flat(rows))


def _subclass(kind: type[Subclassed], **options: object) -> Callable[..., object]:
    """Built by a call before it is trained, so that both sides begin with the same values."""

    def program(side: Side) -> list[Array | dict[str, dict[str, object]]]:
        model = kind(side.vocabulary)
        model(side.x[:1])
        result = trained(side, model, **options)
        return [result, model.predict(side.x, verbose=0)]

    return program


def _sequential(side: Side) -> Outcome:
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items")
    layers = [table, keras.layers.Flatten(), keras.layers.Dense(1, name="out")]
    return trained(side, keras.Sequential([keras.Input((LENGTH,), dtype="int64"), *layers]))


def _nested(side: Side) -> object:
    table = keras.layers.Embedding(side.vocabulary, DIM, name="items")
    inner = keras.Sequential([keras.Input((LENGTH,), dtype="int64"), table, keras.layers.Flatten()])
    ids = keras.Input((LENGTH,), dtype="int64")
    return trained(side, keras.Model(ids, keras.layers.Dense(1, name="out")(inner(ids))))


def _frozen_model(side: Side) -> keras.Model:
    model = small(side)
    model.trainable = False
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "The model does not have any trainable weights")
        return trained(side, model)


def _dict_features(side: Side) -> object:
    inputs = {name: keras.Input((), dtype="int64", name=name) for name in ("user", "item")}
    rows = [keras.layers.Embedding(side.vocabulary, DIM, name=f"{name}s")(inputs[name]) for name in inputs]
    model = keras.Model(inputs, keras.layers.Dense(1, name="out")(keras.layers.Concatenate()(rows)))
    return trained(side, model, x={"user": side.x[:, 0], "item": side.x[:, 1]})


def _fitted(side: Side) -> keras.Model:
    model = small(side)
    trained(side, model, metrics=["mae"])
    return model


def _after(use: Callable[[keras.Model, Side], object]) -> Callable[[Side], object]:
    """Trains the small model, then uses it."""
    return lambda side: use(_fitted(side), side)


def _saved(model: keras.Model, side: Side) -> list[Array | str]:
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/model.keras", overwrite=True)
        loaded = keras.models.load_model(f"{folder}/model.keras")
    kind = type(loaded.get_layer("items")).__name__
    return [loaded.predict(side.x, verbose=0), kind.replace("OffloadedEmbedding", "Embedding")]


def _weights_saved(model: keras.Model, side: Side) -> object:
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/model.weights.h5")
        plain = small(Side(every_row=side.every_row))
        plain.load_weights(f"{folder}/model.weights.h5")
        into = _fitted(side)
        into.load_weights(f"{folder}/model.weights.h5")
    return [plain.predict(side.x, verbose=0), outcome(into)]


def _exported(model: keras.Model, side: Side) -> Array:
    with tempfile.TemporaryDirectory() as folder:
        model.export(f"{folder}/served", verbose=False)
        served = tf.saved_model.load(f"{folder}/served")
        return np.asarray(served.serve(tf.constant(side.x)))


def _exported_keras(side: Side) -> object:
    """`et.export_keras` of a trained model against `model.save`."""
    model = _fitted(side)
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "model.keras"
        if side.stored:
            et.export_keras(model, model.get_layer("items").source, file)
        else:
            model.save(file)
        return keras.models.load_model(file).predict(side.x, verbose=0)


def _quantized(model: keras.Model, side: Side) -> object:
    before = model.predict(side.x, verbose=0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Keras warns of every layer that has nothing to quantise
        model.quantize("int8")
    after = model.predict(side.x, verbose=0)
    return [model.get_layer("out").quantization_mode, float(np.abs(after - before).max() < 0.05)]


def _compiled_again(model: keras.Model, side: Side) -> Outcome:
    return trained(side, model, optimizer=keras.optimizers.Adagrad(0.1), loss="mae")


def _reset(model: keras.Model, side: Side) -> object:
    model.reset_metrics()
    return [model.evaluate(side.x, side.y, batch_size=BATCH, verbose=0), model.metrics_names]


def _case(
    name: str, use: Callable[[keras.Model, Side], object], covers: str, meaning: str = "", only: str = ""
) -> Case:
    return Case(name, _after(use), covers, meaning, only=only)


CASES = [
    Case("a Sequential model", _sequential),
    Case("a Sequential model with an embedding inside a Functional one", _nested),
    Case("features as a dictionary, two tables", _dict_features),
    Case("a subclass of `Model`", _subclass(Subclassed), "Model.call"),
    Case("a `compute_loss` of its own", _subclass(SubclassedOwnLoss, loss=None), "Model.compute_loss"),
    Case("a `compute_metrics` of its own", _subclass(OwnMetrics), "Model.compute_metrics"),
    Case("`self.add_loss(...)` in `call`", _subclass(LossInCall), "Model.add_loss"),
    Case("a `train_step` of its own", _subclass(OwnTrainStep), "Model.train_step"),
    Case("a `test_step` of its own", _subclass(OwnTestStep), "Model.test_step"),
    Case("a `predict_step` of its own", _subclass(OwnPredictStep), "Model.predict_step"),
    Case("`model.trainable = False`", _frozen_model, "Model.trainable"),
    _case("`model(x)`", lambda model, side: keras.ops.convert_to_numpy(model(side.x)), "Model.call"),
    _case(
        "`evaluate(x, y, batch_size=8)`",
        lambda model, side: model.evaluate(side.x, side.y, batch_size=8, verbose=0),
        "evaluate.x evaluate.y evaluate.batch_size evaluate.verbose",
    ),
    _case(
        "`evaluate(..., sample_weight=w, return_dict=True, steps=2)`",
        lambda model, side: model.evaluate(
            side.x, side.y, batch_size=8, verbose=0, sample_weight=side.weights, return_dict=True, steps=2
        ),
        "evaluate.sample_weight evaluate.return_dict evaluate.steps",
    ),
    _case(
        "`evaluate(..., callbacks=[...])`",
        lambda model, side: model.evaluate(side.x, side.y, verbose=0, callbacks=[keras.callbacks.LambdaCallback()]),
        "evaluate.callbacks",
    ),
    _case(
        "`predict(x, batch_size=8)`",
        lambda model, side: model.predict(side.x, batch_size=8, verbose=0),
        "predict.x predict.batch_size predict.verbose",
    ),
    _case(
        "`predict(..., steps=2, callbacks=[...])`",
        lambda model, side: model.predict(
            side.x, batch_size=8, steps=2, verbose=0, callbacks=[keras.callbacks.LambdaCallback()]
        ),
        "predict.steps predict.callbacks",
    ),
    _case("`predict_on_batch(x)`", lambda model, side: model.predict_on_batch(side.x), "Model.predict_on_batch"),
    _case(
        "`test_on_batch(x, y)`",
        lambda model, side: list(map(float, model.test_on_batch(side.x, side.y))),
        "Model.test_on_batch",
    ),
    _case(
        "`train_on_batch(x, y)`",
        lambda model, side: [list(map(float, model.train_on_batch(side.x, side.y))), outcome(model)],
        "Model.train_on_batch",
    ),
    _case("`save(file)`, loaded by plain Keras", _saved, "Model.save"),
    _case("`save_weights(file)`, `load_weights(file)`", _weights_saved, "Model.save_weights Model.load_weights"),
    _case("`export(folder)`, a SavedModel", _exported, "Model.export", only="tensorflow"),
    Case("`et.export_keras(model, store, file)`", _exported_keras, "Model.save"),
    _case("`compile` again with another optimizer and loss, then trained on", _compiled_again, "Model.compile"),
    _case("`reset_metrics()`, `metrics_names`", _reset, "Model.reset_metrics Model.metrics_names"),
    _case(
        "`to_json()`, `get_config()`",
        lambda model, side: keras.models.model_from_json(model.to_json()).count_params(),
        "Model.to_json Model.get_config",
    ),
    _case(
        "`quantize('int8')`",
        _quantized,
        "Model.quantize",
        meaning="dense layers are quantised; a table is served as int8 by `convert_table` "
        "([tables.md](tables.md#weights-in-16-and-8-bits))",
    ),
]
