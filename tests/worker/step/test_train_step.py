"""The compiled step equals plain Keras on the same batch: loss, gradients, states, metrics."""

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.embedding_store.shards.server_contract import Slices
from elastable.worker.layers.embedding import Embedding
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.step.forward import batch_spec
from elastable.worker.step.id_plan import plan_ids
from elastable.worker.step.id_set import make_id_sets
from elastable.worker.step.train_step import EvaluateStep, TrainStep
from elastable.worker.step.trainable import StepResult
from elastable.worker.user_model.build import build_model
from tests.untyped import Keyword

X = np.random.default_rng(0).integers(0, 50, (16, 3))
Y = np.random.default_rng(1).normal(size=(16, 1)).astype(np.float32)
BATCH = (tf.constant(X), tf.constant(Y))


def _model(
    embedding: Callable[..., keras.layers.Layer], dropout: float = 0.0, regularizer: object = None
) -> keras.Model:
    inputs = keras.Input((3,), dtype="int64")
    layer = embedding(name="items", embeddings_regularizer=regularizer)
    joined = keras.layers.Flatten()(layer(inputs) + layer(inputs // 2))
    normal = keras.layers.BatchNormalization()(joined)
    dropped = keras.layers.Dropout(dropout)(normal)
    hidden = keras.layers.Dense(5, "relu", kernel_regularizer="l2")(dropped)
    model = keras.Model(inputs, keras.layers.Dense(1)(hidden))
    model.compile("sgd", "mse", metrics=["mae", keras.metrics.AUC(name="auc")])
    build_model(model, BATCH)
    return model


def _ours(**arguments: Keyword) -> keras.layers.Layer:
    return Embedding(50, 4, **arguments)


def _theirs(**arguments: object) -> keras.layers.Layer:
    return keras.layers.Embedding(50, 4, **arguments)


def _same_rows(*models: keras.Model) -> None:
    """Their tables begin with the initial values of one seed, and not with a draw of Keras' each."""
    for model in models:
        model.get_layer("items").attach(None, seed=0)


def _steps(model: keras.Model, batch: tf.Tensor = BATCH, seed: int = 0) -> Callable[[int], StepResult]:
    """The step of the micro-batch with a number, traced once."""
    spec = batch_spec(batch)
    plan = plan_ids(model, spec, training=True)
    layers = {layer.table_name: layer for layer in store_layers(model)}
    specs = {name: layer.table_spec() for name, layer in layers.items()}
    ids = make_id_sets(plan.tables, plan.ids(batch), specs)
    rows = {name: layers[name].read_rows(unique) for name, unique in ids.unique.items()}
    step = TrainStep(model, spec, plan, lambda table, asked: layers[table].read_rows(asked), seed)
    return lambda micro_batch: step(batch, rows, ids, micro_batch)


def _step(model: keras.Model, batch: tf.Tensor = BATCH) -> StepResult:
    return _steps(model, batch)(0)


def _assign(target: keras.Model, model: keras.Model) -> None:
    for weight, value in zip(target.weights, model.weights, strict=True):
        weight.assign(value)


def _full(slices: Slices) -> np.ndarray:
    """float32 `[50, 4]`: the gradient of the whole table."""
    full = np.zeros((50, 4), np.float32)
    np.add.at(full, slices.indices, slices.values)
    return full


class _Pooled(keras.Model):
    """Sums the rows of its layer `items`, and ends in a dense layer."""

    def __init__(self, **options: Keyword) -> None:
        super().__init__()
        self.items, self.out = _ours(name="items", **options), keras.layers.Dense(1)

    def call(self, x: tf.Tensor) -> tf.Tensor:
        return self.out(tf.reduce_sum(self.items(x), axis=1))


def _twins(**arguments: Keyword) -> tuple[keras.Model, keras.Model]:
    ours, theirs = _model(_ours, **arguments), _model(_theirs, **arguments)
    theirs.get_layer("items").set_weights([ours.get_layer("items").read_rows(np.arange(50))])
    _assign(theirs, ours)
    return ours, theirs


def test_loss_gradients_states_and_metrics_equal_plain_keras() -> None:
    ours, theirs = _twins()
    result = _step(ours)
    with tf.GradientTape() as tape:
        predicted = theirs(X, training=True)
        loss = theirs.compute_loss(X, BATCH[1], predicted, None, training=True)
    table, *dense = tape.gradient(loss, [weight.value for weight in theirs.trainable_weights])
    theirs.compute_metrics(X, BATCH[1], predicted)
    assert result.loss == pytest.approx(float(loss), rel=1e-6)
    slices = result.slices["items"]
    assert len(np.unique(slices.indices)) == len(slices.indices)
    np.testing.assert_allclose(_full(slices), tf.convert_to_tensor(table), rtol=1e-4, atol=1e-6)
    for mine, other in zip(result.dense, dense, strict=True):
        np.testing.assert_allclose(mine, other, rtol=1e-4, atol=1e-6)
    for mine, weight in zip(result.states, theirs.non_trainable_weights, strict=True):
        np.testing.assert_allclose(mine, weight, rtol=1e-5)
    names = [variable.path for variable in ours.metrics_variables]
    by_path = dict(zip(names, result.metrics, strict=True))
    mae = next(metric for metric in theirs.metrics_variables if metric.path == "mean_absolute_error/total")
    assert by_path["loss/total"] == pytest.approx(float(loss) * 16, rel=1e-5)
    assert by_path["mean_absolute_error/total"] == pytest.approx(float(mae), rel=1e-5)


def test_a_condition_on_a_tensor_is_refused_as_by_fit() -> None:
    """`Model.fit` does not convert Python's `if` (AutoGraph); a job that did would train what Keras refuses."""

    def loss(true: tf.Tensor, predicted: tf.Tensor) -> tf.Tensor:
        squares = (true - predicted) ** 2
        return squares if tf.reduce_sum(predicted) > 0.0 else 2.0 * squares

    def refused(embedding: Callable[..., object], train: Callable[[keras.Model], object]) -> str:
        model = _model(embedding)
        model.compile("sgd", loss)
        with pytest.raises(tf.errors.OperatorNotAllowedInGraphError) as raised:
            train(model)
        return str(raised.value)

    assert refused(_ours, _step) == refused(_theirs, lambda model: model.fit(X, Y, verbose=0))


def test_metrics_are_of_the_micro_batch_alone() -> None:
    step = _steps(_model(_ours))
    first, again = step(0), step(0)
    counts = [float(metric) for metric in again.metrics if metric.ndim == 0]
    assert 16.0 in counts
    np.testing.assert_array_equal(first.metrics[1], again.metrics[1])


def test_dropout_belongs_to_the_micro_batch() -> None:
    """Whatever a process has drawn before, micro-batch 7 drops the same units; others drop others."""
    model, other = _model(_ours, dropout=0.5), _model(_ours, dropout=0.5)
    _same_rows(model, other)
    _assign(other, model)
    step, step_of_other = _steps(model), _steps(other)
    once = step(7)
    step_of_other(3)
    for gradient, same in zip(once.dense, step_of_other(7).dense, strict=True):
        np.testing.assert_array_equal(gradient, same)
    assert once.loss != step(8).loss
    assert once.loss != _steps(model, seed=1)(7).loss
    # Beyond 2**32 draws the numbers go on differing.
    assert once.loss != step(7 + 2**22).loss


def test_a_regularizer_counts_once_a_layer_over_touched_rows() -> None:
    plain, heavy = _model(_ours), _model(_ours, regularizer=keras.regularizers.L2(0.5))
    _same_rows(plain, heavy)
    _assign(heavy, plain)
    touched = np.unique(np.concatenate([X.reshape(-1), X.reshape(-1) // 2]))
    penalty = 0.5 * float((plain.get_layer("items").read_rows(touched) ** 2).sum())
    assert _step(heavy).loss - _step(plain).loss == pytest.approx(penalty, rel=1e-3)


def test_penalties_that_no_step_can_give_are_refused() -> None:
    class Chained(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = _ours(name="first"), _ours(name="second", embeddings_regularizer="l2")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            hop = tf.cast(tf.abs(self.first(x)[..., 0]) * 900.0, tf.int64)
            return tf.reduce_sum(self.second(hop), axis=[1, 2])[:, tf.newaxis]

    chained = Chained()
    chained.compile("sgd", "mse")
    build_model(chained, BATCH)
    with pytest.raises(Unsupported, match="'second': its ids depend on values of the model"):
        _step(chained)
    layer = _ours(name="items", embeddings_regularizer="l2")
    each = keras.Sequential([keras.Input((3,), dtype="int64"), layer, keras.layers.Flatten(), keras.layers.Dense(1)])
    each.compile("sgd", keras.losses.MeanSquaredError(reduction="none"))
    with pytest.raises(Unsupported, match="reduction 'none'"):
        _step(each)


def test_ids_that_cannot_be_planned_still_get_their_gradients() -> None:
    class Chained(keras.Model):
        def __init__(self, embedding: Callable[..., keras.layers.Layer]) -> None:
            super().__init__()
            self.first = embedding(name="first")
            self.second = embedding(name="second")

        def call(self, x: tf.Tensor) -> tf.Tensor:
            rows = self.first(x)
            hop = tf.cast(tf.abs(rows[..., 0]) * 900.0, tf.int64)
            return tf.reduce_sum(self.second(hop) * rows, axis=[1, 2])[:, tf.newaxis]

    models = [Chained(_ours), Chained(_theirs)]
    for model in models:
        model.compile("sgd", "mse")
        build_model(model, BATCH)
    for layer, other in zip((models[0].first, models[0].second), (models[1].first, models[1].second), strict=True):
        other.set_weights([layer.read_rows(np.arange(50))])
    result = _step(models[0])
    with tf.GradientTape() as tape:
        loss = models[1].compute_loss(X, BATCH[1], models[1](X), None)
    gradients = tape.gradient(loss, [weight.value for weight in models[1].trainable_weights])
    for table, gradient in zip(("first", "second"), gradients, strict=True):
        full = _full(result.slices[table])
        np.testing.assert_allclose(full, tf.convert_to_tensor(gradient), rtol=1e-4, atol=1e-7)
        assert np.abs(full).max() > 0


@pytest.mark.parametrize("eager", [False, True])
def test_a_call_whose_gradient_is_not_recorded_is_refused_by_name(eager: bool) -> None:
    class Recomputed(_Pooled):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return self.out(tf.recompute_grad(lambda ids: tf.reduce_sum(self.items(ids), axis=1))(x))

    for trainable in (True, False):
        model = Recomputed(trainable=trainable)
        model.compile("sgd", "mse", run_eagerly=eager)
        build_model(model, BATCH)
        if trainable:
            with pytest.raises(Unsupported, match=r"'items' is called where no gradient is recorded.*RematScope"):
                _step(model)
        else:
            assert np.isfinite(_step(model).loss)


def test_values_that_are_no_metrics_are_said_not_to_be_shown(caplog: pytest.LogCaptureFixture) -> None:
    class Telling(_Pooled):
        def compute_metrics(self, x: object, y: object, y_pred: object, sample_weight: object = None) -> object:
            return {**super().compute_metrics(x, y, y_pred, sample_weight), "largest": keras.ops.max(y_pred)}

        def test_step(self, data: object) -> object:
            return {**super().test_step(data), "tested": 1.0}

    model = Telling()
    model.compile("sgd", "mse", metrics=["mae"])
    model.fit(X, Y, validation_data=(X, Y), verbose=0)
    assert "compute_metrics() returns 'largest', of which the history and callbacks will not hear" in caplog.text
    assert "test_step() returns 'largest', 'tested', of which" in caplog.text
    assert "'mae'" not in caplog.text


def test_sample_weights_and_several_weighted_losses() -> None:
    def make(embedding: Callable[..., keras.layers.Layer]) -> keras.Model:
        inputs = keras.Input((3,), dtype="int64")
        flat = keras.layers.Flatten()(embedding(name="items")(inputs))
        outputs = {"a": keras.layers.Dense(1, name="a")(flat), "b": keras.layers.Dense(1, name="b")(flat)}
        model = keras.Model(inputs, outputs)
        model.compile("sgd", {"a": "mse", "b": "mae"}, loss_weights={"a": 2.0, "b": 0.5}, weighted_metrics={"a": "mae"})
        build_model(model, batch)
        return model

    weight = tf.constant(np.linspace(0.1, 2.0, 16, dtype=np.float32))
    batch = (BATCH[0], {"a": BATCH[1], "b": BATCH[1] * 2}, weight)
    ours, theirs = make(_ours), make(_theirs)
    theirs.get_layer("items").set_weights([ours.get_layer("items").read_rows(np.arange(50))])
    for name in ("a", "b"):
        theirs.get_layer(name).set_weights(ours.get_layer(name).get_weights())
    result = _step(ours, batch)
    x, y, w = batch
    expected = theirs.compute_loss(x, y, theirs(x, training=True), {"a": w, "b": w}, training=True)
    assert result.loss == pytest.approx(float(expected), rel=1e-5)


def test_evaluation_runs_as_in_inference() -> None:
    ours, theirs = _twins(dropout=0.5)
    spec = batch_spec(BATCH)
    plan = plan_ids(ours, spec, training=False)
    layer = ours.get_layer("items")
    ids = make_id_sets(plan.tables, plan.ids(BATCH), {"items": layer.table_spec()})
    metrics = EvaluateStep(ours, spec, plan, None)(BATCH, {"items": layer.read_rows(ids.unique["items"])}, ids)
    logs = theirs.test_on_batch(X, Y, return_dict=True)
    assert float(metrics[0]) / 16 == pytest.approx(float(logs["loss"]), rel=1e-5)


def test_jit_compile_is_said_to_have_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """Keras turns it off itself where a layer has `supports_jit=False`, as ours have; here none has yet."""
    model = keras.Sequential(
        [keras.Input((3,), dtype="int64"), _theirs(), keras.layers.Flatten(), keras.layers.Dense(1)]
    )
    model.compile("sgd", "mse", jit_compile=True)
    with caplog.at_level(logging.WARNING):
        build_model(model, BATCH)
    assert "jit_compile=True) has no effect" in caplog.text


def test_why_a_model_fails_on_its_first_records_is_said_where_it_is_known() -> None:
    model = keras.Sequential([keras.Input((4,)), keras.layers.Dense(1)])
    with pytest.raises(ModelError, match="not compiled"):
        build_model(model, BATCH)
    model.compile("sgd", "mse")
    for batch, message in ((BATCH, "fails on the first records"), ((tf.ones((2, 4)),), "its data has no labels")):
        with pytest.raises(ModelError, match=message):
            build_model(model, batch)
    inputs = keras.Input(batch_shape=(24, 4))
    fixed = keras.Model(inputs, keras.layers.Dense(1)(keras.ops.reshape(inputs, (24, 4))))
    fixed.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"has a fixed batch size: write keras\.Input"):
        build_model(fixed, (tf.ones((2, 4)), tf.ones(2)))
