"""Streams of batches as readers: what was streamed is what is fetched, and nothing is left behind."""

import gc
import itertools
import os
import resource
import weakref
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import keras
import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import elastable as et
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers import pass_reader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.readers.pass_reader import EndlessReader
from elastable.worker.readers.stream_reader import StreamReader, is_stream

X = {"user": np.arange(20, dtype=np.int32), "pair": np.arange(40.0).reshape(20, 2)}


Y = np.arange(20, dtype=np.float32) / 3


W = np.linspace(0, 1, 20, dtype=np.float32)


def cut(nest: Array | dict[str, Array], start: int, stop: int) -> object:
    return {name: part[start:stop] for name, part in nest.items()} if isinstance(nest, dict) else nest[start:stop]


def batches(size: int, *parts: Array | dict[str, Array]) -> Iterator[tuple[object, ...]]:
    for start in range(0, 20, size):
        yield tuple(cut(part, start, start + size) for part in parts)


class Pairs(keras.utils.PyDataset):
    """Never raises IndexError: whoever asks on gets on."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self.size = size

    def __len__(self) -> int:
        return -(-20 // self.size)

    def __getitem__(self, number: int) -> object:
        start = self.size * (number % len(self))
        return cut(X, start, start + self.size), Y[start : start + self.size]


class Endless(Pairs):
    @property
    def num_batches(self) -> None:
        return None


def same(ours: object, theirs: object) -> None:
    keras.tree.map_structure(np.testing.assert_array_equal, ours, theirs)
    assert keras.tree.map_structure(lambda a: a.dtype, ours) == keras.tree.map_structure(lambda a: a.dtype, theirs)


@given(st.lists(st.integers(0, 19), max_size=12), st.integers(1, 25))
def test_any_record_is_that_of_the_stream(wanted: list[int], size: int) -> None:
    rows = np.array(wanted, np.int64)
    reader = StreamReader(batches(size, X, Y, W))
    assert (len(reader), reader.batch_records, reader.shuffle_block) == (20, min(size, 20), None)
    assert StreamReader(batches(size, X), shuffle_block=16).shuffle_block == 16
    same(reader.take(rows), NumpyReader(X, Y, W).take(rows))


@pytest.mark.parametrize(
    "stream",
    [
        lambda: tf.data.Dataset.from_tensor_slices((X, Y)).batch(6),
        lambda: Pairs(6),
        lambda: [[cut(X, 0, 20), Y]],  # as a torch DataLoader hands batches out
        lambda: ((x, y, None) for x, y in batches(6, X, Y)),
    ],
    ids=["tf.data", "PyDataset", "list", "generator"],
)
def test_whatever_keras_takes_as_a_stream(stream: Callable[..., object]) -> None:
    rows = np.array([19, 0, 7, 7])
    same(StreamReader(stream()).take(rows), NumpyReader(X, Y).take(rows))


@given(st.lists(st.lists(st.text(max_size=5), min_size=2, max_size=2), min_size=1, max_size=9), st.integers(1, 4))
def test_strings_of_any_length(texts: list[list[str]], size: int) -> None:
    words = np.array(texts, object)
    reader = StreamReader([words[start : start + size] for start in range(0, len(words), size)])
    (taken,) = reader.take(np.arange(len(words))[::-1])
    assert taken.tolist() == words[::-1].tolist()


def test_only_so_many_batches_of_a_stream_without_an_end() -> None:
    def forever() -> Iterator[object]:
        while True:
            yield np.arange(4), np.zeros(4, np.float32)

    endless = tf.data.Dataset.from_tensor_slices((np.arange(4), np.zeros(4, np.float32))).repeat().batch(4)
    for stream in (forever(), endless):
        assert len(StreamReader(stream, count=3)) == 12
    assert len(StreamReader(Endless(5), count=3)) == 15
    for stream in (endless, Endless(5)):
        with pytest.raises(BadInput, match="has no end; say how many"):
            StreamReader(stream)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        ([], "ended before its first batch"),
        ([(np.zeros((2, 3)), np.zeros(2)), (np.zeros((2, 4)), np.zeros(2))],
         r"batch 1: x has records of shape \[4\], those before \[3\]"),
        ([np.zeros(2, np.int64), np.zeros(2, np.int32)], "batch 1: x is int32, and was int64 before"),
        ([np.zeros(2, np.float32), np.zeros(2)], "batch 1: x is float64, and was float32 before"),
        ([np.zeros(2), np.array(["a", "b"])], "batch 1: x is <U1, and was float64 before"),
        ([np.array(["a", "b"]), np.zeros(2)], "batch 1: x is float64, and was strings before"),
        ([{"a": np.zeros(2)}, {"b": np.zeros(2)}], r"batch 1: it holds x\['b'\], and the batches before held x\['a'\]"),
        ([(np.zeros(2), np.zeros(3))], "batch 0: arrays: arrays must have one length, but x has 2, y has 3"),
        ([np.zeros(2), np.zeros(0)], "batch 1: arrays: empty, x has 0 records"),
        ([(1, 2, 3, 4)], "batch 0: a tuple of 4"),
        ([tf.ragged.constant([[1], [1, 2]]), np.zeros(2, np.int32)], "batch 1: x is a ndarray, and was ragged before"),
        ([np.zeros(2, np.int32), tf.ragged.constant([[1], [1, 2]])], "batch 1: x is a RaggedArray, and was an array"),
        (np.zeros(3), "ndarray: no stream of batches; give a tf.data.Dataset"),
        ({"x": np.zeros(3)}, "dict: no stream"),
        (7, "int: no stream"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(stream: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        StreamReader(stream)


def test_settings_that_cannot_be() -> None:
    with pytest.raises(BadInput, match="count=0"):
        StreamReader(Pairs(5), count=0)
    with pytest.raises(BadInput, match="shuffle_block=0"):
        StreamReader(Pairs(5), shuffle_block=0)
    with pytest.raises(BadInput, match=r"'/nowhere'.*No such file"):
        StreamReader(Pairs(5), folder="/nowhere")


def test_an_error_of_the_stream_comes_out_as_it_is() -> None:
    def breaks() -> Iterator[object]:
        yield np.zeros(2)
        raise RuntimeError("no more to read from there")

    with pytest.raises(RuntimeError, match="no more to read"):
        StreamReader(breaks())


def test_nothing_is_left_in_the_folder_nor_open(tmp_path: Path) -> None:
    def mapped() -> bool:
        return str(tmp_path) in Path("/proc/self/maps").read_text()

    def opened() -> list[str]:
        found = []
        for number in os.listdir("/proc/self/fd"):
            with suppress(FileNotFoundError):  # that of the listing itself
                found.append(os.readlink(f"/proc/self/fd/{number}"))
        return [to for to in found if str(tmp_path) in to]

    reader = StreamReader(batches(6, X, Y), folder=tmp_path)
    assert list(tmp_path.iterdir()) == []
    assert mapped()
    same(reader.take(np.array([3])), NumpyReader(X, Y).take(np.array([3])))
    del reader
    gc.collect()
    assert not mapped()
    assert opened() == []


def test_a_disk_that_is_full_is_named(tmp_path: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, hard))  # Python ignores the signal that comes with it
    try:
        with pytest.raises(BadInput, match=rf"batch \d+: x: File too large after [\d,]+ bytes in folder '{tmp_path}'"):
            StreamReader((np.zeros((100, 100), np.float32) for _ in range(50)), folder=tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_which_streams_are_known_to_end() -> None:
    assert is_stream(tf.data.Dataset.range(3))
    assert is_stream(Pairs(3))
    assert is_stream(iter([1]))
    assert not is_stream([(X, Y)])


SIZE = 4


def batch(number: int) -> object:
    ids = np.arange(SIZE) + SIZE * number
    return {"item": ids % 11}, (ids % 7).astype(np.float32)[:, None]


def forever(start: int = 0) -> Iterator[object]:
    yield from map(batch, itertools.count(start))


def counting(start: int = 0) -> Iterator[object]:
    return (np.arange(SIZE) + SIZE * number for number in itertools.count(start))


def test_passes_follow_one_another() -> None:
    reader = EndlessReader(counting(), 3)
    assert (len(reader), reader.batches, reader.batch_records, reader.in_order) == (12, 3, SIZE, True)
    assert reader.take(np.array([3, 0]))[0].tolist() == [3, 0]  # of the first batch
    assert reader.of_pass(0).batch(2)[0].tolist() == [8, 9, 10, 11]
    assert reader.of_pass(1).batch(0)[0].tolist() == [12, 13, 14, 15]
    assert reader.of_pass(7).batch(2)[0].tolist() == [92, 93, 94, 95]
    with pytest.raises(BadInput, match="record index 4 at position 0"):
        reader.take(np.array([4]))


def test_only_the_last_batches_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pass_reader, "_KEPT", 3)
    made: list[weakref.ref[Array]] = []

    def stream() -> Iterator[object]:
        for number in itertools.count():
            array = np.arange(SIZE) + SIZE * number
            made.append(weakref.ref(array))
            yield array
            del array

    reader = EndlessReader(stream(), 10)
    for number in range(20):
        assert reader.of_pass(number).batch(9)[0].tolist() == [40 * number + 36 + each for each in range(SIZE)]
    assert len(made) == 200
    assert sum(array() is not None for array in made) <= 5  # the first, and the last
    assert reader.of_pass(19).batch(7)[0].tolist() == [788, 789, 790, 791]
    with pytest.raises(BadInput, match="batch 196 is asked for again, and only the last 3 are kept"):
        reader.of_pass(19).batch(6)


@pytest.mark.parametrize(
    ("stream", "message"),
    [
        (lambda: [np.zeros(4)], r"ended before its batch 1; epochs x steps_per_epoch asks for more"),
        (lambda: [np.zeros(4), np.array([1, None])], "batch 1: x: an object array"),
        (lambda: 7, "int: no stream of batches"),
    ],
)
def test_streams_that_cannot_be_trained_on(stream: Callable[..., object], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        EndlessReader(stream(), 5).of_pass(0).batch(4)


def model() -> keras.Model:
    item = keras.Input((), dtype="int64", name="item")
    made = keras.Model({"item": item}, keras.layers.Dense(1)(et.Embedding(11, 3, name="t")(item)))
    made.compile("sgd", "mse")
    return made


# tests/elastable/in_process/test_fit_streams.py compares what is trained with plain Keras.
def test_each_record_is_read_once() -> None:
    read: list[int] = []

    def stream() -> Iterator[object]:
        for number in itertools.count():
            read.append(number)
            yield batch(number)

    et.fit(model(), stream(), steps_per_epoch=5, epochs=3, verbose=False)
    assert read == list(range(15))


def test_where_a_stream_without_an_end_is_refused() -> None:
    with pytest.raises(BadInput, match=r"validation_data is a generator, a stream without an end.*validation_steps="):
        et.fit(model(), batch(0), validation_data=forever(), verbose=False)
    endless = tf.data.Dataset.from_tensors(np.zeros(3)).repeat()
    with pytest.raises(BadInput, match=r"has no end; say how many .*\(count=\), or give it to model.fit or et.fit"):
        et.StreamReader(endless)
