"""Streams as `model.fit` reads them: again for each pass, in their own order and batches; or on and on."""

import itertools
import random
import threading
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, cast

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.pytrees import batch_arrays, gathered, map_arrays, named_parts, records_of
from elastable.worker.readers.batch.ragged import taken
from elastable.worker.readers.batch.reader import Batch, ModelInputs, Reader, checked_indices
from elastable.worker.readers.stream_reader import (
    StreamReader,
    batch_parts,
    batches_of,
    is_dataset,
    is_endless,
    is_py_dataset,
)


class PartReader(Reader):
    """The records `start <= record < stop` of another reader.

    Raises:
        BadInput: the range is empty or exceeds the reader.
    """

    def __init__(self, reader: Reader, start: int, stop: int) -> None:
        if not 0 <= start < stop <= len(reader):
            raise BadInput(f"records {start} to {stop} of {len(reader)}: there are none, or not so many")
        if reader.parts:
            raise BadInput("validation_split of an et.PartsReader: split each part, or give validation_data")
        self._reader, self._start, self._records = reader, start, stop - start
        self.shuffle_block = reader.shuffle_block

    def __len__(self) -> int:
        return self._records

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        return PartReader(self._reader.for_inputs(inputs), self._start, self._start + self._records)

    def take(self, indices: Int64) -> Batch:
        return self._reader.take(checked_indices(indices, self._records, "part") + self._start)


class PartsReader(Reader):
    """The records of several readers as parts of one, such as the days of a week.

    A pass over the records goes through the parts, one after the other. The records of a part are shuffled among
    themselves, and its last micro-batch and its last version may be smaller: to the bit it is a job on the first part,
    which another one continues on the second, and so on (`continue_from`).

    Args:
        parts: Readers, or what `et.fit` takes as records. They have the same columns.

    Raises:
        BadInput: no parts, or one that makes its batches itself: a stream.
    """

    def __init__(self, parts: Sequence[Reader]) -> None:
        if not parts:
            raise BadInput("PartsReader: parts=[]: give at least one reader")
        for number, part in enumerate(parts):
            if (
                not isinstance(part, Reader)
                or part.batches is not None
                or part.parts
                or part.streams
                or part.of_pass(1) is not part
            ):
                raise BadInput(
                    f"PartsReader: part {number}, counted from 0, is a {type(part).__name__}: give a reader of "
                    "numbered records, such as et.ParquetReader, or et.StreamReader for a stream that ends"
                )
        self._readers = tuple(parts)
        self.parts = tuple(map(len, self._readers))
        self._starts = np.cumsum((0, *self.parts))

    def __len__(self) -> int:
        return int(self._starts[-1])

    def of_pass(self, number: int) -> Reader:
        return self._readers[number % len(self._readers)]

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        return PartsReader([part.for_inputs(inputs) for part in self._readers])

    def digest(self) -> str:
        return "".join(part.digest() for part in self._readers)

    def take(self, indices: Int64) -> Batch:
        rows = checked_indices(indices, len(self), "the parts")
        parts = np.searchsorted(self._starts, rows, side="right") - 1
        places, order = rows - self._starts[parts], np.argsort(parts, kind="stable")
        within = np.empty_like(rows)
        taken = {}
        for part in np.unique(parts).tolist() or [0]:
            members = order[parts[order] == part]
            within[members] = np.arange(len(members))
            taken[part] = self._readers[part].take(places[members])
        return cast("Batch", gathered(parts, within, taken.__getitem__))


class ClassWeightReader(Reader):
    """Records of another reader, weighted by the class of their target, as `model.fit(class_weight=)` does.

    Args:
        reader: Gives `(x, y)`; `y` is one array, of class numbers `[n]` or `[n, 1]`, or one-hot `[n, classes]`.
        class_weight: Class -> weight; the default weight is 1.

    Attributes:
        batch_records: Records of the other reader's batches; 0: it has none.

    Raises:
        BadInput: not a mapping of class numbers to weights, several targets, or a reader with sample weights.
    """

    def __init__(self, reader: Reader, class_weight: Mapping[int, float]) -> None:
        if not isinstance(class_weight, Mapping):
            raise BadInput(f"class_weight={class_weight!r}: give a dict, class number -> weight")
        try:
            self._weights = {int(number): float(weight) for number, weight in class_weight.items()}
        except (TypeError, ValueError) as error:
            raise BadInput(f"class_weight={class_weight!r}: give a dict, class number -> weight") from error
        self._reader = reader
        self.shuffle_block, self.in_order, self.batches = reader.shuffle_block, reader.in_order, reader.batches
        self.parts = reader.parts
        self.batch_records = int(getattr(reader, "batch_records", 0))
        _require_one_target(reader.take(np.zeros(1, np.int64)))

    def __len__(self) -> int:
        return len(self._reader)

    def batch(self, number: int) -> Batch:
        return self._weighted(self._reader.batch(number))

    def of_pass(self, number: int) -> Reader:
        return self._of(self._reader.of_pass(number))

    def for_inputs(self, inputs: ModelInputs) -> Reader:
        return self._of(self._reader.for_inputs(inputs))

    def _of(self, reader: Reader) -> Reader:
        if reader is self._reader:
            return self
        weighted = copy(self)
        weighted._reader = reader
        return weighted

    def take(self, indices: Int64) -> Batch:
        return self._weighted(self._reader.take(indices))

    def _weighted(self, batch: Batch) -> Batch:
        x, y = batch
        of = np.asarray(y)
        if of.ndim > 1:
            of = of[..., 0] if of.shape[-1] == 1 else np.argmax(of, axis=-1)
        classes, inverse = np.unique(np.round(of).astype(np.int32), return_inverse=True)
        weights = np.array([self._weights.get(int(number), 1.0) for number in classes], np.float32)
        return x, y, weights[inverse].reshape(of.shape)


def _require_one_target(batch: Batch) -> None:
    if len(batch) == 3:
        raise BadInput("class_weight and sample_weight: give one of them, as in model.fit")
    if len(batch) == 1:
        raise BadInput("class_weight: there are no targets y to have classes")
    if not hasattr(batch[1], "__array__"):
        raise BadInput("class_weight: y is several targets; weights by class are for models with a single output")


if TYPE_CHECKING:
    import keras

_KEPT = 64  # batches of a stream that are kept, for micro-batches that are computed again
_LOOKED_AT = 2  # batches of a PyDataset that Keras reads for their shapes before it starts


class PassReader(StreamReader):
    """A stream that is read again for each pass over the data, as in plain Keras.

    So a stream that shuffles or augments does so in every pass, and the epoch hooks of a `keras.utils.PyDataset` are
    called. Batches are those of the stream, of any sizes (`Reader.batches`). The first pass is read into files, like
    those of `StreamReader`, when the reader is created; later passes are read as they are trained, and their last few
    batches are kept.

    Args:
        batches: As of `StreamReader`.
        count: As of `StreamReader`; the most batches in a pass.
        shuffle: Whether Python's `random` shuffles the batches of a `PyDataset`, as in Keras. Other streams shuffle
            themselves or not at all.
        first_pass: Number of the first pass that is read; earlier ones are never requested.
        goes_on: Whether Keras would begin the next pass within an epoch (`steps_per_epoch`).

    Raises:
        BadInput: as of `StreamReader`; later, a pass that is shorter than the first one.
    """

    in_order = True

    def __init__(
        self, batches: object, *, count: int | None = None, shuffle: bool, first_pass: int = 0, goes_on: bool = False
    ) -> None:
        passes = _passes(batches, count, shuffle, goes_on)
        self._first = next(passes)
        self._first_pass = first_pass
        super().__init__(batches, count=count)
        self.batches = len(self.sizes)
        later, each = _joined(passes, self.batches, self.name), self.batches
        self._later = _StreamBatches(
            later, self.name, lambda number: f"batch {number % each} of pass {number // each + 1}"
        )
        self._pass = 0

    def __len__(self) -> int:
        """The number of records in a pass, as closely as batches of `batch_records` allow."""
        full = len(self.sizes) * self.batch_records
        return max(full - self.batch_records + 1, min(full, sum(self.sizes)))

    def of_pass(self, number: int) -> Reader:
        its = copy(self)
        its._pass = max(0, number - self._first_pass)
        return its

    def batch(self, number: int) -> Batch:
        if self._pass:
            return self._later.batch((self._pass - 1) * len(self.sizes) + number)
        start = sum(self.sizes[:number])
        return self.take(np.arange(start, start + self.sizes[number], dtype=np.int64))

    def _opened(self, batches: object, count: int | None) -> Iterator[object]:
        return self._first


class EvaluationReader(StreamReader):
    """A stream with an end that is read anew for each evaluation, as in plain Keras.

    Args:
        batches: As of `StreamReader`.
        count: The most batches of an evaluation; None: all.

    Raises:
        BadInput: as of `StreamReader`; later, an evaluation with another number of records than the first.
    """

    def __init__(self, batches: object, *, count: int | None) -> None:
        self._data = batches
        self._passes = _passes(batches, count, shuffle=False, goes_on=count is not None)
        self._now: tuple[int | None, StreamReader] = (None, self)
        super().__init__(batches)  # to the end, which tells the source

    def _opened(self, batches: object, count: int | None) -> Iterator[object]:
        return next(self._passes)

    def of_evaluation(self, version: int) -> Reader:
        of, reader = self._now
        if of not in (None, version):
            if is_py_dataset(self._data):
                self._data.on_epoch_end()  # by which Keras resets it
            reader = StreamReader(next(self._passes))
            if len(reader) != len(self):
                raise BadInput(
                    f"{self.name}: {len(reader)} records to evaluate version {version} on, and {len(self)} before: "
                    "there must be as many each time; wrap it in et.StreamReader, which reads it once"
                )
        self._now = version, reader
        return reader


class _StreamBatches:
    """The batches of a stream, one after another; the last ones are kept.

    Args:
        where: Number of a batch -> where it is, for messages.
    """

    def __init__(self, stream: Iterator[object], name: str, where: Callable[[int], str]) -> None:
        self._stream, self._name, self._where = stream, name, where
        self._lock = threading.Lock()
        self._next = 0
        self._kept: deque[Batch] = deque(maxlen=_KEPT)

    def batch(self, number: int) -> Batch:
        """Batch `number` of the stream; one thread at a time reads on.

        Raises:
            BadInput: the stream ended too early, or the batch is no longer kept.
        """
        with self._lock:
            while self._next <= number:
                self._kept.append(self._read())
                self._next += 1
            behind = self._next - number
            if behind > len(self._kept):
                raise BadInput(f"{self._name}: batch {number} is asked for again, and only the last {_KEPT} are kept")
            return self._kept[-behind]

    def _read(self) -> Batch:
        batch = next(self._stream)
        try:
            return batch_arrays(batch_parts(batch))
        except BadInput as error:
            raise type(error)(f"{self._name}: {self._where(self._next)}: {error}") from error


def _joined(passes: Iterator[Iterator[object]], batches: int, name: str) -> Iterator[object]:
    """The batches of passes after the first, which had so many."""
    for number, one in enumerate(passes, 1):
        for read in range(batches):
            batch = next(one, None)
            if batch is None:
                raise BadInput(
                    f"{name}: pass {number}, counted from 0, ended after {read} batches, and the first one after "
                    f"{batches}: every pass must be as long as the first; wrap the stream in et.StreamReader, which "
                    "reads it once, or say steps_per_epoch= of a stream that repeats"
                )
            if read == batches - 1:
                next(one, None)  # tells the source that it was the last
            yield batch


def _passes(data: object, count: int | None, shuffle: bool, goes_on: bool) -> Iterator[Iterator[object]]:
    """The batches of each pass."""
    for number in itertools.count():
        if is_py_dataset(data) and data.num_batches is not None:
            yield _of_py_dataset(data, count, shuffle, first=number == 0)
        else:
            yield _of_stream(data, count, once_more=not goes_on and is_endless(data) is False)


def _of_py_dataset(data: "keras.utils.PyDataset", count: int | None, shuffle: bool, first: bool) -> Iterator[object]:
    if first:
        # Keras does so, too, in case these calls change what the data set returns.
        for number in range(min(_LOOKED_AT, data.num_batches)):
            data[number]
        data.on_epoch_end()
    data.on_epoch_begin()
    order = list(range(data.num_batches))
    if shuffle:
        random.shuffle(order)
    for number in order[:count]:
        yield data[number]
    data.on_epoch_end()


def _of_stream(data: object, count: int | None, once_more: bool) -> Iterator[object]:
    yield from itertools.islice(batches_of(data, count), count)
    if once_more and is_dataset(data):
        # After its last batch Keras opens a dataset of known length again, and a seeded shuffle counts how often it
        # was opened.
        iter(data)


class EndlessReader(Reader):
    """A stream without an end as `model.fit` reads it: an epoch is its next `steps_per_epoch` batches.

    Records are trained once each, in the order and the batches of the stream; only the last batches are kept.

    Args:
        batches: A stream, as for `StreamReader`.
        steps_per_epoch: Batches in an epoch.
        first_epoch: The epoch of its first batch.

    Attributes:
        batch_records: Records of the first batch.

    Raises:
        BadInput: not a stream; later, a stream that ends.
    """

    in_order = True

    def __init__(self, batches: object, steps_per_epoch: int, first_epoch: int = 0) -> None:
        name = type(batches).__name__
        self.batches, self._first_epoch, self._start = steps_per_epoch, first_epoch, 0
        stream = _without_end(batches_of(batches, None, endless=True), name)
        self._stream = _StreamBatches(stream, name, "batch {}".format)
        self._first = self._stream.batch(0)
        self.batch_records = records_of(named_parts(self._first), f"{name}: batch 0")

    def __len__(self) -> int:
        """The number of records in an epoch, if all batches are as large as the first."""
        return int(self.batches or 0) * self.batch_records

    def of_pass(self, number: int) -> Reader:
        """The records of epoch `number`."""
        its = copy(self)
        its._start = max(0, number - self._first_epoch) * int(self.batches or 0)
        return its

    def batch(self, number: int) -> Batch:
        return self._stream.batch(self._start + number)

    def take(self, indices: Int64) -> Batch:
        """Records of the first batch, which show what the others are like."""
        rows = checked_indices(indices, self.batch_records, "the first batch")
        return tuple(map_arrays(lambda array: taken(array, rows), part) for part in self._first)


def _without_end(stream: Iterator[object], name: str) -> Iterator[object]:
    read = 0
    for batch in stream:
        yield batch
        read += 1
    raise BadInput(
        f"{name}: the stream ended before its batch {read}; epochs x steps_per_epoch asks for more: repeat it "
        "(tf.data: .repeat()), or ask for fewer"
    )
