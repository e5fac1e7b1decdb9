"""Moving averages and constraints of rows: the numbers of Keras, the same in every store."""

import json
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import Commit, TableUpdate, UpdateBatch
from elastable.embedding_store.contract.spec import EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.master.model.dense import KerasUpdate
from elastable.master.model.wrapping_optimizers import constrained, keeps_averages, rows_become_averages, with_averages
from tests.file_stores import file_store

ADAM = OptimizerSpec.of("adam", learning_rate=0.1)


def trained(store: EmbeddingStore) -> tuple[Array, Array, Array]:
    """Weights as they are trained, and after they became their averages; and the slots then."""
    with store:
        eviction = EvictionSpec(max_age=100, every=50)
        store.create_table(TableSpec("t", 5, None, optimizer=with_averages(ADAM, 0.8, 4), eviction=eviction))
        store.create_table(TableSpec("plain", 5, None, optimizer=ADAM))
        random = np.random.default_rng(4)
        for version in range(1, 7):
            ids = random.choice(60, 20, replace=False)
            update = TableUpdate(ids, random.normal(size=(20, 5)).astype(np.float32))
            store.commit(Commit(version, {"t": update, "plain": update}, version - 1, {}))
        ids = np.arange(60)
        before = store.lookup({"t": ids})["t"]
        reported: list[int] = []
        rows_become_averages(store, ["t", "plain"], lambda table, ids: reported.extend(ids))
        after = store.read_rows("t", ids)
        assert sorted(reported) == after.ids.tolist()
        np.testing.assert_array_equal(after.weights, after.slots[:, -6:-1])
        rows_become_averages(store, ["t", "plain"])
        again = store.read_rows("t", ids)
        for part in ("weights", "slots", "touches"):
            np.testing.assert_array_equal(getattr(again, part), getattr(after, part))
        return before, store.lookup({"t": ids})["t"], after.slots


def test_the_same_bits_in_every_store(tmp_path: Path) -> None:
    def parts() -> list[EmbeddingStore]:
        return [MemoryStore(threads=1) for _ in range(3)]

    plain = trained(MemoryStore(threads=1))
    assert np.abs(plain[0] - plain[1]).max() > 1e-3
    stores = (PartitionedStore(parts(), "token"), PartitionedStore(parts(), "encoding"), file_store(tmp_path / "rows"))
    for store in stores:
        for found, expected in zip(trained(store), plain, strict=True):
            np.testing.assert_array_equal(found, expected, err_msg=type(store).__name__)


def test_only_such_optimizers_keep_averages() -> None:
    assert keeps_averages(with_averages(ADAM, 0.8, None))
    assert not keeps_averages(ADAM)
    assert not with_averages(ADAM, 0.8, None).same_but_rate(with_averages(ADAM, 0.9, None))
    slower = OptimizerSpec.of("adam", learning_rate=0.01)
    assert with_averages(ADAM, 0.8, None).same_but_rate(with_averages(slower, 0.8, None))


@pytest.mark.parametrize(
    "config", ["", "[]", "{}", '{"optimizer": 1, "momentum": 0, "overwrite_every": 0}', "[" * 100_000]
)
def test_a_config_of_something_else_is_refused(config: str) -> None:
    with pytest.raises(BadSpec, match="'averaged'"):
        row_optimizer(OptimizerSpec("averaged", (), config))
    with pytest.raises(BadSpec, match="momentum must lie from 0 to 1"):
        row_optimizer(with_averages(ADAM, 1.5, None))


def test_averages_of_unchanged_variables_move_as_in_keras() -> None:
    def optimizer() -> keras.optimizers.SGD:
        return keras.optimizers.SGD(0.1, use_ema=True, ema_momentum=0.8, ema_overwrite_frequency=4)

    def kernel() -> keras.Variable:
        return keras.Variable(np.ones((2, 2), np.float32), name="kernel")

    theirs, rows, plain = kernel(), keras.Variable(np.ones((3, 2), np.float32), name="rows"), optimizer()
    plain.build([theirs, rows])
    mine, own = kernel(), optimizer()
    own.build([mine])
    update = KerasUpdate(own)
    step = tf.function(lambda gradient: update.apply([gradient], [mine]), autograph=False)
    stand = tf.function(update.update_tables_only, autograph=False)
    gradient, none = np.full((2, 2), 0.5, np.float32), np.ones((3, 2), np.float32)
    for number in range(7):
        if number < 2:
            plain.apply([gradient, none], [theirs, rows])
            step(tf.constant(gradient))
        else:
            plain.apply([none], [rows])
            stand()
        average, expected = own._model_variables_moving_average[0], plain._model_variables_moving_average[0]
        np.testing.assert_allclose(average.numpy(), expected.numpy(), rtol=1e-6)
        np.testing.assert_allclose(mine.numpy(), theirs.numpy(), rtol=1e-6)
        assert int(own.iterations) == number + 1


C = keras.constraints


class Own(C.Constraint):  # type: ignore[name-defined]
    """A person's own constraint."""


@pytest.mark.parametrize(
    "constraint",
    [
        C.NonNeg(),
        C.MaxNorm(0.7, axis=1),
        C.MaxNorm(0.7, axis=-1),
        C.UnitNorm(axis=1),
        C.MinMaxNorm(0.5, 0.9, rate=0.3, axis=[1]),
    ],
)
def test_touched_rows_are_constrained_as_in_keras(constraint: keras.constraints.Constraint) -> None:
    spec = OptimizerSpec.of("sgd", learning_rate=0.5, momentum=0.9)
    rows = row_optimizer(constrained("e", spec, constraint))
    random = np.random.default_rng(0)
    start = random.normal(size=(6, 8)).astype(np.float32)
    gradients = random.normal(size=(3, 8)).astype(np.float32)
    weights, slots = start.copy(), np.zeros((6, 8), np.float32)
    chosen = np.array([4, 0, 2])
    rows.apply(weights, slots, UpdateBatch(chosen, chosen, gradients, 0, 0.5))
    expected = np.asarray(constraint(start[[4, 0, 2]] - np.float32(0.5) * gradients))
    np.testing.assert_allclose(weights[[4, 0, 2]], expected, rtol=1e-6)
    assert np.array_equal(weights[[1, 3, 5]], start[[1, 3, 5]])
    assert rows.fused
    assert rows.slot_width(8) == 8


def test_another_epsilon_of_keras_goes_with_the_spec() -> None:
    """The rows may be updated in another process, which has an epsilon of its own, or no Keras at all."""
    spec, before = OptimizerSpec.of("sgd", learning_rate=0.5), keras.config.epsilon()
    usual = constrained("e", spec, C.UnitNorm(axis=1))
    assert "epsilon" not in usual.keras_config
    weights = np.full((1, 2), 0.1, np.float32)
    keras.config.set_epsilon(0.5)
    try:
        said = constrained("e", spec, C.UnitNorm(axis=1))
        expected = np.asarray(C.UnitNorm(axis=1)(weights))
    finally:
        keras.config.set_epsilon(before)
    batch = UpdateBatch(np.array([0]), np.array([0]), np.zeros((1, 2), np.float32), 0, 0.5)
    row_optimizer(said).apply(weights, np.zeros((1, 0), np.float32), batch)
    np.testing.assert_allclose(weights, expected, rtol=1e-6)


@pytest.mark.parametrize(
    ("constraint", "message"),
    [(C.MaxNorm(2.0), r"layer 'e'.*MaxNorm\(axis=0\).*use axis=1"), (C.UnitNorm(axis=0), "UnitNorm"), (Own(), "Own")],
)
def test_what_joins_rows_is_refused_by_name(constraint: object, message: str) -> None:
    with pytest.raises(Unsupported, match=message):
        constrained("e", OptimizerSpec(), constraint)


def max_norm(config: object) -> str:
    """A spec's config with one of MaxNorm that Keras would not write."""
    constraint = {"module": "keras.constraints", "class_name": "MaxNorm", "config": config}
    return json.dumps({"optimizer": {"name": "sgd", "hyperparameters": [], "config": ""}, "constraint": constraint})


@pytest.mark.parametrize(
    "config",
    [
        "",
        "{}",
        '{"optimizer": 3, "constraint": 4}',
        "[" * 100_000,
        max_norm(5),
        max_norm({"axis": 1, "max_value": [1, 2]}),
        max_norm({"axis": 1, "max_value": None}),
    ],
)
def test_a_constraint_without_a_config_is_refused(config: str) -> None:
    with pytest.raises(BadSpec, match="constrained"):
        row_optimizer(OptimizerSpec("constrained", (), config))
