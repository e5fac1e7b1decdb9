"""Columns as pandas, Spark and people write them: the right array, or an error that names file, place and column."""

import decimal
import gzip
import re
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.reader import Batch, ModelInputs
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from tests.contracts.readers import listed
from tests.untyped import Keyword


def parquet(folder: Path, files: object, want: str = "", **options: Keyword) -> Batch:
    """All records of files with a column "c": Arrow arrays, tables or data frames, one or a list of them."""
    for number, file in enumerate(files if isinstance(files, list) else [files]):
        path = folder / f"part-{number}.parquet"
        if isinstance(file, pd.DataFrame):
            file.to_parquet(path)
        else:
            pq.write_table(file if isinstance(file, pa.Table) else pa.table({"c": file}), path, row_group_size=2)
    reader = ParquetReader(folder / "*.parquet", **options)
    read = reader.for_inputs(ModelInputs({"c": want}, own_step=False)) if want else reader
    return read.take(np.arange(len(reader)))


def arrow(values: object, kind: object = None) -> pa.Array:
    return pa.array(values, kind)


NULLED = arrow([[1, 2], None, [3, None]], pa.list_(pa.int64(), 2))
TEXT, INTEGER, BOOLEAN = ({"column_types": {"c": name}} for name in ("string", "int64", "bool"))
DIGITS = [arrow([98765432109.0, None, np.nan]), arrow([98765432109]), arrow([decimal.Decimal("98765432109.00")])]
UNSIGNED = arrow([[2**64 - 1], [], [1, 2**63]], pa.list_(pa.uint64()))

RIGHT = {
    "int32 and int64": ([arrow([1], pa.int32()), arrow([2**53 + 1])], "int64", {}, [1, 2**53 + 1]),
    "int64 and double": ([arrow([2**60]), arrow([1.0, None])], "int64", {"fill_null": {"c": -1}}, [2**60, 1, -1]),
    "int and double": ([arrow([2**60 + 1]), arrow([1.5])], "float32", {}, [2.0**60, 1.5]),
    "uint64 and int64": ([arrow([7], pa.uint64()), arrow([-2])], "", {}, [7, -2]),
    "uint8 and int8": ([arrow([200], pa.uint8()), arrow([-2], pa.int8())], "", {}, [200, -2]),
    "bool and int": ([arrow([True]), arrow([5])], "int64", {}, [1, 5]),
    "null and int": ([pa.nulls(1), arrow([5])], "int64", {"fill_null": {"c": 0}}, [0, 5]),
    "null and list": ([pa.nulls(1), arrow([[5]])], "int64", {"fill_null_list": {"c": []}}, [[], [5]]),
    "null alone": (pa.nulls(1), "int64", {"fill_null": {"c": 3}}, [3]),
    "string and dictionary": ([arrow(["007"]), arrow(["b"]).dictionary_encode()], "string", {}, ["007", "b"]),
    "string and large_string": ([arrow(["a"]), arrow(["b"], pa.large_string())], "", {}, ["a", "b"]),
    "string_view": (arrow(["a", "b"], pa.string_view()), "string", {}, ["a", "b"]),
    "binary": (arrow([b"a\xe9"]), "string", {}, [b"a\xe9"]),
    "columns in another order": (
        [pa.table({"d": [0.5], "c": [1]}), pa.table({"c": [2], "d": [1.5]})], "int64", {}, [1, 2],
    ),
    "lists of one size with nulls": (
        NULLED, "int64", {"fill_null": {"c": 9}, "fill_null_list": {"c": [7, 8]}}, [[1, 2], [7, 8], [3, 9]],
    ),
    "lists of floats": (arrow([[1.0, None]], pa.list_(pa.float64(), 2)), "int64", {"fill_null": {"c": 0}}, [[1, 0]]),
    "lists of one size and others": (
        [NULLED[:1], arrow([[3], []], pa.list_(pa.int32()))], "int64", {}, [[1, 2], [3], []],
    ),
    "lists of two sizes": ([NULLED[:1], arrow([[3]], pa.list_(pa.int64(), 1))], "int64", {}, [[1, 2], [3]]),
    "lists of lists": (
        arrow([[[1], [2, None]], [], [None]]), "int64", {"fill_null": {"c": 9}, "fill_null_list": {"c": []}},
        [[[1], [2, 9]], [], [[]]],
    ),
    "list_view": (
        arrow([[1], None, [2, None]], pa.list_view(pa.int64())), "int64",
        {"fill_null": {"c": 9}, "fill_null_list": {"c": [7]}}, [[1], [7], [2, 9]],
    ),
    "lists of strings": (arrow([["a"], ["b", "c"]], pa.large_list(pa.string())), "string", {}, [["a"], ["b", "c"]]),
    "empty lists": (arrow([[], []], pa.list_(pa.null())), "int64", {}, [[], []]),
    "a decimal by name": (arrow([decimal.Decimal(3)]), "int64", {"column_types": {"c": "int64"}}, [3]),
    "half floats": (arrow(np.array([1, 2047], np.float16)), "int64", {}, [1, 2047]),
    "the last exact float32": (arrow([2.0**24 - 1], pa.float32()), "int64", {}, [2**24 - 1]),
    "int64 with a null": (
        arrow([2**53 + 1, None, -(2**63)]), "", {"fill_null": {"c": 2**53 + 3}}, [2**53 + 1, 2**53 + 3, -(2**63)],
    ),
    "bits of uint64": (UNSIGNED, "", {"column_types": {"c": "uint64-bits"}}, [[-1], [], [1, -(2**63)]]),
    "bits of lists": (UNSIGNED, "", {"column_types": {"c": "list<uint64-bits>"}}, [[-1], [], [1, -(2**63)]]),
    "digits of lists": (UNSIGNED[:1], "", {"column_types": {"c": "string"}}, [[str(2**64 - 1)]]),
    "text by name": (arrow(["5", "6"]), "", {"column_types": {"c": "int64"}}, [5, 6]),
    "lists of text by name": (arrow([["1"], []]), "", {"column_types": {"c": "list<int64>"}}, [[1], []]),
    "digits of floats, integers and decimals": (
        DIGITS, "string", TEXT | {"fill_null": {"c": ""}}, ["98765432109", "", "", "98765432109", "98765432109"],
    ),
    "digits of lists of floats": (arrow([[1e10], []]), "string", TEXT, [["10000000000"], []]),
    "timestamps of one unit": ([arrow([7], pa.timestamp("us")), pa.nulls(0)], "int64", INTEGER, [7]),
    "0 and 1 as booleans": (arrow([0.0, 1.0]), "int64", BOOLEAN, [0, 1]),
    "days": (arrow([3], pa.date32()), "int64", {"column_types": {"c": "int32"}}, [3]),
    "a plus": (arrow(["+1", "2"]), "int64", INTEGER, [1, 2]),
    "NaN in a column that is filled": (arrow([0.5, np.nan]), "float32", {"fill_null": {"c": 2}}, [0.5, 2]),
    "pandas Int64": (
        pd.DataFrame({"c": pd.array([1, None, 2**60], "Int64")}), "int64", {"fill_null": {"c": 0}}, [1, 0, 2**60],
    ),
    "pandas strings": (pd.DataFrame({"c": ["007", None]}), "string", {"fill_null": {"c": ""}}, ["007", ""]),
    "pandas categories": (pd.DataFrame({"c": pd.Categorical(["b", "a", "b"])}), "string", {}, ["b", "a", "b"]),
    "pandas categories of integers": (pd.DataFrame({"c": pd.Categorical([2**60, 7])}), "int64", {}, [2**60, 7]),
}  # fmt: skip


@pytest.mark.parametrize(("files", "want", "options", "right"), RIGHT.values(), ids=RIGHT)
def test_right_values(tmp_path: Path, files: object, want: str, options: dict[str, Keyword], right: object) -> None:
    (x,) = parquet(tmp_path, files, want, **options)
    assert listed(x["c"]) == right


UUID = pa.ExtensionArray.from_storage(pa.uuid(), pa.array([b"0" * 16], pa.binary(16)))
NOT_UTF8 = pa.StringArray.from_buffers(
    3, pa.py_buffer(np.array([0, 1, 3, 4], np.int32).tobytes()), pa.py_buffer(b"a\xe9bc")
)

REFUSED = {
    "int and string": ([arrow([1]), arrow(["x"])], "", {}, "part-1.parquet: column 'c' is string, and int64 in"),
    "int and double": ([arrow([1]), arrow([1.0])], "", {}, "part-1.parquet: column 'c' is double, and int64 in .*"),
    "bool and int": ([arrow([True]), arrow([2])], "", {}, "part-1.parquet: column 'c' is int64, and bool in"),
    "missing later": ([arrow([1]), pa.table({"d": [1]})], "", {}, "part-1.parquet: no column 'c'; .*part-0"),
    "missing first": (
        [pa.table({"d": [1]}), pa.table({"c": [1], "d": [2]})], "int64", {}, "part-0.parquet: no column 'c'",
    ),
    "null alone": (pa.nulls(2), "", {}, "part-0.parquet: column 'c' holds nulls alone; say column_types="),
    "decimal": (arrow([decimal.Decimal("1.5")]), "int64", {}, r"column 'c': type decimal128\(2, 1\)"),
    "a decimal's fraction": (
        arrow([decimal.Decimal(1), decimal.Decimal("1.5")]), "int64", {"column_types": {"c": "int64"}},
        r"row 1: column 'c': Decimal\('1.5'\) is no int64",
    ),
    "date": (arrow([1], pa.date32()), "int64", {}, "column 'c': type date32"),
    "pandas timestamp": (
        pd.DataFrame({"c": pd.to_datetime(["2020-01-01"])}), "int64", {}, "column 'c': type timestamp",
    ),
    "pandas period": (
        pd.DataFrame({"c": pd.period_range("2020", periods=2)}), "int64", {}, "column 'c': type extension",
    ),
    "duration": (arrow([1], pa.duration("s")), "", {}, "column 'c': type duration"),
    **{
        f"{kinds[0]} and {kinds[1]}": (
            [arrow([1], kind) for kind in kinds], "", options,
            re.escape(f"part-1.parquet: column 'c' is {kinds[1]}, and {kinds[0]} in"),
        )
        for kinds, options in (
            ((pa.timestamp("us"), pa.timestamp("ns")), INTEGER),
            ((pa.timestamp("us"), pa.timestamp("us", "UTC")), TEXT),
            ((pa.duration("ms"), pa.duration("us")), INTEGER),
            ((pa.date32(), pa.int32()), TEXT),
        )
    },
    "timestamps in lists": (
        [arrow([[1]], pa.list_(pa.timestamp(unit))) for unit in ("us", "ns")], "", INTEGER, "'c' is timestamp.*in .*-0",
    ),
    "a boolean's text": ([arrow([1]), arrow([True])], "", TEXT, "part-1.parquet: column 'c' is bool, and int64 in"),
    "a fraction's text": (arrow([1.5]), "string", TEXT, r"row 0: column 'c': 1.5 where .*write the column as text"),
    "a decimal fraction's text": (arrow([decimal.Decimal("1.50")]), "string", TEXT, "row 0: .*'1.50'.*column as text"),
    "NaN as text": (arrow([1.0, np.nan]), "string", TEXT, "row 1: column 'c': null"),
    "a rounded float's text": (arrow([2.0**24], pa.float32()), "string", TEXT, r"row 0: .* below 2\*\*24"),
    "2 as a boolean": (pa.table({"c": [1, 2], "d": [1, 2]}), "", BOOLEAN | {"label": "c"}, "row 1: .*: 2 is no bool"),
    "3 as a boolean": (arrow([1, 3]), "float32", BOOLEAN, "row 1: column 'c': 3 is no bool"),
    "300 as an int8": (arrow([[], [300]]), "int64", {"column_types": {"c": "int8"}}, "row 1: .*: 300 is no int8"),
    "a float's fraction by name": (arrow([1.0, 1.5]), "float32", INTEGER, "row 1: column 'c': 1.5 where integers"),
    "days as int64": (arrow([3], pa.date32()), "int64", INTEGER, "row 0: .*say column_types={'c': 'int32'}.*'string'"),
    "map": (arrow([[("a", 1)]], pa.map_(pa.string(), pa.int64())), "int64", {}, "column 'c': type map"),
    "uuid": (UUID, "string", {}, "column 'c': type extension<arrow.uuid>"),
    "no UTF-8": (NOT_UTF8, "string", {}, r"part-0.parquet, row 1: column 'c': is no UTF-8"),
    "a null bool": (arrow([True, None]), "bool", {}, "row 1: column 'c': null, one of 1 nulls in a column of bool"),
    "a null list": (NULLED, "int64", {}, r"row 1: column 'c': null, .* list of 2 values in their place"),
    "a null in a list": (
        NULLED, "int64", {"fill_null_list": {"c": [0, 0]}},
        "row 2: column 'c': null, one of 1 nulls in a column of int64",
    ),
    "a list that does not fit": (
        NULLED, "int64", {"fill_null_list": {"c": [1]}}, r"'c': nulls cannot become \[1\], which is no fixed_size",
    ),
    "a fraction in fill_null_list": (
        NULLED, "int64", {"fill_null_list": {"c": [1, 1.5]}}, r"nulls cannot become \[1, 1.5\]",
    ),
    "a list in fill_null": (NULLED, "int64", {"fill_null": {"c": []}}, "fill_null_list= replaces null lists"),
    "a scalar in fill_null_list": (NULLED, "int64", {"fill_null_list": {"c": 0}}, "give a list"),
    "a fraction in a list": (arrow([[1.0], [], [2.0, 2.5]]), "int64", {}, "row 2: column 'c': 2.5 where integers"),
    "float32 at 2**24": (
        arrow([5, 2**24], pa.float32()), "int64", {}, r"row 1: column 'c': 16777216.0 .* below 2\*\*24",
    ),
    "bits of lists unsaid": (UNSIGNED, "", {}, r"column_types=\{'c': 'uint64-bits'\}"),
    "a fraction by name": (arrow([1.0, 2.5]), "", {"column_types": {"c": "int64"}}, r"row 1: column 'c': 2\.5 where"),
    "a type of no column": (arrow([1]), "", {"column_types": {"m": "int64"}}, "no column 'm'; its columns are 'c'"),
    "struct": (arrow([{"a": 1}]), "", {}, "column 'c': type struct"),
    "a text target": (
        pa.table({"c": [1], "y": ["a"]}), "int64", {"label": "y"}, "column 'y' is string, and the model takes",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("files", "want", "options", "message"), REFUSED.values(), ids=REFUSED)
def test_refused_by_name(tmp_path: Path, files: object, want: str, options: dict[str, Keyword], message: str) -> None:
    with pytest.raises(BadInput, match=message):
        parquet(tmp_path, files, want, **options)


def test_a_column_that_a_file_lacks_does_not_matter_where_nothing_wants_it(tmp_path: Path) -> None:
    files = [pa.table({"c": [1], "old": [1], "t": arrow([1], pa.date32())}), pa.table({"c": [2], "new": [1]})]
    (x,) = parquet(tmp_path, files, "int64")
    assert {name: values.tolist() for name, values in x.items()} == {"c": [1, 2]}
    with pytest.raises(BadInput, match=r"part-1\.parquet: no column 'old'"):
        parquet(tmp_path, files, "int64", features=["c", "old"])
    with pytest.raises(BadInput, match=r"part-0\.parquet: no column 'new'"):
        parquet(tmp_path, files, "int64", label="new")


def text(folder: Path, content: bytes | str, want: str = "", **options: Keyword) -> Batch:
    (folder / "t.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    reader = CsvReader(folder / "t.csv", **options)
    read = reader.for_inputs(ModelInputs({"c": want}, own_step=False)) if want else reader
    return read.take(np.arange(len(reader)))


CSV_RIGHT = {
    "leading zeros": ("c\n007\n7\n", "string", {}, ["007", "7"]),
    "signs and spaces": ("c\n+7\n 8\n-0\n", "int64", {}, [7, 8, 0]),
    "1.0 and 1": ("c\n1\n2\n3.0\n", "int64", {"block_records": 2}, [1, 2, 3]),
    "exponents": ("c\n1e3\n2\n", "int64", {}, [1000, 2]),
    "true for an integer": ("c\ntrue\nfalse\n", "int64", {}, [1, 0]),
    "integers for floats, then fractions": ("c\n1\n2\n1.5\n", "float32", {"block_records": 2}, [1, 2, 1.5]),
    "NA is text": ("c,d\nNA,1\n,2\n", "string", {}, ["NA", ""]),
    "NA is null": ("c,d\nNA,1\n5,2\n", "int64", {"fill_null": {"c": 2**53 + 1}}, [2**53 + 1, 5]),
    "nothing but nulls": ("c,d\n,1\n,2\n", "int64", {"fill_null": {"c": 4}}, [4, 4]),
    "dates are text": ("c\n2020-01-01\n", "string", {}, ["2020-01-01"]),
    "other columns are no matter": ("c,d\n1,caf\xe9\n".encode("latin-1"), "int64", {}, [1]),
    "latin-1": ("c\ncaf\xe9\n".encode("latin-1"), "string", {"encoding": "latin-1"}, ["café"]),
    "cp1252 in quotes": ('c,d\n"a\x93,\nb",1\n'.encode("latin-1"), "string", {"encoding": "cp1252"}, ["a“,\nb"]),
    "without a model": (f"c\n{2**53 + 1}\n{-(2**63)}\n{2**63 - 1}\n", "", {}, [2**53 + 1, -(2**63), 2**63 - 1]),
    "floats as integers by name": (
        "c,d\n16777217.0,1\n,2\n", "", INTEGER | {"fill_null": {"c": 0}}, [16_777_217, 0],
    ),
    "digits": (f"c\n1\n{2**63}\n", "", {"column_types": {"c": "string"}}, ["1", str(2**63)]),
    "empty text that is filled": ("c,y\n,1\nx,2\n", "string", {"fill_null": {"c": "NA"}}, ["NA", "x"]),
    "empty text that is not": ("c,y\n,1\nx,2\n", "string", {}, ["", "x"]),
    "one quoted name with a semicolon": ('"c","d;e;f"\n1,2\n', "int64", {}, [1]),
}  # fmt: skip


@pytest.mark.parametrize(("content", "want", "options", "right"), CSV_RIGHT.values(), ids=CSV_RIGHT)
def test_csv_text_is_read_as_the_input_wants_it(
    tmp_path: Path, content: bytes | str, want: str, options: dict[str, Keyword], right: object
) -> None:
    (x, *_) = text(tmp_path, content, want, **options)
    assert x["c"].tolist() == right


CSV_REFUSED = {
    "text for floats": ("c\n1.5\n\"two\nlines\"\n", "float32", {}, r"line 3: column 'c': 'two\\nlines' is no double"),
    "thousands": ('c\n"1,000"\n', "int64", {}, "line 2: column 'c': '1,000' is no int64"),
    "yes for a boolean": ("c\nyes\n", "bool", {}, "line 2: column 'c': 'yes' is no bool"),
    "hexadecimal": ("c\n7\n0x10\n", "int64", {}, r"line 3: column 'c': '0x10' is no int64: write it in decimal"),
    "hexadecimal, untyped": ("c\n7\n0x10\n", "", {}, r"line 3: column 'c': '0x10' is no int64: .* or say .*'string'"),
    "UTF-16 unsaid": ("c\n1\n".encode("utf-16"), "int64", {}, "it is UTF-16: convert the file to UTF-8"),
    "one of several": ("c\nyes\nno\n", "float32", {}, r"line 2: column 'c': 'yes' is no double$"),
    "a later fraction": (
        "c\n1\n2\n1.5\n", "", {"block_records": 2}, r"line 4: column 'c': '1.5' is no int64; say .*'float64'",
    ),
    "a text target": ("c,y\n1,a\n", "int64", {"label": "y"}, "line 2: column 'y': 'a' is no double"),
    "Latin-1 and malformed": ("c,d\n1,2\n\xe9\n".encode("latin-1"), "", {}, r"line 3: .*Expected 2 columns, got 1"),
    "Latin-1": ("c\nab\ncaf\xe9\n".encode("latin-1"), "string", {}, r"line 3: column 'c': b'caf\\xe9' .* encoding="),
    "Latin-1 without a model": ("c\nab\ncaf\xe9\n".encode("latin-1"), "", {}, r"line 3: column 'c': .* encoding="),
    "Latin-1 later": (
        "c\na\nb\n\xe9\n".encode("latin-1"), "", {"block_records": 2}, r"line 4: column 'c': .* encoding=",
    ),
    "no cp1252": (b"c\na\n\x81\n", "string", {"encoding": "cp1252"}, "line 3: is no cp1252"),
    "UTF-16": ("c\n1\n".encode("utf-16"), "", {"encoding": "utf-16"}, "encoding='utf-16'.* convert the files to UTF-8"),
    "a pipe in Shift JIS": (b"c\n1\n", "", {"encoding": "shift_jis", "delimiter": "|"}, "convert the files to UTF-8"),
    "an unknown encoding": (b"c\n1\n", "", {"encoding": "klingon"}, "unknown encoding: klingon"),
    "beyond int64 without a model": (f"c\n1\n{2**63}\n", "", {}, f"beyond int64, such as {2**63}.*uint64-bits"),
    "beyond int64 later": (
        f"c\n1\n2\n{2**63}\n", "", {"block_records": 2}, rf"line 4: .*'{2**63}' .*\{{'c': 'uint64-bits'\}}.*'string'",
    ),
    "gzip": (gzip.compress(b"c\n1\n"), "", {}, "t.csv: is a gzip file, no CSV: decompress it"),
    "Parquet": (b"PAR1\x15\x04", "", {}, "t.csv: is a Parquet file, no CSV: .*et.ParquetReader"),
    "a quoted header cut by semicolons": ('"c";"d"\n1;2\n', "", {}, "is cut by ';', not by ','; say delimiter=';'"),
    "a line for Excel": ("sep=;\nc;d;e\n1;2;3\n", "", {"delimiter": ";"}, "'sep=;' .*: delete it; say delimiter=';'"),
    "5,000 digits": (f"c\n{'9' * 5_000}\n", "", {}, r"beyond int64, such as 9{40}\.\.\. \(5000 digits\)"),
    "a header that is no UTF-8": ("größe,c\n1,2\n".encode("latin-1"), "", {}, r"t\.csv: no header can be read from it"),
    "two columns of a name": ("a,a,c\n1,2,3\n", "", {"label": "c"}, r"t\.csv: 2 of its columns are called 'a'"),
    "nulls alone": ("c,d\n,1\n", "", {}, "column 'c' holds nulls alone"),
    "a header cut by semicolons": ("c;d\n1;2\n", "int64", {}, "'c;d' is cut by ';', not by ','; say delimiter=';'"),
    "a decimal comma": ("c;d,e;f\n1;2,5;3\n", "int64", {}, "is cut by ';', not by ','; say delimiter=';'"),
    "records cut by pipes": ("1|2\n", "int64", {"column_names": ["c", "d"]}, r"line 1: .*say delimiter='\|'"),
    "fill_null that is no dict": ("c\n1\n", "", {"fill_null": 0}, "fill_null=0: give a dict"),
    "a type that is no name": ("c\n1\n", "", {"column_types": {"c": pa.int64()}}, "the name of an Arrow type, such as"),
    "no type of Arrow": ("c\n1\n", "", {"column_types": {"c": "number"}}, "no Arrow type"),
    "a long delimiter": ("c\n1\n", "", {"delimiter": ";;"}, "delimiter ';;'"),
    "no header": ("", "", {}, "no header"),
    "no records": ("a,b\n", "", {}, "empty, there must be at least one record"),
    "too few fields": ("a,b\n1,2\n\n3\n", "", {}, "t.csv, line 4: .*Expected 2 columns, got 1"),
    "too many fields": ('a,b\n1,"x\ny"\n2,z\n3,w,v\n', "", {}, "t.csv, line 5: .*Expected 2 columns, got 3"),
    "an open quote": (
        'a,b\n1,2\n3,"never\nclosed\n', "", {}, "t.csv, line 3: the quote opened in this record is never closed",
    ),
    "a header cut by tabs": ("a\tb,c\td\n1\t2,5\t3\n", "", {}, r"cut by '\\t', not by ','; say delimiter='\\t'"),
}  # fmt: skip


@pytest.mark.parametrize(("content", "want", "options", "message"), CSV_REFUSED.values(), ids=CSV_REFUSED)
def test_csv_is_refused_by_file_line_and_value(
    tmp_path: Path, content: bytes | str, want: str, options: dict[str, Keyword], message: str
) -> None:
    with pytest.raises(BadInput, match=message):
        text(tmp_path, content, want, **options)


def test_folder_values_are_read_as_the_input_wants_them(tmp_path: Path) -> None:
    for code in ("007", "7"):
        (tmp_path / f"c={code}").mkdir()
        pq.write_table(pa.table({"d": [1]}), tmp_path / f"c={code}" / "a.parquet")
    reader = ParquetReader(tmp_path)
    for want, right in (("string", ["007", "7"]), ("int64", [7, 7]), ("float32", [7.0, 7.0])):
        (x,) = reader.for_inputs(ModelInputs({"c": want}, own_step=False)).take(np.arange(2))
        assert x["c"].tolist() == right
    (tmp_path / "c=x").mkdir()
    pq.write_table(pa.table({"d": [1]}), tmp_path / "c=x" / "a.parquet")
    for want in ("int64", "float32"):
        with pytest.raises(BadInput, match="column 'c'"):
            ParquetReader(tmp_path).for_inputs(ModelInputs({"c": want}, own_step=False)).take(np.arange(3))


def test_a_folder_and_a_column_of_one_name_must_say_the_same(tmp_path: Path) -> None:
    (tmp_path / "c=5").mkdir()
    pq.write_table(pa.table({"c": [5, 5]}), tmp_path / "c=5" / "a.parquet")
    assert ParquetReader(tmp_path).take(np.arange(2))[0]["c"].tolist() == [5, 5]
    pq.write_table(pa.table({"c": [5, 6]}), tmp_path / "c=5" / "a.parquet")
    with pytest.raises(BadInput, match=r"a\.parquet, row 1: column 'c': 6, and its folder is c=5; rename"):
        ParquetReader(tmp_path).take(np.arange(2))


def test_thousands_of_columns_are_refused_in_few_words(tmp_path: Path) -> None:
    names = ",".join(f"c{number}" for number in range(5_000))
    (tmp_path / "t.csv").write_text(f"{names}\n{'1,' * 4_999}1\n")
    with pytest.raises(BadInput, match=r"no column 'y'; its columns are 'c0', .*, 'c19', \.\.\. \(5000\)$") as message:
        CsvReader(tmp_path / "t.csv", label="y")
    assert len(str(message.value)) < 400
    reader = CsvReader(tmp_path / "t.csv", label="c7").for_inputs(ModelInputs({"c4999": "int64"}, own_step=False))
    assert list(reader.take(np.array([0]))[0]) == ["c4999"]


def test_parquet_names_that_are_there_twice_or_no_utf8(tmp_path: Path) -> None:
    path = tmp_path / "t.parquet"
    pq.write_table(pa.Table.from_arrays([pa.array([1]), pa.array([2]), pa.array([3])], names=["a", "a", "y"]), path)
    with pytest.raises(BadInput, match=r"t\.parquet: 2 of its columns are called 'a'"):
        ParquetReader(path, label="y").take(np.array([0]))
    assert ParquetReader(path, features=["y"]).take(np.array([0]))[0]["y"] == [3]
    pq.write_table(pa.table({"name_of_it": [1, 2]}), path, store_schema=False)
    path.write_bytes(path.read_bytes().replace(b"name_of_it", b"n\xffme_of_it"))
    with pytest.raises(BadInput, match=r"t\.parquet: "):
        ParquetReader(path).take(np.array([0]))


def test_a_column_that_the_model_takes_and_no_file_has_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_text(",".join([*(f"c{i}" for i in range(40)), "y"]) + "\n" + ",".join(["1"] * 41) + "\n")
    reader = CsvReader(tmp_path / "a.csv", label="y")
    with pytest.raises(BadInput, match=r"no column 'item', which the model takes; its columns are 'c0', .*'c19'$"):
        reader.for_inputs(ModelInputs({"item": "int64"}, own_step=False))


def test_text_of_numbers_with_a_point_is_warned_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    for text, warned in (("7.0", True), ("7.5", False)):  # the latter may be versions
        (tmp_path / "a.csv").write_text(f"item,y\n{text},1\n,2\n")
        reader = CsvReader(tmp_path / "a.csv", label="y").for_inputs(ModelInputs({"item": "string"}, own_step=False))
        assert reader.take(np.arange(2))[0]["item"].tolist() == [text, ""]
        assert ("the text '7.0' is not '7'" in caplog.text) is warned
        caplog.clear()
