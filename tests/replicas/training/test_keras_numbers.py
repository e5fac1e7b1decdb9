"""What Keras' `fit` computes, replicas compute: metrics, clipping, constraints, the losses of outputs, validation."""

from collections.abc import Callable

import keras
import numpy as np
import pytest

from elastable.embedding_store.composite.locations import LocationSettings
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.training.trainer import ReplicaTrainer
from tests.replicas.training.models import BOTH, STATE, WEIGHTS, compiled, perceptron, records, seeded, trained
from tests.untyped import Keyword, Keywords, Parsed

X, Y = records()


def plain(
    optimizer: Callable[[], object], make: Callable[[], object] = perceptron, metrics: object = None, **fit: Keyword
) -> tuple[list[object], Parsed]:
    model = seeded(make)
    model.compile(optimizer(), "mse", metrics=metrics)
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


@pytest.mark.parametrize("clipping", [{"clipnorm": 0.1}, {"global_clipnorm": 0.1}, {"clipvalue": 0.05}], ids=str)
def test_gradients_of_a_scaled_loss_are_clipped_as_unscaled(clipping: Keywords) -> None:
    optimizer = sgd(loss_scale_factor=64.0, **clipping)
    want = plain(optimizer)
    for found in trained(2, STATE, optimizer=optimizer, shuffle=False):
        require_equal(found, want)


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

    def compiled(model: keras.Model) -> Keywords:
        return {"loss": {"one": "mse", "two": "mae"}, "loss_weights": {"one": 1.0, "two": 0.3}}

    def make() -> object:
        entry = keras.Input((6,))
        hidden = keras.layers.Dense(5, "tanh")(entry)
        outputs = [keras.layers.Dense(1, name="one")(hidden), keras.layers.Dense(1, name="two")(hidden)]
        return keras.Model(entry, outputs)

    fit: Keywords = {"batch_size": 5, "epochs": 2, "verbose": 0, "shuffle": False, "validation_split": 0.3}
    model = seeded(make)
    model.compile(sgd()(), **compiled(model))
    history = model.fit(X, [Y, -Y], **fit).history

    def work(group: ReplicaGroup) -> tuple[list[object], Parsed]:
        trainer = ReplicaTrainer(seeded(make), None, group)
        trainer.compile(sgd()(), **compiled(trainer.model))
        return trainer.model.get_weights(), trainer.fit(X, [Y, -Y], **fit).history

    for found in run_threads(3, work):
        assert "val_one_loss" in found[1]
        require_equal(([], found[1]), ([], history))
