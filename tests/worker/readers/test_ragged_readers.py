"""Records of different lengths: whatever they come in, they are read unpadded, and any of them can be fetched."""

from pathlib import Path

import keras
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tensorflow as tf

import elastable as et
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.readers.stream_reader import StreamReader
from elastable.worker.user_model.build import as_tensors


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
    mixed = np.empty(2, object)
    mixed[:] = [np.array([]), np.array([2**53 + 1])]
    (x,) = NumpyReader(mixed).take(np.arange(2))
    assert (x.dtype, x.values.tolist()) == (np.int64, [2**53 + 1])
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
