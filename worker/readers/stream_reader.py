"""Streams of batches, read once so that any record can be fetched afterwards."""

import tempfile
from collections.abc import Iterable, Iterator, Sized
from contextlib import contextmanager
from itertools import count as counted
from itertools import islice, pairwise
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, TypeGuard, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.pytrees import batch_arrays, map_arrays, named_parts, records_of
from elastable.worker.readers.batch.ragged import Leaf, RaggedArray, SparseArray, ranges, splits_of
from elastable.worker.readers.batch.reader import Batch, Reader, checked_indices

if TYPE_CHECKING:
    import keras
    import tensorflow as tf

_TEXT = "SUO"


class _Spool:
    """Appends the records of one leaf to unnamed files; `finish` makes them readable.

    Numbers keep their dtype. Lists are their lengths and their elements, each a spool; so are strings, of bytes in
    UTF-8. Files are unlinked at once, so nothing is left when the process ends.

    Args:
        name: Its name in errors, such as "x['user']".
        first: Records of the first batch: all are of its kind and dtype, and have its shape but for the first axis.
    """

    def __init__(self, name: str, folder: Path, first: Leaf) -> None:
        self._name, self._folder, self._dtype = name, folder, first.dtype
        self._kind, self._text = _kind_of(first), isinstance(first, np.ndarray) and first.dtype.kind in _TEXT
        self._shape: tuple[int, ...] = first.shape[1:] if isinstance(first, np.ndarray) else ()
        self._shape = first.shape if isinstance(first, SparseArray) else self._shape
        self._width = int(np.prod(self._shape, dtype=np.int64)) if self._text else 1  # strings of a record
        self._decodes = isinstance(first, np.ndarray) and isinstance(next(first.flat, b""), str)
        self._bytes = 0
        self._inside = [_Spool(name, folder, part) for part in _inside(first)]
        self._file = None if self._inside else self._new_file()
        self._values: Array = np.empty(0)
        self._splits: Int64 = np.zeros(1, np.int64)

    def append(self, part: Leaf) -> None:
        """Appends `[n, ...]` records.

        Raises:
            BadInput: another kind of records, another shape or dtype than before, or no room on the disk.
        """
        if _kind_of(part) != self._kind:
            raise BadInput(
                f"{self._name} is a {type(part).__name__}, and was {self._kind} before; make all batches alike"
            )
        if isinstance(part, np.ndarray):
            self._require_alike(part)
        elif isinstance(part, SparseArray):  # batches made of ragged ones are as wide as their longest record
            self._shape = tuple(map(max, self._shape, part.shape))
        for spool, elements in zip(self._inside, _inside(part), strict=True):
            spool.append(elements)
        if self._file is not None and isinstance(part, np.ndarray):
            values = np.ascontiguousarray(part, self._dtype.newbyteorder("="))
            with self._disk_errors():
                self._file.write(values.reshape(-1).view(np.uint8).data)
            self._bytes += values.nbytes

    def _require_alike(self, part: Array) -> None:
        if part.shape[1:] != self._shape:
            raise BadInput(
                f"{self._name} has records of shape {list(part.shape[1:])}, those before {list(self._shape)}; "
                "make them ragged, or pad them to one shape"
            )
        kept, found = self._dtype.newbyteorder("="), part.dtype.newbyteorder("=")
        floats = found.kind == kept.kind == "f"
        if floats and not self._bytes:
            self._dtype = kept = found  # records without elements have said nothing
        fits = found.kind in _TEXT if self._text else found == kept or (floats and found.itemsize < kept.itemsize)
        if not fits:
            before = "strings" if self._text else self._dtype
            raise BadInput(f"{self._name} is {part.dtype}, and was {before} before; cast it to one dtype")

    def finish(self, records: int) -> None:
        """Ends writing; from now on `take` may be called."""
        if self._file is not None:
            with self._disk_errors():
                self._file.flush()
            shape, dtype = (records, *self._shape), self._dtype.newbyteorder("=")
            self._values = np.empty(shape, dtype) if 0 in shape else np.memmap(self._file, dtype, "r", shape=shape)
            return
        lengths, *elements = self._inside
        lengths.finish(records * self._width)
        self._splits = splits_of(lengths._values)
        for spool in elements:
            spool.finish(int(self._splits[-1]))

    def close(self) -> None:
        """Closes the files; finished records stay readable. Calling it twice is harmless."""
        for spool in self._inside:
            spool.close()
        if self._file is not None:
            self._file.close()

    def take(self, rows: Int64) -> Leaf:
        """Copies of the records at `rows` int64 `[n]`; strings are `[n, ...]` objects."""
        if self._file is not None:
            return np.asarray(self._values[rows])
        wanted = (rows[:, None] * self._width + np.arange(self._width)).reshape(-1)
        starts = self._splits[wanted]
        lengths = self._splits[wanted + 1] - starts
        elements: list[Any] = [spool.take(ranges(starts, lengths)) for spool in self._inside[1:]]
        if not self._text:
            if self._kind == _RAGGED:
                return RaggedArray.of_lengths(elements[0], lengths)
            return SparseArray(elements[0], elements[1], splits_of(lengths), self._shape)
        content, splits = elements[0].tobytes(), splits_of(lengths).tolist()
        texts = [content[start:stop] for start, stop in pairwise(splits)]
        made = np.empty(len(texts), object)
        made[:] = [text.decode() for text in texts] if self._decodes else texts
        return made.reshape(len(rows), *self._shape)

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
                f"{self._name}: {error.strerror or error} after {self._bytes:,} bytes in folder {str(self._folder)!r}; "
                "name one with more room"
            ) from error


_RAGGED = "ragged"


def _kind_of(leaf: Leaf) -> str:
    if isinstance(leaf, np.ndarray):
        return "an array"
    return _RAGGED if isinstance(leaf, RaggedArray) else f"sparse of {len(leaf.shape) + 1} axes"


def _inside(leaf: Leaf) -> tuple[Array | RaggedArray, ...]:
    """What records of lists or strings are made of: lengths `[n]`, and elements; nothing for numbers."""
    if isinstance(leaf, RaggedArray):
        return np.diff(leaf.splits), leaf.values
    if isinstance(leaf, SparseArray):
        return np.diff(leaf.splits), leaf.indices, leaf.values
    if leaf.dtype.kind not in _TEXT:
        return ()
    texts = [text.encode() if isinstance(text, str) else bytes(text) for text in leaf.reshape(-1).tolist()]
    return np.array([len(text) for text in texts], np.int64), np.frombuffer(b"".join(texts), np.uint8)


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
        self._spools: dict[str, _Spool] = {}
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
        return batches_of(batches, count)

    def _append(self, batch: object, folder: Path) -> None:
        parts = batch_arrays(batch_parts(batch))
        leaves: list[tuple[str, Leaf]] = named_parts(parts)
        size = records_of(leaves, "arrays")
        if not self._spools:
            self.batch_records = size
            self._like = tuple(map_arrays(lambda _: None, part) for part in parts)
            self._spools = {name: _Spool(name, folder, array) for name, array in leaves}
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
