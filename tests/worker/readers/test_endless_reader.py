"""Streams without an end: an epoch is so many of their batches, each record counts once, little is kept."""

import itertools
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.worker.models.model_file import load_model_file

SIZE = 4


def batch(number: int) -> object:
    ids = np.arange(SIZE) + SIZE * number
    return {"item": ids % 11}, (ids % 7).astype(np.float32)[:, None]


def forever(start: int = 0) -> Iterator[object]:
    yield from map(batch, itertools.count(start))


def numbers(reader: et.EndlessReader, of_pass: int, rows: list[int]) -> list[float]:
    taken: list[float] = reader.of_pass(of_pass).take(np.array(rows, np.int64))[0].tolist()
    return taken


def counting(start: int = 0) -> Iterator[object]:
    return (np.arange(SIZE) + SIZE * number for number in itertools.count(start))


@pytest.mark.parametrize("opened", [counting, counting()], ids=["function", "generator"])
def test_passes_follow_one_another(opened: object) -> None:
    reader = et.EndlessReader(opened, 3)
    assert (len(reader), reader.batch_records, reader.in_order) == (12, SIZE, True)
    assert numbers(reader, 0, [5, 0, 11, 5]) == [5, 0, 11, 5]
    assert numbers(reader, 1, [0, 11]) == [12, 23]
    assert numbers(reader, 7, [3]) == [87]
    assert numbers(reader, 7, []) == []
    with pytest.raises(BadInput, match="record index 12 at position 0"):
        numbers(reader, 0, [12])


def test_only_the_last_batches_are_kept() -> None:
    made: list[weakref.ref[Array]] = []

    def stream() -> Iterator[object]:
        for number in itertools.count():
            array = np.arange(SIZE) + SIZE * number
            made.append(weakref.ref(array))
            yield array
            del array

    reader = et.EndlessReader(stream(), 10, keep_batches=3)
    for number in range(20):
        assert numbers(reader, number, [39]) == [40 * number + 39]
    assert len(made) == 200
    assert sum(array() is not None for array in made) <= 4
    assert numbers(reader, 19, [30]) == [790]
    with pytest.raises(BadInput, match=r"batch 196 of the stream is asked for again, and only those from 197 on"):
        numbers(reader, 19, [24])


def test_a_stream_that_can_be_opened_anywhere_goes_back_and_ahead() -> None:
    opened: list[int] = []

    def open_at(start: int) -> Iterator[object]:
        opened.append(start)
        return counting(start)

    reader = et.EndlessReader(open_at, 10, keep_batches=2)
    assert numbers(reader, 1_000, [0]) == [40_000]
    assert numbers(reader, 1_000, [20, 8]) == [40_020, 40_008]
    assert numbers(reader, 0, [0]) == [0]
    assert numbers(reader, 0, [4, 1]) == [4, 1]  # both kept, or read on
    assert opened == [0, 10_000, 0]


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (lambda: [np.zeros(4), np.zeros(3)], r"batch 1 holds 3 records, and the first 4: .*repeat\(\) before \.batch"),
        (lambda: [np.zeros(4)], r"ended before its batch 1; epochs x steps_per_epoch asks for more"),
        (lambda: [np.zeros(4), np.array([1, None])], "batch 1: x: an object array"),
        (lambda: 7, "int: no stream of batches"),
    ],
)
def test_streams_that_cannot_be_trained_on(stream: Callable[..., object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        numbers(et.EndlessReader(stream(), 5), 0, [0, 19])


def test_settings_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="steps_per_epoch=0"):
        et.EndlessReader(counting, 0)
    with pytest.raises(BadInput, match=r"keep_batches=2\.5"):
        et.EndlessReader(counting, 1, keep_batches=2.5)  # type: ignore[arg-type]


def model(plain: bool) -> keras.Model:
    item = keras.Input((), dtype="int64", name="item")
    start = np.random.default_rng(0).normal(size=(11, 3)).astype(np.float32)
    layer = keras.layers.Embedding(11, 3, weights=[start]) if plain else et.Embedding(11, 3, weights=start, name="t")
    made = keras.Model({"item": item}, keras.layers.Dense(1, kernel_initializer="ones")(layer(item)))
    made.compile(keras.optimizers.SGD(0.05), "mse")
    return made


@pytest.mark.parametrize("kind", ["generator", "function", "dataset"])
def test_fit_equals_keras_with_steps_per_epoch(kind: str) -> None:
    def dataset() -> object:
        signature = ({"item": tf.TensorSpec([SIZE], tf.int64)}, tf.TensorSpec([SIZE, 1], tf.float32))
        return tf.data.Dataset.from_generator(forever, output_signature=signature)

    expected = model(plain=True).fit(forever(), steps_per_epoch=5, epochs=3, shuffle=False, verbose=0).history["loss"]
    source = {"generator": forever, "function": lambda: forever, "dataset": dataset}[kind]()  # type: ignore[operator]
    done = et.fit(model(plain=False), et.EndlessReader(source, 5), epochs=3, verbose=False)
    np.testing.assert_allclose(done.history["loss"], expected, rtol=1e-5)


def test_each_record_is_read_once() -> None:
    read: list[int] = []

    def stream() -> Iterator[object]:
        for number in itertools.count():
            read.append(number)
            yield batch(number)

    et.fit(model(plain=False), et.EndlessReader(stream(), 5), epochs=3, verbose=False)
    assert read == list(range(15))


def test_where_a_stream_without_an_end_is_refused(tmp_path: Path) -> None:
    with pytest.raises(BadInput, match=r"for training alone.*give et\.StreamReader\(stream, count"):
        et.fit(model(plain=False), (batch(0)), validation_data=et.EndlessReader(forever, 2), verbose=False)
    text = "import itertools\nimport numpy as np\nimport elastable as et\ndef model(): pass\ndef data(split):\n"
    text += "    forever = (np.zeros(3) for _ in itertools.count())\n    return et.EndlessReader(%s, 2)\n"
    (tmp_path / "m.py").write_text(text % "forever")
    with pytest.raises(BadInput, match=r"read only once: .* pass a function open\(start\)"):
        load_model_file(tmp_path / "m.py").reader("train")
    (tmp_path / "n.py").write_text(text % "lambda start: forever")
    assert len(load_model_file(tmp_path / "n.py").reader("train") or ()) == 6
    with pytest.raises(BadInput, match="for training alone"):
        load_model_file(tmp_path / "n.py").reader("validation")
