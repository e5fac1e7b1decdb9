"""Readers of arrays and files, beyond the contract of all: nests of arrays, malformed files, options."""

import csv
import io
import subprocess
import sys
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.numpy_reader import NumpyReader, as_reader
from tests.contracts.readers import FORMATS
from tests.untyped import Keywords

COLUMNS = pa.table({"user": [-100, -93, -86], "price": [-1.0, 0.0, 1.0]})


# NumPy arrays


def test_nests_keep_their_shape_and_numbers_their_dtype() -> None:
    reader = NumpyReader(({"a": np.zeros((4, 2))}, [np.arange(4, dtype=np.int16)]), np.ones(4, np.float16))
    (features, (codes,)), y = reader.take(np.array([3, 1]))
    assert features["a"].shape == (2, 2)
    assert (features["a"].dtype, codes.dtype, y.dtype) == (np.float64, np.int16, np.float16)
    assert codes.tolist() == [3, 1]


@pytest.mark.parametrize(
    ("given_", "message"),
    [
        (({"a": np.zeros(3)}, np.zeros(4)), r"x\['a'\] has 3, y has 4 records"),
        ((np.zeros(0), np.zeros(0)), "empty, x has 0 records"),
        ((np.zeros(3), None, np.zeros(3)), "sample_weight without y"),
        (([1, 2, 3],), "x: a list of int; make it a NumPy array"),
        (({},), "x: an empty dict"),
        (({3: np.zeros(3)},), "key 3 is a int"),
        ((np.float32(3),), "x: a single float32 value"),
        ((None,), "x is None; leave it out, or give an array"),
        ((np.array(["2013-01-01"], "datetime64[D]"),), r"x: dtype datetime64\[D\]"),
        ((np.array([[1], 2], object),), "x: record 1 is a int, and record 0 a list"),
        ((np.array([b"a", 2], object),), "element 1 is a int; objects must all be strings.*astype"),
        ((np.array([5, None], object),), "x: an object array whose element 1 is None: put a value in its place"),
        ((np.array([5, 2**63 + 1], np.uint64),), r"x: 9223372036854775809 at position 1 is above 2\*\*63 - 1"),
    ],
)
def test_arrays_that_cannot_be_read_are_refused(given_: tuple[object, ...], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        NumpyReader(*given_)


# as_reader


def test_tuples_dicts_and_readers_become_readers() -> None:
    x, y = np.arange(3), np.ones(3, np.float32)
    reader = as_reader((x, y))
    assert as_reader(reader) is reader
    assert len(as_reader({"x": x, "y": y}).take(np.array([0]))) == 2
    assert len(as_reader((x,)).take(np.array([0]))) == 1
    assert len(as_reader((x, y, y)).take(np.array([0]))) == 3


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (np.zeros(3), "ndarray alone; give a Reader, a tuple"),
        ((1, 2, 3, 4), "a tuple of 4"),
        ({"user": np.zeros(3)}, "keys 'user'; give"),
        ((n for n in range(3)), "generator, a stream, and a job's seeded order"),
        (None, "a NoneType; give"),
        ("train.csv", "a str; give"),
    ],
)
def test_other_data_is_refused_by_name(data: object, message: str) -> None:
    with pytest.raises(BadInput, match=message):
        as_reader(data)


def test_a_stream_is_read_only_where_a_person_says_so() -> None:
    tf = pytest.importorskip("tensorflow")
    dataset = tf.data.Dataset.range(5).batch(2)
    with pytest.raises(BadInput, match=r"fetches records by number: wrap it in et\.StreamReader"):
        as_reader(dataset)


# Files


def test_readers_do_not_import_backend() -> None:
    code = "import sys, elastable.worker.readers; assert not {'tensorflow', 'keras'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("kind", FORMATS)
def test_missing_files_and_columns_are_named(tmp_path: Path, kind: str) -> None:
    path, reader = tmp_path / f"t.{kind}", FORMATS[kind].reader
    FORMATS[kind].write(COLUMNS, path)
    with pytest.raises(BadInput, match=r"absent\.x: no such file"):
        reader(tmp_path / "absent.x")
    with pytest.raises(BadInput, match="no files given"):
        reader([])
    with pytest.raises(BadInput, match="no column 'users'; its columns are 'user', 'price'"):
        reader(path, features=["users"])
    with pytest.raises(BadInput, match="without label"):
        reader(path, weight="weight")
    with pytest.raises(BadInput, match="give a list of column names"):
        reader(path, features="user")


def test_a_transform_makes_the_batch(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(COLUMNS, path)
    reader = ParquetReader(path, ["user"], "price", transform=lambda b: (b[0]["user"] % 10, b[1] > 0))
    x, y = reader.take(np.arange(3)[::-1])
    assert (x.tolist(), y.tolist()) == ([4, 7, 0], [True, False, False])
    with pytest.raises(BadInput, match="made 2 records of 3"):
        ParquetReader(path, ["user"], transform=lambda b: (b[0]["user"][1:],)).take(np.arange(3))
    two: Keywords = {"transform": lambda x, y: (x, y)}
    with pytest.raises(BadInput, match=r"missing 1 required.* 'y'; transform takes one batch, a tuple such as \(x, y"):
        ParquetReader(path, ["user"], "price", **two).take(np.arange(3))
    with pytest.raises(BadInput, match="returned a dict"):
        ParquetReader(path, ["user"], transform=lambda b: b[0]).take(np.arange(3))


def test_nulls_of_floats_are_nan(tmp_path: Path) -> None:
    pq.write_table(pa.table({"nan": pa.array([1.0, None, 2.0, None])}), tmp_path / "t.parquet", row_group_size=3)
    (x,) = ParquetReader(tmp_path / "t.parquet").take(np.array([3, 1, 0]))
    assert np.isnan(x["nan"]).tolist() == [True, True, False]


def test_parquet_files_must_be_whole(tmp_path: Path) -> None:
    pq.write_table(pa.table({"c": pa.array([], pa.int64())}), tmp_path / "empty.parquet")
    (tmp_path / "broken.parquet").write_bytes(b"not Parquet")
    with pytest.raises(BadInput, match=r"empty\.parquet: empty"):
        ParquetReader(tmp_path / "empty.parquet")
    with pytest.raises(BadInput, match=r"broken\.parquet: not a Parquet file"):
        ParquetReader(tmp_path / "broken.parquet")


def test_csv_options(tmp_path: Path) -> None:
    (tmp_path / "t.tsv").write_bytes(b"\xef\xbb\xbf1\t2013-01-01\tNA\r\n2\t2013-01-02\t5")
    reader = CsvReader(
        tmp_path / "t.tsv", delimiter="\t", column_names=["n", "day", "gust"], label="gust", fill_null={"gust": 0}
    )
    x, y = reader.take(np.array([1, 0]))
    assert (x["n"].tolist(), x["day"].tolist(), y.tolist()) == ([2, 1], ["2013-01-02", "2013-01-01"], [5, 0])


def test_csv_columns_are_found_by_name(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text("a,b\n1,2\n")
    (tmp_path / "b.csv").write_text("b,c,a\n3,4,5\n")
    x, y = CsvReader([tmp_path / "a.csv", tmp_path / "b.csv"], ["a"], "b").take(np.array([1, 0]))
    assert (x["a"].tolist(), y.tolist()) == ([5, 1], [3, 2])
    with pytest.raises(BadInput, match=r"a\.csv: no column 'c'; its columns are 'a', 'b'; .*b\.csv has it"):
        CsvReader([tmp_path / "a.csv", tmp_path / "b.csv"]).take(np.array([0]))


def test_a_csv_file_that_changed_is_noticed(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a\n1\n2\n3\n4\n")
    reader = CsvReader(tmp_path / "t.csv", block_records=2, cached_blocks=1)
    (tmp_path / "t.csv").write_text("a\n1\n2\n\n\n\n\n")
    with pytest.raises(BadInput, match="0 records from line 4 on, where there were 2"):
        reader.take(np.array([0, 3]))


FIELDS = st.text(st.sampled_from('ab ",\n\r'), max_size=4)


@settings(max_examples=60, deadline=None)
@given(rows=st.lists(st.tuples(st.integers(-5, 5), FIELDS), min_size=1, max_size=12), block=st.integers(1, 5))
def test_quotes_delimiters_and_line_ends_within_values(
    tmp_path_factory: pytest.TempPathFactory, rows: list[tuple[int, str]], block: int
) -> None:
    text = io.StringIO()
    csv.writer(text).writerows([("n", "s"), *rows])
    path = tmp_path_factory.mktemp("quotes") / "t.csv"
    path.write_bytes(text.getvalue().encode())
    (x,) = CsvReader(path, block_records=block, column_types={"s": "string"}).take(np.arange(len(rows))[::-1])
    assert list(zip(x["n"].tolist(), x["s"].tolist(), strict=True)) == rows[::-1]
