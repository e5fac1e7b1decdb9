"""What every reader gives for one logical table, whatever holds it: the right value, or an error that says where."""

import csv
import math
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.reader import ModelInputs, Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.live.stream_reader import StreamReader
from elastable.worker.readers.numpy_reader import NumpyReader
from tests.untyped import Keyword

Table = Mapping[str, Sequence[Any]]
Make = Callable[..., Reader]
"""(folder, table, input name -> dtype, options of the reader) -> the reader."""


def _halves(table: Table) -> list[Table]:
    records = len(next(iter(table.values())))
    cut = records // 3 + 1
    return [{name: values[part] for name, values in table.items()} for part in (slice(0, cut), slice(cut, records))]


def parquet(
    folder: Path, table: Table, inputs: Mapping[str, str], files: int = 1, coded: bool = False, **options: Keyword
) -> Reader:
    for number, part in enumerate(_halves(table) if files == 2 else [table]):
        made = {name: pa.array(values) for name, values in part.items()}
        if coded and number:
            made = {name: column.dictionary_encode() for name, column in made.items()}
        pq.write_table(pa.table(made), folder / f"part-{number}.parquet", row_group_size=3 - number)
    return ParquetReader(folder / "*.parquet", **options).for_inputs(ModelInputs(inputs))


def csv_files(
    folder: Path, table: Table, inputs: Mapping[str, str], files: int = 1, end: str = "\n", encoding: str = "utf-8",
    **options: Keyword,
) -> Reader:  # fmt: skip
    for number, part in enumerate(_halves(table) if files == 2 else [table]):
        with (folder / f"part-{number}.csv").open("w", newline="", encoding=encoding) as opened:
            writer = csv.writer(opened, lineterminator=end)
            writer.writerow(part)
            writer.writerows(zip(*part.values(), strict=True))
    if encoding != "utf-8-sig":
        options["encoding"] = encoding
    return CsvReader(folder / "*.csv", block_records=3, **options).for_inputs(ModelInputs(inputs))


def _arrays(table: Table) -> dict[str, np.ndarray]:
    return {name: np.array(values, object if isinstance(values[0], str) else None) for name, values in table.items()}


def numpy(folder: Path, table: Table, inputs: Mapping[str, str]) -> Reader:
    return NumpyReader(_arrays(table)).for_inputs(ModelInputs(inputs))


def tfrecord(folder: Path, table: Table, inputs: Mapping[str, str]) -> Reader:
    tf = pytest.importorskip("tensorflow")
    arrays = _arrays(table)
    kinds = {"O": tf.string, "i": tf.int64, "f": tf.float32, "b": tf.int64}
    with tf.io.TFRecordWriter(str(folder / "t.tfrecord")) as writer:
        for row in zip(*arrays.values(), strict=True):
            made = {name: _feature(tf, value) for name, value in zip(arrays, row, strict=True)}
            writer.write(tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString())
    features = {name: tf.io.FixedLenFeature((), kinds[array.dtype.kind]) for name, array in arrays.items()}
    records = tf.data.TFRecordDataset(str(folder / "t.tfrecord")).batch(3)
    return StreamReader(records.map(lambda each: (tf.io.parse_example(each, features),))).for_inputs(
        ModelInputs(inputs)
    )


def _feature(tf: Any, value: Any) -> Any:
    if isinstance(value, str):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
    if isinstance(value, float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value)]))


FILES: dict[str, Make] = {
    "parquet": parquet,
    "parquet files": partial(parquet, files=2),
    "parquet and dictionaries": partial(parquet, files=2, coded=True),
    "csv": csv_files,
    "csv files": partial(csv_files, files=2),
    "csv crlf bom": partial(csv_files, end="\r\n", encoding="utf-8-sig"),
    "csv latin-1": partial(csv_files, encoding="latin-1"),
    "csv gb18030": partial(csv_files, encoding="gb18030"),
}
ALL: dict[str, Make] = {**FILES, "numpy": numpy, "tfrecord": tfrecord}

every_reader = pytest.mark.parametrize("make", ALL.values(), ids=ALL)
every_file = pytest.mark.parametrize("make", FILES.values(), ids=FILES)


def as_text(values: Sequence[object]) -> list[str]:
    return [value.decode() if isinstance(value, bytes) else str(value) for value in values]


@every_reader
def test_values_are_exact_and_any_records_can_be_fetched(tmp_path: Path, make: Make) -> None:
    table: Table = {
        "id": [2**53 + 1, -(2**63), 2**63 - 1, 0, 7, 16_777_217, -1],
        "code": ["007", "7", "NA", "", 'a "q", é', "two\nlines", "1e3"],
        "price": [0.5, 2.0, -1.25, 3.0, 1e30, 0.0, 4.0],
    }
    reader = make(tmp_path, table, {"id": "int64", "code": "string", "price": "float32"})
    assert len(reader) == 7
    rng = np.random.default_rng(0)
    for rows in (np.arange(7), rng.permutation(7), rng.integers(0, 7, 20), np.array([], np.int64)):
        (x,) = reader.take(rows)
        assert x["id"].dtype == np.int64
        assert x["id"].tolist() == [table["id"][row] for row in rows]
        assert as_text(x["code"]) == [table["code"][row] for row in rows]
        assert x["price"].dtype.kind == "f"  # a model gets float32; arrays and streams keep doubles, which may be ids
        assert np.float32(x["price"]).tolist() == [np.float32(table["price"][row]) for row in rows]
    for wrong in (7, -1):
        with pytest.raises(BadInput, match=f"record index {wrong} at position 1; it holds 7 records, 0 to 6"):
            reader.take(np.array([0, wrong]))


@every_reader
def test_numbers_feed_the_input_that_wants_them(tmp_path: Path, make: Make) -> None:
    for values in ([1, 0, 3, 1], [True, False, False, True]):
        (tmp_path / str(values[0])).mkdir()
        (x,) = make(tmp_path / str(values[0]), {"n": values}, {"n": "float32"}).take(np.arange(4))
        assert np.asarray(x["n"], np.float32).tolist() == values


@every_file
def test_integers_in_a_column_of_floats_are_exact(tmp_path: Path, make: Make) -> None:
    ids = [16_777_217.0, 5.0, 2.0**53 - 1, -3.0, 0.0]
    (x,) = make(tmp_path, {"id": ids}, {"id": "int64"}).take(np.arange(5))
    assert x["id"].dtype == np.int64
    assert x["id"].tolist() == [16_777_217, 5, 2**53 - 1, -3, 0]


@every_file
@pytest.mark.parametrize("missing", [math.nan, None])
def test_a_null_is_refused_or_filled(tmp_path: Path, make: Make, missing: float | None) -> None:
    table = {"id": [5.0, 16_777_217.0, 6.0, 7.0, missing, 8.0]}
    with pytest.raises(BadInput, match=r"part-[01]\.(parquet, row \d|csv, line \d): column 'id': null, .*fill_null="):
        make(tmp_path, table, {"id": "int64"}).take(np.arange(6))
    (x,) = make(tmp_path, table, {"id": "int64"}, fill_null={"id": 2**53 + 1}).take(np.arange(6))
    assert x["id"].tolist() == [5, 16_777_217, 6, 7, 2**53 + 1, 8]
    for wrong in (1.5, "x", 2**64):
        with pytest.raises(BadInput, match=r"column 'id': nulls cannot become .*, which is no int64"):
            make(tmp_path, table, {"id": "int64"}, fill_null={"id": wrong}).take(np.arange(6))


@every_file
@pytest.mark.parametrize("wrong", [1.5, math.inf, 2.0**53, -1e300])
def test_a_float_that_is_no_exact_integer_is_refused(tmp_path: Path, make: Make, wrong: float) -> None:
    table = {"id": [5.0, 6.0, 7.0, wrong, 8.0]}
    with pytest.raises(BadInput, match=r"part-\d\.\w+, (row|line) \d: column 'id': .* where integers are wanted"):
        make(tmp_path, table, {"id": "int64"}).take(np.arange(5))


@every_file
def test_text_for_numbers_is_refused(tmp_path: Path, make: Make) -> None:
    table = {"n": ["1", "2", "x", "4"]}
    for want in ("int64", "float32"):
        with pytest.raises(
            BadInput,
            match=r"part-\d\.(csv, line [24]: column 'n': 'x' is no (int64|double)|parquet: column 'n' is string)",
        ):
            make(tmp_path, table, {"n": want}).take(np.arange(4))


@every_file
def test_an_integer_beyond_the_input_is_refused(tmp_path: Path, make: Make) -> None:
    with pytest.raises(BadInput, match=r"part-\d\.\w+, (row|line) \d: column 'n': 2147483648 is no int32"):
        make(tmp_path, {"n": [1, 2, 2**31, 3]}, {"n": "int32"}).take(np.arange(4))
    (x,) = make(tmp_path, {"n": [1, 2, 2**31 - 1, 3]}, {"n": "int32"}).take(np.arange(4))
    assert (x["n"].dtype, x["n"].tolist()) == (np.int32, [1, 2, 2**31 - 1, 3])


@every_file
def test_unsigned_ids_are_refused_or_keep_their_bits(tmp_path: Path, make: Make) -> None:
    ids = np.array([1, 2**64 - 1, 2**63, 7], np.uint64)
    for inputs in ({"id": "int64"}, {}):
        with pytest.raises(BadInput, match=r"column 'id'.*column_types=\{'id': 'uint64-bits'\}"):
            make(tmp_path, {"id": ids}, inputs).take(np.arange(4))
        (x,) = make(tmp_path, {"id": ids}, inputs, column_types={"id": "uint64-bits"}).take(np.arange(4))
        assert x["id"].dtype == np.int64
        assert x["id"].tolist() == ids.view(np.int64).tolist()
    (x,) = make(tmp_path, {"id": ids}, {"id": "string"}, column_types={"id": "string"}).take(np.arange(4))
    assert x["id"].tolist() == [str(each) for each in ids]


@every_file
def test_integers_for_an_input_of_strings(tmp_path: Path, make: Make) -> None:
    """The text of a CSV is what it is; of the numbers in other files only the user knows how they are written."""
    try:
        (x,) = make(tmp_path, {"code": [1, 2, 3, 4]}, {"code": "string"}).take(np.arange(4))
    except BadInput as error:
        assert "'string'" in str(error)  # noqa: PT017 - half of the readers take it
        made = make(tmp_path, {"code": [1, 2, 3, 4]}, {"code": "string"}, column_types={"code": "string"})
        (x,) = made.take(np.arange(4))
    assert x["code"].tolist() == ["1", "2", "3", "4"]


@every_file
def test_a_reader_serves_several_models(tmp_path: Path, make: Make) -> None:
    reader = make(tmp_path, {"n": [1, 2, 3]}, {})
    narrow, wide = (reader.for_inputs(ModelInputs({"n": kind})) for kind in ("int32", "int64"))
    assert [each.take(np.arange(2))[0]["n"].dtype for each in (narrow, wide, reader)] == [np.int32, np.int64, np.int64]


@every_file
def test_a_transform_sees_floats_as_they_are(tmp_path: Path, make: Make) -> None:
    reader = make(
        tmp_path, {"id": [16_777_217.0, 5.5, 1.0]}, {"id": "float32"},
        transform=lambda batch: ({"id": batch[0]["id"].astype(np.int64)},),
    )  # fmt: skip
    assert reader.take(np.arange(3))[0]["id"].tolist() == [16_777_217, 5, 1]


CELLS = st.lists(
    st.one_of(
        st.text(st.sampled_from("0123456789+-.e _a"), max_size=6),
        st.integers(-(2**64), 2**64).map(str),
        st.integers(-(2**55), 2**55).map(lambda number: f"{number}.0"),
        st.sampled_from(["NA", "", "nan", "inf", "true", "007", "1e3", "0.5"]),
    ),
    min_size=1,
    max_size=6,
)


@settings(max_examples=150, deadline=None)
@given(cells=CELLS, block=st.integers(1, 3))
def test_text_that_is_accepted_as_an_id_is_that_integer(
    tmp_path_factory: pytest.TempPathFactory, cells: list[str], block: int
) -> None:
    path = tmp_path_factory.mktemp("cells") / "t.csv"
    path.write_text("id,code\n" + "".join(f"{cell},{cell}\n" for cell in cells))
    reader = CsvReader(path, block_records=block)
    codes, ids = (
        reader.for_inputs(ModelInputs(wanted, own_step=False)) for wanted in ({"code": "string"}, {"id": "int64"})
    )
    for row, cell in enumerate(cells):
        assert codes.take(np.array([row]))[0]["code"].tolist() == [cell]
        try:
            (x,) = ids.take(np.array([row]))
        except BadInput as error:
            assert "column 'id'" in str(error)  # noqa: PT017 - what is accepted matters
            continue
        wrote = {"true": 1, "false": 0}.get(cell)
        assert x["id"].tolist() == [Decimal(cell) if wrote is None else wrote]
