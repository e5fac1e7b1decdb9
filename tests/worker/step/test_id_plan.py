"""The id plan: what it cuts out, what it leaves, and what it cannot plan."""

import logging
from collections.abc import Callable

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import TableNotFound, Unsupported
from elastable.worker.layers.embedding import Embedding
from elastable.worker.step.forward import batch_spec
from elastable.worker.step.id_plan import IdPlan, plan_ids
from elastable.worker.step.id_set import make_id_sets
from tests.untyped import Keywords

Y = tf.zeros([1])


def _plan(model: keras.Model, x: object, training: bool = True) -> IdPlan:
    model(x)
    model.compile("sgd", _total)
    return plan_ids(model, batch_spec((x, tf.zeros([1]))), training)


def _total(_: object, predicted: tf.Tensor) -> tf.Tensor:
    return tf.reduce_sum(predicted)


def test_ids_computed_by_the_model_are_planned_in_call_order() -> None:
    """Hashing, arithmetic, two calls of one layer, behind BatchNormalization and Dropout."""
    inputs = keras.Input((3,), dtype="int64")
    hashed = keras.layers.Hashing(100)(inputs)
    layer = Embedding(100, 4, name="hashed")
    joined = layer(hashed) + layer(inputs % 7)
    flat = keras.layers.Dropout(0.5)(keras.layers.BatchNormalization()(keras.layers.Flatten()(joined)))
    model = keras.Model(inputs, keras.layers.Dense(1)(flat))
    x = tf.constant(np.arange(12).reshape(4, 3))
    plan = _plan(model, x)
    assert plan.planned == (True, True)
    assert plan.tables == ("hashed", "hashed")
    first, second = plan.ids((x, Y))
    np.testing.assert_array_equal(first, keras.layers.Hashing(100)(x).numpy().reshape(-1))
    np.testing.assert_array_equal(second, np.arange(12) % 7)


def test_a_plan_runs_for_any_batch_size_and_changes_no_state() -> None:
    inputs = keras.Input((2,), dtype="int64")
    flat = keras.layers.BatchNormalization()(keras.layers.Flatten()(Embedding(None, 3, name="t")(inputs)))
    model = keras.Model(inputs, keras.layers.Dropout(0.3)(flat))
    before = None
    plan = _plan(model, tf.zeros([4, 2], tf.int64))
    variables = variables_of(model.variables)
    before = [variable.numpy() for variable in variables]
    for size in (1, 5, 0):
        assert [len(ids) for ids in plan.ids((tf.zeros([size, 2], tf.int64), Y))] == [2 * size]
    for variable, value in zip(variables, before, strict=True):
        np.testing.assert_array_equal(variable.numpy(), value)


def test_subclassed_model_with_dict_of_strings_and_ragged_ids() -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.lookup = keras.layers.StringLookup(vocabulary=["a", "b"])
            self.words = Embedding(None, 2, name="words")
            self.tags = Embedding(None, 2, combiner="mean", name="tags")

        def call(self, x: dict[str, tf.Tensor]) -> tf.Tensor:
            return self.words(self.lookup(x["word"])) + self.tags(x["tags"])

    x = {"word": tf.constant(["b", "z"]), "tags": tf.ragged.constant([[5, 6], []], dtype=tf.int64)}
    plan = _plan(Model(), x)
    assert [ids.tolist() for ids in plan.ids((x, Y))] == [[2, 0], [5, 6]]


def test_ids_that_depend_on_rows_variables_or_chance_are_not_planned(caplog: pytest.LogCaptureFixture) -> None:
    class Model(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            names = ("first", "second", "third", "fourth")
            self.first, self.second, self.third, self.fourth = (Embedding(50, 1, name=name) for name in names)
            self.dense = keras.layers.Dense(1)

        def call(self, x: tf.Tensor) -> tf.Tensor:
            from_rows = tf.cast(tf.abs(self.first(x)[..., 0]) * 100, tf.int64)
            from_variable = tf.cast(tf.abs(self.dense(tf.cast(x, tf.float32))), tf.int64) % 50
            by_chance = x + tf.cast(tf.random.uniform(tf.shape(x), 0, 2, tf.int32), tf.int64)
            return self.second(from_rows) + self.third(from_variable) + self.fourth(by_chance)

    with caplog.at_level(logging.WARNING):
        plan = _plan(Model(), tf.ones([2, 3], tf.int64))
    assert plan.planned == (True, False, False, False)
    assert plan.tables == ("first",)
    assert [record.getMessage().split("'")[1] for record in caplog.records] == ["second", "third", "fourth"]


@pytest.mark.parametrize(("how", "more"), [(tf.map_fn, {"fn_output_signature": tf.float32}), (tf.vectorized_map, {})])
def test_an_embedding_inside_of_a_loop_is_refused_by_name(how: Callable[..., tf.Tensor], more: Keywords) -> None:
    layer = Embedding(None, 2, name="looped")

    class Model(keras.Model):
        def call(self, x: tf.Tensor) -> tf.Tensor:
            return how(layer, x, **more)

    model = Model()
    model.looped = layer
    with pytest.raises(Unsupported, match="'looped' is called inside of"):
        _plan(model, tf.ones([2, 3], tf.int64))


def test_a_model_without_planned_calls_has_an_empty_plan() -> None:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    plan = _plan(model, tf.zeros([1, 2]))
    assert plan.layers == ()
    assert plan.ids((tf.zeros([1, 2]), Y)) == []


def test_a_table_that_the_store_has_lost_is_named() -> None:
    specs = {"b": TableSpec("b", 2, None)}
    with pytest.raises(TableNotFound, match=r"no table 'a' in the job's store \(tables: b\)"):
        make_id_sets(["b", "a"], [np.array([1]), np.array([2])], specs)
