"""One array of a stream's records: appended batch by batch to unnamed files, then read at random."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.records.pytrees import Array

__all__ = ["Spool"]

_TEXT = "SUO"


class Spool:
    """Appends `[n, ...]` parts of one array; `finish` makes it readable.

    Numbers keep their dtype, strings are stored as UTF-8 or bytes, one after another, with their
    lengths. Files are unlinked at once, so nothing is left when the process ends.

    Args:
        name: Its name in errors, such as "x['user']".
        folder: Folder of its files.
        first: One of the parts: all have its dtype, and its shape but for the first axis.

    Attributes:
        bytes: Written so far.
    """

    def __init__(self, name: str, folder: Path, first: Array) -> None:
        self._name, self._folder = name, folder
        self._shape = first.shape[1:]
        self._text = first.dtype.kind in _TEXT
        self._decodes = first.dtype.kind == "U" or (first.dtype.kind == "O" and isinstance(next(first.flat, b""), str))
        self._dtype = np.dtype(np.uint8) if self._text else _kept(first.dtype)
        self._given = first.dtype
        self.bytes = self._text_bytes = 0
        self._file: IO[bytes] = self._new_file()
        self._lengths: IO[bytes] | None = self._new_file() if self._text else None
        self._values: Array = np.empty(0, self._dtype)
        self._starts: Int64 = np.zeros(1, np.int64)

    def append(self, part: Array) -> None:
        """Appends `[n, ...]` records.

        Raises:
            BadInput: another shape or dtype than before, or no room on the disk.
        """
        if part.shape[1:] != self._shape:
            raise BadInput(
                f"{self._name} has records of shape {list(part.shape[1:])}, those before {list(self._shape)}; "
                "make them ragged, or pad them to one shape"
            )
        if self._text:
            self._append_text(part)
            return
        if not self.bytes and part.dtype.kind == self._dtype.kind == "f":
            self._dtype = _kept(part.dtype)  # records without elements have said nothing
        if _kept(part.dtype) != self._dtype and not _widens(part.dtype, self._dtype):
            raise BadInput(f"{self._name} is {part.dtype}, and was {self._given} before; cast it to one dtype")
        self._write(self._file, np.ascontiguousarray(part, self._dtype))

    def finish(self, records: int) -> None:
        """Ends writing; from now on `take` may be called.

        Args:
            records: How many were appended.

        Raises:
            BadInput: no room on the disk.
        """
        with self._disk_errors():
            self._file.flush()
            if self._lengths is not None:
                self._lengths.flush()
        if self._lengths is None:
            self._values = _mapped(self._file, self._dtype, (records, *self._shape))
        else:
            values = records * int(np.prod(self._shape, dtype=np.int64))
            self._values = _mapped(self._file, self._dtype, (self._text_bytes,))
            self._starts = np.concatenate(([0], np.cumsum(_mapped(self._lengths, np.dtype(np.int64), (values,)))))

    def close(self) -> None:
        """Closes the files; finished records stay readable. Calling it twice is harmless."""
        self._file.close()
        if self._lengths is not None:
            self._lengths.close()

    def take(self, rows: Int64) -> Array:
        """Copies of the records at `rows` int64 `[n]`: `[n, ...]`, strings as objects."""
        if not self._text:
            return np.asarray(self._values[rows])
        width = int(np.prod(self._shape, dtype=np.int64))
        wanted = (rows[:, None] * width + np.arange(width)).reshape(-1)
        taken = np.empty(len(wanted), object)
        for place, at in enumerate(wanted.tolist()):
            text = self._values[self._starts[at] : self._starts[at + 1]].tobytes()
            taken[place] = text.decode() if self._decodes else text
        return taken.reshape(len(rows), *self._shape)

    def _append_text(self, part: Array) -> None:
        if part.dtype.kind not in _TEXT:
            raise BadInput(f"{self._name} is {part.dtype}, and was strings before; cast it to one dtype")
        texts = [text.encode() if isinstance(text, str) else bytes(text) for text in part.reshape(-1).tolist()]
        assert self._lengths is not None
        self._write(self._lengths, np.array([len(text) for text in texts], np.int64))
        self._write(self._file, np.frombuffer(b"".join(texts), np.uint8))
        self._text_bytes += sum(map(len, texts))

    def _write(self, file: IO[bytes], values: Array) -> None:
        with self._disk_errors():
            file.write(values.reshape(-1).view(np.uint8).data)
        self.bytes += values.nbytes

    def _new_file(self) -> IO[bytes]:
        try:
            return tempfile.TemporaryFile(dir=self._folder, prefix="elastable-records-")
        except OSError as error:
            raise BadInput(f"folder {str(self._folder)!r}: {error.strerror or error}; name one to write to") from error

    @contextmanager
    def _disk_errors(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise BadInput(
                f"{self._name}: {error.strerror or error} after {self.bytes:,} bytes in folder {str(self._folder)!r}; "
                "name one with more room"
            ) from error


def _kept(dtype: np.dtype[np.generic]) -> np.dtype[np.generic]:
    """The stored dtype of numbers: their own, in this machine's order of bytes."""
    return dtype.newbyteorder("=")


def _widens(given: np.dtype[np.generic], kept: np.dtype[np.generic]) -> bool:
    return given.kind == kept.kind == "f" and given.itemsize < kept.itemsize


def _mapped(file: IO[bytes], dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", shape=shape)
