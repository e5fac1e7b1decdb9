"""Records in Parquet files, decoded by row group."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor

import pyarrow as pa
import pyarrow.dataset as ds
from pyarrow.fs import LocalFileSystem

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.arrow_columns import ColumnChoice, Kinds
from elastable.worker.readers.formats.block_reader import BlockReader, Place, Transform
from elastable.worker.readers.formats.data_files import DataFile, FileSystem, Paths, find_files

_OPENED_TOGETHER = 16


class ParquetReader(BlockReader):
    """Parquet files as one record space, in the order given.

    x is a dict of arrays, each read as the model's input of its name wants it (docs/data.md): integers, float32,
    booleans, object arrays of `str`; lists are ragged, lists of one fixed size `[records, size]`. Types that differ
    between files become one that holds them all. Folders named `key=value`, in a folder or glob that you pass,
    become columns, too, as in Hive: int64 if all values are integers, else strings; a column of the files must say
    the same. Pages that carry a checksum are verified.

    Args:
        paths: A file, a glob, a folder, or several of them: paths of this machine or URLs (`s3://`, `gs://`, `abfs://`,
            whatever fsspec opens). Files of a folder or glob are read in the order of their paths.
        features: Columns that make up x; None: all but label and weight.
        label: Column of the target; None: batches are `(x,)`.
        weight: Column of the sample weights.
        transform: Batch -> batch, one record for each; floats come to it in the type of their column.
        column_types: Column -> name of the Arrow type to read it, or the elements of its lists, as, such as "int64";
            "uint64-bits" for unsigned ids whose 64 bits are kept as an int64.
        fill_null: Column -> replacement of null values, also of those within lists, and of NaN.
        fill_null_list: Column -> replacement of null lists.
        filesystem: A `pyarrow.fs.FileSystem` or fsspec file system for the paths; None: the local one, or that of a
            path's URL.
        cached_row_groups: Number of decoded row groups to keep.

    Raises:
        BadInput: no records; a missing or broken file; a column that a file lacks. Later, with file, row (counted from
            0) and column: a type or a value that the model's input does not take, a null.
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
        fill_null_list: Mapping[str, Sequence[object]] | None = None,
        filesystem: FileSystem | None = None,
        cached_row_groups: int = 4,
    ) -> None:
        files = find_files(paths, "Parquet", (".parquet", ".parq", ".pq"), filesystem)
        choice = ColumnChoice(features, label, weight, column_types, fill_null, fill_null_list)
        self._fragments = _opened(files)
        counts = [[group.num_rows for group in fragment.row_groups] for fragment in self._fragments]
        names = [fragment.physical_schema.names for fragment in self._fragments]
        super().__init__(files, names, counts, choice, transform, cached_row_groups)

    def types_of(self, name: str, want: str) -> Kinds:
        """The types that the files' own schemas say."""
        schemas = (fragment.physical_schema for fragment in self._fragments)
        return [(file, schema.field(name).type) for file, schema in zip(self.files, schemas, strict=True)]

    def read_block(self, file: int, block: int) -> tuple[pa.Table, Place]:
        """Reads a row group."""
        where, count, first = (
            f"{self.files[file]}: row group {block}",
            self.counts[file][block],
            self.before(file, block),
        )
        try:
            part = self._fragments[file].subset(row_group_ids=[block])
            # In the types of this file: `to_array` casts, and names the value that it cannot.
            table = part.to_table(columns=self.in_file, batch_size=1 << 30, use_threads=False)
        except (OSError, pa.ArrowException, UnicodeDecodeError) as error:
            raise BadInput(f"{where} cannot be read: {error}") from error
        if table.num_rows != count:
            raise BadInput(f"{where} holds {table.num_rows} records, where the file's own metadata says {count}")
        return table, lambda record: f"{self.files[file]}, row {first + record}"


def _opened(files: Sequence[DataFile]) -> list[ds.ParquetFileFragment]:
    """Fragments of `pyarrow.dataset` with their metadata; several remote files are read at a time."""

    def opened(file: DataFile) -> ds.ParquetFileFragment:
        # Reading ahead costs memory, and gains nothing on this machine's disk.
        ahead = not isinstance(file.filesystem, LocalFileSystem)
        scan = ds.ParquetFragmentScanOptions(page_checksum_verification=True, pre_buffer=ahead)
        form = ds.ParquetFileFormat(default_fragment_scan_options=scan)
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
