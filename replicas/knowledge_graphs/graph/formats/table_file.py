"""CSV and Parquet files of triples, with named columns."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.csv
import pyarrow.parquet

from elastable.embedding_store.errors import BadInput
from elastable.replicas.knowledge_graphs.graph.triple_file import NamedColumns
from elastable.worker.readers.formats.arrow_columns import At, as_type

__all__ = ["TABLE_ENDINGS", "read_table_columns"]

TABLE_ENDINGS = (".csv", ".csv.gz", ".parquet")
"""Endings of files with named columns."""


def read_table_columns(file: Path, columns: tuple[str, ...], header: bool = True) -> NamedColumns:
    """Reads columns of names; what is not text becomes text, such as integers.

    Args:
        file: A CSV file (`.csv`, `.csv.gz`), or a Parquet file.
        columns: Names of the columns; others are skipped.
        header: Whether a CSV file's first line names its columns; without, it must have as many as `columns`, in this
            order.

    Raises:
        BadInput: a file that cannot be read, a column that is missing, or a row without a name or with a float that is
            no exact integer; names the row.
    """
    if file.suffix == ".parquet" and not header:
        raise BadInput(f"{file}: columns of a Parquet file have names; leave out header=no")
    try:
        table = _parquet(file, columns) if file.suffix == ".parquet" else _csv(file, columns, header)
    except (pa.ArrowException, OSError, ValueError) as error:
        raise BadInput(f"{file}: cannot be read ({error})") from error
    found = []
    for name in columns:
        encoded = table[name].combine_chunks().dictionary_encode()
        names = encoded.dictionary.to_pylist()
        if encoded.null_count or not all(names):
            empty = [place for place, each in enumerate(table[name].to_pylist()) if not each]
            raise BadInput(f"{file}, row {empty[0]} (from 0): column {name!r} is empty")
        found.append((names, np.asarray(encoded.indices, np.int32)))
    return found


def _require_columns(file: Path, present: list[str], columns: tuple[str, ...]) -> None:
    for name in columns:
        if present.count(name) != 1:
            raise BadInput(
                f"{file}: no column {name!r} among {', '.join(map(repr, present[:20]))}, or several; name columns as "
                "FOLDER?head=A&relation=B&tail=C"
            )


def _csv(file: Path, columns: tuple[str, ...], header: bool) -> pa.Table:
    types = {name: pa.string() for name in columns}
    options = pyarrow.csv.ConvertOptions(column_types=types)
    named = pyarrow.csv.ReadOptions(column_names=None if header else list(columns))
    table = pyarrow.csv.read_csv(file, read_options=named, convert_options=options)
    _require_columns(file, table.column_names, columns)
    return table.select(list(columns))


def _parquet(file: Path, columns: tuple[str, ...]) -> pa.Table:
    with pyarrow.parquet.ParquetFile(file) as read:
        _require_columns(file, read.schema_arrow.names, columns)
        table = read.read(columns=list(columns))
    return pa.table({name: _as_text(file, name, table[name]) for name in columns})


def _as_text(file: Path, name: str, values: pa.ChunkedArray) -> pa.ChunkedArray:
    """Names as text: of floats, as pandas makes them of integers beside nulls, the integers' digits."""
    if pa.types.is_floating(values.type):
        at = At(name, lambda record: f"{file}, row {record} (from 0)")
        values = pa.chunked_array([as_type(values.combine_chunks(), pa.int64(), at)])
    return values.cast(pa.string())
