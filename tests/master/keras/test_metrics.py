"""Metrics of many micro-batches are those of all records together."""

from __future__ import annotations

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import CheckpointError, Unsupported
from elastable.master.commits.accumulate import add_metrics
from elastable.master.keras.metrics import LazyLogs, ModelMetrics
from elastable.master.tasks.progress import Progress
from tests.master.fakes import small_model


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


def test_a_metric_of_one_value_in_an_array_has_its_own_name() -> None:
    model = small_model(metrics=[keras.metrics.F1Score(threshold=0.5, average=None, name="f1")])
    results = ModelMetrics(model).results(state_after(model, np.ones((3, 1)), np.ones((3, 1))))
    assert results["f1"] == 1.0


def test_a_metric_that_does_not_add_up_is_refused_by_name() -> None:
    with pytest.raises(Unsupported, match="does not begin at zero"):
        ModelMetrics(small_model(metrics=[FromOne()]))


def test_lazy_logs_compute_once_when_looked_at() -> None:
    calls: list[int] = []
    logs = LazyLogs(lambda: calls.append(1) or {"loss": 0.5})  # type: ignore[func-returns-value]
    assert not calls
    assert (dict(logs), len(logs), logs["loss"]) == ({"loss": 0.5}, 1, 0.5)
    assert calls == [1]


def test_progress_survives_json_to_the_bit() -> None:
    metrics = (np.array([[0.1, np.pi]]), np.array(2**40, np.int64))
    progress = Progress(7, True, 99, metrics, 1, (4, 6), {"a": 3}, {"loss": 0.1})
    again = Progress.from_json(progress.to_json())
    assert again.to_json() == progress.to_json()
    assert all(
        np.array_equal(one, other) and one.dtype == other.dtype
        for one, other in zip(again.metrics, metrics, strict=True)
    )
    for text in ("", "[]", "{}", '{"metrics": [{}]}', '{"metrics": [], "done": [], "nonsense": 1}'):
        with pytest.raises(CheckpointError, match="no progress"):
            Progress.from_json(text)
