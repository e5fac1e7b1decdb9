"""Finds where the records of a CSV file begin, in one pass over its bytes, so that any range can be read."""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Int64, UInt8
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.native.kernel import kernel
from elastable.worker.readers.formats.data_files import DataFile

__all__ = ["CsvIndex", "index_csv", "record_starts"]

_CHUNK_BYTES = 8 << 20
_FIRST_BYTES = 1 << 16
_BOM = b"\xef\xbb\xbf"
_QUOTE, _NEWLINE, _RETURN = 34, 10, 13
_AT_RECORD, _AT_FIELD, _IN_FIELD, _IN_QUOTES, _AFTER_QUOTE = range(5)
# Places of the scanner's state: mode, previous byte, line, records so far, line of the record.
_MODE, _RECORDS, _RECORD_LINE = 0, 3, 4


@dataclass(frozen=True, slots=True)
class CsvIndex:
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


def index_csv(file: DataFile, block_records: int, delimiter: str, has_header: bool) -> CsvIndex:
    """Finds the blocks of `block_records` records each (the last may have fewer).

    A record ends with its line, unless within quotes; empty lines are skipped.

    Raises:
        BadInput: a quote that is never closed, or a file that cannot be read.
    """
    state = _fresh(has_header)
    found: list[tuple[Int64, Int64]] = []
    try:
        with file.open() as opened:
            begin = len(_BOM) if opened.read(len(_BOM)) == _BOM else 0
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
    return CsvIndex(header, re.split(rb"[\r\n]", first)[0], np.append(starts, position), lines, counts)


def record_starts(block: bytes, delimiter: str) -> tuple[Int64, Int64]:
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
