"""`elastable export`: a version of a job, as a plain model, a SavedModel or weights that are served."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import (
    BadInput,
    CheckpointError,
    ElastableError,
    ModelError,
    StoreBroken,
    Unsupported,
)
from elastable.models.configuration import config_of, model_of
from elastable.models.predictor import Predictor
from elastable.models.saving import export_version

WORDS = np.array([["red", "green"], ["blue", "red"], ["pink", ""], ["green", "blue"]] * 8, object)
X = {
    "ids": np.random.default_rng(0).integers(-(2**60), 2**60, (32, 3)),
    "seen": np.random.default_rng(1).integers(0, 40, (32, 3)),
    "colour": WORDS,
    "shop": WORDS[::-1],
}
Y = np.random.default_rng(2).random((32, 1)).astype(np.float32)


def model(hashed: bool = False) -> keras.Model:
    """Tables of any ids, of a fixed vocabulary, of strings by an adapted lookup, and of hashed strings."""
    given = {
        "ids": keras.Input((3,), dtype="int64", name="ids"),
        "seen": keras.Input((3,), dtype="int64", name="seen"),
        "colour": keras.Input((2,), dtype="string", name="colour"),
    }
    lookup = keras.layers.StringLookup(name="colours")
    lookup.adapt(["red", "green", "blue"])
    parts = [
        et.Embedding(None, 4, combiner="mean", name="any")(given["ids"]),
        keras.layers.Flatten()(et.Embedding(40, 8, name="fixed")(given["seen"])),
        et.Embedding(4, 4, combiner="sum", name="looked_up")(lookup(given["colour"])),
    ]
    if hashed:
        given["shop"] = keras.Input((2,), dtype="string", name="shop")
        parts.append(et.Embedding(None, 4, combiner="sum", name="hashed")(given["shop"]))
    made = keras.Model(given, keras.layers.Dense(1, name="click")(keras.layers.Concatenate()(parts)), name="clicks")
    made.compile(keras.optimizers.Adam(0.05), "mse")
    return made


def train(of: keras.Model, url: str, epochs: int = 1, first: int = 0) -> None:
    x = {name: X[name] for name in of.input}
    et.fit(of, x, Y, store=url, batch_size=16, epochs=epochs, initial_epoch=first, verbose=0)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[keras.Model, str]]:
    """A model at version 4, whose job goes on, and its store."""
    url = f"memory?log={tmp_path_factory.mktemp('export') / 'log'}"
    made = model(hashed=True)
    train(made, url, epochs=2)
    yield made, url
    made.get_layer("any").source.close()


def predicted(of: keras.Model, x: dict[str, np.ndarray]) -> np.ndarray:
    return np.asarray(of.predict({name: x[name] for name in of.input}, batch_size=32, verbose=0))


def test_weights_and_graph_predict_as_the_model_that_is_trained(
    trained: tuple[keras.Model, str], tmp_path: Path
) -> None:
    made, url = trained
    unseen = {**X, "ids": X["ids"] + 1, "shop": X["colour"]}
    assert export_version(url, tmp_path / "weights", "serving") == 4
    assert export_version(url, tmp_path / "graph", "savedmodel", version=4) == 4
    graph = tf.saved_model.load(tmp_path / "graph")
    with Predictor(tmp_path / "weights") as found:
        for x in (X, unseen):
            wanted = predicted(made, x)
            outputs, version = found.predict(x)
            assert version == 4
            np.testing.assert_allclose(outputs["click"], wanted, rtol=1e-5, atol=1e-6)
            served = graph.signatures["serving_default"](**{name: tf.constant(x[name]) for name in x})
            np.testing.assert_allclose(next(iter(served.values())), wanted, rtol=1e-5, atol=1e-6)
    with pytest.raises(Unsupported, match="'hashed': hashes strings to ids"):
        export_version(url, tmp_path / "plain.keras", "keras")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["graph", "weights"]


def test_rows_that_move_with_every_step_are_written_as_they_are_now(tmp_path: Path) -> None:
    ids = keras.Input((3,), dtype="int64", name="ids")
    made = keras.Model(ids, keras.layers.Dense(1, name="click")(et.Embedding(None, 4, combiner="sum", name="any")(ids)))
    made.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
    url = f"memory?log={tmp_path / 'log'}"
    et.fit(made, X["seen"], Y, store=url, batch_size=4, shuffle=False, lazy=False, verbose=0)
    export_version(url, tmp_path / "weights", "serving")
    with Predictor(tmp_path / "weights") as found:
        for x in (X["seen"], X["seen"] + 1_000):
            wanted = made.predict(x, batch_size=32, verbose=0)
            np.testing.assert_allclose(found.predict({"ids": x})[0]["click"], wanted, rtol=1e-5, atol=1e-6)
    made.get_layer("any").source.close()


def test_a_plain_model_has_the_words_that_a_lookup_has_learned(tmp_path: Path) -> None:
    made, url = model(), f"memory?log={tmp_path / 'log'}"
    train(made, url)
    assert export_version(url, tmp_path / "plain.keras", "keras") == 2
    plain = keras.models.load_model(tmp_path / "plain.keras")
    found = plain({name: tf.constant(X[name]) for name in made.input})
    np.testing.assert_allclose(found, predicted(made, X), rtol=1e-5, atol=1e-6)
    made.get_layer("any").source.close()


def test_too_many_words_for_each_version_need_the_model_file() -> None:
    lookup = keras.layers.StringLookup(name="words")
    lookup.adapt([str(number) for number in range(10_001)])
    made = keras.Sequential([keras.Input((1,), dtype="string"), lookup])
    with pytest.raises(
        ModelError, match=r"'words' has learned by adapt\(\) what the version does not hold .*--model-file"
    ):
        model_of(config_of(made))


@pytest.mark.parametrize(("dtype", "tolerance"), [("bfloat16", 0.02), ("int8", 0.05)])
def test_rows_are_kept_smaller(trained: tuple[keras.Model, str], dtype: str, tolerance: float, tmp_path: Path) -> None:
    made, url = trained
    x = {name: X[name] for name in made.input}
    export_version(url, tmp_path / "weights", "serving", dtype=dtype)
    export_version(url, tmp_path / "graph", "savedmodel", dtype=dtype)
    with Predictor(tmp_path / "weights") as found:
        assert {spec.dtype for spec in found._versions.rows.specs().values()} == {dtype}
        served = found.predict(x)[0]["click"]
    np.testing.assert_allclose(served, predicted(made, X), atol=tolerance)
    assert np.abs(served - predicted(made, X)).max() > 1e-6
    graph = tf.saved_model.load(tmp_path / "graph").signatures["serving_default"]
    in_graph = next(iter(graph(**{name: tf.constant(each) for name, each in x.items()}).values()))
    np.testing.assert_allclose(in_graph, served, rtol=1e-4, atol=1e-5)


def test_weights_alone_are_written_to_be_served(trained: tuple[keras.Model, str], tmp_path: Path) -> None:
    _, url = trained
    export_version(url, tmp_path / "weights", "serving")
    with Predictor(tmp_path / "weights") as found:
        assert all(spec.optimizer.name == "sgd" for spec in found._versions.rows.specs().values())
        with found._versions.current(-1) as (_, record):
            assert record is not None
            assert not [key for key in record.dense if key.startswith("optimizer")]


def test_a_serving_folder_goes_on_with_the_log_of_its_store(tmp_path: Path) -> None:
    made, log, weights = model(), tmp_path / "log", tmp_path / "weights"
    url, x = f"memory?log={log}", {name: X[name] for name in made.input}
    train(made, url)
    shutil.copytree(log, tmp_path / "early")
    export_version(url, weights, "serving")
    export_version(url, tmp_path / "int8", "serving", dtype="int8")
    with Predictor(weights) as found, Predictor(weights) as late:
        assert found.look_s is not None
        assert (found.version, found.advance(), found.newest()) == (2, 2, 2)
        et.fit(made, x, Y, store=made.get_layer("any").source, batch_size=16, epochs=2, initial_epoch=1, verbose=0)
        assert (found.advance(), found.newest()) == (4, 4)
        np.testing.assert_allclose(found.predict(x)[0]["click"], predicted(made, X), rtol=1e-5, atol=1e-6)
        found.hold(2)  # from the folder
        assert (found.advance(), found.free()) == (2, 4)
        export_version(url, tmp_path / "later", "serving")
        made.get_layer("any").source.close()
        shutil.rmtree(log)
        with pytest.raises(ElastableError, match="log"):
            late.advance()
        assert late.predict(x)[1] == 2
    shutil.copytree(tmp_path / "early", log)
    with (
        Predictor(tmp_path / "later") as found,
        pytest.raises(StoreBroken, match=r"log is at version 2, behind version 4 of "),
    ):
        found.advance()
    with Predictor(tmp_path / "int8") as found:
        assert found.look_s is None  # no store has such rows


def test_a_serving_folder_names_its_store_without_the_login(tmp_path: Path, redis_url: str) -> None:
    made = model()
    train(made, redis_url)
    export_version(redis_url.replace("://", "://default:@"), tmp_path / "weights", "serving")
    assert json.loads((tmp_path / "weights" / "manifest.json").read_text())["job"]["store_url"] == redis_url
    with Predictor(tmp_path / "weights") as found:
        assert found.advance() == 2


def test_another_version_is_read_from_checkpoints_or_refused(
    trained: tuple[keras.Model, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, url = trained
    with pytest.raises(CheckpointError, match="version 3 cannot be read: the store is at version 4"):
        export_version(url, tmp_path / "weights", "serving", version=3)
    export_version(url, tmp_path / "ckpt-0000000004", "serving")
    again = export_version(f"{tmp_path}", tmp_path / "again", "serving", version=4)
    assert again == 4
    with pytest.raises(BadInput, match="has come meanwhile, and nothing is overwritten"):
        export_version(url, tmp_path / "again", "serving")
    monkeypatch.setattr("elastable.models.saving.write_checkpoint", failing)
    with pytest.raises(BadInput, match="cannot be written: the disk is full"):
        export_version(url, tmp_path / "late", "serving")
    assert sorted(each.name for each in tmp_path.iterdir()) == ["again", "ckpt-0000000004"]


def failing(*_: object) -> str:
    raise OSError("the disk is full")
