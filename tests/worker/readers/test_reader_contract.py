"""What every reader gives for one logical table, whatever holds it: the right value, or an error that says where."""

import math
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tensorflow as tf
from hypothesis import given, settings
from hypothesis import strategies as st

import elastable as et
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.batch.reader import ModelInputs, Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.user_model.build import as_tensors
from tests.contracts.readers import FILES, LISTS, READERS, Make, Table, listed, reader_of
from tests.untyped import Keywords


def _cases(makes: Mapping[str, Make]) -> list[Any]:
    """Of a Ray, which takes seconds to start, by make test-slow alone."""
    slow = {"ray": pytest.mark.slow}
    return [pytest.param(make, id=name, marks=slow.get(name, ())) for name, make in makes.items()]


every_reader = pytest.mark.parametrize("make", _cases(READERS))
every_file = pytest.mark.parametrize("make", _cases(FILES))
RECORDS = 37
IDS = [2**53 + 1, -(2**63), 2**63 - 1, 0, 7, 16_777_217, -1]
CODES = ["007", "7", "NA", "", 'a "q", é', "two\nlines", "1e3"]
PRICES = [0.5, 2.0, -1.25, 3.0, 1e30, 0.0, 4.0]
LONG: Table = {
    "id": [*IDS, *range(RECORDS - len(IDS))],
    "code": [CODES[row % len(CODES)] for row in range(RECORDS)],
    "price": [PRICES[row % len(PRICES)] for row in range(RECORDS)],
}
INPUTS = {"id": "int64", "code": "string", "price": "float32"}
NESTED: Table = {
    "ids": [[2**53 + 1, 5], [], [7], [1, 2, 3, 2**63 - 1], [], [9, 9]],
    "weights": [[0.5, 1.0], [], [2.0], [1.0, 2.0, 3.0, 4.0], [], [0.25, 0.75]],
    "nested": [[[1, 2], []], [], [[3]], [[], [4, 5, 6]], [[7]], [[]]],
    "words": [["a", "b"], [], ["cc"], ["", "d", "e", "f"], [], ["g", "g"]],
}
AT = r"(part-\d\.\w+, (row|line)|Ray Dataset, record) \d"
"""Where a value is, in messages."""
ROWS = st.lists(st.integers(0, RECORDS - 1), max_size=60)


@pytest.fixture(scope="module", params=_cases(READERS))
def reader(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    return reader_of(request.param, tmp_path_factory.mktemp("long"), LONG, INPUTS)


@settings(max_examples=25, deadline=None)
@given(rows=ROWS)
def test_values_are_exact_and_any_records_can_be_fetched(reader: Reader, rows: list[int]) -> None:
    assert len(reader) == RECORDS
    (x,) = reader.take(np.array(rows, np.int64))
    assert x["id"].dtype == np.int64
    assert x["id"].tolist() == [LONG["id"][row] for row in rows]
    assert listed(x["code"]) == [LONG["code"][row] for row in rows]
    assert x["price"].dtype.kind == "f"  # a model gets float32; arrays and streams keep doubles, which may be ids
    assert np.float32(x["price"]).tolist() == [np.float32(LONG["price"][row]) for row in rows]


def test_records_that_there_are_not_are_refused(reader: Reader) -> None:
    for wrong in (RECORDS, -1):
        with pytest.raises(
            BadInput, match=f"record index {wrong} at position 1; it holds {RECORDS} records, 0 to {RECORDS - 1}"
        ):
            reader.take(np.array([0, wrong]))
    with pytest.raises(BadInput, match=r"must be integers \[n\], got float64\[1\]"):
        reader.take(np.array([0.5]))


def test_records_are_fetched_from_another_thread(reader: Reader) -> None:
    with ThreadPoolExecutor(1) as other:
        (x,) = other.submit(reader.take, np.array([5, 0])).result()
    assert {type(x["id"]), type(x["price"])} == {np.ndarray}  # also of a mapped file
    x["id"][:] = 3  # what is taken is a copy
    assert reader.take(np.array([5, 0]))[0]["id"].tolist() == [LONG["id"][5], LONG["id"][0]]


def test_what_is_read_together_is_reported(reader: Reader, request: pytest.FixtureRequest) -> None:
    kind = request.node.callspec.id
    of_files = kind in FILES
    assert reader.shuffle_block == (3 if of_files else None)
    assert reader.take(np.array([0]))[0]["price"].dtype == (np.float32 if of_files or "tf" in kind else np.float64)


@pytest.fixture(scope="module", params=_cases(LISTS))
def lists(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reader:
    made: Reader = request.param(tmp_path_factory.mktemp("lists"), NESTED)
    return made


@settings(deadline=None)
@given(rows=st.lists(st.integers(0, 5), max_size=8))
def test_lists_are_ragged_and_never_padded(lists: Reader, rows: list[int]) -> None:
    taken = lists.take(np.array(rows, np.int64))
    for name, column in taken[0].items():
        assert isinstance(column, RaggedArray)
        assert listed(column) == [NESTED[name][row] for row in rows]
    if isinstance(lists, ParquetReader):
        assert taken[0]["weights"].dtype == np.float32
    found: Any = as_tensors(taken)[0]
    assert all(isinstance(column, tf.RaggedTensor) for column in found.values())
    assert found["ids"].to_list() == [NESTED["ids"][row] for row in rows]
    assert found["ids"].dtype == tf.int64


@every_reader
def test_numbers_feed_the_input_that_wants_them(tmp_path: Path, make: Make) -> None:
    for values in ([1, 0, 3, 1], [True, False, False, True]):
        (tmp_path / str(values[0])).mkdir()
        (x,) = reader_of(make, tmp_path / str(values[0]), {"n": values}, {"n": "float32"}).take(np.arange(4))
        assert np.asarray(x["n"], np.float32).tolist() == values


@every_file
def test_columns_are_features_label_and_weight(tmp_path: Path, make: Make) -> None:
    table = {"id": LONG["id"], "price": LONG["price"], "late": [row % 3 for row in range(RECORDS)]}
    chosen: Keywords = {"features": ["price", "id"], "label": "late", "weight": "price"}
    rows = np.random.default_rng(0).permutation(RECORDS)
    x, y, weight = make(tmp_path, table, **chosen).take(rows)
    assert list(x) == ["price", "id"]
    assert (y.tolist(), weight.tolist()) == ((rows % 3).tolist(), x["price"].tolist())
    (x,) = make(tmp_path, table).take(rows)
    assert list(x) == list(table)


@every_file
def test_integers_in_a_column_of_floats_are_exact(tmp_path: Path, make: Make) -> None:
    ids = [16_777_217.0, 5.0, 2.0**53 - 1, -3.0, 0.0]
    (x,) = reader_of(make, tmp_path, {"id": ids}, {"id": "int64"}).take(np.arange(5))
    assert x["id"].dtype == np.int64
    assert x["id"].tolist() == [16_777_217, 5, 2**53 - 1, -3, 0]


@every_file
@pytest.mark.parametrize("missing", [math.nan, None])
def test_a_null_is_refused_or_filled(tmp_path: Path, make: Make, missing: float | None) -> None:
    table = {"id": [5.0, 16_777_217.0, 6.0, 7.0, missing, 8.0]}
    with pytest.raises(BadInput, match=rf"{AT}: column 'id': null, .*fill_null="):
        reader_of(make, tmp_path, table, {"id": "int64"}).take(np.arange(6))
    (x,) = reader_of(make, tmp_path, table, {"id": "int64"}, fill_null={"id": 2**53 + 1}).take(np.arange(6))
    assert x["id"].tolist() == [5, 16_777_217, 6, 7, 2**53 + 1, 8]
    for wrong in (1.5, "x", 2**64):
        with pytest.raises(BadInput, match=r"column 'id': nulls cannot become .*, which is no int64"):
            reader_of(make, tmp_path, table, {"id": "int64"}, fill_null={"id": wrong}).take(np.arange(6))


@every_file
@pytest.mark.parametrize("wrong", [1.5, math.inf, 2.0**53, -1e300])
def test_a_float_that_is_no_exact_integer_is_refused(tmp_path: Path, make: Make, wrong: float) -> None:
    table = {"id": [5.0, 6.0, 7.0, wrong, 8.0]}
    with pytest.raises(BadInput, match=rf"{AT}: column 'id': .* where integers are wanted"):
        reader_of(make, tmp_path, table, {"id": "int64"}).take(np.arange(5))


@every_file
def test_text_for_numbers_is_refused(tmp_path: Path, make: Make) -> None:
    table = {"n": ["1", "2", "x", "4"]}
    for want in ("int64", "float32"):
        with pytest.raises(
            BadInput,
            match=r"csv, line [24]: column 'n': 'x' is no (int64|double)|(parquet|block 0): column 'n' is string",
        ):
            reader_of(make, tmp_path, table, {"n": want}).take(np.arange(4))


@every_file
def test_an_integer_beyond_the_input_is_refused(tmp_path: Path, make: Make) -> None:
    with pytest.raises(BadInput, match=rf"{AT}: column 'n': 2147483648 is no int32"):
        reader_of(make, tmp_path, {"n": [1, 2, 2**31, 3]}, {"n": "int32"}).take(np.arange(4))
    (x,) = reader_of(make, tmp_path, {"n": [1, 2, 2**31 - 1, 3]}, {"n": "int32"}).take(np.arange(4))
    assert (x["n"].dtype, x["n"].tolist()) == (np.int32, [1, 2, 2**31 - 1, 3])


@every_file
def test_unsigned_ids_are_refused_or_keep_their_bits(tmp_path: Path, make: Make) -> None:
    ids = np.array([1, 2**64 - 1, 2**63, 7], np.uint64)
    for inputs in ({"id": "int64"}, {}):
        with pytest.raises(BadInput, match=r"column 'id'.*column_types=\{'id': 'uint64-bits'\}"):
            reader_of(make, tmp_path, {"id": ids}, inputs).take(np.arange(4))
        (x,) = reader_of(make, tmp_path, {"id": ids}, inputs, column_types={"id": "uint64-bits"}).take(np.arange(4))
        assert x["id"].dtype == np.int64
        assert x["id"].tolist() == ids.view(np.int64).tolist()
    (x,) = reader_of(make, tmp_path, {"id": ids}, {"id": "string"}, column_types={"id": "string"}).take(np.arange(4))
    assert x["id"].tolist() == [str(each) for each in ids]


@every_file
def test_integers_for_an_input_of_strings(tmp_path: Path, make: Make) -> None:
    """The text of a CSV is what it is; of the numbers in other files only the user knows how they are written."""
    try:
        (x,) = reader_of(make, tmp_path, {"code": [1, 2, 3, 4]}, {"code": "string"}).take(np.arange(4))
    except BadInput as error:
        assert "'string'" in str(error)  # noqa: PT017 - half of the readers take it
        made = reader_of(make, tmp_path, {"code": [1, 2, 3, 4]}, {"code": "string"}, column_types={"code": "string"})
        (x,) = made.take(np.arange(4))
    assert x["code"].tolist() == ["1", "2", "3", "4"]


@every_file
def test_a_reader_serves_several_models(tmp_path: Path, make: Make) -> None:
    reader = reader_of(make, tmp_path, {"n": [1, 2, 3]}, {})
    narrow, wide = (reader.for_inputs(ModelInputs({"n": kind})) for kind in ("int32", "int64"))
    assert [each.take(np.arange(2))[0]["n"].dtype for each in (narrow, wide, reader)] == [np.int32, np.int64, np.int64]


@every_file
def test_a_transform_sees_floats_as_they_are(tmp_path: Path, make: Make) -> None:
    reader = reader_of(
        make, tmp_path, {"id": [16_777_217.0, 5.5, 1.0]}, {"id": "float32"},
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


def test_every_public_reader_is_tested_here_or_with_the_streams_and_named_on_its_page() -> None:
    root = Path(__file__).parents[3]
    tests = [root / "tests/contracts/readers.py", *(root / "tests/worker/readers").rglob("test_*reader*.py")]
    tested, page = "".join(each.read_text() for each in tests), (root / "docs/data.md").read_text()
    names = [name for name in et.__all__ if name.endswith("Reader")]
    assert len(names) > 8
    assert [name for name in names if name not in tested or f"et.{name}" not in page] == []
