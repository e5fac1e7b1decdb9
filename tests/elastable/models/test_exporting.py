"""`model.export` of models with tables in a store: artefacts that work where there is no Elastable."""

from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import Unsupported
from elastable.worker.rows import store_backed
from tests.elastable.models.test_saving import in_plain_keras
from tests.untyped import Keywords

ROWS, DIM = 40, 6
IDS = np.random.default_rng(0).integers(0, ROWS, (32, 3))
LARGE = IDS * 10**15 - 2**60
LABELS = np.random.default_rng(1).random((32, 1)).astype(np.float32)


class Subclassed(keras.Model):
    """Any ids, of which some were never trained, twice; with a table for each of the settings."""

    def __init__(self, *settings: Keywords) -> None:
        super().__init__()
        names = ["any", *(f"any-{number}" for number in range(1, len(settings)))]
        self.rows = [et.Embedding(None, DIM, name=name, **of) for name, of in zip(names, settings or [{}], strict=True)]
        self.out = keras.layers.Dense(1)

    def call(self, ids: tf.Tensor) -> tf.Tensor:
        means = [keras.ops.mean(rows(each), axis=1) for rows in self.rows for each in (ids, ids + 1)]
        return self.out(keras.ops.concatenate(means, axis=1))


def functional() -> keras.Model:
    ids = keras.Input((3,), dtype="int64")
    parts = [
        keras.layers.Flatten()(keras.layers.Embedding(ROWS, DIM, name="large")(ids)),
        et.Embedding(ROWS, DIM, combiner="sqrtn", mask_zero=True, name="combined")(ids),
        et.Embedding(None, 3, combiner="mean", table_dtype="bfloat16", name="half")(ids),
    ]
    return keras.Model(ids, keras.layers.Dense(1)(keras.layers.Concatenate()(parts)))


def trained(model: keras.Model, ids: object) -> keras.Model:
    model.compile(keras.optimizers.AdamW(0.1, weight_decay=0.1), "mse")
    et.fit(model, (ids, LABELS), batch_size=8, seed=5, verbose=False, offload_embeddings_above=ROWS * DIM - 1)
    return model


SIGNATURE = [tf.TensorSpec([None, 3], tf.int64)]
INITIAL = [
    keras.initializers.RandomUniform(-0.3, 0.7),
    keras.initializers.RandomNormal(0.1, 0.5),
    keras.initializers.TruncatedNormal(0.0, 0.5),
    keras.initializers.Constant(0.25),
]


def test_artefacts_work_in_a_fresh_process(tmp_path: Path) -> None:
    settings: list[Keywords] = [{"embeddings_initializer": initial} for initial in INITIAL]
    models = {"any": (Subclassed(*settings, {"lazy": False}), LARGE), "functional": (functional(), IDS)}
    for name, (model, ids) in models.items():
        trained(model, ids)
        unseen = np.concatenate([ids, ids + 7 if name != "functional" else (ids + 7) % ROWS])
        np.save(tmp_path / f"{name}.ids.npy", unseen)
        np.save(tmp_path / f"{name}.expected.npy", model.predict(unseen, verbose=0))
        # Of subclassed models Keras does not know what they take, and assumes floats.
        signature = {} if name == "functional" else {"input_signature": SIGNATURE}
        model.export(tmp_path / name, verbose=False, **signature)
    tf.saved_model.save(models["functional"][0], str(tmp_path / "by tf"))
    program = (
        "import os, numpy as np, tensorflow as tf\n"
        f"for name in {tuple(models)!r}:\n"
        "    loaded = tf.saved_model.load(name)\n"
        "    served = loaded.serve(np.load(name + '.ids.npy'))\n"
        "    expected = np.load(name + '.expected.npy')\n"
        "    np.testing.assert_allclose(served, expected, rtol=2e-6, atol=1e-6, err_msg=name)\n"
        "ids = tf.constant(np.load('functional.ids.npy'))\n"
        "loaded = tf.saved_model.load('by tf')\n"
        "serving = loaded.signatures['serving_default']\n"
        "served, = serving(ids).values()\n"
        "np.testing.assert_allclose(served, np.load('functional.expected.npy'), rtol=2e-6, atol=1e-6)\n"
    )
    in_plain_keras(program, tmp_path)


def served_by(model: keras.Model, spec: object) -> object:
    return tf.function(lambda ids: model(ids), input_signature=[spec])


def test_sparse_and_ragged_ids(tmp_path: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(ROWS, DIM)).astype(np.float32)
    dense = tf.RaggedTensor.from_row_lengths(IDS.reshape(-1)[:43], tf.constant([at % 4 for at in range(30)], tf.int64))
    for name, ids in (("sparse", dense.to_sparse()), ("ragged", dense)):
        inputs = keras.Input((None,), dtype="int64", **{name: True})
        model = keras.Model(inputs, et.Embedding(ROWS, DIM, combiner="mean", weights=rows)(inputs))
        # Keras' own export knows neither.
        module = tf.Module()
        spec = tf.SparseTensorSpec([None, None], tf.int64)
        if name == "ragged":
            spec = tf.RaggedTensorSpec([None, None], tf.int64, 1, tf.int64)
        module.serve = served_by(model, spec)
        tf.saved_model.save(module, str(tmp_path / name))
        loaded = tf.saved_model.load(str(tmp_path / name))
        np.testing.assert_allclose(loaded.serve(ids), model(ids), rtol=1e-6)


def test_a_subclassed_model_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    model = trained(Subclassed(), LARGE)
    with pytest.raises(Unsupported, match=r"'any'.*input_signature=\[tf.TensorSpec\(\[None, 3\], tf.int64\)\]"):
        model.export(tmp_path / "model", verbose=False)


def test_predictions_after_an_export_still_come_from_the_store(tmp_path: Path) -> None:
    model = trained(functional(), IDS)
    model.export(tmp_path / "model", verbose=False)
    before = model.predict(IDS, verbose=0)
    large = model.get_layer("large")
    large.embeddings.assign(large.embeddings.numpy() + 100)
    assert np.abs(model.predict(IDS, verbose=0) - before).max() > 0.01


def test_tables_that_a_graph_cannot_hold_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = trained(functional(), IDS)
    monkeypatch.setattr(store_backed, "LARGEST_EXPORTED_BYTES", ROWS * DIM * 4 - 1)
    with pytest.raises(Unsupported, match=r"'large': its 40 rows .*et\.save.*keras.models.load_model"):
        model.export(tmp_path / "model", verbose=False)


def test_litert_holds_fixed_tables_and_refuses_any_ids(tmp_path: Path) -> None:
    model = trained(Subclassed(), LARGE)
    with pytest.raises(Unsupported, match="'any': its table takes any int64 id, and format='litert'"):
        model.export(tmp_path / "any.tflite", format="litert", verbose=False, input_signature=SIGNATURE)
    ids = keras.Input((3,), dtype="int64")
    fixed = trained(keras.Model(ids, keras.layers.Flatten()(et.Embedding(ROWS, DIM, name="fixed")(ids))[:, :1]), IDS)
    fixed.export(tmp_path / "fixed.tflite", format="litert", verbose=False)
    assert b"PyFunc" not in (tmp_path / "fixed.tflite").read_bytes()
