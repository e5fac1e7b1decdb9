"""Records of different lengths: whatever they come in, they are read unpadded, and any of them can be fetched."""

from collections.abc import Callable, Sequence
from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf
from hypothesis import given
from hypothesis import strategies as st

import elastable as et
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.live.stream_reader import StreamReader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.user_model.build import as_tensors

IDS = [[2**53 + 1, 5], [], [7], [1, 2, 3, 2**63 - 1], [], [9, 9]]
WEIGHTS = [[0.5, 1.0], [], [2.0], [1.0, 2.0, 3.0, 4.0], [], [0.25, 0.75]]
NESTED = [[[1, 2], []], [], [[3]], [[], [4, 5, 6]], [[7]], [[]]]
WORDS = [["a", "b"], [], ["cc"], ["", "d", "e", "f"], [], ["g", "g"]]
RECORDS = len(IDS)


def objects(lists: Sequence[object], leaf: Callable[..., object] = list) -> object:
    made = np.empty(len(lists), object)
    made[:] = [leaf(record) for record in lists]
    return made


def int64s(record: list[int]) -> object:
    return np.array(record, np.int64)


def tensors(reader: Reader, rows: list[int]) -> tf.RaggedTensor:
    found = as_tensors(reader.take(np.array(rows, np.int64)))[0]
    assert isinstance(found, dict)
    return found


def numpy_reader() -> Reader:
    return NumpyReader({"ids": objects(IDS, int64s), "weights": objects(WEIGHTS), "nested": objects(NESTED),
                        "words": objects(WORDS)})  # fmt: skip


def columns_of_tensors() -> dict[str, object]:
    return {"ids": tf.ragged.constant(IDS, tf.int64), "weights": tf.ragged.constant(WEIGHTS),
            "nested": tf.ragged.constant(NESTED, tf.int64), "words": tf.ragged.constant(WORDS)}  # fmt: skip


def stream_reader() -> Reader:
    return StreamReader(tf.data.Dataset.from_tensor_slices(columns_of_tensors()).ragged_batch(4))


def parquet_reader(folder: Path) -> Reader:
    columns = {"ids": pa.array(IDS, pa.list_(pa.int64())), "weights": pa.array(WEIGHTS, pa.list_(pa.float64())),
               "nested": pa.array(NESTED, pa.large_list(pa.list_(pa.int64()))), "words": pa.array(WORDS)}  # fmt: skip
    pq.write_table(pa.table(columns), folder / "t.parquet", row_group_size=4)
    return ParquetReader(folder / "t.parquet", cached_row_groups=1)


@pytest.fixture(scope="module")
def readers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Reader]:
    parquet = parquet_reader(tmp_path_factory.mktemp("ragged"))
    return {
        "numpy": numpy_reader(),
        "tensor": NumpyReader(columns_of_tensors()),
        "stream": stream_reader(),
        "parquet": parquet,
    }


@pytest.mark.parametrize("kind", ["numpy", "tensor", "stream", "parquet"])
@given(rows=st.lists(st.integers(0, RECORDS - 1), max_size=8))
def test_any_records_equal_the_naive_selection(readers: dict[str, Reader], kind: str, rows: list[int]) -> None:
    found = tensors(readers[kind], rows)
    for name, lists in (("ids", IDS), ("weights", WEIGHTS), ("nested", NESTED)):
        assert isinstance(found[name], tf.RaggedTensor)
        assert found[name].to_list() == [lists[row] for row in rows]
    assert found["words"].to_list() == [[word.encode() for word in WORDS[row]] for row in rows]
    assert (found["ids"].dtype, found["weights"].dtype) == (tf.int64, tf.float64 if kind == "numpy" else tf.float32)


def test_what_is_taken_holds_no_padding() -> None:
    long = np.empty(1000, object)
    long[:] = [np.arange(1 if record else 100_000) for record in range(1000)]
    (x,) = NumpyReader(long).take(np.arange(1000))
    assert isinstance(x, RaggedArray)
    assert x.values.nbytes == 8 * (100_000 + 999)  # type: ignore[union-attr]


@pytest.mark.parametrize("batch", [1, 4])
def test_sparse_records(batch: int) -> None:
    dense = np.array([[0, 5, 0], [0, 0, 0], [7, 0, 2**53 + 1], [1, 2, 3]], np.int64)
    sparse = tf.sparse.from_dense(dense)
    streamed = StreamReader(tf.data.Dataset.from_tensor_slices(sparse).batch(batch))
    for reader in (NumpyReader(sparse), streamed):
        (found,) = as_tensors(reader.take(np.array([2, 0, 1, 2])))
        assert isinstance(found, tf.SparseTensor)
        np.testing.assert_array_equal(tf.sparse.to_dense(found), dense[[2, 0, 1, 2]])


def test_empty_records_do_not_decide_the_dtype() -> None:
    (x,) = NumpyReader(objects([[], [2**53 + 1]], np.array)).take(np.arange(2))
    assert (x.dtype, x.values.tolist()) == (np.int64, [2**53 + 1])
    mixed = np.empty(2, object)
    mixed[:] = [np.array([1], np.uint64), np.array([2**53 + 1], np.int64)]
    assert NumpyReader(mixed).take(np.arange(2))[0].values.tolist() == [1, 2**53 + 1]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([[1], [2**63, -1]], "an integer beyond int64"),
        ([["a"], [2]], "element 1 is a int"),
        ([[1], [[2]]], "hold both lists and single values"),
        ([np.zeros(2), np.zeros((2, 2))], "arrays of 1 axes and of others"),
        ([np.zeros((2, 3)), np.zeros((2, 2))], "differ behind their first axis"),
    ],
)
def test_lists_that_make_no_records(values: list[object], message: str) -> None:
    array = np.empty(len(values), object)
    array[:] = values
    with pytest.raises(BadInput, match=f"x: .*{message}"):
        NumpyReader(array)


@pytest.mark.parametrize("splits", [[0, 2], [1, 3], [0, 2, 1, 3], [], [0.0, 3.0]])
def test_splits_that_do_not_fit(splits: list[object]) -> None:
    with pytest.raises(BadInput, match="RaggedArray: splits must"):
        RaggedArray(np.arange(3), np.array(splits))


class TestInputsOfOneLength:
    """Lists for `keras.Input((2,))`, which plain Keras would not take from any source either."""

    @staticmethod
    def model(combiner: str | None = "mean") -> keras.Model:
        ids = keras.Input((2,), dtype="int64", name="item")
        rows = et.Embedding(None, 2, combiner=combiner)(ids)
        rows = rows if combiner else keras.layers.Flatten()(rows)
        model = keras.Model({"item": ids}, keras.layers.Dense(1)(rows))
        model.compile("sgd", "mse")
        return model

    @staticmethod
    def folder(path: Path, *files: pa.Array) -> ParquetReader:
        for number, lists in enumerate(files):
            pq.write_table(pa.table({"item": lists, "y": [1.0] * len(lists)}), path / f"{number}.parquet")
        return ParquetReader(path, label="y")

    @pytest.mark.parametrize(
        ("files", "where"),
        [
            ([pa.array([[1, 2], [3]])], r"0\.parquet, row 1: column 'item': a list of 1 values.*takes 2"),
            ([pa.array([[1, 2, 3], [3, 4, 5]])], r"0\.parquet, row 0: column 'item': a list of 3 values"),
            ([pa.array([[1, 2, 3]], pa.list_(pa.int64(), 3))], r"0\.parquet, row 0: column 'item': a list of 3 values"),
            (
                [pa.array([[1, 2]] * 2, pa.list_(pa.int64(), 2)), pa.array([[1, 2, 3]], pa.list_(pa.int64(), 3))],
                r"1\.parquet, row 0: column 'item': a list of 3 values.*keras.Input\(\(None,\)\)",
            ),
        ],
    )
    def test_other_lengths_in_files_are_refused(self, files: list[pa.Array], where: str, tmp_path: Path) -> None:
        with pytest.raises(BadInput, match=where):
            et.fit(self.model(), self.folder(tmp_path, *files), batch_size=2, verbose=0)

    def test_lists_of_that_length_are_an_array(self, tmp_path: Path) -> None:
        reader = self.folder(tmp_path, pa.array([[1, 2], [3, 4]]), pa.array([[5, 6]], pa.list_(pa.int64(), 2)))
        et.fit(self.model(None), reader, batch_size=2, verbose=0)

    def test_other_ragged_records_are_refused(self) -> None:
        lists = {"item": tf.ragged.constant([[1, 2], [3]], dtype=tf.int64)}
        for train in (lambda: self.model().fit(lists, np.ones(2), verbose=0), lambda: self.model().predict(lists)):
            with pytest.raises(
                BadInput, match=r"input 'item': record 1: a list of 1 values, and the model's input tak"
            ):
                train()
