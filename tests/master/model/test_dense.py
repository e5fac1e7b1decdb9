"""The dense part and its metrics: Keras' own optimizer without its clipping, and metrics of all records together."""

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import CheckpointError, ModelError, Unsupported
from elastable.master.commits.accumulate import add_metrics
from elastable.master.model.dense import DenseState
from elastable.master.model.model_metrics import LazyLogs, ModelMetrics
from tests.master.fakes import StoreLayer, small_model


def some_gradients(dense: DenseState, seed: int = 0) -> list[Array]:
    random = np.random.default_rng(seed)
    return [random.normal(size=spec.shape).astype(np.float32) for spec in dense.variables]


def same(one: dict[str, Array], other: dict[str, Array]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[key], other[key]) for key in one)


def test_steps_are_keras_own() -> None:
    dense, reference = DenseState(small_model()), small_model()
    for step in range(3):
        gradients = some_gradients(dense, step)
        states = [np.full(spec.shape, step, np.float32) for spec in dense.states]
        dense.apply(gradients, states)
        reference.optimizer.apply([keras.ops.convert_to_tensor(g) for g in gradients], reference.trainable_variables)
    snapshot = dense.snapshot(3)
    assert dense.steps()[0].number == 3
    for ours, theirs in zip(snapshot.variables, reference.trainable_variables, strict=True):
        np.testing.assert_allclose(ours, theirs.value.numpy(), rtol=1e-6, atol=1e-7)
    assert all((state == 2).all() for state in snapshot.states)
    assert [spec.name for spec in dense.variables] == list(snapshot.variable_names)


def test_a_snapshot_stays_as_it_is_and_cannot_be_changed() -> None:
    dense = DenseState(small_model())
    snapshot = dense.snapshot(0)
    before = [value.copy() for value in snapshot.variables]
    dense.apply(some_gradients(dense), snapshot.states)
    assert all(np.array_equal(one, other) for one, other in zip(before, snapshot.variables, strict=True))
    with pytest.raises(ValueError, match="read-only"):
        snapshot.variables[0][...] = 0


def test_the_users_clipping_stays_configured_and_is_not_applied_here() -> None:
    model = small_model(keras.optimizers.SGD(1.0, clipvalue=1e-3))
    dense = DenseState(model)
    before = dense.snapshot(0)
    dense.apply([np.ones(spec.shape, np.float32) for spec in dense.variables], before.states)
    after = dense.snapshot(1)
    np.testing.assert_allclose(after.variables[0], before.variables[0] - 1, rtol=1e-6)
    assert model.optimizer.clipvalue == 1e-3
    assert dense.steps()[0].clipping.clipvalue == 1e-3


def test_an_assigned_rate_counts_from_the_next_step_on() -> None:
    model = small_model(keras.optimizers.SGD(1.0))
    dense = DenseState(model)
    ones = [np.ones(spec.shape, np.float32) for spec in dense.variables]
    dense.apply(ones, dense.snapshot(0).states)
    before = dense.snapshot(1)
    model.optimizer.learning_rate = 0.25
    assert dense.steps()[0].rate == 0.25
    dense.apply(ones, before.states)
    np.testing.assert_allclose(dense.snapshot(2).variables[0], before.variables[0] - 0.25, rtol=1e-6)


def test_a_skipped_step_counts() -> None:
    dense = DenseState(small_model())
    before = dense.snapshot(0)
    dense.skip()
    assert dense.steps()[0].number == 1
    assert all(map(np.array_equal, before.variables, dense.snapshot(1).variables))


def test_a_model_without_dense_variables_works() -> None:
    model = keras.Sequential([StoreLayer(table="t")])
    model.compile(keras.optimizers.Nadam(0.1), "mse")
    model(np.zeros((2, 1), np.int64))
    dense = DenseState(model)
    dense.apply([], [])
    assert dense.steps()[0].number == 1
    assert dense.snapshot(1).variables == ()


def test_frozen_layers_are_states() -> None:
    model = small_model()
    model.layers[-1].trainable = False
    model.compile(keras.optimizers.SGD(0.1), "mse")
    dense = DenseState(model)
    assert (len(dense.variables), len(dense.states)) == (2, 4)


def test_a_loss_scale_is_continued_by_name() -> None:
    models = [keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)]) for _ in range(2)]
    for model in models:
        model.compile(keras.optimizers.LossScaleOptimizer(keras.optimizers.Adam(), initial_scale=8.0), "mse")
    first, other = map(DenseState, models)
    first.overflow(())
    other.restore(other.from_names(first.tensors())[0])
    assert float(models[1].optimizer.dynamic_scale) == 4.0


def test_restored_statistics_are_those_that_are_computed_with() -> None:
    states, layers = [], []
    for scale in (1.0, 7.0):
        layers.append(keras.layers.Normalization())
        layers[-1].adapt(scale * np.arange(8, dtype=np.float32).reshape(4, 2))
        model = keras.Sequential([keras.Input((2,)), layers[-1], keras.layers.Dense(1)])
        model.compile("sgd", "mse")
        states.append(DenseState(model))
    states[1].restore(states[0].tensors())
    x = np.ones((1, 2), np.float32)
    np.testing.assert_array_equal(layers[1](x), layers[0](x))


def test_counters_of_another_width_are_restored_if_they_fit() -> None:
    keras.utils.clear_session()  # so that layers have the same names
    """Keras counts steps with 32 bits on JAX."""
    dense = DenseState(small_model())
    dense.apply(some_gradients(dense), dense.snapshot(0).states)
    saved = dense.tensors()
    counters = [key for key, value in saved.items() if value.dtype == np.int64]
    assert counters
    keras.utils.clear_session()
    other = DenseState(small_model())
    other.restore({**saved, **{key: saved[key].astype(np.int8) for key in counters}})
    assert same(saved, other.tensors())
    with pytest.raises(CheckpointError, match=rf"{counters[0]} .* is uint64 \[\] in the checkpoint and int64 \[\]"):
        other.restore({**saved, counters[0]: np.array(2**63, np.uint64)})
    assert same(saved, other.tensors())


def test_a_checkpoint_of_another_model_changes_nothing() -> None:
    dense = DenseState(small_model())
    saved = dense.tensors()
    other = {key: value + 1 for key, value in saved.items()}
    last = list(other)[-1]
    with pytest.raises(CheckpointError, match=f"lacks {last}"):
        dense.restore({key: value for key, value in other.items() if key != last})
    with pytest.raises(CheckpointError, match=r"float32 \[5\] in the checkpoint"):
        dense.restore({**other, last: np.zeros(5, np.float32)})
    assert same(saved, dense.tensors())


def test_an_uncompiled_model_is_refused() -> None:
    with pytest.raises(ModelError, match="compile"):
        DenseState(keras.Sequential([StoreLayer(table="t")]))


class FromOne(keras.metrics.Metric):
    """A product: its state begins at 1, so states do not add up."""

    def __init__(self) -> None:
        super().__init__(name="product")
        self.value = self.add_weight(shape=(), initializer="ones", name="value")

    def update_state(self, y_true: Array, y_pred: keras.KerasTensor, sample_weight: object = None) -> None:
        self.value.assign(self.value * keras.ops.sum(y_pred))

    def reset_state(self) -> None:
        self.value.assign(1.0)

    def result(self) -> object:
        return self.value


def model_with_metrics() -> keras.Model:
    return small_model(metrics=[keras.metrics.AUC(name="auc"), keras.metrics.BinaryAccuracy(name="accuracy")])


def state_after(model: keras.Model, labels: Array, predicted: Array) -> tuple[Array, ...]:
    model.reset_metrics()
    model.compute_metrics(None, labels, predicted)
    return tuple(variable.value.numpy() for variable in model.metrics_variables)


def test_an_auc_is_merged_as_counts() -> None:
    random = np.random.default_rng(0)
    labels = random.integers(0, 2, (60, 1)).astype(np.float32)
    predicted = np.clip(labels * 0.2 + random.random((60, 1)), 0, 1).astype(np.float32)
    worker = model_with_metrics()
    whole = state_after(worker, labels, predicted)
    parts = [state_after(worker, labels[cut], predicted[cut]) for cut in (slice(0, 7), slice(7, 40), slice(40, 60))]
    book = ModelMetrics(model_with_metrics())
    got, expected = book.results(add_metrics((), parts), "val_"), book.results(whole, "val_")
    assert set(got) == {"val_loss", "val_auc", "val_accuracy"}
    assert got == pytest.approx(expected)
    averaged = np.mean([book.results(part)["auc"] for part in parts])
    assert abs(averaged - expected["val_auc"]) > 1e-3


def test_without_state_or_model_there_are_no_results() -> None:
    assert ModelMetrics(model_with_metrics()).results(()) == {}
    assert ModelMetrics().results((np.zeros(3),)) == {}


def test_a_metric_that_does_not_add_up_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="does not begin at zero"):
        ModelMetrics(small_model(metrics=[FromOne()]))


def test_lazy_logs_compute_once_when_looked_at() -> None:
    calls: list[int] = []
    logs = LazyLogs(lambda: calls.append(1) or {"loss": 0.5})  # type: ignore[func-returns-value]
    assert not calls
    assert (dict(logs), len(logs), logs["loss"]) == ({"loss": 0.5}, 1, 0.5)
    assert calls == [1]
