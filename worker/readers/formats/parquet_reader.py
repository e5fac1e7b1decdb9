"""Records in Parquet files, decoded by row group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from pyarrow.fs import LocalFileSystem

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.arrow_columns import ColumnChoice, arrow_types, refuse_type, to_arrays
from elastable.worker.readers.formats.block_reader import Block, BlockReader, Transform
from elastable.worker.readers.formats.data_files import DataFile, FileSystem, Paths, find_files
from elastable.worker.readers.formats.folder_values import partition_scalars, partition_types

__all__ = ["ParquetReader"]

_OPENED_TOGETHER = 16


class ParquetReader(BlockReader):
    """Parquet files as one record space, in the order given.

    x is a dict of arrays: see `arrow_columns.to_arrays` for their types; lists are ragged. Strings are arrays of `str`,
    because dictionary codes differ between row groups. Folders named `key=value`, in a folder or glob that you pass,
    become columns, too, as in Hive: int64 if all values are integers, else strings; a column of the files takes
    precedence. Pages that carry a checksum are verified.

    Args:
        paths: A file, a glob, a folder, or several of them: paths of this machine or URLs (`s3://`, `gs://`, `abfs://`,
            whatever fsspec opens). Files of a folder or glob are read in the order of their paths.
        features: Columns that make up x; None: all but label and weight.
        label: Column of the target; None: batches are `(x,)`.
        weight: Column of the sample weights.
        transform: Batch -> batch, one record for each.
        column_types: Column -> name of the Arrow type to read it as, such as "int64" or "list<int64>"; a value that
            does not fit it is an error.
        fill_null: Column -> replacement of nulls.
        filesystem: A `pyarrow.fs.FileSystem` or fsspec file system for the paths; None: the local one, or that of a
            path's URL.
        cached_row_groups: Number of decoded row groups to keep.

    Raises:
        BadInput: no records; a missing or broken file; a missing column; a column whose type is unsupported or differs
            between files.
    """

    def __init__(
        self,
        paths: Paths,
        features: Sequence[str] | None = None,
        label: str | None = None,
        weight: str | None = None,
        transform: Transform | None = None,
        *,
        column_types: Mapping[str, str] | None = None,
        fill_null: Mapping[str, object] | None = None,
        filesystem: FileSystem | None = None,
        cached_row_groups: int = 4,
    ) -> None:
        self._files = find_files(paths, "Parquet", (".parquet", ".parq", ".pq"), filesystem)
        choice = ColumnChoice(features, label, weight, fill_null or {})
        fragments = _opened(self._files)
        schemas = [fragment.physical_schema for fragment in fragments]
        keys = [key for key, _ in self._files[0].partitions if key not in schemas[0].names]
        found = [*schemas[0].names, *keys]
        self._wanted = arrow_types(column_types or {}, found, "Parquet")
        names = choice.feature_names(found, str(self._files[0]))
        self._columns = choice.columns(names)
        for file, schema in zip(self._files, schemas, strict=True):
            choice.feature_names([*schema.names, *keys], str(file))
            self._check_types(file, schema, schemas[0])
        types = partition_types(self._files, self._wanted)
        self._partitions = {key: kind for key, kind in types.items() if key in keys and key in self._columns}
        self._in_file = [name for name in self._columns if name not in self._partitions]
        self._places = [(place, group.id) for place, fragment in enumerate(fragments) for group in fragment.row_groups]
        counts = [group.num_rows for fragment in fragments for group in fragment.row_groups]
        self._fragments = fragments
        source = ", ".join(map(str, self._files[:3])) + (", ..." if len(self._files) > 3 else "")
        super().__init__(counts, names, choice, transform, cached_row_groups, source)

    def read_block(self, block: int) -> Block:
        """Decodes a row group.

        Raises:
            BadInput: a file that changed or is broken, nulls, or a value that is not of the type wanted.
        """
        place, group = self._places[block]
        file, fragment = self._files[place], self._fragments[place]
        try:
            # Opened for each read: thousands of files would need as many handles.
            # The fragment's own scan takes a fourth longer for one row group.
            with pq.ParquetFile(
                file.open(),
                metadata=fragment.metadata,
                page_checksum_verification=True,
                pre_buffer=not isinstance(file.filesystem, LocalFileSystem),
            ) as opened:
                table = opened.read_row_group(group, columns=self._in_file, use_threads=False)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise BadInput(f"{file}: row group {group} cannot be read: {error}") from error
        if table.num_rows != fragment.row_groups[group].num_rows:
            raise BadInput(
                f"{file}: row group {group} holds {table.num_rows} records, where the file's own metadata says "
                f"{fragment.row_groups[group].num_rows}"
            )
        for key, value in partition_scalars(file, self._partitions).items():
            table = table.append_column(key, pa.repeat(value, fragment.row_groups[group].num_rows))
        for name in set(self._wanted) & set(self._in_file):
            position = table.schema.get_field_index(name)
            try:
                table = table.set_column(position, name, table.column(name).cast(self._wanted[name]))
            except pa.ArrowException as error:
                raise BadInput(
                    f"{file}: row group {group}: column {name!r} is no {self._wanted[name]}: {error}"
                ) from error
        return to_arrays(table, self._choice.fill_null, f"{file}: row group {group}")

    def _check_types(self, file: DataFile, schema: pa.Schema, first: pa.Schema) -> None:
        for name in self._columns:
            if name not in schema.names:
                continue  # a column from folder names
            kind, expected = schema.field(name).type, first.field(name).type
            if name in self._wanted:
                kind = expected = self._wanted[name]
            refuse_type(kind, f"{file}: column {name!r}")
            if kind != expected:
                raise BadInput(f"{file}: column {name!r} is {kind}, and {expected} in {self._files[0]}")


def _opened(files: Sequence[DataFile]) -> list[ds.ParquetFileFragment]:
    """Fragments of `pyarrow.dataset` with their metadata; several remote files are read at a time."""
    form = ds.ParquetFileFormat()

    def opened(file: DataFile) -> ds.ParquetFileFragment:
        try:
            fragment = form.make_fragment(file.path, filesystem=file.filesystem)
            fragment.ensure_complete_metadata()
            _ = fragment.physical_schema.names  # decodes the names
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise BadInput(f"{file}: not a Parquet file that can be read: {error}") from error
        return fragment

    if len(files) == 1:
        return [opened(files[0])]
    with ThreadPoolExecutor(min(_OPENED_TOGETHER, len(files)), thread_name_prefix="elastable-open") as pool:
        return list(pool.map(opened, files))
