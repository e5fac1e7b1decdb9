"""Columns from folder names, as in Hive: `day=2024-01-31/part-0.parquet`."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import pyarrow as pa

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.data_files import DataFile

__all__ = ["partition_scalars", "partition_types"]

_INTEGER = re.compile(r"[+-]?\d+")


def partition_types(files: Sequence[DataFile], types: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
    """Key -> Arrow type of the `key=value` folders of all files.

    A key whose values are all integers is int64; every other is a string.

    Args:
        files: Files in folders with the same keys.
        types: Column -> Arrow type that overrides the inferred one.

    Raises:
        BadInput: keys that differ from file to file, or a value beyond int64.
    """
    keys = tuple(key for key, _ in files[0].partitions)
    for file in files:
        found = tuple(key for key, _ in file.partitions)
        if found != keys:
            raise BadInput(
                f"{file}: its folders name {', '.join(found) or 'no column'}, those of {files[0]} "
                f"{', '.join(keys) or 'none'}; all files of a data set must have the same"
            )
    return {key: types.get(key) or _type_of(files, key) for key in keys}


def partition_scalars(file: DataFile, types: Mapping[str, pa.DataType]) -> dict[str, pa.Scalar]:
    """Key -> Arrow scalar of a file's folders.

    Raises:
        BadInput: a value that is not of its type.
    """
    scalars = {}
    for key, value in file.partitions:
        try:
            scalars[key] = pa.scalar(value, pa.string()).cast(types[key])
        except pa.ArrowException as error:
            raise BadInput(f"{file}: folder {key}={value}: is no {types[key]}: {error}") from error
    return scalars


def _type_of(files: Sequence[DataFile], key: str) -> pa.DataType:
    values = [(file, value) for file in files if (value := dict(file.partitions)[key]) is not None]
    if not values or not all(_INTEGER.fullmatch(value) for _, value in values):
        return pa.string()
    for file, value in values:
        if len(value) > 4_000 or not -(2**63) <= int(value) < 2**63:
            raise BadInput(f"{file}: folder {key}={value[:40]}: beyond int64; say column_types={{{key!r}: 'string'}}")
    return pa.int64()
