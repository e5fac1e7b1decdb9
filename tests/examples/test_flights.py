"""The flights example: no feature is known too early, and the split is the documented one."""

import importlib.util
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType

import keras
import numpy as np
import pyarrow as pa
import pytest

import elastable as et
from elastable.worker.user_model.model_file import ModelFile, load_model_file

FOLDER = Path(__file__).parents[2] / "examples" / "flights"
AFTER_DEPARTURE = ("dep_time", "dep_delay", "arr_time", "arr_delay", "air_time")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ELASTABLE_CACHE", str(folder))
        yield folder


@pytest.fixture(scope="module")
def columns() -> ModuleType:
    spec = importlib.util.spec_from_file_location("flights_columns", FOLDER / "columns.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def flights(columns: ModuleType) -> pa.Table:
    return columns.read_flights()


@pytest.fixture(scope="module")
def model_file() -> ModelFile:
    return load_model_file(FOLDER / "model.py")


def assert_same(one: dict[str, object], other: dict[str, object]) -> None:
    assert list(one) == list(other)
    for name in one:
        np.testing.assert_array_equal(one[name], other[name], err_msg=name)


def test_the_source_is_the_whole_year(flights: pa.Table) -> None:
    assert flights.num_rows == 336_776


def test_what_happened_after_departure_changes_no_column(columns: ModuleType, flights: pa.Table) -> None:
    expected = columns.columns_of(flights)
    random = np.random.default_rng(0)
    shuffled = flights
    for name in AFTER_DEPARTURE:
        place = shuffled.column_names.index(name)
        shuffled = shuffled.set_column(place, name, flights[name].take(random.permutation(flights.num_rows)))
    assert_same(columns.columns_of(shuffled), expected)
    assert_same(columns.columns_of(flights.drop_columns(list(AFTER_DEPARTURE))), expected)


def test_columns_are_small_integers(columns: ModuleType) -> None:
    x, late = columns.load("train")
    assert tuple(x) == columns.COLUMNS
    assert late.dtype == np.float32
    for name, values in x.items():
        assert values.dtype == np.int32, name
        assert values.shape == late.shape, name
        assert 0 <= values.min() <= values.max() < 2**14, name
    assert (x["date"].max(), x["departure"].max() < 1440, x["origin"].max()) == (364, True, 2)


def test_every_fifth_flight_that_arrived_is_held_out(columns: ModuleType, flights: pa.Table) -> None:
    arrived = flights.filter(flights["arr_delay"].is_valid())
    expected = columns.columns_of(arrived)
    late = arrived["arr_delay"].to_numpy() > 15
    held_out = np.arange(late.size) % 5 == 0
    for split, rows, count in (("validation", held_out, 65_470), ("train", ~held_out, 261_876)):
        x, y = columns.load(split)
        assert y.size == count
        np.testing.assert_array_equal(y, late[rows])
        assert_same(x, {name: values[rows] for name, values in expected.items()})


def test_an_unknown_split_is_refused(columns: ModuleType) -> None:
    with pytest.raises(ValueError, match="split 'test': use 'train' or 'validation'"):
        columns.load("test")


def test_processes_that_start_at_once_share_one_cache(columns: ModuleType, tmp_path: Path) -> None:
    code = "import columns; print([int(v.astype('int64').sum()) for v in columns.load('train')[0].values()])"
    environment = {**os.environ, "ELASTABLE_CACHE": str(tmp_path), "PYTHONPATH": str(FOLDER)}
    started = [
        subprocess.Popen([sys.executable, "-c", code], env=environment, stdout=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    output = {process.communicate(timeout=120)[0] for process in started}
    assert [process.returncode for process in started] == [0, 0, 0]
    assert output == {f"{[int(v.astype('int64').sum()) for v in columns.load('train')[0].values()]}\n"}
    assert [file.suffix for file in tmp_path.iterdir()] == [".npz"]


def test_a_cache_that_cannot_be_written_is_done_without(
    columns: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise PermissionError("read-only")

    monkeypatch.setenv("ELASTABLE_CACHE", str(tmp_path))
    monkeypatch.setattr(columns.tempfile, "NamedTemporaryFile", refuse)
    assert columns.load("validation")[1].size == 65_470
    assert list(tmp_path.iterdir()) == []


def test_a_cross_is_one_integer_for_each_combination(model_file: ModelFile, columns: ModuleType) -> None:
    module = sys.modules["elastable_model_model"]
    x, _ = columns.load("validation")
    parts = [x[name].astype(np.int64) for name in ("date", "carrier", "tailnum", "dest")]
    ids = module.cross(*parts)
    assert np.unique(ids).size == np.unique(np.stack(parts), axis=1).shape[1]
    assert ids.min() >= 0


def test_flights_share_a_window_when_they_leave_within_half_of_it(model_file: ModelFile) -> None:
    windows = sys.modules["elastable_model_model"].windows
    times = np.arange(300, 1440)
    ids = [set(row) for row in np.asarray(windows(np.full(times.size, 7), times, 60)).tolist()]
    assert {len(row) for row in ids} == {2}
    for one in range(0, times.size, 17):
        apart = [bool(ids[one] & other) for other in ids]
        shared = np.abs(times - times[one])[apart]
        assert shared.max() < 60
        assert all(np.asarray(apart)[np.abs(times - times[one]) <= 30])


def test_the_model_takes_plain_columns(model_file: ModelFile, columns: ModuleType) -> None:
    model = model_file.model()
    assert tuple(model.input) == columns.COLUMNS
    x, _ = columns.load("validation")
    chance = np.asarray(model({name: values[:5] for name, values in x.items()}))
    assert chance.shape == (5, 1)
    assert ((chance >= 0) & (chance <= 1)).all()
    assert sum(isinstance(layer, et.Embedding) for layer in model.layers) == 15


@pytest.mark.slow
def test_one_epoch_tells_late_flights_from_others(model_file: ModelFile) -> None:
    keras.utils.set_random_seed(0)
    train, held_out = model_file.reader("train"), model_file.reader("validation")
    fitted = et.fit(model_file.model(), train, validation_data=held_out, batch_size=512, grads_to_wait=2, verbose=False)
    assert fitted.history["val_auc"][-1] >= 0.82
