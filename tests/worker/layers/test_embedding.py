"""The layer: shapes, combiners, masks, errors; against ElasticDL's own numbers."""

import inspect

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.spec import SCALED_INITIALIZERS, InitializerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadIds, BadSpec, IdOutOfRange, ModelError, Unsupported
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.embedding_store.tables.row_blocks import fresh_rows
from elastable.worker.layers.embedding import EdlEmbedding, Embedding
from tests.untyped import Keywords
from tests.worker.layers.in_step import column, ids_as_rows, record_calls, run_in_step

# elasticdl/python/tests/layer_test.py: sparse ids of shape [4, 6].
SPARSE = tf.SparseTensor([[0, 0], [1, 1], [1, 2], [2, 1], [3, 1], [3, 3], [3, 5]], [1, 1, 3, 2, 0, 2, 6], [4, 6])
COMBINED = {"sum": [1, 4, 2, 8], "mean": [1, 2, 2, 8 / 3], "sqrtn": [1, 4 / np.sqrt(2), 2, 8 / np.sqrt(3)]}
GRADIENTS = {
    "sum": [1, 1, 5, 3, 3],
    "mean": [0.5, 0.5, 3, 1, 1],
    "sqrtn": [1 / np.sqrt(2), 1 / np.sqrt(2), 2 + np.sqrt(3), np.sqrt(3), np.sqrt(3)],
}


@pytest.mark.parametrize("graph", [False, True], ids=["eager", "graph"])
@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
def test_sparse_ids_are_combined_and_gradients_reach_every_unique_id(combiner: str, graph: bool) -> None:
    """ElasticDL: the output scaled by the row index 0..3 and summed."""
    layer = Embedding(None, 8, name="table", combiner=combiner)
    scale = tf.constant([0.0, 1.0, 2.0, 3.0])[:, tf.newaxis]
    output, [(table, unique, gradient)] = run_in_step(
        lambda: layer(SPARSE), ids_as_rows(8), graph, lambda output: tf.reduce_sum(output * scale)
    )
    assert table == "table"
    np.testing.assert_allclose(output, column(COMBINED[combiner]), rtol=1e-6)  # type: ignore[arg-type]
    np.testing.assert_array_equal(unique, [1, 3, 2, 0, 6])
    np.testing.assert_allclose(gradient, column(GRADIENTS[combiner]), rtol=1e-6)  # type: ignore[arg-type]


def test_two_calls_of_one_layer_are_two_records_and_both_gradients_count() -> None:
    layer = Embedding(None, 4, name="table")

    def call() -> tf.Tensor:
        return tf.reduce_sum(layer(np.array([1, 2]))) + 10.0 * tf.reduce_sum(layer(np.array([2, 3, 2])))

    calls = record_calls(call)
    assert [ids.tolist() for _, ids in calls] == [[1, 2], [2, 3, 2]]
    _, [(_, unique, gradient)] = run_in_step(call, ids_as_rows(4))
    np.testing.assert_array_equal(unique, [1, 2, 3])
    np.testing.assert_array_equal(gradient, column([1, 21, 10], 4))


def test_the_design_documents_own_example() -> None:
    """dim 16, inputs [[2, 6], [9, 6]]: BET [3, 16], output rows BET[0], BET[1], BET[2], BET[1]."""
    layer = EdlEmbedding(10, 16, "edl")
    inputs = np.array([[2, 6], [9, 6]])
    table = np.random.default_rng(0).normal(size=(10, 16)).astype(np.float32)
    output, [(_, unique, gradient)] = run_in_step(lambda: layer(inputs), lambda _, ids: table[ids])
    np.testing.assert_array_equal(unique, [2, 6, 9])
    assert gradient.shape == (3, 16)
    assert output.shape == (2, 2, 16)
    np.testing.assert_array_equal(output, table[inputs])


def test_mask_zero_masks_where_ids_are_zero() -> None:
    layer = Embedding(10, 8, mask_zero=True, name="masked")
    output = layer(np.array([[0, 1, 3, 8], [5, 0, 2, 3]]))
    expected = np.ones((2, 4), bool)
    expected[0, 0] = expected[1, 1] = False
    np.testing.assert_array_equal(output._keras_mask, expected)


def test_a_combiner_leaves_masked_ids_out() -> None:
    layer = Embedding(10, 2, mask_zero=True, combiner="mean", name="masked")
    output, _ = run_in_step(lambda: layer(np.array([[0, 2, 4], [0, 0, 0]])), ids_as_rows(2))
    np.testing.assert_array_equal(output, column([3, 0], 2))


@pytest.mark.parametrize("combiner", ["sum", "mean", "sqrtn"])
@pytest.mark.parametrize("kind", ["dense", "ragged", "sparse"])
def test_weights_and_kinds_agree_with_a_loop(combiner: str, kind: str) -> None:
    generator = np.random.default_rng(3)
    lengths = [3, 3, 3] if kind == "dense" else [3, 0, 1]
    ids = [generator.integers(0, 20, length) for length in lengths]
    weights = [generator.uniform(0.5, 2.0, length).astype(np.float32) for length in lengths]
    layer = Embedding(None, 4, name="table", combiner=combiner)
    table = generator.normal(size=(20, 4)).astype(np.float32)
    inputs, weight = _tensors(kind, ids, weights)
    output, _ = run_in_step(lambda: layer(inputs, weights=weight), lambda _, unique: table[unique])
    norms = {"sum": lambda w: 1.0, "mean": np.sum, "sqrtn": lambda w: np.sqrt(np.sum(w * w))}
    for row, (mine, weigh) in enumerate(zip(ids, weights, strict=True)):
        expected = (table[mine] * weigh[:, np.newaxis]).sum(axis=0)
        expected = expected / norms[combiner](weigh) if len(mine) else np.zeros(4)  # type: ignore[operator]
        np.testing.assert_allclose(output[row], expected, rtol=1e-5)


def _tensors(kind: str, ids: list[np.ndarray], weights: list[np.ndarray]) -> tuple[object, object]:
    if kind == "dense":
        return np.stack(ids), np.stack(weights)
    splits = np.cumsum([0, *map(len, ids)])
    ragged = tf.RaggedTensor.from_row_splits(np.concatenate(ids), splits)
    heavy = tf.RaggedTensor.from_row_splits(np.concatenate(weights), splits)
    if kind == "ragged":
        return ragged, heavy
    # Ragged to sparse by hand: a zero weight would be dropped by to_sparse of some versions.
    return ragged.to_sparse(), heavy.to_sparse()


def test_sparse_ids_below_zero_are_pruned_and_an_empty_row_is_zero() -> None:
    layer = Embedding(9, 2, name="table", combiner="sum")
    inputs = tf.SparseTensor([[0, 0], [0, 1], [1, 0]], [-1, 3, -5], [3, 2])
    output, [(_, unique, _)] = run_in_step(lambda: layer(inputs), ids_as_rows(2))
    np.testing.assert_array_equal(unique, [3])
    np.testing.assert_array_equal(output, column([3, 0, 0], 2))


@pytest.mark.parametrize(
    ("combiner", "expected"), [(None, [[[[1, 1], [2, 2]], [[3, 3]]], [[]]]), ("sum", [[[3, 3], [3, 3]], [[0, 0]]])]
)
def test_nested_ragged_ids_stay_ragged_and_are_combined_over_their_innermost_axis(
    combiner: str | None, expected: object
) -> None:
    layer = Embedding(None, 2, name="table", combiner=combiner)
    ragged = tf.ragged.constant([[[1, 2], [3]], [[]]], dtype=tf.int64)
    output, _ = run_in_step(lambda: layer(ragged), ids_as_rows(2), scale=lambda o: tf.reduce_sum(o.flat_values))
    assert output.to_list() == expected


@pytest.mark.parametrize("shared", [False, True])
def test_unattached_layers_read_initial_values_of_their_table(shared: bool) -> None:
    first = Embedding(None, 4, name="a", table="words" if shared else None)
    second = Embedding(None, 4, name="b", table="words" if shared else None)
    ids = np.array([-5, 0, 2**62])
    assert np.array_equal(first(ids), second(ids)) is shared


def test_config_round_trip() -> None:
    layer = Embedding(
        9, 4, "he_normal", "l2", keras.constraints.NonNeg(), True, combiner="mean", table="t", name="layer",
        table_dtype="bfloat16",
    )  # fmt: skip
    again = Embedding.from_config(layer.get_config())
    assert again.get_config() == layer.get_config()
    edl = EdlEmbedding(10, 4, "edl", "ones", table_dtype="float16")
    assert edl.table_spec().dtype == "float16"
    assert EdlEmbedding.from_config(edl.get_config()).get_config() == edl.get_config()
    model = keras.Sequential([keras.Input((3,), dtype="int64"), layer])
    again = keras.Sequential.from_config(model.get_config())
    assert again.layers[0].get_config() == layer.get_config()


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("zeros", "zeros"), ("ones", "ones"), (keras.initializers.Constant(3.0), "constant"), ("uniform", "uniform"),
        ("random_normal", "normal"), ("truncated_normal", "truncated_normal"), ("glorot_uniform", "uniform"),
        ("glorot_normal", "truncated_normal"), ("he_uniform", "uniform"), ("lecun_normal", "truncated_normal"),
        (keras.initializers.VarianceScaling(2.0, "fan_out", "untruncated_normal"), "normal"),
        (keras.initializers.HeUniform(seed=5), "uniform"), (keras.initializers.RandomNormal(1.0, 0.5), "normal"),
    ],
)  # fmt: skip
def test_initializers_keep_their_distribution(name: object, kind: str) -> None:
    """Mean and deviation of many initial values equal those of Keras' own draw.

    The means of two draws of n values differ by 1.4 deviations / sqrt(n), one standard error: the bound is seven of
    them, so that it holds for nearly any seed.
    """
    layer = Embedding(4000, 16, embeddings_initializer=name, name="table")
    assert layer.table_spec().initializer.kind == kind
    ours = layer.read_rows(np.arange(4000))
    theirs = np.asarray(keras.initializers.get(name)((4000, 16)))
    assert ours.mean() == pytest.approx(theirs.mean(), abs=10 * theirs.std() / np.sqrt(theirs.size) + 1e-7)
    assert ours.std() == pytest.approx(theirs.std(), rel=0.02)
    assert ours.max() <= theirs.max() + 0.1 * abs(theirs.max()) + 1e-7 or kind == "normal"


@pytest.mark.parametrize("bad", [10, -1])
def test_ids_outside_of_a_fixed_vocabulary_are_refused(bad: int) -> None:
    with pytest.raises(IdOutOfRange, match=rf"'fixed'.*{bad}"):
        Embedding(10, 4, name="fixed")(np.array([1, bad]))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"input_dim": 8}, r"order is Keras' own, et.Embedding\(input_dim, output_dim\).*\(None, 8\)"),
        ({"output_dim": 0}, "output_dim"),
        ({"output_dim": 2.5}, "output_dim"),
        ({"output_dim": 4, "input_dim": -1}, "input_dim"),
        ({"output_dim": 4, "combiner": "max"}, "combiner 'max'"),
        ({"output_dim": 4, "mask_zero": "mean"}, "mask_zero must be True or False, got 'mean'.*combiner="),
        ({"output_dim": 4, "table_dtype": "double"}, "'bad': table_dtype 'double'.*float32, bfloat16, float16"),
        ({"output_dim": 4, "table_dtype": "int8"}, "'int8'.*served, not trained"),
    ],
)
def test_bad_arguments_are_refused_by_name(arguments: Keywords, message: str) -> None:
    with pytest.raises(BadSpec, match=message):
        Embedding(**{"input_dim": None, **arguments}, name="bad")


def test_arguments_come_in_the_order_of_keras() -> None:
    """Whatever Keras' own layer takes by position means the same here."""
    rows = np.ones((9, 4), np.float32)
    given = (9, 4, "ones", "l2", "non_neg", True, [rows])
    ours, theirs = Embedding(*given), keras.layers.Embedding(*given)
    keras_config = {name: value for name, value in theirs.get_config().items() if name in ours.get_config()}
    assert {name: value for name, value in ours.get_config().items() if name in keras_config} == {
        **keras_config, "name": ours.name, "dtype": ours.get_config()["dtype"],
    }  # fmt: skip
    np.testing.assert_array_equal(ours(np.array([3])), theirs(np.array([3])))
    of_keras = list(inspect.signature(keras.layers.Embedding).parameters)[:7]
    assert list(inspect.signature(Embedding.__init__).parameters)[1:8] == of_keras


def test_sparse_ids_need_a_combiner_and_weights_do_too() -> None:
    with pytest.raises(BadSpec, match="combiner"):
        Embedding(None, 4, name="sparse")(SPARSE)
    with pytest.raises(BadIds, match="combiner"):
        Embedding(None, 4, name="weighted")(np.array([1, 2]), weights=np.array([1.0, 2.0]))


def test_weights_are_the_rows_to_begin_with() -> None:
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    for given in (rows, [rows]):
        np.testing.assert_array_equal(Embedding(5, 3, weights=given, name="t")(np.array([4, 0])), rows[[4, 0]])
    with pytest.raises(BadSpec, match=r"\(5, 3\).*\(6, 3\)"):
        Embedding(6, 3, weights=rows, name="t")
    with pytest.raises(BadSpec, match="fixed table"):
        Embedding(None, 3, weights=rows, name="t")


def my_rows(shape: object, dtype: object = None) -> object:
    return tf.ones(shape)


class OwnDraw(keras.initializers.RandomUniform):
    def __call__(self, shape: object, dtype: object = None) -> object:
        return 2 * super().__call__(shape, dtype)


@pytest.mark.parametrize(
    ("size", "initializer", "message"),
    [
        (8, "orthogonal", "Orthogonal"),
        (None, "glorot_uniform", "vocabulary"),
        (8, my_rows, "my_rows"),
        (8, OwnDraw(), "OwnDraw"),
    ],
)
def test_initializers_that_cannot_be_computed_by_row_are_refused(
    size: int | None, initializer: object, message: str
) -> None:
    with pytest.raises(Unsupported, match=message):
        Embedding(size, 4, embeddings_initializer=initializer, name="o").table_spec()


class Narrow(keras.initializers.RandomUniform):
    def __init__(self) -> None:
        super().__init__(-0.01, 0.01)


def test_initializers_of_ones_own_count_as_what_they_draw_as() -> None:
    spec = Embedding(8, 4, embeddings_initializer=Narrow(), name="narrow").table_spec()
    assert spec.initializer == InitializerSpec("uniform", -0.01, 0.01)


def test_a_scale_by_columns_alone_needs_no_vocabulary() -> None:
    scaled = keras.initializers.VarianceScaling(1.0, "fan_out", "uniform")
    specs = [Embedding(size, 12, embeddings_initializer=scaled, name="t").table_spec() for size in (None, 100)]
    assert specs[0].initializer == specs[1].initializer == InitializerSpec("uniform", -0.5, 0.5)


@pytest.mark.parametrize("name", SCALED_INITIALIZERS)
def test_a_specs_own_scaled_kinds_are_kerass(name: str) -> None:
    layer = Embedding(1000, 24, embeddings_initializer=name, name="t")
    assert layer.table_spec().initializer == TableSpec("t", 24, 1000, initializer=InitializerSpec(name)).initializer


def test_the_smallest_float16_are_read_in_threads_that_flush_subnormals() -> None:
    """TensorFlow's own threads turn float32 below 2**-126 into 0, also where they run our kernels."""
    every = np.arange(1, 1024, dtype=np.uint16).view(np.float16).astype(np.float32)
    rows, ids = np.resize(every, (31, 33)), np.arange(31)
    layer = Embedding(31, 33, name="t", table_dtype="float16")
    with MemoryStore(threads=1) as store:
        store.create_table(layer.table_spec())
        store.put("t", [fresh_rows(layer.table_spec(), ids, rows)])
        layer.attach(store)
        np.testing.assert_array_equal(tf.function(lambda some: layer(some))(tf.constant(ids)), rows)


@pytest.mark.parametrize("table_dtype", ["bfloat16", "float16"])
def test_a_layer_reads_what_its_narrow_table_keeps(table_dtype: str) -> None:
    rows = np.random.default_rng(0).normal(size=(5, 3)).astype(np.float32)
    ids = np.arange(5)
    layer = Embedding(5, 3, weights=rows, name="t", table_dtype=table_dtype)
    with MemoryStore(threads=1) as store:
        store.create_table(layer.table_spec())
        store.put("t", [fresh_rows(layer.table_spec(), ids, rows)])
        unattached = np.asarray(layer(ids))
        layer.attach(store)
        np.testing.assert_array_equal(unattached, layer(ids))
    fresh = Embedding(None, 3, name="t", table_dtype=table_dtype)
    assert fresh(ids).dtype == tf.float32
    np.testing.assert_array_equal(fresh(ids), initial_rows(fresh.table_spec(), ids))


class Hidden(keras.Model):
    """Makes its layer where Keras cannot see it before the first call."""

    def build(self, input_shape: tuple[int | None, ...]) -> None:
        self.rows = Embedding(10, 4, name="t")

    def call(self, inputs: tf.Tensor, training: bool | None = None) -> tf.Tensor:
        return keras.ops.sum(self.rows(inputs, training=training), axis=(1, 2))


def test_keras_own_train_step_is_refused_by_a_layer_that_it_could_not_train() -> None:
    model = Hidden()
    model.compile("sgd", "mse")
    with pytest.raises(ModelError, match=r"et\.fit"):
        model.fit(np.zeros((4, 2), np.int64), np.zeros((4, 1)), verbose=0)
