"""What Keras' `fit` computes and calls, replicas do; what would depend on the replicas is refused."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.training.trainer import ReplicaCallbacks, ReplicaTrainer
from tests.replicas.training.models import (
    BOTH,
    STATE,
    WEIGHTS,
    compiled,
    perceptron,
    records,
    same_bits,
    seeded,
    trained,
)
from tests.untyped import Keyword, Keywords, Parsed

X, Y = records()


def plain(
    optimizer: Callable[[], object], make: Callable[[], object] = perceptron, metrics: object = None, **fit: Keyword
) -> tuple[list[object], Parsed]:
    model = seeded(make)
    model.compile(optimizer(), "mse", metrics=metrics, run_eagerly=True)  # for a few steps, a graph costs more
    history = model.fit(X, Y, **{"batch_size": 4, "epochs": 2, "verbose": 0, "shuffle": False, **fit}).history
    return model.get_weights(), history


def require_equal(found: tuple[object, ...], want: tuple[object, ...]) -> None:
    for one, other in zip(found[0], want[0], strict=True):  # type: ignore[call-overload]
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5)
    for name, values in want[1].items():  # type: ignore[attr-defined]
        np.testing.assert_allclose(found[1][name], values, rtol=1e-4, err_msg=name)  # type: ignore[index]


def sgd(**named: Keyword) -> Callable[[], object]:
    return lambda: keras.optimizers.SGD(0.1, **named)


def test_metrics_are_those_of_all_replicas_also_if_the_state_was_asked_for_first() -> None:
    """As `load` does, which needs the state before any batch has made the metrics of `compile`."""

    def work(group: ReplicaGroup) -> tuple[list[object], Parsed]:
        trainer = compiled(perceptron, STATE, group, sgd()(), metrics=["mae"])
        assert trainer.placements
        history = trainer.fit(X, Y, 4, epochs=2, verbose=0, shuffle=False).history
        return trainer.model.get_weights(), history

    want = plain(sgd(), metrics=["mae"])
    for found in run_threads(3, work):
        require_equal(found, want)


def test_nothing_is_split_off_where_there_is_validation_data() -> None:
    fit: Keywords = {"validation_split": 0.3, "validation_data": (X[:5], Y[:5]), "shuffle": False}
    want = plain(sgd(), **fit)
    for found in trained(2, optimizer=sgd(), **fit):
        require_equal(found, want)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("clipping", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.05}], ids=str)
def test_gradients_of_a_scaled_loss_are_clipped_as_unscaled(clipping: Keywords) -> None:
    optimizer = sgd(loss_scale_factor=64.0, **clipping)
    want = plain(optimizer)
    for found in trained(2, STATE, optimizer=optimizer, shuffle=False):
        require_equal(found, want)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("locations", [None, STATE, WEIGHTS, BOTH], ids=["none", "state", "weights", "both"])
def test_moving_averages_are_not_constrained_at_the_end(locations: LocationSettings | None) -> None:
    def make() -> object:
        unit = keras.constraints.UnitNorm()
        layers = keras.layers
        return keras.Sequential([keras.Input((6,)), layers.Dense(5, "tanh", kernel_constraint=unit), layers.Dense(1)])

    optimizer = sgd(momentum=0.9, use_ema=True, ema_momentum=0.5)
    want = plain(optimizer, make)
    for found in trained(2, locations, make, optimizer, shuffle=False):
        require_equal(found, want)


def test_the_loss_of_an_output_counts_every_batch_once() -> None:
    """22 records in batches of 5: the parts of a batch differ, and so does the last batch."""
    compiled: Keywords = {"loss": {"one": "mse", "two": "mae"}, "loss_weights": {"one": 1.0, "two": 0.3}}

    def make() -> object:
        entry = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh")(entry)
        outputs = [keras.layers.Dense(1, name="one")(hidden), keras.layers.Dense(1, name="two")(hidden)]
        return keras.Model(entry, outputs)

    fit: Keywords = {"batch_size": 5, "epochs": 2, "verbose": 0, "shuffle": False, "validation_split": 0.3}
    model = seeded(make)
    model.compile(sgd()(), **compiled)
    history = model.fit(X, [Y, -Y], **fit).history

    def work(group: ReplicaGroup) -> tuple[list[object], Parsed]:
        trainer = ReplicaTrainer(seeded(make), None, group)
        trainer.compile(sgd()(), **compiled)
        return trainer.model.get_weights(), trainer.fit(X, [Y, -Y], **fit).history

    for found in run_threads(3, work):
        assert "val_one_loss" in found[1]
        require_equal(([], found[1]), ([], history))


class _Penalised(keras.layers.Layer):
    def __init__(self, penalty: Callable[[tf.Tensor], tf.Tensor]) -> None:
        super().__init__()
        self._penalty = penalty

    def call(self, x: tf.Tensor) -> tf.Tensor:
        self.add_loss(self._penalty(x))
        return x


def _with(layer: keras.layers.Layer) -> keras.Model:
    return keras.Sequential([keras.Input((6,)), keras.layers.Dense(5, "tanh"), layer, keras.layers.Dense(1)])


@pytest.mark.parametrize(
    ("loss", "message"),
    [
        (lambda y, p: keras.ops.sum((y - p) ** 2), "is a sum"),
        (lambda y, p: keras.ops.sqrt(keras.ops.mean((y - p) ** 2)), "an unknown number"),
        (keras.losses.SparseCategoricalCrossentropy(ignore_class=0), "how many values count"),
    ],
    ids=["sum", "root", "ignore_class"],
)
def test_a_loss_that_is_no_mean_over_records(loss: object, message: str) -> None:
    classes = isinstance(loss, keras.losses.Loss)
    model = _with(keras.layers.Dense(3)) if not classes else keras.Sequential(
        [keras.Input((6,)), keras.layers.Dense(3, "softmax")]
    )  # fmt: skip
    trainer = ReplicaTrainer(model, None, alone())
    trainer.compile("sgd", loss)
    labels = np.arange(len(X)) % 3 if classes else Y
    with pytest.raises(Unsupported, match=message):
        trainer.fit(X, labels, verbose=0)
    with pytest.raises(Unsupported, match=message):
        trainer.evaluate(X, labels)


def test_a_sum_among_the_terms_and_what_is_marked() -> None:
    def fitted(penalty: Callable[[tf.Tensor], tf.Tensor]) -> None:
        trainer = ReplicaTrainer(_with(_Penalised(penalty)), None, alone())
        trainer.compile("sgd", "mse")
        trainer.fit(X, Y, verbose=0)

    with pytest.raises(Unsupported, match="is a sum"):
        fitted(lambda x: 0.1 * keras.ops.sum(x**2))
    fitted(lambda x: 0.1 * keras.ops.mean(x**2))
    fitted(lambda x: et.averaged(keras.ops.sqrt(keras.ops.mean(x**2))))


def test_a_layer_that_changes_its_weights_in_the_forward_pass() -> None:
    def work(group: ReplicaGroup) -> None:
        model = seeded(lambda: _with(keras.layers.SpectralNormalization(keras.layers.Dense(4), name="spectral")))
        trainer = ReplicaTrainer(model, WEIGHTS, group)
        trainer.compile("sgd", "mse")
        if group.size == 1:
            trainer.fit(X, Y, verbose=0)
            return
        with pytest.raises(Unsupported, match=r"changes its weight '.*spectral.*' in the forward pass"):
            trainer.fit(X, Y, verbose=0)

    run_threads(1, work)
    run_threads(2, work)


def test_a_scaled_loss_with_a_host_embedding() -> None:
    rows = et.create_host_embedding("rows", (9, 4), optimizer_spec=et.HostEmbeddingOptimizerSpec(0.1), group=alone())
    ids = keras.Input((3,), dtype="int64")
    model = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Flatten()(rows.lookup(ids))))
    trainer = ReplicaTrainer(model, None, rows.table.group)
    trainer.compile(keras.optimizers.SGD(0.1, loss_scale_factor=8.0), "mse")
    with rows.register(), pytest.raises(Unsupported, match=r"loss_scale_factor=8\) with host embedding 'rows'"):
        trainer.fit(np.zeros((4, 3), np.int64), np.zeros((4, 1), np.float32), verbose=0)
    plain = ReplicaTrainer(perceptron(), None, alone())
    plain.compile(keras.optimizers.SGD(0.1, loss_scale_factor=8.0), "mse")
    plain.fit(X, Y, verbose=0)


class Batches(keras.callbacks.Callback):
    """Notes logs and weights behind every batch, and stops behind `most`."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self.most = most
        self.logs: list[dict[str, float]] = []
        self.weights: list[Array] = []

    def on_train_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
        assert logs is not None
        self.logs.append(dict(logs))
        self.weights = [np.array(weight) for weight in self.model.get_weights()]
        if len(self.logs) == self.most:
            self.model.stop_training = True


class Halves(keras.callbacks.Callback):
    """Halves the learning rate, and sets a bias, behind every epoch."""

    def on_epoch_end(self, epoch: int, logs: dict[str, float] | None = None) -> None:
        self.model.optimizer.learning_rate = 0.5 * float(self.model.optimizer.learning_rate)
        self.model.layers[0].bias.assign(np.full(5, epoch, np.float32))


def fitted(
    group: ReplicaGroup, callbacks: list[object], locations: LocationSettings | None = BOTH, **named: Keyword
) -> tuple[ReplicaTrainer, keras.callbacks.History]:
    trainer = compiled(perceptron, locations, group, keras.optimizers.SGD(0.1))
    return trainer, trainer.fit(X, Y, **{"batch_size": 4, "epochs": 2, "verbose": 0, "callbacks": callbacks, **named})


def test_one_replica_stops_all_and_batch_logs_cover_all() -> None:
    def work(group: ReplicaGroup) -> tuple[list[dict[str, float]], dict[str, list[float]], int]:
        batches = Batches(3)
        trainer, history = fitted(group, [batches] if group.rank == 1 else [])
        assert same_bits(batches.weights, trainer.model.get_weights() if group.rank == 1 else [])
        return batches.logs, history.history, trainer.step

    (_, first, steps), (logs, second, _) = run_threads(2, work)
    assert steps == 3
    assert first == second == {"loss": [logs[-1]["loss"]]}


def test_learning_rates_and_weights_that_callbacks_set_count() -> None:
    def work(group: ReplicaGroup, locations: LocationSettings | None) -> list[Array]:
        trainer, _ = fitted(group, [Halves()], locations)
        assert trainer.optimizer.learning_rate.numpy() == pytest.approx(0.025)
        return trainer.model.get_weights()

    sharded = run_threads(2, lambda group: work(group, BOTH))
    whole = run_threads(2, lambda group: work(group, None))
    assert same_bits(sharded[0], whole[0])
    assert same_bits(sharded[1], whole[0])
    np.testing.assert_array_equal(sharded[0][1], 1)


def test_a_learning_rate_that_only_one_replica_sets_is_refused() -> None:
    def work(group: ReplicaGroup) -> None:
        fitted(group, [Halves()] if group.rank == 1 else [])

    with pytest.raises(BadInput, match=r"rank 1 continues at learning rate 0\.05, and rank 0 at 0\.1"):
        run_threads(2, work)


def test_early_stopping_and_its_best_weights() -> None:
    def work(group: ReplicaGroup) -> tuple[list[float], float, list[Array]]:
        stopping = keras.callbacks.EarlyStopping("val_loss", patience=1, restore_best_weights=True)
        trainer = ReplicaTrainer(seeded(perceptron), BOTH, group, seed=7)
        trainer.compile(keras.optimizers.SGD(10.0), "mse")  # far too fast: the first epoch is the best
        history = trainer.fit(X, Y, 4, 9, verbose=0, callbacks=[stopping], validation_data=(X, Y))
        return history.history["val_loss"], trainer.evaluate(X, Y), trainer.model.get_weights()

    (losses, after, weights), (_, _, others) = run_threads(2, work)
    assert len(losses) < 9
    assert after == pytest.approx(min(losses), rel=1e-5)
    assert same_bits(weights, others)


def test_rank_0_shows_a_line_an_epoch(capsys: pytest.CaptureFixture[str]) -> None:
    run_threads(2, lambda group: fitted(group, [], verbose=1) and None)
    shown = capsys.readouterr().out
    assert shown.count("Epoch 1/2") == 1
    assert shown.count("loss:") == 2


def test_unsupported_callbacks_are_refused(tmp_path: Path) -> None:
    kinds, model = keras.callbacks, perceptron()
    refused = [
        (kinds.BackupAndRestore(str(tmp_path)), r"use ReplicaTrainer\.save and load"),
        (kinds.SwapEMAWeights(), "moving averages"),
        (kinds.ModelCheckpoint(str(tmp_path / "m.keras")), "save_weights_only=True"),
        ("early", "callback str: not a keras.callbacks.Callback"),
    ]
    for callback, message in refused:
        with pytest.raises(Unsupported, match=message):
            ReplicaCallbacks([callback], model, alone(), 1, 1, 0)
    weights_only = kinds.ModelCheckpoint(str(tmp_path / "m.weights.h5"), save_weights_only=True)
    ReplicaCallbacks([weights_only], model, alone(), 1, 1, 0)
    noted = ReplicaCallbacks([kinds.LambdaCallback(on_epoch_end=lambda epoch, logs: None)], model, alone(), 1, 1, 0)
    assert not noted.sees_batches
    noted = ReplicaCallbacks([kinds.LambdaCallback(on_train_batch_end=lambda b, logs: None)], model, alone(), 1, 1, 0)
    assert noted.sees_batches


class Validations(keras.callbacks.Callback):
    def __init__(self) -> None:
        super().__init__()
        self.heard: list[object] = []

    def on_test_begin(self, logs: dict[str, float] | None = None) -> None:
        self.heard.append("begin")

    def on_test_end(self, logs: dict[str, float] | None = None) -> None:
        self.heard.append(dict(logs or {}))


def test_validations_are_reported_as_in_keras() -> None:
    named: dict[str, Keyword] = {"validation_data": (X[:7], Y[:7]), "epochs": 4, "validation_freq": 2}
    plain, heard = seeded(perceptron), Validations()
    plain.compile(keras.optimizers.SGD(0.1), "mse")
    plain.fit(X, Y, batch_size=4, verbose=0, shuffle=False, callbacks=[heard], **named)

    def work(group: ReplicaGroup) -> list[object]:
        mine = Validations()
        fitted(group, [mine], shuffle=False, **named)
        return mine.heard

    for found in run_threads(3, work):
        assert [type(each) for each in found] == [type(each) for each in heard.heard]
        for one, other in zip(found, heard.heard, strict=True):
            assert one == (pytest.approx(other, rel=1e-4) if isinstance(other, dict) else other)


def test_a_callback_of_the_batches_of_a_validation_is_refused() -> None:
    class Counts(keras.callbacks.Callback):
        def on_test_batch_end(self, batch: int, logs: dict[str, float] | None = None) -> None:
            pass

    with pytest.raises(Unsupported, match="callback Counts has on_test_batch_end"):
        fitted(alone(), [Counts()])
