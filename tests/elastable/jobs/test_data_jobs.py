"""Jobs on files as they come, and on a stream: training, evaluation, prediction and lookups see the same data."""

import json
from collections.abc import Sequence
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from tests.elastable.jobs import columns_job as job
from tests.elastable.jobs import ragged_stream_job as stream_job
from tests.elastable.processes import succeeded
from tests.untyped import Parsed

BIG = 16_777_217
"""The first integer that a float32 does not hold."""


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv(job.HOME, str(tmp_path))
    lines = [f"00{n % 3},{float(BIG) if n % 2 else ''},{n / 8},2020-01-0{n % 9 + 1},{n % 2}" for n in range(32)]
    (tmp_path / "train.csv").write_text("code,item,price,day,y\n" + "\n".join(lines) + "\n")
    columns = {"item": [float(BIG), 5.0], "code": ["000", "7"], "price": [1, 2], "y": [1, 0]}
    pq.write_table(pa.table(columns), tmp_path / "validation.parquet")
    return tmp_path


def fitted(x: object, y: object = None) -> tuple[et.MemoryStore, dict[str, list[float]]]:
    keras.utils.set_random_seed(3)
    store, validation = et.MemoryStore(), job.data("validation") if y is None else None
    done = et.fit(
        job.model(), x, y, batch_size=8, validation_data=validation, shuffle=False, seed=3, store=store, verbose=False
    )
    return store, done.history


def rows_of(store: et.MemoryStore) -> np.ndarray:
    ids = {"codes": et.hash_ids(["000", "001", "002"]), "items": np.array([BIG, 0])}
    return np.concatenate(list(store.lookup(ids).values()))


def test_files_train_what_the_same_arrays_train(home: Path) -> None:
    code = np.array([f"00{n % 3}" for n in range(32)], object)
    item = np.array([BIG if n % 2 else 0 for n in range(32)])
    x = {"code": code, "item": item, "price": np.arange(32, dtype=np.float32) / 8}
    store, history = fitted(job.data("train"))
    expected, losses = fitted(x, np.arange(32) % 2)
    np.testing.assert_allclose(rows_of(store), rows_of(expected), rtol=1e-5)
    assert history["loss"] == pytest.approx(losses["loss"], rel=1e-5)
    # Trained ids alone have rows: not the integers that the codes look like, nor what BIG is as a float32.
    assert [store.table_statistics(name).rows for name in ("codes", "items")] == [3, 2]
    with pytest.raises(BadInput, match=r"train\.csv, line 2: column 'item': null, one of 16 nulls"):
        fitted(et.CsvReader(home / "train.csv", label="y"))


def used(
    model: ModuleType, home: Path, *asked: str, rounds: Sequence[Sequence[str]]
) -> tuple[list[Parsed], float, Array]:
    """What a job of two workers leaves to other commands: the rows that are asked for, val_loss, and predictions."""
    saved, out = home / "saved", home / "predictions.npy"
    file, options = Path(str(model.__file__)), ("--micro-batch-size", "8", "--grads-to-wait", "1", "--seed", "3")
    for more in rounds:
        places = ("--run-dir", home / "runs", "--checkpoint-dir", saved)
        succeeded("train", file, "--workers", "2", *options, *places, *more)
    evaluated = succeeded("evaluate", file, "--checkpoint", saved)
    succeeded("predict", file, "--checkpoint", saved, "--output", out, "--batch-size", "7")
    found = succeeded("lookup", *asked, "--checkpoint", saved)
    rows = [json.loads(line) for line in found.out.splitlines()]
    return rows, json.loads(evaluated.out)["loss"], np.load(out)


def test_a_job_on_files_is_trained_and_used(home: Path) -> None:
    found, loss, predictions = used(job, home, "items", str(BIG), "0", rounds=[["--no-shuffle"]])
    store, history = fitted(job.data("train"))
    rows = store.lookup({"items": np.array([BIG, 0])})["items"]
    np.testing.assert_allclose([line["row"] for line in found], rows, rtol=1e-4, atol=1e-6)
    assert loss == pytest.approx(history["val_loss"][-1], rel=1e-4)
    assert predictions.shape == (2, 1)


@pytest.mark.slow
def test_a_job_on_ragged_strings_with_weights_is_resumed_and_used(tmp_path: Path) -> None:
    rounds = [["--epochs", "1"], ["--epochs", "3", "--resume"]]
    found, loss, predictions = used(stream_job, tmp_path, "items_table", "item 3", "item 999", rounds=rounds)
    # As the job was: from one seed, in one process.
    keras.utils.set_random_seed(3)
    model, store, validation = stream_job.model(), et.MemoryStore(), stream_job.data("validation")
    done = et.fit(
        model, stream_job.data("train"), batch_size=8, epochs=3, seed=3, store=store, validation_data=validation,
        verbose=False,
    )  # fmt: skip
    rows = store.lookup({"items_table": et.hash_ids(["item 3", "item 999"])})["items_table"]
    assert [line["string"] for line in found] == ["item 3", "item 999"]
    np.testing.assert_allclose([line["row"] for line in found], rows, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(loss, done.history["val_loss"][-1], rtol=1e-4)
    assert predictions.shape == (3 * stream_job.SIZE, 1)
