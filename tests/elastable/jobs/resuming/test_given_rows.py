"""A job whose model() returns a loaded or trained model begins with its rows, slots and steps, as `fit` goes on."""

import json
import logging
from dataclasses import dataclass
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.jobs.options import JobOptions
from elastable.jobs.prepare import PreparedJob, prepare_job
from elastable.master.checkpoints.writing import write_checkpoint
from elastable.worker.layers.model_tables import tables_given
from elastable.worker.rows.saved_rows import leaving_rows_out
from tests.elastable.processes import succeeded

USERS, DIM, RECORDS, BATCH = 30, 4, 96, 16
LARGE_IDS = np.array([-5, 7, 1 << 40])  # of the table of any ids; the last is never trained

DATA = f"""
import keras
import numpy as np

import elastable as et

HOME = {{home!r}}
random = np.random.default_rng(0)
users = random.integers(0, {USERS} // 2, {RECORDS})
x = {{{{"user": users, "any": np.where(users % 2, -5, 7)}}}}
y = (users % 3 == 0).astype("float32")[:, None]


def fresh():
    user, any_id = keras.Input((), dtype="int64", name="user"), keras.Input((), dtype="int64", name="any")
    rows = [et.Embedding({USERS}, {DIM}, name="users")(user), et.Embedding(None, {DIM}, name="any_ids")(any_id)]
    model = keras.Model([user, any_id], keras.layers.Dense(1)(keras.layers.Concatenate()(rows)))
    model.compile(keras.optimizers.Adam(0.05), "mse")
    return model


def data(split):
    return (x, y) if split == "train" else None
"""

LOADED = """
def model():
    found = keras.models.load_model(HOME + "/trained.keras")
    print("ROWS HERE", found.get_layer("users").source is not None)
    return found
"""
WEIGHTS = """
def model():
    found = fresh()
    found.optimizer.build(found.trainable_variables)  # the file holds its slots, too
    found.load_weights(HOME + "/trained.weights.h5")
    found.compile(keras.optimizers.SGD(0.1), "mse")
    return found
"""
ASSIGNED = """
def model():
    found = fresh()
    found.get_layer("users").embeddings.assign(np.load(HOME + "/users.npy"))
    return found
"""
FRESH = "\ndef model():\n    return fresh()\n"


@dataclass
class Home:
    path: Path
    users: Array
    any_ids: Array

    def file(self, text: str) -> Path:
        file = self.path / f"job-{abs(hash(text))}.py"
        file.write_text(DATA.format(home=str(self.path)) + text)
        return file

    def trained(self) -> keras.Model:
        return keras.models.load_model(self.path / "trained.keras")


@pytest.fixture(scope="module", name="home")
def fixture_home(tmp_path_factory: pytest.TempPathFactory) -> Home:
    home = Home(tmp_path_factory.mktemp("given"), np.zeros(0), np.zeros(0))
    space: dict[str, object] = {}
    exec(DATA.format(home=str(home.path)), space)
    model = space["fresh"]()  # type: ignore[operator]
    et.fit(model, space["x"], space["y"], batch_size=BATCH, epochs=3, shuffle=False, verbose=0)
    home.users = model.get_layer("users").read_rows(np.arange(USERS))
    home.any_ids = model.get_layer("any_ids").read_rows(LARGE_IDS)
    model.save(home.path / "trained.keras")
    model.save_weights(home.path / "trained.weights.h5")
    np.save(home.path / "users.npy", home.users)
    return home


def prepared(file: Path, **options: object) -> PreparedJob:
    return prepare_job(JobOptions(file, micro_batch_size=BATCH, **options))  # type: ignore[arg-type]


def assert_rows(home: Home, job: PreparedJob, any_ids: bool) -> None:
    assert job.store.version() == 0
    np.testing.assert_array_equal(job.store.lookup({"users": np.arange(USERS)})["users"], home.users)
    if any_ids:
        np.testing.assert_array_equal(job.store.lookup({"any_ids": LARGE_IDS})["any_ids"], home.any_ids)


@pytest.mark.parametrize(
    ("text", "any_ids", "slots"),
    [(LOADED, True, True), (WEIGHTS, True, False), (ASSIGNED, False, False)],
    ids=["load_model", "load_weights", "assign"],
)
def test_version_0_has_the_rows_that_the_model_has(home: Home, text: str, any_ids: bool, slots: bool) -> None:
    with (job := prepared(home.file(text))).store as store:
        assert_rows(home, job, any_ids)
        moved = max(np.abs(block.slots).max(initial=0.0) for block in store.scan("users"))
        assert bool(moved > 0) is slots  # a new optimizer begins with new ones, as in Keras
        assert int(job.model.optimizer.iterations) == (3 * RECORDS // BATCH if slots else 0)


def test_slots_go_on_where_every_row_follows_each_step(home: Home) -> None:
    """The model was trained with `lazy`, and is trained on without, as `model.fit` does the other way round."""
    with prepared(home.file(LOADED), lazy=False).store as store:
        blocks = list(store.scan("users"))
        slots = {int(one): row for block in blocks for one, row in zip(block.ids, block.slots, strict=True)}
    with prepared(home.file(LOADED)).store as store:
        for block in store.scan("users"):
            np.testing.assert_array_equal(block.slots, [slots[int(each)] for each in block.ids])
    assert max(np.abs(row).max() for row in slots.values()) > 0


@pytest.mark.parametrize("workers", [0, 2], ids=["one process", "servers"])
def test_a_job_goes_on_as_fit_does(home: Home, tmp_path: Path, workers: int) -> None:
    again = home.trained()
    space: dict[str, object] = {}
    exec(DATA.format(home=str(home.path)), space)
    et.fit(again, space["x"], space["y"], batch_size=BATCH, epochs=2, shuffle=False, verbose=0)
    processes = ("--workers", "2", "--stores", "2", "--grads-to-wait", "1") if workers else ("--workers", "1")
    ran = succeeded(
        "train", home.file(LOADED), "--epochs", "2", "--micro-batch-size", str(BATCH), "--no-shuffle",
        "--run-dir", tmp_path / "runs", "--deadline", "60", *processes,
    )  # fmt: skip
    latest = tmp_path / "runs" / "latest"
    exported = keras.models.load_model(json.loads((latest / "result.json").read_text())["model"])
    inputs = space["x"]
    np.testing.assert_allclose(
        exported.predict(inputs, verbose=0), again.predict(inputs, verbose=0), rtol=1e-5, atol=1e-6
    )
    assert "ROWS HERE True" in ran.out
    logs = [log.read_text() for log in latest.glob("worker-*.log")]
    assert ["ROWS HERE False" in log for log in logs] == [True] * workers  # a worker builds the model without them


def test_a_worker_reads_no_rows_from_files(home: Home) -> None:
    with leaving_rows_out() as left_out:
        model = home.trained()
        model.load_weights(home.path / "trained.weights.h5")
        model.get_layer("users").embeddings.assign(home.users)
    assert left_out == {"users", "any_ids"}
    assert tables_given([model.get_layer("users"), model.get_layer("any_ids")]) == []
    np.testing.assert_array_equal(model.layers[-1].get_weights()[0], home.trained().layers[-1].get_weights()[0])


def test_what_is_resumed_wins_and_says_so(home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    saved, file = tmp_path / "saved", home.file(ASSIGNED)
    words = ("--micro-batch-size", str(BATCH), "--workers", "1", "--no-export", "--run-dir", tmp_path / "runs")
    ran = succeeded("train", file, *words, "--checkpoint-dir", saved, "--resume")
    assert "left out" not in ran.err
    with caplog.at_level(logging.WARNING), prepared(file, resume=True, checkpoint_dir=saved, epochs=2).store as store:
        assert store.version() == RECORDS // BATCH
        assert np.abs(store.lookup({"users": np.arange(USERS)})["users"] - home.users).max() > 1e-3
    assert [line for line in caplog.messages if "rows that model() gives (users) are left out" in line], caplog.messages
    with pytest.raises(BadInput, match=r"--warm-start .*: model\(\) gives rows of users, too"):
        prepared(file, warm_start=saved)
    with (job := prepared(file, warm_start=saved, warm_tables=("any_ids",))).store as store:
        assert_rows(home, job, any_ids=False)
        assert store.row_count("any_ids") == 2


def test_a_job_with_a_loaded_model_is_resumed(home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with (first := prepared(home.file(LOADED))).store as store:
        write_checkpoint(tmp_path, store, first.dense.tensors(), first.job, first.progress)
    with caplog.at_level(logging.WARNING):
        again = prepared(home.file(LOADED), resume=True, checkpoint_dir=tmp_path)
    with again.store:
        assert again.job.job == first.job.job
        assert_rows(home, again, any_ids=True)
    assert "the rows that model() gives (any_ids, users) are left out" in caplog.text


def test_slots_of_offloaded_layers_are_not_lost_in_silence(tmp_path: Path) -> None:
    plain = keras.Sequential(
        [keras.Input((), dtype="int64"), keras.layers.Embedding(USERS, DIM, name="words"), keras.layers.Dense(1)]
    )
    plain.compile("adam", "mse")
    ids, y = np.arange(RECORDS) % USERS, np.ones((RECORDS, 1), "float32")
    plain.fit(ids, y, verbose=0)
    plain.save(tmp_path / "plain.keras")
    head = "import keras\nimport numpy as np\n"
    tail = f"def data(split):\n    return np.arange({RECORDS}) % {USERS}, np.ones(({RECORDS}, 1), 'float32')\n"
    file = tmp_path / "job.py"
    file.write_text(
        f"{head}def model():\n    return keras.models.load_model({str(tmp_path / 'plain.keras')!r})\n{tail}"
    )
    with (
        pytest.warns(UserWarning, match="Skipping variable loading"),
        pytest.raises(Unsupported, match=r"offloaded here \(words\) would be lost: load the model with compile=False"),
    ):
        prepared(file, offload_above=10)
    file.write_text(
        f"{head}def model():\n    found = keras.models.load_model({str(tmp_path / 'plain.keras')!r}, compile=False)\n"
        f"    found.compile('sgd', 'mse')\n    return found\n{tail}"
    )
    with prepared(file, offload_above=10).store as store:
        rows = store.lookup({"words": np.arange(USERS)})["words"]
    np.testing.assert_array_equal(rows, plain.get_layer("words").get_weights()[0])
