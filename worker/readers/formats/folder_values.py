"""Columns from folder names, as in Hive: `day=2024-01-31/part-0.parquet`."""

from __future__ import annotations

import re
from collections.abc import Sequence

import pyarrow as pa

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.data_files import DataFile

__all__ = ["folder_type", "require_same_folders"]

_INTEGER = re.compile(r"[+-]?\d+")


def require_same_folders(files: Sequence[DataFile]) -> None:
    """Raises `BadInput` where the keys of the `key=value` folders differ from file to file."""
    keys = [key for key, _ in files[0].partitions]
    for file in files:
        found = [key for key, _ in file.partitions]
        if found != keys:
            raise BadInput(
                f"{file}: its folders name {', '.join(found) or 'no column'}, those of {files[0]} "
                f"{', '.join(keys) or 'none'}; all files of a data set must have the same"
            )


def folder_type(files: Sequence[DataFile], key: str, want: str) -> pa.DataType:
    """Arrow type of a folder's values: as the model's input wants it, else int64 if all are integers.

    Raises:
        BadInput: a value beyond int64.
    """
    if want.startswith(("float", "bfloat")):
        return pa.float64()
    values = [(file, value) for file in files if (value := dict(file.partitions)[key]) is not None]
    if want == "string" or not values or not all(_INTEGER.fullmatch(value) for _, value in values):
        return pa.string()
    for file, value in values:  # Python makes no numbers of thousands of digits
        if len(value) > 4_000 or not -(2**63) <= int(value) < 2**63:
            raise BadInput(f"{file}: folder {key}={value[:40]}: beyond int64; say column_types={{{key!r}: 'string'}}")
    return pa.int64()
