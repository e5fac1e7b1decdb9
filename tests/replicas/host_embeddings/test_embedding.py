"""Host embeddings in Keras and TensorFlow: the numbers of a plain Keras Embedding, wherever lookups stand."""

import json
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import InitializerSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadIds, BadInput, IdOutOfRange, Unsupported
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.replicas.groups.group import ReplicaGroup
from elastable.replicas.groups.thread_group import run_threads
from elastable.replicas.host_embeddings.host_embedding import HostEmbedding, create_host_embedding
from elastable.replicas.host_embeddings.host_table import (
    HostEmbeddingOptimizerSpec,
    HostEmbeddingSGDGAOptimizerSpec,
)
from tests.preloaded.client import run_preloaded
from tests.untyped import Keyword, Keywords

ROWS, DIM = 20, 6
_random = np.random.default_rng(0)
TABLE = _random.normal(size=(ROWS, DIM)).astype(np.float32)
X = _random.integers(0, ROWS, size=(48, 3))  # ids repeat, within a batch and within a sample
Y = _random.normal(size=(48, 1)).astype(np.float32)

Rows = Callable[[object], object]

OPTIMIZERS: dict[str, tuple[Callable[..., keras.optimizers.Optimizer], Keywords]] = {
    "sgd": (keras.optimizers.SGD, {}),
    "adagrad": (keras.optimizers.Adagrad, {}),
    "adam": (keras.optimizers.Adam, {"lazy": False}),  # Keras' own moves all rows in every step
}


def plain() -> keras.layers.Embedding:
    """The regularizer of weight zero makes gradients dense: see `tests.equality.model.plain_model`."""
    zero = keras.regularizers.L2(0.0)
    return keras.layers.Embedding(ROWS, DIM, embeddings_regularizer=zero, weights=[TABLE])


def functional(rows: Rows) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Dense(4, activation="tanh")(keras.layers.Flatten()(rows(ids)))
    return keras.Model(ids, keras.layers.Dense(1)(hidden))


class Subclassed(keras.Model):
    def __init__(self, rows: Rows) -> None:
        super().__init__()
        self.rows = rows
        self.hidden = keras.layers.Dense(4, activation="tanh")
        self.out = keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        return self.out(self.hidden(keras.ops.reshape(self.rows(ids), (-1, 3 * DIM))))


def subclassed(rows: Rows) -> keras.Model:
    keras.utils.set_random_seed(1)
    return Subclassed(rows)


def trained_by_fit(model: keras.Model, optimizer: str, eagerly: bool = False) -> list[float]:
    model.compile(OPTIMIZERS[optimizer][0](0.05), "mse", run_eagerly=eagerly)
    history = model.fit(X, Y, batch_size=16, epochs=3, shuffle=False, verbose=0)
    return [float(loss) for loss in history.history["loss"]]


def embedding(optimizer: str = "sgd", **more: Keyword) -> HostEmbedding:
    spec = HostEmbeddingOptimizerSpec(0.05, optimizer, **OPTIMIZERS[optimizer][1])
    return create_host_embedding("rows", (ROWS, DIM), optimizer_spec=spec, initializer=TABLE, **more)


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("optimizer", "make", "by_layer", "eagerly"),
    [
        ("sgd", functional, True, False),
        pytest.param("adam", functional, False, False, marks=pytest.mark.slow),
        ("adagrad", subclassed, False, False),
        ("adagrad", functional, False, True),
    ],
)
def test_fit_trains_as_a_keras_embedding(
    optimizer: str, make: Callable[[Callable[..., object]], keras.Model], by_layer: bool, eagerly: bool
) -> None:
    layer = plain()
    losses = trained_by_fit(make(layer), optimizer)
    host = embedding(optimizer)
    model = make(host if by_layer else host.lookup)
    with host.register():
        found = trained_by_fit(model, optimizer, eagerly)
        before = host.get_embedding_tensor()
        evaluated, predicted = model.evaluate(X, Y, verbose=0), model.predict(X, verbose=0)
    assert host.table.step == 9
    np.testing.assert_allclose(found, losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(before, np.asarray(layer.embeddings), rtol=0, atol=2e-6)
    np.testing.assert_allclose(float(evaluated), np.mean((predicted - Y) ** 2), rtol=1e-5)
    np.testing.assert_array_equal(host.get_embedding_tensor(), before)  # neither of them trains


@pytest.mark.parametrize("replicas", [1, 2, 3])
@pytest.mark.parametrize("way", ["TOKEN", "ENCODING", "store"])
def test_tape_loops_of_replicas_train_as_one_on_the_joined_batch(replicas: int, way: str) -> None:
    """Uneven batches; dense gradients are averaged by their batches, too."""
    kernel = np.linspace(-1, 1, 3 * DIM, dtype=np.float32)[:, None]
    shares = np.split(np.arange(16), np.cumsum([9, 5])[: replicas - 1])
    store = MemoryStore() if way == "store" else None

    def loss_of(rows: tf.Tensor, weights: tf.Variable, samples: Array) -> tf.Tensor:
        return tf.reduce_mean((tf.reshape(rows, (-1, 3 * DIM)) @ weights - Y[samples]) ** 2)

    def work(group: ReplicaGroup) -> tuple[list[float], Array, Array]:
        strategy = "TOKEN" if store else way
        host = embedding("adagrad", group=group, partition_strategy=strategy, store=store)
        weights, losses = tf.Variable(kernel), []
        with host.register():
            for step in range(3):
                samples = 16 * step + shares[group.rank]
                with tf.GradientTape() as tape:
                    loss = loss_of(host.lookup(X[samples]), weights, samples)
                (gradient,) = tape.gradient(loss, [weights])
                share = np.float32(len(samples) / 16)
                weights.assign_sub(0.1 * group.all_reduce(gradient.numpy() * share))
                losses.append(float(group.all_reduce(loss.numpy() * share)))
        return losses, weights.numpy(), host.get_embedding_tensor()

    layer, weights = plain(), tf.Variable(kernel)
    layer.build()
    optimizer, expected = keras.optimizers.Adagrad(0.05), []
    for step in range(3):
        samples = np.arange(16 * step, 16 * step + 16)
        with tf.GradientTape() as tape:
            loss = loss_of(layer(X[samples]), weights, samples) + 0.0 * tf.reduce_sum(layer.embeddings)
        gradient, of_rows = tape.gradient(loss, [weights, layer.embeddings.value])
        optimizer.apply([of_rows], [layer.embeddings])
        weights.assign_sub(0.1 * gradient)
        expected.append(float(loss))
    results = run_threads(replicas, work)
    for losses, dense, rows in results:
        np.testing.assert_allclose(losses, expected, rtol=0, atol=1e-6)
        np.testing.assert_allclose(dense, weights.numpy(), rtol=0, atol=1e-6)
        np.testing.assert_allclose(rows, np.asarray(layer.embeddings), rtol=0, atol=1e-6)
        np.testing.assert_array_equal(rows, results[0][2])


def test_fit_of_replicas_within_compiled_functions() -> None:
    """Three threads wait for each other on TensorFlow's threads, of which a separate process has enough."""
    program = Path(__file__).with_name("fit_of_replicas.py")
    done = run_preloaded([str(program)], program.parents[3])
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert found["differences"] <= 2e-6
    assert found["same_bits"]
    assert "4 replicas in threads of one process wait for each other" in found["too_few"]


def test_a_table_that_was_never_trained() -> None:
    """Source: the host-embedding document's test: ones [4, 1024], ids [1, 2], weight 0, target 1."""
    host = create_host_embedding("never", (4, 1024), initializer="ones")
    weight = tf.Variable(tf.zeros((1024, 1)))

    @tf.function
    def step() -> object:
        with tf.GradientTape() as tape:
            loss = tf.reduce_mean((host.lookup(tf.constant([1, 2])) @ weight - 1.0) ** 2)
        weight.assign_sub(0.1 * tape.gradient(loss, weight))
        return loss

    with host.register():
        assert float(step()) == 1.0
        step()
    np.testing.assert_array_equal(host.get_embedding_tensor(), np.ones((4, 1024)))


def test_gradients_reach_the_table_in_functions_as_in_loops() -> None:
    """Also where a tape is asked for other gradients only, and only where one is asked at all."""

    def step(host: HostEmbedding, scale: tf.Variable, ids: tf.Tensor) -> tf.Tensor:
        with tf.GradientTape() as tape:
            loss = tf.reduce_sum(host.lookup(ids) ** 2) * scale
        return tape.gradient(loss, scale)

    tables = []
    for run in (step, tf.function(step)):
        host, scale = embedding("adagrad"), tf.Variable(0.5)
        with host.register():
            for ids in ([[1, 1], [2, 0]], [[7, 1], [7, 7]]):
                run(host, scale, tf.constant(ids))
            host.lookup([3])
        assert host.table.step == 2
        tables.append(host.get_embedding_tensor())
    np.testing.assert_array_equal(tables[0], tables[1])
    assert {int(row) for row in np.flatnonzero((tables[0] != TABLE).any(axis=1))} == {0, 1, 2, 7}


def test_gradients_of_a_gather_behind_the_lookup() -> None:
    """They come as IndexedSlices."""
    host, scale = embedding(), tf.Variable(1.0)
    with host.register(), tf.GradientTape() as tape:
        loss = tf.reduce_sum(tf.gather(host.lookup([4, 5, 6]), [1, 1])) * scale
    with host.register():
        tape.gradient(loss, scale)
    expected = TABLE.copy()
    expected[5] -= np.float32(0.05) * 2
    np.testing.assert_allclose(host.get_embedding_tensor(), expected, atol=1e-6)


def test_a_frozen_embedding_stays() -> None:
    host = embedding()
    host.trainable = False
    model = functional(host)
    with host.register():
        trained_by_fit(model, "sgd")
    np.testing.assert_array_equal(host.get_embedding_tensor(), TABLE)


def test_two_lookups_a_step_are_summed_by_accumulation() -> None:
    def two(rows: Rows) -> keras.Model:
        keras.utils.set_random_seed(1)
        ids = keras.Input((3,), dtype="int64")
        first, second = rows(ids[:, :2]), rows(ids[:, 1:])
        hidden = keras.layers.Flatten()(keras.layers.Concatenate(axis=1)([first, second]))
        return keras.Model(ids, keras.layers.Dense(1)(hidden))

    layer = plain()
    losses = trained_by_fit(two(layer), "sgd")
    host = create_host_embedding(
        "rows", (ROWS, DIM), optimizer_spec=HostEmbeddingSGDGAOptimizerSpec(0.05, 2), initializer=TABLE
    )
    model = two(host.lookup)
    with host.register():
        np.testing.assert_allclose(trained_by_fit(model, "sgd"), losses, rtol=0, atol=1e-6)
    np.testing.assert_allclose(host.get_embedding_tensor(), np.asarray(layer.embeddings), rtol=0, atol=2e-6)


def test_rows_have_the_tables_dtype() -> None:
    half = create_host_embedding("half", (4, 3), tf.float16, optimizer_spec=HostEmbeddingOptimizerSpec(0.5))
    model = functional(lambda ids: half.lookup(ids))
    with half.register(), tf.GradientTape() as tape:
        rows = half.lookup([[1, 2]])
        assert rows.dtype == tf.float16
        loss = tf.reduce_sum(tf.cast(rows, tf.float32))
    assert rows.shape == (1, 2, 3)
    before = half.get_embedding_tensor()
    assert before.dtype == np.float16
    with half.register():
        tape.gradient(loss, half.trainable_weights[0].value)
    np.testing.assert_allclose(half.get_embedding_tensor()[1:3], before[1:3] - 0.5, atol=1e-3)
    assert model.layers[1] is half


def test_keras_initializers_set_initial_rows() -> None:
    host = create_host_embedding("t", (9, 4), initializer=keras.initializers.RandomNormal(0.0, 2.0, seed=5))
    assert (host.table.spec.initializer, host.table.spec.seed) == (InitializerSpec("normal", 0.0, 2.0), 5)
    np.testing.assert_array_equal(host.get_embedding_tensor(), initial_rows(host.table.spec, np.arange(9)))


def test_invalid_lookups_are_refused() -> None:
    host = embedding()
    with pytest.raises(BadInput, match="'rows' is looked up without being registered"):
        host.lookup([1])
    with host.register():
        for indices in ([1.5], tf.constant([1.0]), keras.Input((3,))):
            with pytest.raises(BadIds, match="'rows': indices must be integers, got float32"):
                host.lookup(indices)
        with pytest.raises(IdOutOfRange, match="index 20 at position 1 of rank 0"):
            host.lookup([[0, ROWS]], clip_indices=False)
        np.testing.assert_array_equal(host.lookup([[-3, ROWS]]), TABLE[[[0, ROWS - 1]]])


def test_errors_within_compiled_functions_have_their_message() -> None:
    host = embedding()
    model = functional(lambda ids: host.lookup(ids, clip_indices=False))
    model.compile("sgd", "mse")
    with pytest.raises(tf.errors.InvalidArgumentError, match="BadInput: host embedding 'rows' is looked up without"):
        model.fit(X, Y, verbose=0)
    with host.register(), pytest.raises(tf.errors.InvalidArgumentError, match="IdOutOfRange: host embedding 'rows'"):
        model.predict(X + 1, verbose=0)
    with host.register():
        assert model.predict(X, verbose=0).shape == (48, 1)


def test_models_with_host_embeddings_save_their_weights_and_not_their_rows(tmp_path: Path) -> None:
    host = embedding()
    model = functional(host.lookup)
    model.save_weights(tmp_path / "dense.weights.h5")
    with pytest.raises(Unsupported, match=r"cannot be saved in a model file.*Save its state\(\)"):
        model.get_layer("rows").get_config()
