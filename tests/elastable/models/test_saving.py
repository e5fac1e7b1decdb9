"""Models with tables in a store, saved and loaded as Keras saves and loads them."""

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, Unsupported
from tests.elastable.small_models import assert_same, clicks, store_model
from tests.untyped import Keywords, Parsed

ROWS, DIM = 40, 4

SUBCLASS = '''
import keras


@keras.saving.register_keras_serializable(package="tests")
class Clicks(keras.Model):
    """Looks words up in one of its tables, and in the list of them."""

    def __init__(self, **kwargs):
        super().__init__(**kwargs)
        self.large = keras.layers.Embedding(40, 4, name="large")
        self.others = [keras.layers.Embedding(40, 2, name="small"), keras.layers.Embedding(40, 5, name="other")]
        self.out = keras.layers.Dense(1)

    def call(self, words):
        rows = [self.large(words), *(other(words) for other in self.others)]
        return self.out(keras.ops.mean(keras.ops.concatenate(rows, axis=-1), axis=1))

    def get_config(self):
        return {"name": self.name}
'''


def words() -> tuple[Array, Array]:
    x, y = clicks(64)
    return x["word"], y[:, None]


def functional() -> object:
    inputs = keras.Input((3,), dtype="int64")
    inner_in = keras.Input((3,), dtype="int64")
    inner = keras.Model(
        inner_in, keras.layers.Embedding(ROWS, DIM, mask_zero=True, name="large")(inner_in), name="inner"
    )
    rows = keras.layers.Concatenate()([inner(inputs), keras.layers.Embedding(ROWS, 2, name="small")(inputs)])
    return keras.Model(inputs, keras.layers.Dense(1)(keras.layers.GlobalAveragePooling1D()(rows)))


def sequential() -> object:
    table = keras.layers.Embedding(ROWS, DIM, name="large")
    return keras.Sequential([keras.Input((3,), dtype="int64"), table, keras.layers.Flatten(), keras.layers.Dense(1)])


def subclassed() -> object:
    namespace: Parsed = {"__name__": "clicks_model"}
    exec(SUBCLASS, namespace)  # the text that the other process runs, too
    return namespace["Clicks"]()


MODELS = {"functional": functional, "sequential": sequential, "subclassed": subclassed}


def trained(make: Callable[[], keras.Model], by_keras: bool = False) -> keras.Model:
    keras.utils.set_random_seed(0)
    model = make()
    model.compile(keras.optimizers.SGD(0.5), "mse")
    fit(model, by_keras)
    return model


def fit(model: keras.Model, by_keras: bool = False) -> None:
    if by_keras:
        model.fit(*words(), batch_size=16, shuffle=False, verbose=0)
    else:
        et.fit(model, words(), batch_size=16, offload_embeddings_above=100, shuffle=False, verbose=False)


def large(model: keras.Model) -> keras.layers.Layer:
    return next(layer for layer in model._flatten_layers() if layer.name == "large")


def in_plain_keras(program: str, tmp_path: Path, *results: str) -> None:
    """Runs a program in a process in which nothing of Elastable can be imported."""
    blocked = (
        "import sys\n"
        "class Blocked:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name.split('.')[0] in ('elastable', 'embedding_store', 'worker', 'master'):\n"
        "            raise ImportError(name + ' is blocked')\n"
        "sys.meta_path.insert(0, Blocked())\n"
    )
    (tmp_path / "program.py").write_text(blocked + program)
    ran = subprocess.run(
        [sys.executable, "program.py"], cwd=tmp_path, timeout=300, check=False, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr


class TestOffloaded:
    def test_files_open_in_plain_keras(self, tmp_path: Path) -> None:
        x, _ = words()
        np.save(tmp_path / "x.npy", x)
        expected = {}
        for name, make in MODELS.items():
            model = trained(make)
            assert large(model).source is not None
            expected[name] = model.predict(x, verbose=0)
            model.save(tmp_path / f"{name}.keras")
            model.save_weights(tmp_path / f"{name}.weights.h5")
        program = SUBCLASS + (
            "import numpy as np\n"
            "x = np.load('x.npy')\n"
            f"for name in {tuple(MODELS)!r}:\n"
            "    model = keras.models.load_model(name + '.keras')\n"
            "    assert {type(layer).__module__.split('.')[0] for layer in model.layers} == {'keras'}, model.layers\n"
            "    np.save(name + '.npy', model.predict(x, verbose=0))\n"
            "    for layer in model._flatten_layers():\n"
            "        if isinstance(layer, keras.layers.Embedding):\n"
            "            layer.embeddings.assign(layer.embeddings * 0)\n"
            "    model.load_weights(name + '.weights.h5')\n"
            "    np.save(name + '.again.npy', model.predict(x, verbose=0))\n"
        )
        in_plain_keras(program, tmp_path)
        for name, values in expected.items():
            np.testing.assert_allclose(np.load(tmp_path / f"{name}.npy"), values, rtol=1e-6, err_msg=name)
            np.testing.assert_allclose(np.load(tmp_path / f"{name}.again.npy"), values, rtol=1e-6, err_msg=name)

    def test_weights_are_loaded_into_the_store_and_trained_on(self, tmp_path: Path) -> None:
        x, _ = words()
        model, plain = trained(subclassed), trained(subclassed, by_keras=True)
        plain_weights = tmp_path / "plain.weights.h5"
        plain.save_weights(plain_weights)
        model.load_weights(plain_weights)
        np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-6)
        assert large(model).source is not None
        fit(model)
        fit(plain, by_keras=True)
        np.testing.assert_allclose(model.predict(x, verbose=0), plain.predict(x, verbose=0), rtol=1e-5)

    def test_a_clone_and_a_copy_are_plain_keras(self) -> None:
        model = trained(functional)
        clone = keras.models.clone_model(model)
        assert type(large(clone)) is keras.layers.Embedding
        assert keras.models.model_from_json(model.to_json()).count_params() == clone.count_params()

    def test_larger_tables_are_written_on_request(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        model, path = trained(sequential), tmp_path / "model.keras"
        size = ROWS * DIM * 4
        with pytest.raises(Unsupported, match=rf"'large'.*et.save\(model, path, largest_table_bytes={size}\)"):
            et.save(model, path, largest_table_bytes=size - 1)
        et.save(model, path, largest_table_bytes=size)
        et.save(model, tmp_path / "model.weights.h5", largest_table_bytes=size)
        x, _ = words()
        loaded = keras.models.load_model(path)
        np.testing.assert_allclose(loaded.predict(x, verbose=0), model.predict(x, verbose=0), rtol=1e-6)
        with pytest.raises(BadInput, match=r"writes a \.keras file"):
            et.save(model, tmp_path / "model.tf")

    def test_a_legacy_file_is_refused(self, tmp_path: Path) -> None:
        with pytest.raises(Unsupported, match=r"'large'.*legacy HDF5.*\.keras"):
            trained(sequential).save(tmp_path / "model.h5")


class TestStoreBacked:
    @pytest.mark.parametrize("lazy", [True, False])
    def test_a_loaded_model_trains_on_with_its_slots(self, lazy: bool, tmp_path: Path) -> None:
        records = clicks(96)

        def fit(model: keras.Model) -> None:
            et.fit(model, records, batch_size=16, shuffle=False, lazy=lazy, verbose=False)

        model = store_model()
        model.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "binary_crossentropy")
        fit(model)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        for each in (model, loaded):
            fit(each)
        assert_same(loaded, model, rtol=1e-5, atol=1e-7)

    def test_weights_are_loaded_into_the_table_that_is_there(self, tmp_path: Path) -> None:
        records = clicks(96)
        model, other = store_model(), store_model()
        for each, epochs in ((model, 1), (other, 3)):
            each.compile(keras.optimizers.Adagrad(0.3), "binary_crossentropy")
            et.fit(each, records, epochs=epochs, batch_size=16, verbose=False)
        other.save_weights(tmp_path / "other.weights.h5")
        store = model.get_layer("users").source
        model.load_weights(tmp_path / "other.weights.h5")
        assert model.get_layer("users").source is store
        assert_same(model, other)

    def test_any_ids(self, tmp_path: Path) -> None:
        ids = np.random.default_rng(0).integers(-(2**62), 2**62, (64, 1))
        model = keras.Sequential(
            [keras.Input((1,), dtype="int64"), et.Embedding(None, DIM), keras.layers.Flatten(), keras.layers.Dense(1)]
        )
        model.compile(keras.optimizers.Adam(0.1), "mse")
        et.fit(model, (ids, np.ones((64, 1), np.float32)), seed=5, verbose=False)
        model.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        new = np.concatenate([ids, ids + 1])  # those that were never trained, too
        np.testing.assert_array_equal(loaded.predict(new, verbose=0), model.predict(new, verbose=0))
        et.fit(model, (ids[:8], np.zeros((8, 1), np.float32)), verbose=False)
        model.load_weights(tmp_path / "model.keras")
        np.testing.assert_array_equal(model.predict(new, verbose=0), loaded.predict(new, verbose=0))
        with pytest.raises(Unsupported, match="takes any int64 id"):
            np.asarray(model.layers[0].embeddings)


class TestOptimizerState:
    """Keras trains, then `et.fit`, then Keras again: the numbers of Keras all along."""

    @pytest.mark.parametrize(
        "optimizer",
        [
            lambda: keras.optimizers.SGD(0.05, momentum=0.9, weight_decay=0.1),
            lambda: keras.optimizers.Adam(0.05, amsgrad=True),
        ],
    )
    def test_goes_along(self, optimizer: Callable[..., object], tmp_path: Path) -> None:
        # No id comes twice in a batch: Keras squares un-summed slices (docs/fit.md).
        random = np.random.default_rng(0)
        x = np.concatenate([random.permutation(ROWS)[:16] for _ in range(4)])[:, None]
        records = (x, random.random((64, 1)).astype(np.float32))
        models = []
        for _ in range(2):
            out = keras.layers.Dense(1, kernel_initializer=keras.initializers.GlorotUniform(seed=1))
            ids = keras.Input((1,), dtype="int64")
            rows = keras.layers.Embedding(ROWS, DIM, "ones", name="large")(ids)
            models.append(keras.Model(ids, out(keras.layers.Flatten()(rows))))
            models[-1].compile(optimizer(), "mse")
        moved, plain = models

        def by_keras(*models: keras.Model) -> None:
            for model in models:
                model.fit(*records, batch_size=16, shuffle=False, verbose=0)

        def by_us() -> None:
            settings: Keywords = {"batch_size": 16, "shuffle": False, "verbose": False, "lazy": False}
            et.fit(moved, records, offload_embeddings_above=100, **settings)

        def assert_same(model: keras.Model) -> None:
            np.testing.assert_allclose(large(model).embeddings, large(plain).embeddings, rtol=1e-4, atol=1e-5)

        by_keras(moved, plain)
        by_us()
        by_keras(plain)
        assert_same(moved)
        moved.save(tmp_path / "model.keras")
        loaded = keras.models.load_model(tmp_path / "model.keras")
        by_keras(loaded, plain)
        assert_same(loaded)
        # And back into the store, with what Keras has learnt since.
        loaded.save_weights(tmp_path / "later.weights.h5")
        moved.load_weights(tmp_path / "later.weights.h5")
        by_us()
        by_keras(plain)
        assert_same(moved)
