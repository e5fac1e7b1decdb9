"""What programs do with a model's weights: its rows are one of them."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.master.backend.lazy import tf
from tests.keras_table.case import BATCH, DIM, LENGTH, Case, Outcome, Side, around, outcome, small

_SGD = 0.2


def _matrix(side: Side) -> Array:
    return np.random.default_rng(7).normal(size=(side.vocabulary, DIM)).astype(np.float32)


def _model(side: Side, name: str = "items", loss: object = "mse", kind: type[keras.Model] = keras.Model) -> keras.Model:
    """A model that begins with the same weights on both sides, its table in a store from the beginning."""
    keras.utils.set_random_seed(5)
    table = side.embedding(side.vocabulary, DIM, weights=_matrix(side), name=name)
    model = around(table, keras.layers.Flatten(), keras.layers.Dense(1, name="out"), kind=kind)
    model.compile(keras.optimizers.SGD(_SGD), loss)
    return model


def _fit(model: keras.Model, side: Side, epochs: int = 2, **options: object) -> dict[str, list[float]]:
    shown = model.fit(side.x, side.y, batch_size=BATCH, epochs=epochs, shuffle=False, verbose=0, **options)
    return dict(shown.history)


def _after_a_fit(use: Callable[[keras.Model, Side], object]) -> Callable[[Side], object]:
    """Of a plain layer, which a fit has offloaded, and of `et.Embedding`, before and after it is trained."""

    def program(side: Side) -> list[object]:
        plain = small(side)
        plain.compile(keras.optimizers.SGD(_SGD), "mse")
        side.fit(plain, side.x, side.y)
        ours = _model(side)
        before = use(ours, side)
        _fit(ours, side)
        return [use(plain, side), before, use(ours, side)]

    return program


def _halved(model: keras.Model, side: Side) -> Outcome:
    model.set_weights([weight * 0.5 for weight in model.get_weights()])
    _fit(model, side, 1)
    return outcome(model)


def _listed(model: keras.Model, side: Side) -> object:
    lists = (model.weights, model.trainable_weights, model.trainable_variables, model.get_layer("items").weights)
    model.get_layer("items").trainable = False
    frozen = (model.trainable_weights, model.non_trainable_weights)
    model.get_layer("items").trainable = True
    return [[list(each.shape) for each in every] for every in (*lists, *frozen)]


def _summary(model: keras.Model, side: Side) -> str:
    lines: list[str] = []
    model.summary(print_fn=lambda text, **_: lines.append(text))
    return next(line.split(":")[1] for line in "\n".join(lines).splitlines() if "Trainable params" in line)


def _of_the_layer(model: keras.Model, side: Side) -> object:
    layer = model.get_layer("items")
    return [layer.get_weights()[0], np.asarray(layer.weights[0]), layer.count_params(), len(layer.weights)]


def _folds(side: Side) -> object:
    model = _model(side)
    start, found = model.get_weights(), []
    for _ in range(2):
        model.set_weights(start)
        found.append(_fit(model, side))
    return found


def _folds_by_file(side: Side) -> object:
    model, found = _model(side), []
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/start.weights.h5")
        for _ in range(2):
            model.load_weights(f"{folder}/start.weights.h5")
            found.append(_fit(model, side))
    return [found, outcome(model)]


class Averaging(keras.callbacks.Callback):
    def on_train_begin(self, logs: object = None) -> None:
        self.seen = [self.model.get_weights()]

    def on_epoch_end(self, epoch: int, logs: object = None) -> None:
        self.seen.append(self.model.get_weights())

    def on_train_end(self, logs: object = None) -> None:
        self.model.set_weights([np.mean(each, axis=0) for each in zip(*self.seen, strict=True)])


class Halving(keras.callbacks.Callback):
    def on_epoch_begin(self, epoch: int, logs: object = None) -> None:
        for weight in self.model.trainable_variables:
            weight.assign(weight * 0.9)


class Best(keras.callbacks.Callback):
    def on_train_begin(self, logs: object = None) -> None:
        self.best, self.weights = np.inf, self.model.get_weights()

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        if logs is not None and logs["loss"] < self.best:
            self.best, self.weights = logs["loss"], self.model.get_weights()

    def on_train_end(self, logs: object = None) -> None:
        self.model.set_weights(self.weights)


def _with(callback: type[keras.callbacks.Callback]) -> Callable[[Side], object]:
    def program(side: Side) -> object:
        model = _model(side)
        history = _fit(model, side, 3, callbacks=[callback()])
        return [history, outcome(model), model.predict(side.x, verbose=0)]

    return program


def _copied(side: Side) -> object:
    trained, fresh = _model(side), _model(side, "others")
    _fit(trained, side)
    fresh.set_weights(trained.get_weights())
    history = _fit(fresh, side)
    return [history, outcome(fresh), trained.predict(side.x, verbose=0)]


def _cloned(side: Side) -> object:
    model = _model(side)
    _fit(model, side)
    clone = keras.models.clone_model(model)
    clone.set_weights(model.get_weights())
    clone.compile(keras.optimizers.SGD(_SGD), "mse")
    before = clone.predict(side.x, verbose=0)
    return [before, _fit(clone, side), clone.predict(side.x, verbose=0)]


def _polyak(side: Side) -> object:
    model, target = _model(side), _model(side, "target")
    for _ in range(3):
        _fit(model, side, 1)
        for slow, fast in zip(target.weights, model.weights, strict=True):
            slow.assign(0.9 * slow + 0.1 * fast)
        for slow in target.trainable_variables:
            slow.assign_sub(0.01 * keras.ops.sign(slow))
    return [target.get_weights(), target.predict(side.x, verbose=0)]


@keras.saving.register_keras_serializable("keras_table")
class Penalised(keras.Model):
    def compute_loss(
        self, x: object, y: tf.Tensor, y_pred: tf.Tensor, sample_weight: object = None, training: bool = True
    ) -> tf.Tensor:
        fit = keras.ops.mean(keras.ops.square(y - y_pred))
        return fit + 0.01 * sum(keras.ops.sum(keras.ops.square(each)) for each in self.trainable_variables)


def _penalised(side: Side) -> object:
    model = _model(side, loss=None, kind=Penalised)
    return [_fit(model, side), outcome(model)]


def _penalty_in_a_loss(side: Side) -> object:
    model = _model(side)

    def loss(true: keras.KerasTensor, predicted: keras.KerasTensor) -> keras.KerasTensor:
        if keras.config.backend() == "tensorflow":
            size = tf.add_n([tf.nn.l2_loss(weight) for weight in model.trainable_weights])
        else:
            size = sum(keras.ops.sum(keras.ops.square(weight)) / 2 for weight in model.trainable_weights)
        return keras.ops.mean(keras.ops.square(true - predicted), axis=-1) + 0.01 * size

    model.compile(keras.optimizers.SGD(_SGD), loss)
    return [_fit(model, side), outcome(model)]


def _checkpointed(side: Side) -> object:
    model = _model(side)
    model.compile(keras.optimizers.Adagrad(_SGD), "mse")
    _fit(model, side)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = tf.train.Checkpoint(model=model, optimizer=model.optimizer)
        path = checkpoint.save(f"{folder}/kept")
        on = _fit(model, side)
        checkpoint.restore(path).assert_consumed()
        again = _fit(model, side)
        fresh = _model(side, "items")
        fresh.set_weights([weight * 0 for weight in fresh.get_weights()])
        tf.train.Checkpoint(model=fresh).restore(path).expect_partial()
    return [on, again, fresh.predict(side.x, verbose=0)]


def _set_after_build(side: Side) -> object:
    layer = side.embedding(side.vocabulary, DIM)
    layer.build((None, LENGTH))
    layer.set_weights([_matrix(side)])
    return keras.ops.convert_to_numpy(layer(side.x))


def _constant(side: Side, value: object) -> object:
    keras.utils.set_random_seed(5)
    constant = keras.initializers.Constant(value)
    table = side.embedding(side.vocabulary, DIM, embeddings_initializer=constant, name="items")
    model = around(table, keras.layers.Flatten(), keras.layers.Dense(1, name="out"))
    model.compile(keras.optimizers.SGD(_SGD), "mse")
    before = [model.get_layer("items").get_weights(), model.predict(side.x, verbose=0)]
    with tempfile.TemporaryDirectory() as folder:
        model.save(f"{folder}/untrained.keras")
        loaded = keras.models.load_model(f"{folder}/untrained.keras")
    return [before, loaded.predict(side.x, verbose=0), _fit(model, side), outcome(model)]


def _built_optimizer(side: Side) -> object:
    model = _model(side)
    model.compile(keras.optimizers.Adagrad(_SGD), "mse")
    model.optimizer.build(model.trainable_variables)
    return [_fit(model, side), outcome(model)]


def _stored_once(side: Side) -> object:
    """The bytes of a file except those of the rows."""
    model = _model(side)
    with tempfile.TemporaryDirectory() as folder:
        model.save_weights(f"{folder}/one.weights.h5")
        size = Path(f"{folder}/one.weights.h5").stat().st_size
        wide = keras.Sequential([keras.Input((1,), dtype="int64"), side.embedding(20_000, 8, name="wide")])
        wide.get_layer("wide").set_weights([np.ones((20_000, 8), np.float32)])
        wide.save_weights(f"{folder}/two.weights.h5")
        return int((Path(f"{folder}/two.weights.h5").stat().st_size - size) / (20_000 * 8 * 4) < 1.5)


def _both(name: str, use: Callable[[keras.Model, Side], object], *covers: str) -> Case:
    return Case(name, _after_a_fit(use), " ".join(covers))


CASES = [
    _both("`model.get_weights()`", lambda model, side: model.get_weights(), "Model.get_weights"),
    _both("`model.set_weights(weights)`, then trained on", _halved, "Model.set_weights", "Embedding.set_weights"),
    _both("`layer.get_weights()`, `layer.weights[0]`, `layer.count_params()`", _of_the_layer, "Embedding.get_weights"),
    _both(
        "`layer.embeddings`",
        lambda model, side: np.asarray(model.get_layer("items").embeddings),
        "Embedding.embeddings",
    ),
    _both("`weights`, `trainable_weights`, `trainable_variables`, also of a frozen layer", _listed),
    _both("`count_params()`", lambda model, side: model.count_params(), "Model.count_params"),
    _both("`summary()`", _summary),
    Case("`layer.build(...)`, then `set_weights([matrix])`", _set_after_build),
    Case("`embeddings_initializer=Constant(matrix)`", lambda side: _constant(side, _matrix(side))),
    Case("`embeddings_initializer=Constant(row)`", lambda side: _constant(side, _matrix(side)[0])),
    Case("k folds that begin with `set_weights(start)`", _folds),
    Case("k folds that begin with `load_weights(start)`", _folds_by_file),
    Case("a callback that averages `get_weights()` of each epoch", _with(Averaging)),
    Case("a callback that keeps the best `get_weights()`", _with(Best)),
    Case("a callback that assigns every trainable variable, `on_epoch_begin`", _with(Halving)),
    Case("`fresh.set_weights(trained.get_weights())`, then trained on", _copied),
    Case("`clone_model(model)` and `set_weights`, then trained on", _cloned),
    Case("a target network that follows by Polyak averaging", _polyak),
    Case("a penalty over `self.trainable_variables` in `compute_loss`", _penalised),
    Case("a penalty over `model.trainable_weights` in a loss of one's own", _penalty_in_a_loss),
    Case(
        "`tf.train.Checkpoint(model=model, optimizer=model.optimizer)`, restored and trained on",
        _checkpointed,
        only="tensorflow",
    ),
    Case("`optimizer.build(model.trainable_variables)` before `fit`", _built_optimizer),
    Case("`save_weights(file)` holds the rows once", _stored_once),
]
