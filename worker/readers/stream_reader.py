"""Streams of batches, read once so that any record can be fetched afterwards."""

import tempfile
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import count as counted
from itertools import islice
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn, TypeAlias, TypeGuard, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.pytrees import batch_arrays, map_arrays, named_parts, records_of
from elastable.worker.readers.batch.ragged import Leaf, RaggedArray, SparseArray, ranges, splits_of
from elastable.worker.readers.batch.reader import Batch, Reader, checked_indices

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

# One array of a stream's records: appended batch by batch to unnamed files, then read at random


_TEXT = "SUO"


class _Spool:
    """Appends `[n, ...]` parts of one array; `finish` makes it readable.

    Numbers keep their dtype, strings are stored as UTF-8 or bytes, one after another, with their
    lengths. Files are unlinked at once, so nothing is left when the process ends.

    Args:
        name: Its name in errors, such as "x['user']".
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

    def append(self, part: Leaf) -> None:
        """Appends `[n, ...]` records.

        Raises:
            BadInput: no array, another shape or dtype than before, or no room on the disk.
        """
        if not isinstance(part, np.ndarray):
            raise BadInput(f"{self._name} is a {type(part).__name__}, and was an array before; make all batches alike")
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
        kept = self._dtype
        widens = part.dtype.kind == kept.kind == "f" and part.dtype.itemsize < kept.itemsize
        if _kept(part.dtype) != kept and not widens:
            raise BadInput(f"{self._name} is {part.dtype}, and was {self._given} before; cast it to one dtype")
        self._write(self._file, np.ascontiguousarray(part, self._dtype))

    def finish(self, records: int) -> None:
        """Ends writing; from now on `take` may be called."""
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


def _mapped(file: IO[bytes], dtype: np.dtype[np.generic], shape: tuple[int, ...]) -> Array:
    if 0 in shape:
        return np.empty(shape, dtype)
    return np.memmap(file, dtype, "r", shape=shape)


_STREAMS = frozenset({"tensorflow.DatasetV2", "keras.PyDataset", "torch.DataLoader"})
_INFINITE, _UNKNOWN = -1, -2  # tf.data.INFINITE_CARDINALITY, UNKNOWN_CARDINALITY


class StreamReader(Reader):
    """The records of a stream of batches.

    A stream is a batched `tf.data.Dataset` (of TFRecord files, say), a `keras.utils.PyDataset`, a torch `DataLoader`,
    or any iterable of batches.

    A job fetches records by number, in its own order. So the stream is read to its end when the reader is created, a
    batch at a time, into files that take the room of the records as arrays and are removed with the process. Every
    epoch has the same records: random augmentation and shuffling of the stream happen once. The job shuffles.

    In a model file every process creates a reader, and all must see the same records in the same order: do not shuffle
    the stream, or seed the shuffle.

    Args:
        batches: Batches are x, (x,), (x, y) or (x, y, sample_weight): arrays, or pytrees of arrays, whose first axis is
            the records. Ragged and sparse tensors stay what they are; nothing is padded.
        count: The most batches to read, needed for an endless stream; None: all.
        folder: Folder of the files; None: the system's folder for temporary files.
        shuffle_block: As of `Reader`. None is right if the files fit into the system's free memory.

    Attributes:
        name: What errors call the stream.
        batch_records: Records of the first batch.
        sizes: Records of each batch.

    Raises:
        BadInput: not a stream, an endless or empty one, batches of different structures, shapes or dtypes, or no room
            in `folder`; names the batch, counted from 0.
    """

    def __init__(
        self,
        batches: object,
        *,
        count: int | None = None,
        folder: str | Path | None = None,
        shuffle_block: int | None = None,
    ) -> None:
        if count is not None and count < 1:
            raise BadInput(f"count={count}: take at least one batch, or None for all")
        if shuffle_block is not None and shuffle_block < 1:
            raise BadInput(f"shuffle_block={shuffle_block}: records in a range, at least 1, or None")
        self.name = type(batches).__name__
        self.shuffle_block = shuffle_block
        self._records = self.batch_records = 0
        self.sizes: list[int] = []
        place = Path(tempfile.gettempdir() if folder is None else folder)
        self._spools: dict[str, _AnySpool] = {}
        self._like: Batch = ()
        try:
            for number, batch in enumerate(islice(self._opened(batches, count), count)):
                before = self._records
                try:
                    self._append(batch, place)
                except BadInput as error:
                    raise type(error)(f"{self.name}: batch {number}: {error}") from error
                self.sizes.append(self._records - before)
            if not self._spools:
                raise BadInput(f"{self.name}: the stream ended before its first batch; it must hold a record")
            for spool in self._spools.values():
                spool.finish(self._records)
        finally:
            for spool in self._spools.values():
                spool.close()

    def __len__(self) -> int:
        return self._records

    def take(self, indices: Int64) -> Batch:
        rows = checked_indices(indices, self._records, self.name)
        taken = (spool.take(rows) for spool in self._spools.values())
        return tuple(map_arrays(lambda _: next(taken), part) for part in self._like)

    def _opened(self, batches: object, count: int | None) -> Iterator[object]:
        """The batches to read."""
        return batches_of(batches, count)

    def _append(self, batch: object, folder: Path) -> None:
        parts = batch_arrays(batch_parts(batch))
        leaves: list[tuple[str, Leaf]] = named_parts(parts)
        size = records_of(leaves, "arrays")
        if not self._spools:
            self.batch_records = size
            self._like = tuple(map_arrays(lambda _: None, part) for part in parts)
            self._spools = {name: _spool_for(name, folder, array) for name, array in leaves}
        found = dict(leaves)
        if found.keys() != self._spools.keys():
            raise BadInput(f"it holds {', '.join(found)}, and the batches before held {', '.join(self._spools)}")
        for name, spool in self._spools.items():
            spool.append(found[name])
        self._records += size


def is_stream(data: object) -> bool:
    """Whether `data` gives batches one after the other: a dataset or a loader of a known library, or an iterator."""
    return hasattr(data, "__next__") or bool(_STREAMS & _kinds_of(data))


def is_iterator(data: object) -> bool:
    """Whether `data` is an iterator, such as a generator: it can be read only once, and may be endless."""
    return hasattr(data, "__next__")


def is_endless(data: object) -> bool | None:
    """Whether a stream has no end; None: unknown before it is read."""
    if is_dataset(data):
        cardinality = int(data.cardinality())
        return None if cardinality == _UNKNOWN else cardinality == _INFINITE
    if is_py_dataset(data):
        return data.num_batches is None
    try:
        len(cast("Sized", data))
    except TypeError:
        return None
    return False


def is_dataset(data: object) -> "TypeGuard[tf.data.Dataset]":
    """Whether it is a `tf.data.Dataset`."""
    return "tensorflow.DatasetV2" in _kinds_of(data)


def is_py_dataset(data: object) -> "TypeGuard[keras.utils.PyDataset]":
    """Whether it is a `keras.utils.PyDataset`."""
    return "keras.PyDataset" in _kinds_of(data)


def _kinds_of(data: object) -> set[str]:
    """`package.Class` of its class and all base classes, without importing the packages."""
    found = set()
    for cls in type(data).__mro__:
        found.add(f"{cls.__module__.partition('.')[0]}.{cls.__name__}")
    return found


def batches_of(data: object, count: int | None, endless: bool = False) -> Iterator[object]:
    """The batches of a stream, at most `count` of an endless one.

    Args:
        data: A stream, as for `StreamReader`.
        count: As of `StreamReader`.
        endless: Whether an endless stream is allowed: the caller knows when to stop.

    Raises:
        BadInput: not a stream, or an endless one without `count`.
    """
    message = (
        f"{type(data).__name__}: the stream has no end; say how many of its batches to take (count=), or give it to "
        "model.fit or et.fit itself, and say where an epoch ends (steps_per_epoch=)"
    )
    if is_dataset(data):
        if count is None and not endless and int(data.cardinality()) == _INFINITE:
            raise BadInput(message)
        opened: Iterator[object] = iter(data)
        return opened
    if is_py_dataset(data):
        batches = count if data.num_batches is None else int(data.num_batches)
        if batches is None and not endless:
            raise BadInput(message)
        # Its own iterator continues until an IndexError.
        return (data[number] for number in (range(batches) if batches is not None else counted()))
    if not isinstance(data, Iterable) or isinstance(data, str | bytes | np.ndarray | dict):
        raise BadInput(f"{type(data).__name__}: no stream of batches; give a tf.data.Dataset, a keras.utils.PyDataset, "
                       "a torch DataLoader or an iterable of (x, y)")  # fmt: skip
    return iter(data)


def batch_parts(batch: object) -> tuple[object, ...]:
    """(x,), (x, y) or (x, y, sample_weight), as in `keras.utils.unpack_x_y_sample_weight`."""
    parts = tuple(batch) if isinstance(batch, tuple | list) else (batch,)
    while len(parts) > 1 and parts[-1] is None:
        parts = parts[:-1]
    if not 1 <= len(parts) <= 3:
        raise BadInput(f"a tuple of {len(parts)}; batches are x, (x, y) or (x, y, sample_weight)")
    return parts


# Spools of ragged and sparse records: the length of each, and the elements of all


class _ListSpool:
    """Records that are lists: how long each is, and spools of the elements of all."""

    def __init__(self, name: str, folder: Path, first: RaggedArray | SparseArray) -> None:
        self._name = name
        self._shape = first.shape if isinstance(first, SparseArray) else None
        self._elements = [_spool_for(name, folder, part) for part in _elements_of(first)]
        self._lengths = _Spool(name, folder, np.empty(0, np.int64))
        self._splits: Int64 = np.zeros(1, np.int64)

    def append(self, part: Leaf) -> None:
        if self._shape is None and not isinstance(part, RaggedArray):
            self._refuse(part, "ragged")
        if self._shape is not None:
            if not isinstance(part, SparseArray) or len(part.shape) != len(self._shape):
                self._refuse(part, f"sparse of {len(self._shape) + 1} axes")
            # Batches made of ragged ones are as wide as their longest record.
            self._shape = tuple(map(max, self._shape, part.shape))
        assert not isinstance(part, np.ndarray)
        for spool, elements in zip(self._elements, _elements_of(part), strict=True):
            spool.append(elements)
        self._lengths.append(np.diff(part.splits))

    def _refuse(self, part: Leaf, before: str) -> NoReturn:
        raise BadInput(f"{self._name} is a {type(part).__name__}, and was {before} before; make all batches alike")

    def finish(self, records: int) -> None:
        self._lengths.finish(records)
        self._splits = splits_of(self._lengths.take(np.arange(records, dtype=np.int64)))
        for spool in self._elements:
            spool.finish(int(self._splits[-1]))

    def close(self) -> None:
        for spool in (self._lengths, *self._elements):
            spool.close()

    def take(self, rows: Int64) -> RaggedArray | SparseArray:
        starts = self._splits[rows]
        lengths = self._splits[rows + 1] - starts
        elements: list[Any] = [spool.take(ranges(starts, lengths)) for spool in self._elements]
        if self._shape is None:
            return RaggedArray.of_lengths(elements[0], lengths)
        return SparseArray(elements[0], elements[1], splits_of(lengths), self._shape)


_AnySpool: TypeAlias = _Spool | _ListSpool


def _elements_of(lists: RaggedArray | SparseArray) -> tuple[Array | RaggedArray, ...]:
    return (lists.values,) if isinstance(lists, RaggedArray) else (lists.indices, lists.values)


def _spool_for(name: str, folder: Path, first: Leaf) -> _AnySpool:
    """An empty spool for records like those of `first`; raises `BadInput` if nothing can be written in `folder`."""
    return _Spool(name, folder, first) if isinstance(first, np.ndarray) else _ListSpool(name, folder, first)
