"""Files of plain Keras models, loaded into models whose tables are in a store."""

from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import Unsupported
from tests.elastable.one_table import (
    DIM,
    IDS,
    ROWS,
    START,
    TARGETS,
    assert_same,
    model_of,
    own_table,
    plain_table,
    train,
)

# Keras' own, as for plain layers: of optimizers that are not built yet, and after what could not be loaded.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Skipping variable loading for optimizer"),
    pytest.mark.filterwarnings("ignore:Skipping nested container"),
]


@pytest.fixture(scope="module")
def plain() -> keras.Model:
    """Tests may train it on: they save what they load."""
    model = model_of(plain_table())
    model.get_layer("items").set_weights([START])
    train(model)
    return model


def nothing(model: keras.Model) -> None:
    """The model as it is made."""


def set_before(model: keras.Model) -> None:
    model.get_layer("items").set_weights([START * 7])


def read_before(model: keras.Model) -> None:
    model.predict(IDS, verbose=0)


def train_before(model: keras.Model) -> None:
    train(model, TARGETS * 3)


@pytest.mark.sampled(3)
@pytest.mark.parametrize("suffix", ["weights.h5", "keras"])
@pytest.mark.parametrize("before", [nothing, set_before, read_before, train_before])
def test_rows_load(plain: keras.Model, before: Callable[[keras.Model], None], suffix: str, tmp_path: Path) -> None:
    path = tmp_path / f"plain.{suffix}"
    plain.save_weights(path) if suffix == "weights.h5" else plain.save(path)
    model = model_of(own_table())
    before(model)
    model.load_weights(path)
    assert_same(model, plain)
    np.testing.assert_allclose(model.predict(IDS, verbose=0), plain.predict(IDS, verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.sampled(4)
@pytest.mark.parametrize("optimizer", ["adam", "adagrad", "rmsprop", "sgd"])
def test_slots_are_loaded_where_keras_loads_the_optimizer(optimizer: str, tmp_path: Path) -> None:
    models = []
    for table in (plain_table(), own_table()):
        models.append(model_of(table, optimizer=optimizer))
        models[-1].get_layer("items").set_weights([START])
        train(models[-1])
    plain, own = models
    train(plain)
    plain.save_weights(tmp_path / "plain.weights.h5")
    own.load_weights(tmp_path / "plain.weights.h5")
    assert int(own.optimizer.iterations) == int(plain.optimizer.iterations) == 8
    for model in models:
        train(model, TARGETS * 2)
    assert_same(own, plain)


def test_a_loaded_model_takes_the_slots_of_a_plain_file(plain: keras.Model, tmp_path: Path) -> None:
    own = model_of(own_table())
    train(own)
    own.save(tmp_path / "own.keras")
    loaded = keras.models.load_model(tmp_path / "own.keras")
    plain.save_weights(tmp_path / "plain.weights.h5")
    loaded.load_weights(tmp_path / "plain.weights.h5")
    for model in (loaded, plain):
        train(model)
    assert_same(loaded, plain)


def test_a_table_with_an_optimizer_of_its_own_keeps_its_slots(plain: keras.Model, tmp_path: Path) -> None:
    plain.save_weights(tmp_path / "plain.weights.h5")
    own = model_of(et.Embedding(ROWS, DIM, name="items", optimizer="adagrad"))
    train(own)
    with pytest.warns(UserWarning, match="Skipping variable loading for optimizer"):
        own.load_weights(tmp_path / "plain.weights.h5")
    assert_same(own, plain)


def test_files_of_offloaded_and_of_untrained_layers_are_plain(tmp_path: Path) -> None:
    offloaded = model_of(keras.layers.Embedding(ROWS, DIM, name="items"))
    et.fit(offloaded, IDS, TARGETS, offload_embeddings_above=1, verbose=0)
    untrained = model_of(own_table())
    set_before(untrained)
    for source in (offloaded, untrained):
        source.save_weights(tmp_path / "source.weights.h5")
        for table in (plain_table(), own_table()):
            model = model_of(table)
            model.load_weights(tmp_path / "source.weights.h5")
            assert_same(model, source)


def test_what_does_not_fit_is_refused(plain: keras.Model, tmp_path: Path) -> None:
    path = tmp_path / "plain.weights.h5"
    plain.save_weights(path)
    with pytest.raises(ValueError, match=r"'items': got rows of shape \(12, 3\), its table has \(17, 3\)"):
        model_of(own_table(ROWS + 5)).load_weights(path)
    with pytest.raises(ValueError, match=r"'items': its table takes any int64 id.*layer\.write_rows\(ids, rows\)"):
        model_of(own_table(None)).load_weights(path)
    trained = model_of(own_table())
    train(trained)
    trained.save_weights(path)
    offloaded = model_of(keras.layers.Embedding(ROWS, DIM, name="items"))
    et.fit(offloaded, IDS, TARGETS, offload_embeddings_above=1, verbose=0)
    with pytest.raises(ValueError, match=r"'items': the file holds no rows.*\(ids, rows, slots, spec, steps in its"):
        offloaded.load_weights(path)


def test_a_plain_file_has_nothing_for_a_distributed_embedding(tmp_path: Path) -> None:
    def model_with(rows: object, ids: object) -> keras.Model:
        model = keras.Model(ids, keras.layers.Dense(1, name="out")(rows))
        model.compile("adam", "mse")
        return model

    ids = keras.Input((4,), dtype="int64")
    plain = model_with(keras.layers.GlobalAveragePooling1D()(plain_table()(ids)), ids)
    plain.save_weights(tmp_path / "plain.weights.h5")
    table = et.TableConfig("items", ROWS, DIM, optimizer="adam", placement="default_device", combiner="mean")
    layer = et.DistributedEmbedding(et.FeatureConfig("ids", table, (8, 4), (8, DIM)), name="items")
    own = model_with(layer(ids), ids)
    with pytest.raises(ValueError, match=r"'items': the file holds no rows.*nothing in its place.*set_weights"):
        own.load_weights(tmp_path / "plain.weights.h5")


class TestTensorFlowCheckpoints:
    def test_those_of_plain_layers_are_refused(self, plain: keras.Model, tmp_path: Path) -> None:
        path = tf.train.Checkpoint(model=plain, optimizer=plain.optimizer).save(str(tmp_path / "plain"))
        own = model_of(own_table())
        with pytest.raises(Unsupported, match=r"'items': the tf.train.Checkpoint.*plain.*load_weights"):
            tf.train.Checkpoint(model=own, optimizer=own.optimizer).restore(path)

    def test_those_of_offloaded_layers_hold_no_former_variable(self, tmp_path: Path) -> None:
        model = model_of(keras.layers.Embedding(ROWS, DIM, name="items"))
        et.fit(model, IDS, TARGETS, offload_embeddings_above=1, verbose=0)
        path = tf.train.Checkpoint(model).save(str(tmp_path / "offloaded"))
        assert not [name for name, _ in tf.train.list_variables(path) if "_embeddings" in name]
        rows = model.get_weights()[0]
        train_before(model)
        tf.train.Checkpoint(model).restore(path)
        np.testing.assert_array_equal(model.get_weights()[0], rows)
