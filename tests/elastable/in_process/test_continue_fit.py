"""`et.fit(continue_from=)`: to the bit the fit over both days, from a store with a log or into it."""

import shutil
from pathlib import Path

import keras
import numpy as np
import pytest

import elastable as et
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, CheckpointError
from elastable.worker.readers.pass_reader import EndlessReader
from tests.untyped import Keywords

SETTINGS: Keywords = {"batch_size": 8, "grads_to_wait": 2, "seed": 3, "verbose": 0}


def model(optimizer: object = None, more: bool = False) -> keras.Model:
    keras.utils.set_random_seed(1)
    ids = keras.Input((3,), dtype="int64")
    hidden = keras.layers.Dense(4, "relu")(et.Embedding(None, 4, combiner="sum", name="items")(ids))
    hidden = keras.layers.Dropout(0.3)(hidden)
    made = keras.Model(ids, keras.layers.Dense(1, name="head" if more else None)(hidden))
    made.compile(optimizer or keras.optimizers.Adam(0.02), "mse")
    return made


def day(number: int, count: int) -> et.NumpyReader:
    random = np.random.default_rng(number)
    return et.NumpyReader(random.integers(0, 30, (count, 3)), random.random((count, 1)).astype("float32"))


def numbers(trained: keras.Model) -> list[np.ndarray]:
    store = trained.get_layer("items").source
    assert isinstance(store, EmbeddingStore)
    blocks = list(store.scan("items"))
    ids = np.concatenate([block.ids for block in blocks])
    order = np.argsort(ids)
    rows = [np.concatenate([getattr(block, part) for block in blocks])[order] for part in ("weights", "slots")]
    slots = [np.array(variable) for variable in trained.optimizer.variables]
    return [ids[order], *rows, np.array(store.version()), *kernels(trained), *slots]


def kernels(made: keras.Model) -> list[np.ndarray]:
    return [weight for layer in made.layers if isinstance(layer, keras.layers.Dense) for weight in layer.get_weights()]


@pytest.fixture(scope="module")
def day_one(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The log of a fit on the first day; its rate was halved."""
    log = tmp_path_factory.mktemp("day") / "one"
    with et.open_store(f"memory?log={log}") as store:
        et.fit(model(), day(1, 60), store=store, callbacks=[lower()], **SETTINGS)
    return log


def lower() -> keras.callbacks.Callback:
    return keras.callbacks.LearningRateScheduler(lambda epoch, rate: rate / 2 if epoch == 0 else rate)


def test_two_days_are_one(day_one: Path, tmp_path: Path) -> None:
    one = model()
    et.fit(one, et.PartsReader([day(1, 60), day(2, 45)]), callbacks=[lower()], **SETTINGS)
    for in_place, trained in ((False, False), (True, False), (True, True)):
        url = f"memory?log={shutil.copytree(day_one, tmp_path / f'{in_place}-{trained}')}"
        two = model()
        if trained:
            et.fit(two, day(3, 16), **SETTINGS)  # of which nothing is to be left
        history = et.fit(two, day(2, 45), store=url if in_place else None, continue_from=url, **SETTINGS)
        assert history.epoch == [0]
        for ours, theirs in zip(numbers(two), numbers(one), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_what_does_not_fit_is_refused_and_changes_nothing(day_one: Path, tmp_path: Path) -> None:
    url = f"memory?log={shutil.copytree(day_one, tmp_path / 'log')}"
    for made, message in (
        (model(keras.optimizers.SGD(0.1)), "table 'items': optimizer was .* or begin a new job with its rows"),
        (model(more=True), r"the model has no dense_1/kernel, dense_1/bias: leave them out by name"),
    ):
        before = kernels(made)
        with pytest.raises(CheckpointError, match=message):
            et.fit(made, day(2, 45), continue_from=url, **SETTINGS)
        assert all(map(np.array_equal, before, kernels(made)))
    et.fit(model(more=True), day(2, 45), continue_from=url, leave_out=["dense_1"], **SETTINGS)
    with pytest.raises(BadInput, match="initial_epoch=1: the first begins a new fit where another one ended"):
        et.fit(model(), day(2, 45), continue_from=url, epochs=2, initial_epoch=1, **SETTINGS)
    with pytest.raises(BadInput, match=r"no checkpoint, no run directory, and no store with a log is there"):
        et.fit(model(), day(2, 45), continue_from=tmp_path / "nothing", **SETTINGS)


def numbered(names: tuple[str, ...], rate: float | object = 0.1) -> keras.Model:
    """Layers with names that Keras could have given them, and two tables with learning rates of their own."""
    ids, rows = keras.Input((3,), dtype="int64"), []
    for name, own in (("first", rate), ("other", 0.25)):
        optimizer = keras.optimizers.SGD(own)
        rows.append(et.Embedding(30, 4, name=name, combiner="sum", optimizer=optimizer)(ids))
    hidden = keras.layers.Add()(rows)
    for name in names:
        hidden = keras.layers.Dense(4, name=name)(hidden)
    made = keras.Model(ids, keras.layers.Dense(1, name="out")(hidden))
    made.compile(keras.optimizers.SGD(0.0), "mse")
    return made


@pytest.mark.parametrize("names", [("dense_3", "dense_2", "dense_1"), ("dense_1", "dense_3")])
def test_names_that_look_counted_are_names(names: tuple[str, ...], tmp_path: Path) -> None:
    one = numbered(("dense_1", "dense_2", "dense_3"), keras.optimizers.schedules.ExponentialDecay(0.1, 9, 0.5))
    with et.open_store(f"memory?log={tmp_path}") as store:
        et.fit(one, day(1, 16), store=store, **SETTINGS)
    two = numbered(names)
    et.fit(two, day(2, 16), continue_from=f"memory?log={tmp_path}", leave_out=["dense_2"], **SETTINGS)
    for name in names:
        np.testing.assert_array_equal(two.get_layer(name).get_weights()[0], one.get_layer(name).get_weights()[0])
    rates = [float(two.get_layer(name).optimizer.learning_rate) for name in ("first", "other")]
    assert rates == pytest.approx([0.1, 0.25])


def spelled(words: list[str]) -> keras.Model:
    given, lookup = keras.Input((3,), dtype="string"), keras.layers.StringLookup(name="spelled")
    lookup.adapt(np.array(words))
    rows = et.Embedding(9, 4, combiner="sum", name="items")(lookup(given))
    made = keras.Model(given, keras.layers.Dense(1, name="out")(rows))
    made.compile("sgd", "mse")
    return made


def test_a_layer_that_learned_other_words_is_refused(tmp_path: Path) -> None:
    words, labels = np.array([["a", "a", "b"]] * 8), np.ones((8, 1), np.float32)
    with et.open_store(f"memory?log={tmp_path}") as store:
        et.fit(spelled(["a", "a", "b"]), words, labels, store=store, **SETTINGS)
    et.fit(spelled(["a", "a", "a", "b", "b", "c"]), words, labels, continue_from=f"memory?log={tmp_path}", **SETTINGS)
    with pytest.raises(CheckpointError, match="layer 'spelled' numbers other words or bins than it did"):
        et.fit(spelled(["a", "b", "b"]), words, labels, continue_from=f"memory?log={tmp_path}", **SETTINGS)


def test_a_learning_rate_that_was_assigned_goes_on(
    day_one: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    url = f"memory?log={shutil.copytree(day_one, tmp_path / 'log')}"
    made = model()
    et.fit(made, day(2, 45), continue_from=url, **SETTINGS)
    assert float(made.optimizer.learning_rate) == pytest.approx(0.01)
    assert "learning rates go on as [0.00999" in caplog.text


class TestParts:
    def test_records_of_several_parts(self) -> None:
        reader = et.PartsReader([day(1, 5), day(2, 4)])
        x, y = reader.take(np.array([7, 0, 5, 4, 0]))
        for place, (number, count, row) in enumerate([(2, 4, 2), (1, 5, 0), (2, 4, 0), (1, 5, 4), (1, 5, 0)]):
            expected = day(number, count).take(np.array([row]))
            np.testing.assert_array_equal(x[place], expected[0][0])
            np.testing.assert_array_equal(y[place], expected[1][0])
        assert (len(reader), reader.parts) == (9, (5, 4))

    def test_what_is_no_part_is_refused(self) -> None:
        with pytest.raises(BadInput, match="part 1, counted from 0, is a EndlessReader"):
            et.PartsReader([day(1, 5), EndlessReader(iter([(np.ones(2),)] * 9), 3)])
        with pytest.raises(BadInput, match="parts=\\[\\]"):
            et.PartsReader([])
        with pytest.raises(BadInput, match=r"validation_split of an et.PartsReader"):
            et.fit(model(), et.PartsReader([day(1, 9), day(2, 9)]), validation_split=0.5, **SETTINGS)
