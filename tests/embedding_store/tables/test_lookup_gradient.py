"""The gradient of rows, given that of what was looked up: TensorFlow's, and the definition's."""

import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store import Bags, IndexedSlices, MemoryStore, OptimizerSpec, RowBlock, TableSpec
from elastable.embedding_store.contract.arrays import Array, Float32
from elastable.embedding_store.errors import BadGradient, BadIds, BadInput, IdOutOfRange
from elastable.embedding_store.tables.table import EmbeddingTable, size

RANDOM = np.random.default_rng(3)
OFFSETS = np.array([0, 3, 3, 4, 9])
FLAT = np.array([7, 8, 7, 4, 1, 1, 2, 9, 1])
WEIGHTS = RANDOM.uniform(0.2, 2, 9).astype(np.float32)
UPSTREAM = RANDOM.normal(size=(4, 5)).astype(np.float32)


@pytest.fixture
def table() -> object:
    with MemoryStore(threads=1) as store:
        made = store.table(TableSpec("t", 5, 10, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0)))
        made.put([RowBlock(np.arange(10), RANDOM.normal(size=(10, 5)).astype(np.float32), np.empty((10, 0), "f4"))])
        yield made


def by_id(slices: IndexedSlices) -> Array:
    """[10, 5]: the sums of each id."""
    dense = np.zeros((10, 5), np.float32)
    np.add.at(dense, slices.indices, slices.values)
    return dense


@pytest.mark.parametrize("weights", [None, WEIGHTS], ids=["plain", "weighted"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_it_is_that_of_tensorflow(table: EmbeddingTable, combiner: str, weights: Float32 | None) -> None:
    rows = tf.constant(table.lookup(np.arange(10)))
    bag_of = np.repeat(np.arange(4), np.diff(OFFSETS))
    place = np.concatenate([np.arange(length) for length in np.diff(OFFSETS)])
    at, shape = np.stack([bag_of, place], axis=1), (4, 5)
    with tf.GradientTape() as tape:
        tape.watch(rows)
        given = None if weights is None else tf.sparse.SparseTensor(at, weights, shape)
        ids = tf.sparse.SparseTensor(at, FLAT, shape)
        found = tf.nn.safe_embedding_lookup_sparse(rows, ids, given, combiner=combiner)
        loss = tf.reduce_sum(found * UPSTREAM)
    ours = table.lookup(FLAT, combiner=combiner, offsets=OFFSETS, weights=weights)
    np.testing.assert_allclose(found, ours, rtol=1e-5, atol=1e-6)
    want = tf.convert_to_tensor(tape.gradient(loss, rows)).numpy()
    got = table.lookup_gradient(FLAT, UPSTREAM, combiner=combiner, offsets=OFFSETS, weights=weights)
    assert (got.values.dtype, got.values.shape) == (np.float32, (9, 5))
    np.testing.assert_array_equal(got.indices, FLAT)
    np.testing.assert_allclose(by_id(got), want, rtol=1e-5, atol=1e-6)
    again = table.lookup_gradient(Bags(FLAT, combiner, OFFSETS, weights), UPSTREAM)
    np.testing.assert_array_equal(again.values, got.values)


def test_plain_ids_and_empty_ones(table: EmbeddingTable) -> None:
    slices = table.lookup_gradient([[1, 2], [1, 3]], np.arange(20, dtype=np.float32).reshape(2, 2, 5))
    np.testing.assert_array_equal(slices.indices, [1, 2, 1, 3])
    np.testing.assert_array_equal(slices.values, np.arange(20).reshape(4, 5))
    nothing = table.lookup_gradient(np.empty((0, 2), np.int64), np.empty((0, 2, 5), np.float32))
    assert (nothing.values.shape, nothing.indices.shape) == ((0, 5), (0,))
    empty = table.lookup_gradient(np.empty(0, int), UPSTREAM[:2], combiner="mean", offsets=[0, 0, 0], weights=[])
    assert empty.values.shape == (0, 5)


def test_a_bag_that_is_zeros_whatever_its_rows_are_gives_zeros(table: EmbeddingTable) -> None:
    weights = np.array([[1, -1], [1, 1]], np.float32)
    slices = table.lookup_gradient([[1, 2], [3, 4]], UPSTREAM[:2], combiner="mean", weights=weights)
    assert not table.lookup([[1, 2]], combiner="mean", weights=weights[:1]).any()
    np.testing.assert_array_equal(slices.values, [np.zeros(5), np.zeros(5), UPSTREAM[1] / 2, UPSTREAM[1] / 2])


def test_what_does_not_fit_is_refused(table: EmbeddingTable) -> None:
    with pytest.raises(BadGradient, match=r"'t'.*float32 \[2, 5\]"):
        table.lookup_gradient([[1, 2], [3, 4]], UPSTREAM, combiner="sum")
    with pytest.raises(BadGradient, match="float64"):
        table.lookup_gradient([[1, 2], [3, 4]], UPSTREAM[:2].astype(float), combiner="sum")
    with pytest.raises(BadInput, match="known combiners"):
        table.lookup_gradient([[1, 2]], UPSTREAM[:1], combiner="max")
    with pytest.raises(BadInput, match="a combiner is needed for offsets"):
        table.lookup_gradient([1, 2], UPSTREAM[:1], offsets=[0, 2])
    with pytest.raises(BadIds, match="offsets must end"):
        table.lookup_gradient([1, 2], UPSTREAM[:1], combiner="sum", offsets=[0, 1])
    with pytest.raises(IdOutOfRange, match="id 10"):
        table.update(None, table.lookup_gradient([10], UPSTREAM[:1]))


def test_sizes(table: EmbeddingTable) -> None:
    assert size(table) == table.shape == (10, 5)
    people = table.store.table(TableSpec("people", 3))
    assert size(people) == (0, 3)
    people.put([RowBlock(np.array([-7, 2**40]), np.ones((2, 3), np.float32), np.ones((2, 0), np.float32))])
    assert size(people) == (2, 3)
