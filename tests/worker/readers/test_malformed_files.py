"""CSV and Parquet whose names are no text, or twice the same, or whose parts contradict each other."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader


def test_a_csv_header_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "latin.csv"
    path.write_bytes("größe,y\n1,2\n".encode("latin-1"))
    with pytest.raises(BadInput, match=r"latin\.csv: no header can be read from it"):
        CsvReader(path)


def test_a_csv_column_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "twice.csv"
    path.write_text("a,a,y\n1,2,3\n")
    with pytest.raises(BadInput, match=r"twice\.csv: 2 of its columns are called 'a'"):
        CsvReader(path, label="y").take(np.array([0]))


def test_a_parquet_column_that_is_there_twice(tmp_path: Path) -> None:
    path = tmp_path / "twice.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "y"]), path)
    with pytest.raises(BadInput, match=r"twice\.parquet: 2 of its columns are called 'a'"):
        ParquetReader(path, label="y").take(np.array([0]))
    assert ParquetReader(path, features=["y"]).take(np.array([0]))[0]["y"] == [3]


def test_a_parquet_name_that_is_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "name.parquet"
    pq.write_table(pa.table({"name_of_it": [1, 2]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"name_of_it", b"n\xffme_of_it"))
    with pytest.raises(BadInput, match=r"name\.parquet: "):
        ParquetReader(path).take(np.array([0]))


def test_a_csv_integer_of_thousands_of_digits(tmp_path: Path) -> None:
    path = tmp_path / "long.csv"
    path.write_text(f"a\n{'9' * 5_000}\n")
    with pytest.raises(BadInput, match=r"integers beyond int64, such as 9{40}\.\.\. \(5000 digits\)"):
        CsvReader(path).take(np.array([0]))
