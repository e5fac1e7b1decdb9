"""Callbacks on replicas: what one wants all do, and what they see is of all."""

from pathlib import Path

import keras
import numpy as np
import pytest

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import alone, run_threads
from elastable.replicas.training.trainer import ReplicaCallbacks, ReplicaTrainer
from tests.replicas.training.models import BOTH, compiled, perceptron, records, same_bits, seeded
from tests.untyped import Keyword

X, Y = records()


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
    plain = seeded(perceptron)
    assert plain.get_weights()[0].shape == (6, 5)


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
    """Notes what it hears of validations."""

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
