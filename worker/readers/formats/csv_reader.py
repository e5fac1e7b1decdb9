"""Records in CSV files: byte ranges found by an index, read and parsed by pyarrow."""

from __future__ import annotations

import codecs
import csv as header_csv
import io
import logging
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.csv as csv

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.worker.readers.batch.reader import ModelInputs
from elastable.worker.readers.formats.arrow_columns import (
    BITS,
    INTEGERS,
    At,
    ColumnChoice,
    Kinds,
    as_type,
    casts,
    first_bad,
)
from elastable.worker.readers.formats.block_reader import BlockReader, Place, Transform
from elastable.worker.readers.formats.data_files import DataFile, FileSystem, Paths, find_files

_log = logging.getLogger(__name__)
_HEXADECIMAL = re.compile(rb"(?<![0-9A-Za-z])0[xX]")
_DELIMITERS = ",;\t|"
#: How files begin that are no CSV -> what they are.
_BINARY = {b"\x1f\x8b": "gzip", b"PAR1\x15": "Parquet", b"PK\x03\x04": "zip", b"\x28\xb5\x2f\xfd": "zstd"}
_NULLS = csv.ConvertOptions().null_values


@dataclass(frozen=True, slots=True)
class _Text:
    """The text of a block, the names of its columns, and where its records are."""

    utf8: bytes
    names: Sequence[str]
    place: Place


class CsvReader(BlockReader):
    """CSV files as one record space, in the order given.

    Each file is scanned once for the positions of its records, when the reader is created. x is a dict of arrays. A
    column is read as the model's input of its name wants it (docs/data.md): text as it is for strings, integers
    exactly. Without a model, types are inferred from the first block of the first file: integers, float32, booleans, or
    object arrays of `str`; dates and times stay strings. `column_types` sets them. Folders named `key=value`, in a
    folder or glob that you pass, become columns, too.

    Args:
        paths: A file, a glob, a folder, or several of them: paths of this machine or URLs (`s3://`, `gs://`, `abfs://`,
            whatever fsspec opens). Files of a folder or glob are read in the order of their paths.
        features: Columns that make up x; None: all but label and weight.
        label: Column of the target; None: batches are `(x,)`.
        weight: Column of the sample weights.
        transform: Batch -> batch, one record for each; floats come to it as float64.
        delimiter: One ASCII character.
        encoding: Of the text, such as "latin-1"; any that Python knows and that contains ASCII.
        column_names: Column names for files without a header; None: the first record is the header.
        column_types: Column -> name of an Arrow type, such as "float64"; "uint64-bits" for unsigned ids whose 64 bits
            are kept as an int64.
        fill_null: Column -> replacement of nulls ("", "NA", "NULL", ...; in a column of strings only "").
        filesystem: A `pyarrow.fs.FileSystem` or fsspec file system for the paths; None: the local one, or that of a
            path's URL.
        block_records: Records that are read and parsed together.
        cached_blocks: Parsed blocks that are kept.

    Raises:
        BadInput: no records; a missing file; a column that a file lacks; a first line that another delimiter cuts; a
            malformed record in the first block. Later, with file, line and column: other malformed records, and values
            that the column or the model's input does not take.
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
        encoding: str = "utf-8",
        column_names: Sequence[str] | None = None,
        column_types: Mapping[str, str] | None = None,
        fill_null: Mapping[str, object] | None = None,
        filesystem: FileSystem | None = None,
        block_records: int = 8192,
        cached_blocks: int = 4,
    ) -> None:
        files = find_files(paths, "CSV", (".csv", ".tsv", ".txt"), filesystem)
        if block_records < 1:
            raise BadInput(f"CSV: block_records must be at least 1, got {block_records}")
        if len(delimiter) != 1 or not delimiter.isascii() or delimiter in '"\r\n':
            raise BadInput(f"CSV: delimiter {delimiter!r}; use one ASCII character that is no quote or line end")
        self._delimiter, self._encoding = delimiter, _checked_encoding(encoding, delimiter)
        choice = ColumnChoice(features, label, weight, column_types, fill_null)
        self.files = files
        self._indexes = [_index_csv(file, block_records, delimiter, column_names is None) for file in files]
        #: Of each file.
        self._names = [
            self._header(file, index) if column_names is None else list(column_names)
            for file, index in zip(files, self._indexes, strict=True)
        ]
        counts = [index.counts.tolist() for index in self._indexes]
        super().__init__(files, self._names, counts, choice, transform, cached_blocks)
        self._parse(self._text(*self.places[0]), {}, self.in_file[:1])  # a malformed record is reported at once

    def feed(self, inputs: ModelInputs) -> None:
        super().feed(inputs)
        self._first: pa.Table | None = None  # the first block, with types as they look
        self._parsed = {name: kind for name in self.in_file if (kind := self.choice.type_of(name)) is not None}

    def types_of(self, name: str, want: str) -> Kinds:
        """The type to parse a column as: of all files the one that the first block and the model's input tell."""
        if (named := self.choice.type_of(name)) is not None:
            return [(self.files[0], named)]
        if self._first is None:
            self._first = self._parse(self._text(*self.places[0]), {}, self.in_file)
        found = self._first.field(name).type
        boolean, number = pa.types.is_boolean(found), pa.types.is_integer(found) or pa.types.is_floating(found)
        kind = found
        whole = pa.types.is_floating(found) and pc.all(pc.equal(pc.floor(self._first[name]), self._first[name])).as_py()
        if want == "string" and whole:
            _log.warning(
                "%s: column %r is of numbers such as 7.0, which pandas makes of integers with a missing value: for an "
                "input of strings the text '7.0' is not '7'",
                self.files[0],
                name,
            )
        if want == "string" or (not want and (pa.types.is_temporal(found) or pa.types.is_binary(found))):
            kind = pa.string()
        elif want == "bool" and not number:
            kind = pa.bool_()
        elif want in INTEGERS and not pa.types.is_floating(found) and not boolean:
            kind = pa.uint64() if want == "uint64" else pa.int64()
        elif want and want not in INTEGERS and not boolean and not (number and want == "number"):
            kind = pa.float64()
        elif not want and pa.types.is_floating(found):
            self._refuse_large_integers(name, self._first[name])
        self._parsed[name] = kind
        return [(self.files[0], kind)]

    def read_block(self, file: int, block: int) -> tuple[pa.Table, Place]:
        """Reads and parses one block."""
        text, count = self._text(file, block), self.counts[file][block]
        table = self._parse(text, self._parsed, self.in_file)
        if table.num_rows != count:
            raise BadInput(
                f"{self.files[file]}: {table.num_rows} records from line {self._indexes[file].lines[block]} on, where "
                f"there were {count}; the file must not change while it is read"
            )
        return table, text.place

    def _text(self, number: int, block: int) -> _Text:
        file, index = self.files[number], self._indexes[number]
        try:
            with file.open() as opened:
                opened.seek(int(index.offsets[block]))
                raw = opened.read(int(index.offsets[block + 1] - index.offsets[block]))
        except OSError as error:
            raise BadInput(f"{file}: cannot be read: {error}") from error

        @cache
        def lines() -> list[int]:
            return list(_record_starts(raw, self._delimiter)[1] + index.lines[block] - 1)

        text = self._as_utf8(raw, file, int(index.lines[block]))
        return _Text(text, self._names[number], lambda record: f"{file}, line {lines()[record]}")

    def _as_utf8(self, raw: bytes, file: DataFile, line: int) -> bytes:
        if self._encoding == "utf-8":
            return raw  # Arrow finds what is none, and in which column
        try:
            return raw.decode(self._encoding).encode()
        except UnicodeDecodeError as error:
            line += raw[: error.start].replace(b"\r\n", b"\n").replace(b"\r", b"\n").count(b"\n")
            raise BadInput(f"{file}, line {line}: is no {self._encoding}: {error}") from error

    def _header(self, file: DataFile, index: _CsvIndex) -> list[str]:
        """The names of a file's columns; raises `BadInput` where another delimiter cuts it into more fields."""
        try:
            text = self._as_utf8(index.header, file, 1).decode()
            # Arrow takes a second for some thousand names.
            names = next(filter(None, header_csv.reader(io.StringIO(text, ""), delimiter=self._delimiter)), None)
        except (header_csv.Error, UnicodeDecodeError) as error:
            wide = index.header.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE))
            hint = "say encoding=, such as 'latin-1', if it is no UTF-8"
            hint = "it is UTF-16: convert the file to UTF-8" if wide else hint
            raise BadInput(f"{file}: no header can be read from it: {error}; {hint}") from error
        if names is None:
            raise BadInput(f"{file}: no header can be read from it: it is empty")
        if excel := re.fullmatch(r"sep=(.)\s*", text):
            raise BadInput(
                f"{file}: its first line 'sep={excel[1]}' is for Excel: delete it; say delimiter={excel[1]!r}"
            )
        for other in _DELIMITERS:
            cuts = text.count(other)
            there = not index.first_line or index.first_line.count(other.encode()) == cuts
            quoted = '"' in text and not (len(names) == 1 and f'"{other}' in text)
            if there and cuts > text.count(self._delimiter) and not quoted:
                raise BadInput(
                    f"{file}: its first line {text.strip()[:60]!r} is cut by {other!r}, not by {self._delimiter!r}; "
                    f"say delimiter={other!r}"
                )
        return names

    def _refuse_large_integers(self, name: str, floats: pa.ChunkedArray) -> None:
        """Refuses integers beyond int64, which Arrow reads as floats, and so would merge ids."""
        if not pc.any(pc.greater_equal(pc.abs(floats), 2.0**63)).as_py():
            return
        texts = self._parse(self._text(*self.places[0]), {name: pa.string()}, [name])[name]
        whole = pc.match_substring_regex(texts, r"^\s*[+-]?[0-9]+\s*$")
        nulls = pc.is_in(texts, pa.array(_NULLS))
        if pc.all(pc.or_(whole, nulls)).as_py() and pc.any(whole).as_py():
            # The longest, and not the largest: Python makes no numbers of thousands of digits.
            largest = max((value.strip() for value in texts.filter(whole).to_pylist()), key=len)
            largest = largest if len(largest) <= 40 else f"{largest[:40]}... ({len(largest)} digits)"
            raise BadInput(
                f"{self.files[0]}: column {name!r} holds integers beyond int64, such as {largest}; say "
                f"column_types={{{name!r}: 'uint64-bits'}} for ids whose 64 bits are kept as an int64, or 'string' "
                "(et.Embedding hashes strings)"
            )

    def _parse(self, text: _Text, types: Mapping[str, pa.DataType], columns: Sequence[str]) -> pa.Table:
        """The columns of a block, in `types`; in others as they look.

        Empty text is a null where `fill_null` says what takes its place.
        """
        table = self._parse_as_written(text, types, columns)
        for number, name in enumerate(table.column_names):
            if name in self.choice.fill_null and pa.types.is_string(table.schema.field(number).type):
                filled = pc.if_else(pc.equal(table[name], ""), pa.scalar(None, pa.string()), table[name])
                table = table.set_column(number, name, filled)
        return table

    def _parse_as_written(self, text: _Text, types: Mapping[str, pa.DataType], columns: Sequence[str]) -> pa.Table:
        try:
            if not (types.keys() >= {*columns} and _HEXADECIMAL.search(text.utf8)):  # Arrow takes it for integers
                return self._read(text, types, columns)
        except pa.ArrowException:
            pass  # a second pass, in which columns are text, tells which value it was
        try:
            table = self._read(text, dict.fromkeys(columns, pa.binary()), columns)
        except pa.ArrowException as error:
            raise self._malformed(text, error) from error
        exact = {}
        for name, values in zip(table.column_names, table.columns, strict=True):
            kind, where = types.get(name, pa.string()), At(name, text.place)
            named = pa.types.is_integer(kind) and self.choice.column_types.get(name, BITS) != BITS
            exact[name] = _from_text(values.combine_chunks(), kind, self.choice.want(name, self.inputs), named, where)
        return pa.table(exact)

    def _read(
        self, text: _Text, types: Mapping[str, pa.DataType], columns: Sequence[str], size: int | None = None
    ) -> pa.Table:
        """Parses the first `size` bytes of a block; None: all of it."""
        return csv.read_csv(
            pa.BufferReader(text.utf8[:size]),
            # One Arrow block, so that types are inferred from all records.
            csv.ReadOptions(column_names=text.names, use_threads=False, block_size=max(len(text.utf8), 1 << 16)),
            csv.ParseOptions(delimiter=self._delimiter, newlines_in_values=True),
            # Columns that a file lacks are refused by name before their nulls are used.
            csv.ConvertOptions(include_columns=columns, include_missing_columns=True, column_types=dict(types)),
        )

    def _malformed(self, text: _Text, error: Exception) -> BadInput:
        """Finds the first malformed record by bisection: a prefix that contains it cannot be read.

        Arrow's own handler of invalid rows is not told of those that are no UTF-8.
        """
        starts, _ = _record_starts(text.utf8, self._delimiter)
        ends = [*starts[1:].tolist(), len(text.utf8)]
        reasons: list[Exception] = [error]

        def reads(records: int) -> bool:
            try:
                self._read(text, {}, [], ends[records - 1])
            except pa.ArrowException as earlier:
                reasons.append(earlier)
                return False
            return True

        bad = first_bad(len(ends), reads)
        record, cuts = text.utf8[int(starts[bad]) : ends[bad]], max(1, len(text.names) - 1)
        others = [each for each in _DELIMITERS if each != self._delimiter and record.count(each.encode()) == cuts]
        hint = f"; say delimiter={others[0]!r}, which cuts it so" if others else ""
        return BadInput(f"{text.place(bad)}: {reasons[-1]}{hint}")


def _from_text(values: pa.Array, kind: pa.DataType, want: str, named: bool, at: At) -> pa.Array:
    """The bytes of a column as `kind`; for an input of integers, or integers by name, as floats if all are numbers."""
    texts = as_type(values, pa.string(), at)
    if pa.types.is_string(kind):
        return texts
    trimmed = pc.ascii_trim_whitespace(texts)
    texts = pc.if_else(pc.is_in(trimmed, pa.array(_NULLS)), pa.scalar(None, pa.string()), trimmed)
    if pa.types.is_integer(kind) and pc.any(found := pc.match_substring_regex(texts, r"^[+-]?0[xX]")).as_py():
        bad = pc.index(pc.fill_null(found, False), True).as_py()
        text = "" if want else f", or say column_types={{{at.column!r}: 'string'}} for text"
        raise BadInput(f"{at(bad)}: {texts[bad].as_py()!r} is no {kind}: write it in decimal digits{text}")
    if (named or want in INTEGERS) and not casts(texts, kind) and casts(texts, pa.float64()):
        kind = pa.float64()
    return as_type(texts, kind, at)


def _checked_encoding(encoding: str, delimiter: str) -> str:
    """Python's name of an encoding in which records can be found by bytes: ASCII characters are the same there."""
    try:
        found = codecs.lookup(encoding)
        name = "utf-8" if found.name == "utf-8-sig" else found.name
        ascii_stays = bytes(range(128)).decode(name) == "".join(map(chr, range(128)))
    except (LookupError, UnicodeError, ValueError) as error:
        raise BadInput(
            f"CSV: encoding={encoding!r}: {error}; say one that contains ASCII, such as 'latin-1'"
        ) from error
    if not ascii_stays or (name != "utf-8" and delimiter > "?" and _of_several_bytes(name)):
        raise BadInput(
            f"CSV: encoding={encoding!r} with delimiter={delimiter!r}: records are found by their bytes, which are "
            "others or parts of other characters there; convert the files to UTF-8"
        )
    return name


def _of_several_bytes(encoding: str) -> bool:
    decoder: Callable[[str], codecs.IncrementalDecoder] = codecs.getincrementaldecoder(encoding)
    return any(decoder("replace").decode(bytes([byte])) == "" for byte in range(128, 256))  # it waits for more


# Finds where the records of a CSV file begin, in one pass over its bytes, so that any range can be read


_CHUNK_BYTES = 8 << 20
_FIRST_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_AT_RECORD, _AT_FIELD, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(5)
# Places of the scanner's state: mode, previous byte, line, records so far, line of the record.
_MODE, _RECORDS, _RECORD_LINE = 0, 3, 4


@dataclass(frozen=True, slots=True)
class _CsvIndex:
    """Blocks of a file's records, without the header.

    Attributes:
        header: Bytes before the first record; b"" in a file without header.
        first_line: The line on which the first record begins.
        offsets: int64 `[blocks + 1]`: block b is the bytes offsets[b] .. offsets[b + 1].
        lines: int64 `[blocks]`: number of the line, from 1, on which a block begins.
        counts: int64 `[blocks]`: records in each block.
    """

    header: bytes
    first_line: bytes
    offsets: Int64
    lines: Int64
    counts: Int64


def _index_csv(file: DataFile, block_records: int, delimiter: str, has_header: bool) -> _CsvIndex:
    """Finds the blocks of `block_records` records each (the last may have fewer).

    A record ends with its line, unless within quotes; empty lines are skipped.

    Raises:
        BadInput: a quote that is never closed, or a file that cannot be read.
    """
    state = _fresh(has_header)
    found: list[tuple[Int64, Int64]] = []
    try:
        with file.open() as opened:
            head = opened.read(5)
            if binary := next((kind for start, kind in _BINARY.items() if head.startswith(start)), None):
                raise BadInput(
                    f"{file}: is a {binary} file, no CSV: decompress it, or read Parquet by et.ParquetReader"
                )
            begin = len(_BOM) if head.startswith(_BOM) else 0
            opened.seek(begin)
            position = begin
            while chunk := opened.read(_CHUNK_BYTES):
                found.append(_scan_chunk(chunk, position, state, delimiter, block_records))
                position += len(chunk)
            starts = np.concatenate([np.empty(0, np.int64), *(offsets for offsets, _ in found)])
            lines = np.concatenate([np.empty(0, np.int64), *(numbers for _, numbers in found)])
            opened.seek(begin)
            header = opened.read(int(starts[0] if starts.size else position) - begin) if has_header else b""
            first = opened.read(_FIRST_BYTES) if has_header else b""
    except OSError as error:
        raise BadInput(f"{file}: cannot be read: {error}") from error
    if state[_MODE] == _IN_QUOTES:
        raise BadInput(f"{file}, line {state[_RECORD_LINE]}: the quote opened in this record is never closed")
    records = max(0, int(state[_RECORDS]))
    counts = np.full(starts.size, block_records, np.int64)
    if counts.size:
        counts[-1] = records - (counts.size - 1) * block_records
    return _CsvIndex(header, re.split(rb"[\r\n]", first)[0], np.append(starts, position), lines, counts)


def _record_starts(block: bytes, delimiter: str) -> tuple[Int64, Int64]:
    """Offset in `block` and line number, from 1, of each of its records: int64 `[records]` both."""
    return _scan_chunk(block, 0, _fresh(has_header=False), delimiter, 1)


def _fresh(has_header: bool) -> Int64:
    # The header is record -1.
    return np.array([_AT_RECORD, 0, 1, -1 if has_header else 0, 1], np.int64)


def _scan_chunk(chunk: bytes, position: int, state: Int64, delimiter: str, block_records: int) -> tuple[Int64, Int64]:
    room = len(chunk) // max(1, block_records) + 2
    starts, lines = np.empty(room, np.int64), np.empty(room, np.int64)
    count = _scan(np.frombuffer(chunk, np.uint8), state, ord(delimiter), block_records, starts, lines)
    return starts[:count] + position, lines[:count]


@kernel
def _scan(chunk: UInt8, state: Int64, delimiter: int, block_records: int, starts: Int64, lines: Int64) -> int:
    """Arrow's own rules: a quote counts only where a field begins, and within quotes."""
    mode, previous, line, records, record_line = state[0], state[1], state[2], state[3], state[4]
    count = 0
    for place in range(chunk.size):
        byte = np.int64(chunk[place])
        ends_line = byte in (_RETURN, _NEWLINE)
        if ends_line and not (byte == _NEWLINE and previous == _RETURN):
            line += 1
        previous = byte
        if mode == _IN_QUOTES:
            if byte == _QUOTE:
                mode = _AFTER_QUOTE
            continue
        if mode == _AFTER_QUOTE:
            mode = _IN_QUOTES if byte == _QUOTE else _IN_FIELD
            if mode == _IN_QUOTES:
                continue
        if ends_line:
            mode = _AT_RECORD
            continue
        if mode == _AT_RECORD:
            record_line = line
            if records >= 0 and records % block_records == 0:
                starts[count] = place
                lines[count] = line
                count += 1
            records += 1
            mode = _AT_FIELD
        if byte == delimiter:
            mode = _AT_FIELD
        elif mode == _AT_FIELD:
            mode = _IN_QUOTES if byte == _QUOTE else _IN_FIELD
    state[0], state[1], state[2], state[3], state[4] = mode, previous, line, records, record_line
    return count
