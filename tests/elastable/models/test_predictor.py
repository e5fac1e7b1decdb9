"""`et.Predictor`: a model's predictions from what a job left, or from what it commits."""

import json
import shutil
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import closing
from pathlib import Path

import keras
import numpy as np
import numpy.typing as npt
import pytest

import elastable as et
from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    BadIds,
    BadInput,
    CheckpointError,
    ElastableError,
    IdOutOfRange,
    ModelError,
    StoreBroken,
    Unsupported,
)
from elastable.embedding_store.open_store import open_follower, open_store
from elastable.embedding_store.store_reader import FollowedTable, HeldLog, HeldReader, HeldServers
from elastable.models import versions
from elastable.models.configuration import config_of, model_of
from elastable.models.predictor import Predictor
from elastable.models.saving import export_version
from elastable.serving.service import PredictionService
from tests.elastable.click_job import data as click_data
from tests.elastable.processes import run_elastable
from tests.embedding_store.serving import serving
from tests.servers import Server
from tests.untyped import Keyword, Keywords
from tests.waiting import until

CLICKS = Path(__file__).parents[1] / "click_job.py"
BATCH = 16
IDS = np.random.default_rng(0).integers(0, 40, (96, 3))
X: dict[str, np.ndarray] = {
    "ids": IDS * 10**15 - 2**60,
    "seen": IDS,
    "age": np.random.default_rng(1).random((96, 2)).astype(np.float32),
}
Y = np.random.default_rng(2).random((96, 1)).astype(np.float32)


@pytest.fixture
def url(valkey_node: Server) -> str:
    """Of a store that nobody in this process has had open; what others have in the server stays."""
    return f"{valkey_node.url}?namespace={uuid.uuid4().hex}"


def model(**table: Keyword) -> keras.Model:
    given = {
        "ids": keras.Input((3,), dtype="int64", name="ids"),
        "seen": keras.Input((3,), dtype="int64", name="seen"),
        "age": keras.Input((2,), name="age"),
    }
    scaled = keras.layers.Normalization()
    scaled.adapt(3.0 * X["age"])
    parts = [
        et.Embedding(None, 4, combiner="mean", name="any", **table)(given["ids"]),
        keras.layers.Flatten()(keras.layers.Embedding(40, 8, name="large")(given["seen"])),
        keras.layers.BatchNormalization()(scaled(given["age"])),
    ]
    hidden = keras.layers.Dropout(0.2)(keras.layers.Dense(8, "relu")(keras.layers.Concatenate()(parts)))
    made = keras.Model(given, [keras.layers.Dense(1, name="click")(hidden), keras.layers.Dense(2, name="more")(hidden)])
    made.compile(keras.optimizers.Adam(0.05), "mse")
    return made


def train(of: keras.Model, url: str | EmbeddingStore, epochs: int = 1, first: int = 0, **settings: Keyword) -> None:
    et.fit(
        of, X, [Y, np.repeat(Y, 2, axis=1)], store=url, batch_size=BATCH, epochs=epochs, initial_epoch=first,
        offload_embeddings_above=100, verbose=0, **settings,
    )  # fmt: skip


def assert_predicts(found: Predictor, like: keras.Model, version: int) -> None:
    """The same numbers as the model, for known ids and others."""
    other = {**X, "ids": X["ids"] + 1}
    for x in (X, other):
        outputs, said = found.predict(x)
        assert (said, found.version) == (version, version)
        for name, wanted in zip(("click", "more"), like.predict(x, batch_size=96, verbose=0), strict=True):
            np.testing.assert_allclose(outputs[name], wanted, rtol=1e-5, atol=1e-6)


def test_a_store_in_redis_is_followed_from_version_to_version(url: str) -> None:
    trained = model()
    train(trained, url)
    with Predictor(url) as found:
        assert [(each.name, each.dtype, each.shape) for each in found.inputs] == [
            ("ids", "int64", (3,)), ("seen", "int64", (3,)), ("age", "float32", (2,)),
        ]  # fmt: skip
        assert [(each.name, each.shape) for each in found.outputs] == [("click", (1,)), ("more", (2,))]
        assert_predicts(found, trained, 6)
        before = found.predict(X)[0]["click"]
        train(trained, url, epochs=3, first=1)
        again, version = found.predict(X)
        assert version == 6
        np.testing.assert_array_equal(again["click"], before)
        assert found.newest() == 18
        assert found.advance() == 18
        assert_predicts(found, trained, 18)


@pytest.mark.parametrize("keys", [["more", "a", "click"], None])
def test_every_output_has_the_name_that_a_saved_model_gives_it(tmp_path: Path, keys: list[str] | None) -> None:
    """The key of a dict; a layer called twice, or named as another's key, does not hide one."""
    ids = keras.Input((3,), dtype="int64", name="ids")
    rows = keras.layers.Flatten()(et.Embedding(None, 4)(ids))
    click = keras.layers.Dense(1, name="a")
    outputs = [click(rows), click(-rows), keras.layers.Dense(2, name="more")(rows)]
    made = keras.Model(ids, dict(zip(keys, outputs, strict=True)) if keys else outputs)
    made.compile("sgd", loss=dict.fromkeys(keys, "mse") if keys else "mse")
    y = [Y, Y, np.repeat(Y, 2, axis=1)]
    et.fit(made, X["ids"], dict(zip(keys, y, strict=True)) if keys else y, store=f"memory?log={tmp_path}", verbose=0)
    wanted = made.predict(X["ids"], verbose=0)
    wanted = wanted if keys else {f"output_{place}": each for place, each in enumerate(wanted)}
    with Predictor(f"memory?log={tmp_path}") as found:
        said, _ = found.predict({"ids": X["ids"]})
        assert {each.name: each.shape for each in found.outputs} == {name: a.shape[1:] for name, a in wanted.items()}
    assert said.keys() == wanted.keys()
    for name, values in wanted.items():
        np.testing.assert_allclose(said[name], values, rtol=1e-5, atol=1e-6)


def test_a_sequential_model_is_served(tmp_path: Path) -> None:
    made = keras.Sequential([et.Embedding(None, 4, combiner="sum"), keras.layers.Dense(1)])
    made.compile("sgd", "mse")
    et.fit(made, X["ids"], Y, store=f"memory?log={tmp_path}", verbose=0)
    with Predictor(f"memory?log={tmp_path}") as found:
        said, _ = found.predict({found.inputs[0].name: X["ids"]})
    np.testing.assert_allclose(said["output_0"], made.predict(X["ids"], verbose=0), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("settings", [{"lazy": False}, {"eviction": et.EvictionSpec(max_age=4)}, {"dtype": "bfloat16"}])
def test_rows_that_move_go_and_are_rounded(url: str, settings: Keywords) -> None:
    lazy: Keywords = {"lazy": False} if "lazy" in settings else {}
    table: Keywords = {"table_dtype": "bfloat16"} if "dtype" in settings else {} if lazy else settings
    trained = model(**table)
    if lazy:
        trained.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
    train(trained, url, **lazy)
    with Predictor(url) as found:
        for epoch in (1, 2):
            train(trained, url, epochs=epoch + 1, first=epoch, **lazy)
            found.advance()
            assert_predicts(found, trained, 6 * (epoch + 1))


@pytest.mark.parametrize("settings", [{"lazy": False}, {"eviction": et.EvictionSpec(max_age=4)}])
def test_a_store_in_files_is_followed_at_the_process_that_has_it(tmp_path: Path, settings: Keywords) -> None:
    lazy: Keywords = {"lazy": False} if "lazy" in settings else {}
    trained = model(**({} if lazy else settings))
    if lazy:
        trained.compile(keras.optimizers.AdamW(0.05, weight_decay=0.1), "mse")
    with open_store(f"file://{tmp_path}/rows?flush=0.01") as store, serving(store) as server:
        train(trained, store, **lazy)
        with Predictor(f"grpc://{server.address}") as found:
            assert_predicts(found, trained, 6)
            for epoch in (1, 2):
                train(trained, store, epochs=epoch + 1, first=epoch, **lazy)
                until(lambda wanted=6 * (epoch + 1): found.advance() == wanted)  # type: ignore[misc]
                assert_predicts(found, trained, 6 * (epoch + 1))


def test_a_log_that_was_trimmed_is_no_end(url: str) -> None:
    """The rows are read anew; until then it answers from the version that it has."""
    trained = model()
    train(trained, f"{url}&log_bytes=1&flush=0.05")
    with Predictor(url) as found:
        store = trained.get_layer("any").source
        train(trained, store, epochs=4, first=1)
        wait_until(lambda: first_of_log(url) > 7, "what follows version 6 is trimmed")
        assert found.predict(X)[1] == 6
        assert found.advance() == 24
        assert_predicts(found, trained, 24)


def first_of_log(url: str) -> int:
    with closing(open_follower(url)) as reader:
        assert isinstance(reader, HeldReader)
        return reader._log.first


def wait_until(condition: Callable[[], bool], what: str) -> None:
    end = time.monotonic() + 120
    while not condition():
        assert time.monotonic() < end, what
        time.sleep(0.05)


@pytest.fixture(scope="module")
def stored(valkey_node: Server) -> str:
    """The store of `run`."""
    return f"{valkey_node.url}?namespace={uuid.uuid4().hex}"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory, stored: str) -> Path:
    """Of a job that saved its versions 5, 10, 15 and 20."""
    home = tmp_path_factory.mktemp("served")
    sizes = ("--workers", "1", "--micro-batch-size", "64")
    options = (*sizes, "--checkpoint-every", "5", "--full-every", "1", "--keep", "0")
    done = run_elastable("train", CLICKS, *options, "--run-dir", home, "--store", stored)
    assert done.code == 0, done.err
    return home / "latest"


def test_a_run_and_its_checkpoint_are_served_without_its_model_file(run: Path) -> None:
    x, _ = click_data("validation")
    plain = keras.models.load_model(run / "model.keras")
    wanted = plain.predict([x["user_ids"], x["word_ids"]], batch_size=512, verbose=0)
    checkpoint = sorted((run / "checkpoints").glob("ckpt-*"))[-1]
    for source in (run, str(checkpoint)):
        with Predictor(source) as found:
            if source is not run:
                with pytest.raises(BadInput, match="--follow: version 20 is a single checkpoint, and nothing follows"):
                    PredictionService(found, follow=True, batch_records=1)
            outputs, version = found.predict(x)
            assert version == json.loads((run / "result.json").read_text())["version"] == found.advance()
            (name,) = outputs
            np.testing.assert_allclose(outputs[name], wanted, rtol=1e-5, atol=1e-6)
            with pytest.raises(IdOutOfRange, match="users"):
                found.predict({**x, "user_ids": x["user_ids"] + 50})


@pytest.fixture(scope="module")
def asked(valkey_node: Server) -> Iterator[Predictor]:
    url = f"{valkey_node.url}?namespace={uuid.uuid4().hex}"
    train(model(), url)
    with Predictor(url) as found:
        yield found


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"ids": None}, "inputs age, seen: the model takes"),
        ({"more": X["age"]}, "inputs age, ids, more, seen"),
        ({"age": X["age"][:, :1]}, r"'age' is \[96, 1\]; it must be \[records, 2\]"),
        ({"age": X["age"][:5]}, "need the same number"),
        ({"ids": X["ids"].astype(str)}, "'ids' is of <U21; it takes int64"),
        ({"seen": IDS + 0.5}, "no integer"),
        ({"age": np.array([["1", "2"]] * 96)}, "'age' is of <U1"),
        ({"seen": IDS + 40}, "large"),
        ({name: value[:0] for name, value in X.items()}, "at least 1"),
    ],
)
def test_what_a_model_does_not_take_is_refused(
    asked: Predictor, change: dict[str, npt.ArrayLike | None], said: str
) -> None:
    with pytest.raises((BadInput, BadIds, IdOutOfRange), match=said):
        asked.predict({name: value for name, value in {**X, **change}.items() if value is not None})
    assert len(asked.predict(X)[0]["click"]) == 96


def test_a_configuration_is_read_and_never_run() -> None:
    made = model()
    again = model_of(config_of(made))
    assert [layer.name for layer in again.layers] == [layer.name for layer in made.layers]
    assert again.compiled
    ids = keras.Input((2,), name="ids")
    run = keras.Model(ids, keras.layers.Lambda(lambda given: given + 1)(ids))
    run.compile("sgd", "mse")
    for config, said in [
        (config_of(run), "--model-file"),
        ("", "--model-file"),
        ("no base64!", "no configuration"),
        (config_of(model())[:40], "no configuration"),
    ]:
        with pytest.raises(ModelError, match=said):
            model_of(config)


@pytest.mark.parametrize("saved", [False, True])
def test_ids_without_a_row_may_read_zeros(url: str, saved: bool, tmp_path: Path) -> None:
    ids = keras.Input((3,), dtype="int64", name="ids")
    summed = keras.Model(ids, keras.layers.Identity(name="sum")(et.Embedding(None, 4, combiner="sum", name="any")(ids)))
    summed.compile("sgd", "mse")
    et.fit(summed, IDS[:16], np.ones((16, 4), np.float32), store=url, batch_size=16, verbose=0)
    if saved:
        export_version(url, tmp_path / "weights", "serving")
    x = np.stack([IDS[0], [10**12, IDS[0, 1], 10**13], [10**12, 10**12 + 1, 10**12 + 2]])
    with Predictor(tmp_path / "weights" if saved else url, unknown="zeros") as found:
        outputs, _ = found.predict({"ids": x})
    trained = summed.get_layer("any").read_rows(IDS[0])
    np.testing.assert_allclose(outputs["sum"], [trained.sum(0), trained[1], np.zeros(4)], rtol=1e-5, atol=1e-6)
    with pytest.raises(BadInput, match="unknown='mean': write one of 'initial', 'zeros'"):
        Predictor(url, unknown="mean")


def test_stores_that_their_job_alone_reads_say_what_to_serve(tmp_path: Path) -> None:
    for url in (f"file://{tmp_path}", "token:file:///a,file:///b"):
        with pytest.raises(Unsupported, match=r"read by its job alone.*--checkpoint-every N"):
            Predictor(url)


def test_what_cannot_be_served_is_refused(url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    refused: list[tuple[str | Path, type[ElastableError], str]] = [
        (tmp_path, CheckpointError, "no checkpoint"),
        (url, CheckpointError, "no version of a job yet"),
        ("memory", CheckpointError, "no checkpoint"),
    ]
    for source, kind, said in refused:
        with pytest.raises(kind, match=said):
            Predictor(source)
    ids = keras.Input((3,), dtype="int64", name="ids")
    half = keras.layers.Dense(1, dtype="bfloat16", name="half")(et.Embedding(None, 4, combiner="mean")(ids))
    rounded = keras.Model(ids, half, name="rounded")
    rounded.compile("sgd", "mse")
    et.fit(rounded, IDS[:16], Y[:16], store=url, batch_size=16, verbose=0)
    with pytest.raises(
        Unsupported, match=r"'half' of model 'rounded', \[None, 1\], is of bfloat16, which NumPy has not"
    ):
        Predictor(url)
    monkeypatch.setattr(versions, "backend", lambda: type("Other", (), {"name": "jax", "has_graphs": True}))
    with pytest.raises(Unsupported, match="KERAS_BACKEND=tensorflow"):
        Predictor(url)
    with pytest.raises(BadInput, match="follower"):
        open_follower("file:///nowhere")


@pytest.fixture
def followed(url: str) -> Iterator[Callable[[], HeldReader | HeldLog | HeldServers]]:
    with open_store(url) as store:
        store.create_table(et.TableSpec("rows", 4))
        yield lambda: open_follower(url)


def test_a_reader_that_holds_its_rows_stays_at_its_version(
    followed: Callable[[], HeldReader | HeldLog | HeldServers], url: str
) -> None:
    with followed() as reader, reader.at_one_version() as (version, record):
        assert (version, record) == (0, None)
        assert reader.lookup({"rows": np.arange(3)})["rows"].shape == (3, 4)


def click_of(found: Predictor) -> npt.NDArray[np.float32]:
    x, _ = click_data("validation")
    (click,) = found.predict(x)[0].values()
    return click


def test_a_version_is_held_and_given_free(run: Path, stored: str) -> None:
    with Predictor(run, version=5) as found:
        first = click_of(found)
        assert (found.version, found.held, found.advance(), found.newest()) == (5, 5, 5, 20)
        with pytest.raises(CheckpointError, match="no checkpoint of version 7, but of 5, 10, 15, 20"):
            found.hold(7)
        np.testing.assert_array_equal(click_of(found), first)
        assert (found.free(), found.held) == (20, None)
        newest = click_of(found)
        assert not np.array_equal(first, newest)
    with Predictor(stored, checkpoints=run) as found, pytest.MonkeyPatch.context() as patch:
        np.testing.assert_array_equal(click_of(found), newest)
        patch.setattr(found, "_checkpoints", None)
        with pytest.raises(CheckpointError, match="version 5 cannot be read: the store is at version 20"):
            found.hold(5)
        assert (found.version, found.held) == (20, None)
        patch.undo()
        found.hold(20)  # the one that is there: nothing is read for it
        assert found.held == found.advance() == 20
        found.hold(5)
        np.testing.assert_array_equal(click_of(found), first)
        assert found.free() == 20
        np.testing.assert_array_equal(click_of(found), newest)


def test_checkpoints_of_another_model_are_not_held(
    run: Path, asked: Predictor, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(asked, "_checkpoints", run)
    with pytest.raises(ElastableError, match="whose model is another one"):
        asked.hold(5)
    assert asked.held is None
    assert len(asked.predict(X)[0]["click"]) == 96


def test_the_checkpoints_of_a_run_are_followed(run: Path, tmp_path: Path) -> None:
    saved = sorted((run / "checkpoints").iterdir())
    shutil.copytree(saved[0], tmp_path / saved[0].name)
    with Predictor(tmp_path) as found:
        assert found.advance() == 5
        before = click_of(found)
        shutil.copytree(saved[1], tmp_path / f"copied-{saved[1].name}")
        (tmp_path / f"copied-{saved[1].name}").rename(tmp_path / saved[1].name)
        assert (found.version, found.newest()) == (5, 10)
        np.testing.assert_array_equal(click_of(found), before)
        assert found.advance() == 10
        assert not np.array_equal(click_of(found), before)


def test_a_log_in_files_is_followed_from_version_to_version(tmp_path: Path) -> None:
    """By another reader than the one that has the store open: nothing of the folder is locked or changed."""
    trained, log = model(), tmp_path / "log"
    with open_store(f"memory?log={log}") as store:
        train(trained, store)
        with Predictor(f"memory?log={log}") as found:
            before = click_more(found)
            train(trained, store, epochs=2, first=1)
            assert (found.version, found.newest()) == (6, 12)
            np.testing.assert_array_equal(click_more(found), before)
            assert found.advance() == 12
            assert_predicts(found, trained, 12)


def test_a_log_in_files_is_followed_past_its_trimming(tmp_path: Path) -> None:
    log, ids = tmp_path / "log", np.arange(4)
    with open_store(f"memory?log={log}&log_bytes=2000") as store:
        store.create_table(et.TableSpec("rows", 4))
        write(store, 1)
        with HeldLog(log) as reader:
            version = 1
            while first_in_files(log) <= 2:
                version += 1
                assert version < 10_000, "what follows version 1 is trimmed"
                write(store, version)
            assert reader.version() == 1
            assert reader.advance() == version
            np.testing.assert_array_equal(reader.lookup({"rows": ids})["rows"], store.lookup({"rows": ids})["rows"])


def click_more(found: Predictor) -> npt.NDArray[np.float32]:
    return found.predict(X)[0]["click"]


def first_in_files(log: Path) -> int:
    return min(int(path.stem) for path in log.glob("*.log"))


@pytest.fixture
def logged(tmp_path: Path) -> Iterator[tuple[Path, EmbeddingStore]]:
    with open_store(f"memory?log={tmp_path / 'log'}&log_bytes=4000000") as store:
        store.create_table(et.TableSpec("rows", 4))
        yield tmp_path / "log", store


def write(store: EmbeddingStore, version: int) -> None:
    store.update({"rows": TableUpdate(np.arange(3), np.full((3, 4), version, np.float32))}, {"rows": 0.1})


def test_an_entry_that_is_being_written_is_waited_for(logged: tuple[Path, EmbeddingStore], tmp_path: Path) -> None:
    """A copy of the log, byte by byte; the reader's version is always a whole one."""
    log, store = logged
    for version in (1, 2):
        write(store, version)
    (segment,) = log.glob("*.log")
    content, copied = segment.read_bytes(), tmp_path / "copied"
    copied.mkdir()
    with pytest.raises(BadInput, match="holds no log"):
        HeldLog(copied)
    (copied / segment.name).write_bytes(content)
    with HeldLog(copied) as reader:
        wanted = reader.lookup({"rows": np.arange(4)})["rows"]
        assert reader.version() == 2
    seen = list[int]()
    (copied / segment.name).write_bytes(b"")
    with (copied / segment.name).open("ab", buffering=0) as file:
        file.write(content[:200])
        reader = HeldLog(copied)
        for begin in range(200, len(content), 97):
            file.write(content[begin : begin + 97])
            seen.append(reader.advance())
    assert sorted(set(seen)) == [0, 1, 2]
    assert seen == sorted(seen)
    np.testing.assert_array_equal(reader.lookup({"rows": np.arange(4)}, 2)["rows"], wanted)
    (copied / segment.name).write_bytes(content[:200])  # what was answered from is answered from
    with pytest.raises(StoreBroken, match="is at version 0, and was at version 2"):
        reader.advance()
    assert reader.version() == 2
    (copied / segment.name).write_bytes(content)
    assert reader.advance() == 2
    reader.close()


def test_another_log_in_its_place_is_noticed(logged: tuple[Path, EmbeddingStore], tmp_path: Path) -> None:
    log, store = logged
    for version in (1, 2):
        write(store, version)
    copied = tmp_path / "copied"
    shutil.copytree(log, copied)
    with HeldLog(copied) as reader:
        shutil.rmtree(copied)
        with open_store(f"memory?log={copied}") as other:
            other.create_table(et.TableSpec("rows", 4, seed=7))
            write(other, 1)
            with pytest.raises(StoreBroken, match="is at version 1, and was at version 2"):
                reader.advance()
            for version in (2, 3):
                write(other, version)
            assert (reader.version(), reader.advance()) == (2, 3)
            ids = np.arange(5)
            np.testing.assert_array_equal(reader.lookup({"rows": ids})["rows"], other.lookup({"rows": ids})["rows"])


def test_what_was_applied_in_part_is_not_gone_on_with(
    logged: tuple[Path, EmbeddingStore], monkeypatch: pytest.MonkeyPatch
) -> None:
    log, store = logged
    with HeldLog(log) as reader:
        store.create_table(et.TableSpec("more", 4))
        with monkeypatch.context() as patch:
            patch.setattr(FollowedTable, "__init__", lambda *_: [][0])
            for _ in range(2):
                with pytest.raises(IndexError):
                    reader.advance()
        write(store, 1)
        assert reader.advance() == 1
        assert set(reader.specs()) == {"rows", "more"}


def test_a_corrupt_log_in_files_is_refused_by_name(logged: tuple[Path, EmbeddingStore], tmp_path: Path) -> None:
    log, store = logged
    for version in (1, 2, 3):
        write(store, version)
    (segment,) = log.glob("*.log")
    content, copied = bytearray(segment.read_bytes().rstrip(b"\0")), tmp_path / "copied"
    copied.mkdir()
    content[len(content) // 2] ^= 1
    (copied / segment.name).write_bytes(content)
    with pytest.raises(StoreBroken, match="corrupt at byte"):
        HeldLog(copied)
