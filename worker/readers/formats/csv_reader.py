"""Records in CSV files: byte ranges found by an index, read and parsed by pyarrow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.formats.arrow_columns import ColumnChoice, arrow_types, refuse_type, to_arrays
from elastable.worker.readers.formats.block_reader import Block, BlockReader, Transform
from elastable.worker.readers.formats.csv_index import CsvIndex, index_csv, record_starts
from elastable.worker.readers.formats.data_files import DataFile, FileSystem, Paths, find_files
from elastable.worker.readers.formats.folder_values import partition_scalars, partition_types

__all__ = ["CsvReader"]


class CsvReader(BlockReader):
    """CSV files of one header as one record space, in the order given.

    Each file is scanned once for the positions of its records, when the reader is created. x is a dict of arrays:
    integers, float32, booleans, or object arrays of `str`; dates and times stay strings. Types are inferred from the
    first block of the first file, unless `column_types` sets them. Folders named `key=value`, in a folder or glob that
    you pass, become columns, too.

    Args:
        paths: A file, a glob, a folder, or several of them: paths of this machine or URLs (`s3://`, `gs://`, `abfs://`,
            whatever fsspec opens). Files of a folder or glob are read in the order of their paths.
        features: Columns that make up x; None: all but label and weight.
        label: Column of the target; None: batches are `(x,)`.
        weight: Column of the sample weights.
        transform: Batch -> batch, one record for each.
        delimiter: One ASCII character.
        column_names: Column names for files without a header; None: the first record is the header.
        column_types: Column -> name of an Arrow type, such as "float64".
        fill_null: Column -> replacement of nulls ("", "NA", "NULL", ...).
        filesystem: A `pyarrow.fs.FileSystem` or fsspec file system for the paths; None: the local one, or that of a
            path's URL.
        block_records: Records that are read and parsed together.
        cached_blocks: Parsed blocks that are kept.

    Raises:
        BadInput: no records; a missing file or column; headers that differ; a malformed record in the first block
            (later ones raise, with file and line, when their block is read).
    """

    def __init__(
        self,
        paths: Paths,
        features: Sequence[str] | None = None,
        label: str | None = None,
        weight: str | None = None,
        transform: Transform | None = None,
        *,
        delimiter: str = ",",
        column_names: Sequence[str] | None = None,
        column_types: Mapping[str, str] | None = None,
        fill_null: Mapping[str, object] | None = None,
        filesystem: FileSystem | None = None,
        block_records: int = 8192,
        cached_blocks: int = 4,
    ) -> None:
        self._files = find_files(paths, "CSV", (".csv", ".tsv", ".txt"), filesystem)
        if block_records < 1:
            raise BadInput(f"CSV: block_records must be at least 1, got {block_records}")
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise BadInput(f"CSV: delimiter {delimiter!r}; use one ASCII character that is no quote or line end")
        self._delimiter = delimiter
        choice = ColumnChoice(features, label, weight, fill_null or {})
        self._indexes = [index_csv(file, block_records, delimiter, column_names is None) for file in self._files]
        self._names = list(column_names) if column_names is not None else self._one_header()
        found = [*self._names, *(key for key, _ in self._files[0].partitions if key not in self._names)]
        wanted = arrow_types(column_types or {}, found, "CSV")
        names = choice.feature_names(found, str(self._files[0]))
        self._columns = choice.columns(names)
        partitions = partition_types(self._files, wanted)
        self._partitions = {key: kind for key, kind in partitions.items() if key in set(self._columns) - {*self._names}}
        self._in_file = [name for name in self._columns if name not in self._partitions]
        self._places = [(p, block) for p, index in enumerate(self._indexes) for block in range(index.counts.size)]
        counts = [int(self._indexes[place].counts[block]) for place, block in self._places]
        source = ", ".join(map(str, self._files[:3])) + (", ..." if len(self._files) > 3 else "")
        super().__init__(counts, names, choice, transform, cached_blocks, source)
        self._types = self._infer_types({name: kind for name, kind in wanted.items() if name in self._names})

    def read_block(self, block: int) -> Block:
        """Reads and parses one block.

        Raises:
            BadInput: a malformed record, by file and line; nulls; a file that changed.
        """
        place, local = self._places[block]
        file, index = self._files[place], self._indexes[place]
        table = self._parse(file, index, local, self._types)
        for key, value in partition_scalars(file, self._partitions).items():
            table = table.append_column(key, pa.repeat(value, table.num_rows))
        return to_arrays(table, self._choice.fill_null, str(file))

    def _one_header(self) -> list[str]:
        headers = []
        for file, index in zip(self._files, self._indexes, strict=True):
            try:
                parse = csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True)
                headers.append(list(csv.read_csv(pa.BufferReader(index.header), parse_options=parse).column_names))
            except (pa.ArrowException, UnicodeDecodeError) as error:
                raise BadInput(f"{file}: no header can be read from it: {error}") from error
            if headers[-1] != headers[0]:
                raise BadInput(
                    f"{file}: columns {', '.join(headers[-1])} differ from {', '.join(headers[0])} in {self._files[0]}"
                )
        return headers[0]

    def _infer_types(self, wanted: Mapping[str, pa.DataType]) -> dict[str, pa.DataType]:
        types = dict(wanted)
        place, local = self._places[0]
        file = self._files[place]
        for field in self._parse(file, self._indexes[place], local, types).schema:
            if pa.types.is_floating(field.type) and field.name not in wanted:
                self._refuse_large_integers(place, local, field.name)
            kind = pa.string() if pa.types.is_temporal(field.type) else field.type
            if pa.types.is_null(kind):
                raise BadInput(
                    f"{file}: column {field.name!r} has no value in the first block; "
                    f"say column_types={{{field.name!r}: 'float64'}} or what it is"
                )
            refuse_type(kind, f"{file}: column {field.name!r}")
            types[field.name] = kind
        return types

    def _refuse_large_integers(self, place: int, local: int, name: str) -> None:
        """Refuses integers beyond int64, which Arrow would read as floats and so merge ids."""
        texts = self._parse(self._files[place], self._indexes[place], local, {name: pa.string()})[name].drop_null()
        whole = pc.match_substring_regex(texts, r"^\s*[+-]?[0-9]+\s*$")
        if len(texts) and pc.all(whole).as_py():
            # The longest, and not the largest: Python makes no numbers of thousands of digits.
            largest = max((text.strip() for text in texts.to_pylist()), key=len)
            largest = largest if len(largest) <= 40 else f"{largest[:40]}... ({len(largest)} digits)"
            raise BadInput(
                f"{self._files[place]}: column {name!r} holds integers beyond int64, such as {largest}; "
                f"say column_types={{{name!r}: 'string'}} (et.Embedding hashes strings) or 'float64'"
            )

    def _parse(self, file: DataFile, index: CsvIndex, local: int, types: Mapping[str, pa.DataType]) -> pa.Table:
        try:
            with file.open() as opened:
                opened.seek(int(index.offsets[local]))
                text = opened.read(int(index.offsets[local + 1] - index.offsets[local]))
        except OSError as error:
            raise BadInput(f"{file}: cannot be read: {error}") from error
        try:
            table = self._read(text, types)
        except pa.ArrowException as error:
            raise self._malformed(file, int(index.lines[local]), text, types, error) from error
        if table.num_rows != index.counts[local]:
            raise BadInput(
                f"{file}: {table.num_rows} records from line {index.lines[local]} on, where there were "
                f"{index.counts[local]}; the file must not change while it is read"
            )
        return table

    def _read(self, text: bytes, types: Mapping[str, pa.DataType]) -> pa.Table:
        return csv.read_csv(
            pa.BufferReader(text),
            # One Arrow block, so that types are inferred from all records.
            csv.ReadOptions(column_names=self._names, use_threads=False, block_size=max(len(text), 1 << 16)),
            csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            csv.ConvertOptions(include_columns=self._in_file, column_types=dict(types)),
        )

    def _malformed(
        self, file: DataFile, line: int, text: bytes, types: Mapping[str, pa.DataType], error: Exception
    ) -> BadInput:
        """Finds the first malformed record by bisection: a prefix that contains it cannot be read."""
        starts, lines = record_starts(text, self._delimiter)
        ends = [*starts[1:].tolist(), len(text)]
        good, bad = 0, len(ends)
        while bad - good > 1:
            middle = (good + bad) // 2
            try:
                self._read(text[: ends[middle - 1]], types)
                good = middle
            except pa.ArrowException as earlier:
                bad, error = middle, earlier
        return BadInput(f"{file}, line {line + int(lines[bad - 1]) - 1}: {error}")
