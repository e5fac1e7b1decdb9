"""`elastable evaluate`, `predict` and `export`, with a checkpoint and without, of model files with little data."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest
from typer.testing import CliRunner

import elastable as et
from elastable.command import app
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, CheckpointError, ElastableError, ModelError
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import prepare_job, tables_of
from elastable.master.checkpoints.writing import write_checkpoint
from tests.untyped import Parsed

IDS, ROWS = np.arange(64, dtype=np.int64) % 20, 20
LABELS = (IDS % 3 == 0).astype("float32")[:, None]

HEAD = """
import keras
import numpy as np

import elastable as et

ids = np.arange(64, dtype=np.int64) % 20
labels = (ids % 3 == 0).astype("float32")[:, None]

def fresh():
    inputs = keras.Input((), dtype="int64")
    model = keras.Model(inputs, keras.layers.Dense(1)(et.Embedding(20, 4, name="items")(inputs)))
    model.compile("adam", "mse", metrics=["mae"])
    return model
"""
FRESH = HEAD + "\ndef model():\n    return fresh()\n"
LOADED = HEAD + "\ndef model():\n    return keras.models.load_model({path!r})\n"
WHOLE = "\ndef data(split):\n    return ids, labels\n"
VALIDATION = (  # and its predictions need no labels
    "\ndef data(split):\n    assert split == 'validation', 'nobody reads it'\n    return ids, labels\n"
)
UNLABELLED = "\ndef data(split):\n    assert split == 'validation', 'nobody reads it'\n    return (ids,)\n"


@dataclass
class Home:
    path: Path
    model: keras.Model

    def file(self, text: str, name: str = "job.py") -> Path:
        file = self.path / name
        file.write_text(text.format(path=str(self.path / "trained.keras")))
        return file

    def checkpoint(self) -> str:
        """Of version 0 of the job whose model is fresh."""
        with (job := prepare_job(JobOptions(self.file(FRESH + WHOLE, "fresh.py"), seed=5))).store as store:
            return write_checkpoint(self.path / "saved", store, job.dense.tensors(), job.job, job.progress)


@pytest.fixture(scope="module", name="home")
def fixture_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    path, space = tmp_path_factory.mktemp("home"), Parsed()
    exec(FRESH, space)
    model = space["model"]()
    et.fit(model, IDS, LABELS, batch_size=16, epochs=2, verbose=0)
    model.save(path / "trained.keras")
    return Home(path, model)


def run(*words: str | Path) -> Parsed:
    done = CliRunner().invoke(app, [str(word) for word in words])
    if done.exception is not None:
        raise done.exception
    output: Parsed = json.loads(done.stdout)
    return output


def predicted(model: keras.Model) -> Array:
    found: Array = model.predict(IDS, verbose=0)
    return found


@pytest.mark.parametrize("text", [LOADED + VALIDATION, LOADED + UNLABELLED], ids=["labels", "no labels"])
def test_predictions_of_a_loaded_model_read_their_split_alone(home: Home, tmp_path: Path, text: str) -> None:
    output = run("predict", home.file(text), "--output", tmp_path / "out.npy")
    assert output == {"output": str(tmp_path / "out.npy"), "shape": [64, 1], "checkpoint": None, "version": None}
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), predicted(home.model), rtol=1e-6)


def test_evaluating_a_loaded_model(home: Home) -> None:
    output = run("evaluate", home.file(LOADED + VALIDATION))
    loss, mae = home.model.evaluate(IDS, LABELS, verbose=0)
    assert output.pop("checkpoint") is output.pop("version") is None
    assert output == {"split": "validation", "loss": pytest.approx(loss, rel=1e-5), "mae": pytest.approx(mae, rel=1e-5)}


def test_exporting_and_planning_need_no_data(home: Home, tmp_path: Path) -> None:
    file = home.file(LOADED)
    assert list(tables_of(file)[1]) == ["items"]
    run("export", home.checkpoint(), "--format", "keras", "--output", tmp_path / "fresh.keras")
    assert keras.models.load_model(tmp_path / "fresh.keras").count_params() == ROWS * 4 + 5
    with pytest.raises(ModelError, match=r"job.py: defines no data\(\); split 'validation' is read here"):
        run("evaluate", file)


def test_a_checkpoint_wins_and_says_so(home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    place = home.checkpoint()
    with caplog.at_level(logging.WARNING):
        output = run("predict", home.file(LOADED + VALIDATION), "--checkpoint", place, "--output", tmp_path / "won.npy")
    assert (output["checkpoint"], output["version"]) == (place, 0)
    assert [each for each in caplog.messages if "the rows that model() gives (items) are left out: those of" in each]
    assert np.abs(np.load(tmp_path / "won.npy") - predicted(home.model)).max() > 1e-3


def test_layers_that_number_other_words_are_refused(tmp_path: Path) -> None:
    files = [tmp_path / "first.py", tmp_path / "other.py"]
    for least, file in enumerate(files):
        words = f"keras.layers.IntegerLookup(vocabulary=list(range({least}, {least + 19})), name='words')(inputs)"
        file.write_text(FRESH.replace(")(inputs)", f")({words})") + WHOLE)
    with (job := prepare_job(JobOptions(files[0]))).store as store:
        place = write_checkpoint(tmp_path / "saved", store, job.dense.tensors(), job.job, job.progress)
    with pytest.raises(CheckpointError, match="layer 'words' numbers other words or bins than it did"):
        run("predict", files[1], "--checkpoint", place, "--output", tmp_path / "out.npy")
    with pytest.raises(CheckpointError, match="layer 'words' numbers other words or bins than it did"):
        prepare_job(JobOptions(files[1], checkpoint_dir=tmp_path / "saved", resume=True))


def test_a_model_without_rows_and_checkpoint_is_refused(home: Home) -> None:
    with pytest.raises(BadInput, match=r"model\(\) returns a model without rows .* write --checkpoint DIR"):
        run("evaluate", home.file(FRESH + VALIDATION))


def test_a_plain_model_has_its_weights_alone(home: Home, tmp_path: Path) -> None:
    ids = keras.Input((), dtype="int64")
    plain = keras.Model(ids, keras.layers.Dense(1)(keras.layers.Embedding(ROWS, 4)(ids)))
    plain.compile("adam", "mse", metrics=["mae"])
    plain.fit(IDS, LABELS, verbose=0)
    plain.save(tmp_path / "plain.keras")
    file = home.file(LOADED.replace("{path!r}", repr(str(tmp_path / "plain.keras"))) + VALIDATION)
    loss, _ = plain.evaluate(IDS, LABELS, verbose=0)
    assert run("evaluate", file)["loss"] == pytest.approx(loss, rel=1e-5)
    run("predict", file, "--output", tmp_path / "out.npy")
    np.testing.assert_allclose(np.load(tmp_path / "out.npy"), predicted(plain), rtol=1e-5)


def test_a_directory_for_the_output_that_is_not_there_is_refused_before_the_work(tmp_path: Path) -> None:
    output = tmp_path / "none" / "out"
    for words, name in ((("predict", "no_file.py"), "out.npy"), (("export", "no", "--format", "keras"), "out.keras")):
        with pytest.raises(BadInput, match=rf"--output .*{name}: there is no directory .*none"):
            run(*words, "--output", output.with_name(name))


def test_a_model_that_keras_has_not_built_asks_for_data(home: Home, tmp_path: Path) -> None:
    lazy = "\ndef model():\n    found = keras.Sequential([et.Embedding(20, 4, name='items')])\n"
    file = home.file(HEAD + lazy + "    found.compile('adam', 'mse')\n    return found\n")
    with pytest.raises(ElastableError, match=r"defines no data\(\); split 'train' is read here"):
        run("plan", file)
