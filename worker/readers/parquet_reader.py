"""Records in Parquet files: row groups are the ranges."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.arrow_columns import ColumnChoice, refuse_type, to_arrays
from elastable.worker.readers.block_reader import Block, BlockReader, Transform, checked_paths

__all__ = ["ParquetReader"]


class ParquetReader(BlockReader):
    """Parquet files as one record space, in the order given.

    x is a dict of arrays: see `arrow_columns.to_arrays` for their types.
    Strings are arrays of `str`, because dictionary codes would change their
    meaning from one row group to the next.

    Args:
        paths: A file, or several of one schema.
        features: Columns that make up x; None: all but label and weight.
        label: Column of the target; None: batches are `(x,)`.
        weight: Column of the sample weights.
        transform: Batch -> batch, one record for each.
        fill_null: Column -> value in place of nulls.
        cached_row_groups: Decoded row groups that are kept.

    Raises:
        BadInput: no records; a missing or broken file; a missing column; a
            column of a type that cannot be read, or of different types in two
            files.
    """

    def __init__(
        self,
        paths: str | Path | Sequence[str | Path],
        features: Sequence[str] | None = None,
        label: str | None = None,
        weight: str | None = None,
        transform: Transform | None = None,
        *,
        fill_null: Mapping[str, Any] | None = None,
        cached_row_groups: int = 4,
    ) -> None:
        self._files = checked_paths(paths, "Parquet")
        choice = ColumnChoice(features, label, weight, fill_null or {})
        self._metadata = [_metadata(file) for file in self._files]
        schemas = [metadata.schema.to_arrow_schema() for metadata in self._metadata]
        names = choice.feature_names(schemas[0].names, str(self._files[0]))
        self._columns = choice.columns(names)
        for file, schema in zip(self._files, schemas, strict=True):
            choice.feature_names(schema.names, str(file))
            self._check_types(file, schema, schemas[0])
        self._places = [
            (place, group) for place, metadata in enumerate(self._metadata) for group in range(metadata.num_row_groups)
        ]
        counts = [self._metadata[place].row_group(group).num_rows for place, group in self._places]
        told = ", ".join(map(str, self._files[:3])) + (", ..." if len(self._files) > 3 else "")
        super().__init__(counts, names, choice, transform, cached_row_groups, told)

    def read_block(self, block: int) -> Block:
        """Decodes a row group.

        Raises:
            BadInput: a file that changed or is broken, or nulls.
        """
        place, group = self._places[block]
        file = self._files[place]
        try:
            # Opened for each read: thousands of files would be as many handles.
            with pq.ParquetFile(file, metadata=self._metadata[place]) as opened:
                table = opened.read_row_group(group, columns=self._columns, use_threads=False)
        except (OSError, pa.ArrowException) as error:
            raise BadInput(f"{file}: row group {group} cannot be read: {error}") from error
        return to_arrays(table, self._choice.fill_null, f"{file}: row group {group}")

    def _check_types(self, file: Path, schema: Any, first: Any) -> None:
        for name in self._columns:
            kind, expected = schema.field(name).type, first.field(name).type
            refuse_type(kind, f"{file}: column {name!r}")
            if kind != expected:
                raise BadInput(f"{file}: column {name!r} is {kind}, and {expected} in {self._files[0]}")


def _metadata(file: Path) -> Any:
    try:
        return pq.read_metadata(file)
    except (OSError, pa.ArrowException) as error:
        raise BadInput(f"{file}: not a Parquet file that can be read: {error}") from error
