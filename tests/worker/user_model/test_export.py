"""Export to plain Keras, and Keras embeddings moved to the store and back."""

import json
import zipfile
from pathlib import Path

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.row_source import variables_of
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import Unsupported
from elastable.worker.layers.embedding import Embedding
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.user_model.build import build_model, make_model
from elastable.worker.user_model.export import export_keras, plain_model
from elastable.worker.user_model.offload import OffloadedEmbedding, bring_back, offload_built

IDS = np.random.default_rng(0).integers(0, 30, (12, 4))
LABELS = np.zeros((12, 1), np.float32)
RECORDS = NumpyReader(IDS, LABELS)


def _trained_store(model: keras.Model) -> MemoryStore:
    """A store with the model's tables, attached, with rows moved away from their initial values."""
    store = MemoryStore()
    updates: dict[str, TableUpdate] = {}
    for layer in store_layers(model):
        spec = layer.table_spec(0, OptimizerSpec.of("sgd", learning_rate=1.0))
        if store.create_table(spec):
            ids = np.arange(0, 20, dtype=np.int64)
            noise = np.random.default_rng(len(updates)).normal(size=(20, spec.dim)).astype(np.float32)
            updates[spec.name] = TableUpdate(ids, noise)
        layer.attach(store)
    store.commit(Commit(1, updates, 0, {}))
    return store


def _model() -> keras.Model:
    inputs = keras.Input((4,), dtype="int64")
    parts = [
        keras.layers.Flatten()(Embedding(30, 3, name="plain")(inputs)),
        keras.layers.Flatten()(Embedding(30, 3, table="shared", name="one")(inputs)),
        keras.layers.Flatten()(Embedding(30, 3, table="shared", name="two")(inputs // 2)),
        Embedding(30, 3, combiner="mean", mask_zero=True, name="mean")(inputs),
        Embedding(30, 3, combiner="sqrtn", name="sqrtn")(inputs),
        Embedding(None, 2, combiner="sum", name="any")(inputs),
    ]
    hidden = keras.layers.BatchNormalization()(keras.layers.Concatenate()(parts))
    nested = keras.Sequential([keras.Input((hidden.shape[-1],)), keras.layers.Dense(4, "relu"), keras.layers.Dense(1)])
    model = keras.Model(inputs, nested(hidden))
    model.compile("sgd", "mse")
    build_model(model, (IDS, LABELS))
    return model


def _modules(path: Path) -> set[str]:
    """The modules of all classes that Keras needs to load a file, and what registered names begin with."""
    config = json.loads(zipfile.ZipFile(path).read("config.json"))
    found, waiting = set(), [config]
    while waiting:
        part = waiting.pop()
        if isinstance(part, dict):
            names = part.get("module"), part.get("registered_name")
            found |= {name.partition(">")[0] for name in names if name and name != part.get("class_name")}
            waiting += part.values()
        elif isinstance(part, list):
            waiting += part
    return found


def test_an_exported_model_predicts_the_same_without_elastable(tmp_path: Path) -> None:
    model = _model()
    store = _trained_store(model)
    ids = IDS % 20
    expected = model.predict(ids, verbose=0)
    path = export_keras(model, store, tmp_path / "model.keras")
    # tests/elastable/commands/test_train.py opens such a file where Elastable is not imported.
    assert {module.split(".")[0] for module in _modules(path)} == {"keras"}
    plain = keras.models.load_model(path)
    np.testing.assert_allclose(plain.predict(ids, verbose=0), expected, rtol=1e-5, atol=1e-6)
    # Layers of one table are one layer now, and the exported model keeps what compile() was given.
    assert plain_model(model, store).compiled


def _any_ids(combiner: str | None = None) -> keras.Model:
    inputs = keras.Input((3,), dtype="int64")
    initial = keras.initializers.RandomUniform(1.0, 3.0)
    rows = Embedding(None, 2, embeddings_initializer=initial, combiner=combiner, name="any")(inputs)
    model = keras.Model(inputs, rows)
    model.compile("sgd", "mse")
    return model


def test_ids_a_dynamic_table_has_never_seen_read_the_mean_of_its_distribution() -> None:
    model, known = _any_ids(), np.array([[3, 4, 5]])
    plain = plain_model(model, _trained_store(model))
    np.testing.assert_array_equal(plain.predict(np.array([[10**12, -1, 77]]), verbose=0), np.full((1, 3, 2), 2.0))
    np.testing.assert_array_equal(plain.predict(known, verbose=0), model.predict(known, verbose=0))


def test_a_model_of_which_no_row_was_trained_is_exported(tmp_path: Path) -> None:
    model = _any_ids("mean")
    with MemoryStore() as store:
        for layer in store_layers(model):
            store.create_table(layer.table_spec(0, OptimizerSpec.of("sgd")))
            layer.attach(store)
        path = export_keras(model, store, tmp_path / "model.keras")
    plain = keras.models.load_model(path)
    np.testing.assert_array_equal(plain.predict(np.array([[10**12, 0, -1]]), verbose=0), np.full((1, 2), 2.0))


def test_the_padding_of_a_dynamic_table_is_masked(tmp_path: Path) -> None:
    inputs = keras.Input((3,), dtype="int64")
    rows = Embedding(None, 4, mask_zero=True, name="any")(inputs)
    model = keras.Model(inputs, keras.layers.MultiHeadAttention(2, 2)(rows, rows))
    plain = keras.models.load_model(export_keras(model, _trained_store(model), tmp_path / "model.keras"))
    ids = np.array([[3, 0, 5], [7, 8, 0]])
    np.testing.assert_array_equal(plain.predict(ids, verbose=0), model.predict(ids, verbose=0))


def test_shared_tables_of_which_keras_loads_no_file_are_refused() -> None:
    inputs = keras.Input((4,), dtype="int64")
    for first, other in (({"combiner": "sum"}, {"combiner": "mean"}), ({"mask_zero": True}, {})):
        made = [Embedding(30, 3, table="shared", **each)(inputs) for each in (first, other)]
        model = keras.Model(inputs, made)
        with pytest.raises(Unsupported, match="share the table 'shared', and Keras can load no file of that"):
            plain_model(model, _trained_store(model))


def test_models_that_keras_cannot_clone_are_refused() -> None:
    class Own(keras.Model):
        def __init__(self) -> None:
            super().__init__()
            self.rows = Embedding(30, 2, name="rows")

        def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
            return self.rows(x)

    with pytest.raises(Unsupported, match="subclass"):
        plain_model(Own(), MemoryStore())
    inputs = keras.Input((4,), dtype="int64", sparse=True)
    model = keras.Model(inputs, Embedding(30, 2, combiner="sum", name="rows")(inputs))
    with pytest.raises(Unsupported, match=r"'rows'.*sparse"):
        plain_model(model, _trained_store(model))

    class Scaled(keras.layers.Layer):
        def __init__(self, by: float) -> None:
            super().__init__()
            self.by = by

        def call(self, x: keras.KerasTensor) -> keras.KerasTensor:
            return x * self.by

    dense = keras.Input((4,), dtype="int64")
    model = keras.Model(dense, Scaled(2.0)(Embedding(30, 2, name="rows")(dense)))
    with pytest.raises(Unsupported, match="Keras cannot make its layers anew"):
        plain_model(model, _trained_store(model))


def _keras_model() -> keras.Model:
    big = keras.layers.Embedding(100, 4, "he_normal", "l2", mask_zero=True, name="big")
    inputs = keras.Input((4,), dtype="int32")
    flat = keras.layers.Flatten()(big(inputs) + keras.layers.Embedding(5, 4, name="small")(inputs % 5))
    model = keras.Model(inputs, keras.layers.Dense(1)(flat))
    model.compile("sgd", "mse")
    return model


def test_only_embeddings_above_the_threshold_move_and_keep_their_config() -> None:
    config = _keras_model().get_layer("big").get_config()
    model = make_model(_keras_model, RECORDS, seed=0, offload_above=100)
    big = model.get_layer("big")
    assert type(big) is OffloadedEmbedding
    assert type(model.get_layer("small")) is keras.layers.Embedding
    assert big.get_config() == config
    assert [weight.table_name for weight in big.weights] == ["big"]
    assert big.table_spec().vocabulary_size == 100
    assert big(np.array([[0, 3]]))._keras_mask.numpy().tolist() == [[False, True]]
    untouched = make_model(_keras_model, RECORDS, seed=0, offload_above=0)
    assert type(untouched.get_layer("big")) is keras.layers.Embedding


def test_export_brings_plain_embeddings_back() -> None:
    model = make_model(_keras_model, RECORDS, seed=0, offload_above=100)
    store = _trained_store(model)
    expected = model.predict(IDS, verbose=0)
    plain = plain_model(model, store)
    assert type(plain.get_layer("big")) is keras.layers.Embedding
    assert plain.get_layer("big").get_config() == model.get_layer("big").get_config()
    np.testing.assert_allclose(plain.predict(IDS, verbose=0), expected, rtol=1e-6)


def test_a_subclassed_model_of_offloaded_layers_is_exported_as_it_was(tmp_path: Path) -> None:
    model = make_model(_subclassed, RECORDS, seed=0, offload_above=100)
    store = _trained_store(model)
    loaded = keras.models.load_model(export_keras(model, store, tmp_path / "model.keras"))
    assert type(loaded.rows) is keras.layers.Embedding
    np.testing.assert_allclose(loaded.predict(IDS, verbose=0), model.predict(IDS, verbose=0), rtol=1e-6)


def _subclassed() -> keras.Model:
    model = Rows()
    model.compile("sgd", "mse")
    return model


@keras.saving.register_keras_serializable(package="tests")
class Rows(keras.Model):
    def __init__(self, **settings: object) -> None:
        super().__init__(**settings)
        self.rows, self.out = keras.layers.Embedding(100, 4, name="rows"), keras.layers.Dense(1)

    def call(self, ids: keras.KerasTensor) -> keras.KerasTensor:
        return self.out(keras.ops.mean(self.rows(ids), axis=1))


def test_built_embeddings_move_with_their_values_and_come_back() -> None:
    model = make_model(_keras_model, RECORDS, seed=0)
    before = model.predict(IDS, verbose=0)
    values = offload_built(model, above=100)
    assert list(values) == ["big"]
    assert not any("big" in weight.path for weight in variables_of(model.trainable_weights))
    bring_back(model.get_layer("big"), values["big"])
    assert type(model.get_layer("big")) is keras.layers.Embedding
    np.testing.assert_array_equal(model.predict(IDS, verbose=0), before)


def test_lora_embeddings_are_refused_by_name() -> None:
    def make() -> keras.Model:
        model = keras.Sequential([keras.Input((4,)), keras.layers.Embedding(100, 4, lora_rank=2, name="lora")])
        model.compile("sgd", "mse")
        return model

    with pytest.raises(Unsupported, match="'lora'"):
        make_model(make, RECORDS, seed=0, offload_above=10)
