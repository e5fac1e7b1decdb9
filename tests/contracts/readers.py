"""Every reader, with how a table is put where it reads it: the contract, tests of data sets and the fuzzer go by it.

A new reader is a line in `READERS`; one of files is also a `Format`, which is mutated and put into folders.
"""

import csv
import io
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as arrow_csv
import pyarrow.parquet as pq
import ray
import ray.data
import tensorflow as tf

from elastable.worker.readers.batch.ragged import RaggedArray
from elastable.worker.readers.batch.reader import ModelInputs, Reader
from elastable.worker.readers.formats.csv_reader import CsvReader
from elastable.worker.readers.formats.parquet_reader import ParquetReader
from elastable.worker.readers.formats.ray_data_reader import RayDataReader
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.readers.pass_reader import PartReader, PassReader
from elastable.worker.readers.stream_reader import StreamReader
from tests.untyped import Keyword

Table = Mapping[str, Any]
"""Column -> a number, a string or a list for each record."""
Make = Callable[..., Reader]
"""(folder, table, options of the reader) -> the reader."""


@dataclass(frozen=True)
class Format:
    """A format of files.

    Attributes:
        write: (table, target, settings of the writer).
        small_blocks: Options with which two files of a dozen records have several blocks.
        seeds: Files that are mutated.
        options: Option of the reader -> values to read mutated files with.
    """

    reader: Callable[..., Reader]
    write: Callable[..., None]
    small_blocks: Mapping[str, object]
    seeds: Callable[[], Sequence[bytes]]
    options: Mapping[str, Sequence[object]]


_CSV_SEEDS = (
    b'user,item,price,name,y\r\n1,9007199254740993,1.5,"a, b",1\r\n2,-3,,"say ""hi""",0\n3,4,2e3,"two\nlines",1\n',
    b"a,b\n1,x\n2,y\n3,z\n",
    b"\xef\xbb\xbfid,t\n9223372036854775807,2024-01-31\n-9223372036854775808,2024-02-01\n",
)
_PARQUET_SEED = {
    "id": pa.array([1, 2**53 + 1, 3, 4, 2**63 - 1], pa.int64()),
    "x": pa.array([0.5, None, 1.5, 2.0, 3.0], pa.float32()),
    "name": pa.array(["a", "b", "c", "a", "b"]).dictionary_encode(),
    "list": pa.array([[1], [2, None], [], None, [5]], pa.list_(pa.int64())),
}


def _parquet_seeds() -> list[bytes]:
    """With and without page checksums."""
    files = []
    for checksum, compression, rows in ((True, "none", 2), (False, "snappy", 5), (True, "zstd", 5)):
        out = io.BytesIO()
        settings: dict[str, Any] = {"write_page_checksum": checksum, "compression": compression}
        pq.write_table(pa.table(_PARQUET_SEED), out, row_group_size=rows, **settings)
        files.append(out.getvalue())
    return files


FORMATS = {
    "parquet": Format(
        ParquetReader, partial(pq.write_table, row_group_size=4), {"cached_row_groups": 1}, _parquet_seeds,
        {
            "features": (None, ["id"], ["id", "list"]), "fill_null": (None, {"x": 0}, {"list": 1}),
            "fill_null_list": ({"list": [7]},),
        },
    ),
    "csv": Format(
        CsvReader, arrow_csv.write_csv, {"block_records": 4}, lambda: _CSV_SEEDS,
        {
            "column_names": (None, None, ["a", "b"]), "fill_null": (None, None, {"id": 0}),
            "encoding": ("utf-8", "latin-1", "gb18030"), "block_records": (1, 2, 100),
        },
    ),
}  # fmt: skip
"""Ending of a file's name -> how it is written and read."""


def _parts(table: Table, files: int) -> list[Table]:
    cut = len(next(iter(table.values()))) // 3 + 1
    whole = [slice(None)] if files == 1 else [slice(0, cut), slice(cut, None)]
    return [{name: values[part] for name, values in table.items()} for part in whole]


def _parquet(folder: Path, table: Table, files: int = 1, coded: bool = False, **options: Keyword) -> Reader:
    for number, part in enumerate(_parts(table, files)):
        made = {name: pa.array(values) for name, values in part.items()}
        if coded and number:
            made = {name: column.dictionary_encode() for name, column in made.items()}
        pq.write_table(pa.table(made), folder / f"part-{number}.parquet", row_group_size=3 - number)
    return ParquetReader(folder / "*.parquet", **options)


def _csv(
    folder: Path, table: Table, files: int = 1, end: str = "\n", encoding: str = "utf-8", **options: Keyword
) -> Reader:
    for number, part in enumerate(_parts(table, files)):
        with (folder / f"part-{number}.csv").open("w", newline="", encoding=encoding) as opened:
            writer = csv.writer(opened, lineterminator=end)
            writer.writerow(part)
            for row, record in enumerate(zip(*part.values(), strict=True)):
                writer.writerow(record)
                if row % 11 == 10:
                    opened.write(end)  # an empty line is no record
    if encoding != "utf-8-sig":
        options["encoding"] = encoding
    return CsvReader(folder / "*.csv", **{"block_records": 3, **options})


def start_ray() -> None:
    """Starts a Ray for this process, unless it has one; it ends with the process."""
    if not ray.is_initialized():
        ray.init(address="local", num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")


def _ray_dataset(folder: Path, table: Table, **options: Keyword) -> Reader:
    start_ray()
    whole = pa.table({name: pa.array(values) for name, values in table.items()})
    parts = [whole[start : start + 5] for start in range(0, len(whole), 5)]  # no multiple of what is read together
    return RayDataReader(ray.data.from_arrow(parts), **{"block_records": 3, **options})


def arrays(table: Table) -> dict[str, Any]:
    """Its columns as NumPy arrays, of objects where they are text or lists."""
    made: dict[str, Any] = {}
    for name, values in table.items():
        if isinstance(values[0], str | list):
            made[name] = np.empty(len(values), object)
            made[name][:] = values
        else:
            made[name] = np.array(values)
    return made


def _batches(table: Table, size: int = 3) -> Iterator[object]:
    whole = NumpyReader(arrays(table))
    for start in range(0, len(whole), size):
        yield whole.take(np.arange(start, min(start + size, len(whole))))


def _mapped(folder: Path, table: Table) -> Reader:
    made = arrays(table)
    for name, array in made.items():
        if array.dtype != object:
            np.save(folder / f"{name}.npy", array)
            made[name] = np.load(folder / f"{name}.npy", mmap_mode="r")
    return NumpyReader(made)


def _tensors(folder: Path, table: Table) -> Reader:
    lists = {name: tf.ragged.constant(list(column)) for name, column in table.items() if isinstance(column[0], list)}
    return NumpyReader({name: lists.get(name, array) for name, array in arrays(table).items()})


def _dataset(folder: Path, table: Table) -> Reader:
    made = arrays(table)
    lists = {name: tf.ragged.constant(list(column)) for name, column in table.items() if isinstance(column[0], list)}
    rows = tf.data.Dataset.from_tensor_slices({**made, **lists})
    return StreamReader(rows.ragged_batch(4))


def _tfrecord(folder: Path, table: Table) -> Reader:
    columns = arrays(table)
    kinds = {"O": tf.string, "i": tf.int64, "f": tf.float32, "b": tf.int64}
    with tf.io.TFRecordWriter(str(folder / "t.tfrecord")) as writer:
        for row in zip(*columns.values(), strict=True):
            made = {name: _feature(value) for name, value in zip(columns, row, strict=True)}
            writer.write(tf.train.Example(features=tf.train.Features(feature=made)).SerializeToString())
    features = {name: tf.io.FixedLenFeature((), kinds[array.dtype.kind]) for name, array in columns.items()}
    records = tf.data.TFRecordDataset(str(folder / "t.tfrecord")).batch(3)
    return StreamReader(records.map(lambda each: (tf.io.parse_example(each, features),)))


def _feature(value: Any) -> Any:
    if isinstance(value, str):
        return tf.train.Feature(bytes_list=tf.train.BytesList(value=[value.encode()]))
    if isinstance(value, float):
        return tf.train.Feature(float_list=tf.train.FloatList(value=[value]))
    return tf.train.Feature(int64_list=tf.train.Int64List(value=[int(value)]))


def _part(folder: Path, table: Table) -> Reader:
    longer = {name: [values[-1], *values, values[0]] for name, values in table.items()}
    whole = NumpyReader(arrays(longer))
    return PartReader(whole, 1, len(whole) - 1)


FILES: dict[str, Make] = {
    "parquet": _parquet,
    "parquet files": partial(_parquet, files=2),
    "parquet and dictionaries": partial(_parquet, files=2, coded=True),
    "csv": _csv,
    "csv files": partial(_csv, files=2, cached_blocks=1),
    "csv crlf bom": partial(_csv, end="\r\n", encoding="utf-8-sig"),
    "csv latin-1": partial(_csv, encoding="latin-1"),
    "csv gb18030": partial(_csv, encoding="gb18030"),
    "ray": _ray_dataset,
}
"""Readers of files and Arrow tables, which have options, and read a column as the model's input wants it."""
LISTS: dict[str, Make] = {
    "numpy": lambda folder, table: NumpyReader(arrays(table)),
    "tensors": _tensors,
    "dataset": _dataset,
    "stream": lambda folder, table: StreamReader(_batches(table)),
    "pass": lambda folder, table: PassReader(list(_batches(table)), shuffle=False),
    "part": _part,
    "parquet": FILES["parquet"],
    "parquet files": FILES["parquet files"],
    "ray": FILES["ray"],
}
"""Readers whose records may be lists of different lengths."""
READERS: dict[str, Make] = {**FILES, **LISTS, "mapped": _mapped, "tfrecord": _tfrecord}


def listed(values: Any) -> Any:
    """The records as lists, bytes as `str` where they are UTF-8."""
    if isinstance(values, RaggedArray):
        inner = listed(values.values)
        return [inner[start:stop] for start, stop in zip(values.splits[:-1], values.splits[1:], strict=True)]
    return [_text(value) for value in np.asarray(values).tolist()]


def _text(value: object) -> object:
    with suppress(AttributeError, UnicodeDecodeError):
        return value.decode()  # type: ignore[attr-defined]
    return value


def reader_of(make: Make, folder: Path, table: Table, inputs: Mapping[str, str], **options: Keyword) -> Reader:
    """The reader of a table for a model with these inputs, name -> dtype."""
    return make(folder, table, **options).for_inputs(ModelInputs(inputs))
