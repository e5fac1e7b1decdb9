"""Records of an endless stream: each is trained once, and only the last few batches are kept."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from typing import cast

import numpy as np

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput
from elastable.worker.readers.batch.pytrees import batch_arrays, gathered, named_parts, records_of
from elastable.worker.readers.batch.reader import Batch, Reader, checked_indices
from elastable.worker.readers.live.stream_reader import batch_parts, batches_of

_READ_THROUGH = 16  # batches; to skip more, a stream that can be opened anywhere is reopened


class EndlessReader(Reader):
    """A stream in which an epoch is the next `steps_per_epoch` batches.

    Only the last `keep_batches` batches are kept. Records are trained once each, in the order of the stream, never
    shuffled.

    Args:
        batches: A stream, as for `StreamReader`, which is read once, from its beginning; or a function `open(start)`
            that returns the stream from batch number `start` on, counted from 0, with the same batches each time. A
            model file needs such a function: each worker reads its share, and one that restarts or takes over from
            another continues at the right batch.
        steps_per_epoch: Batches in an epoch.
        keep_batches: How many batches to keep, for micro-batches that are computed again.

    Attributes:
        batch_records: Records of every batch.
        reopens: Whether the stream can be opened at any of its batches.

    Raises:
        BadInput: not a stream, a stream that ends, batches of different sizes or structures, or a batch that is needed
            again but no longer kept.
    """

    in_order = True

    def __init__(
        self, batches: object | Callable[[int], object], steps_per_epoch: int, *, keep_batches: int = 64
    ) -> None:
        for name, value in (("steps_per_epoch", steps_per_epoch), ("keep_batches", keep_batches)):
            if not isinstance(value, int | np.integer) or isinstance(value, bool) or value < 1:
                raise BadInput(f"EndlessReader: {name}={value!r}: give a number of batches, at least 1")
        self._steps, self._keep = int(steps_per_epoch), int(keep_batches)
        self._batches = batches
        self._open_at = batches if callable(batches) and not isinstance(batches, Iterable) else None
        self.reopens = self._open_at is not None
        self._name = "EndlessReader" if self.reopens else type(batches).__name__
        self._lock = threading.Lock()
        self._stream: Iterator[object] = iter(())
        self._next = 0  # the number of the stream's next batch
        self._kept: deque[tuple[int, Batch]] = deque(maxlen=self._keep)
        self.batch_records = 0
        self._open(0)
        self.batch_records = self._records(self._batch(0), 0)

    def __len__(self) -> int:
        return self._steps * self.batch_records

    def of_pass(self, number: int) -> Reader:
        return _Pass(self, number)

    def take(self, indices: Int64) -> Batch:
        return self.of_pass(0).take(indices)

    def take_from(self, first: int, indices: Int64) -> Batch:
        """Records `first + indices` of the stream; one thread at a time reads on."""
        numbers, places = np.divmod(checked_indices(indices, len(self), self._name) + first, self.batch_records)
        with self._lock:
            return cast("Batch", gathered(numbers, places, self._batch, empty=first // self.batch_records))

    def _open(self, start: int) -> None:
        stream = self._batches if self._open_at is None else self._open_at(start)
        self._stream = batches_of(stream, None, endless=True)
        self._next = start
        self._kept.clear()

    def _batch(self, number: int) -> Batch:
        kept = self._kept[0][0] if self._kept else self._next
        if number < kept or (self.reopens and number > self._next + _READ_THROUGH):
            if not self.reopens:
                raise BadInput(
                    f"{self._name}: batch {number} of the stream is asked for again, and only those from {kept} on are "
                    "kept; give EndlessReader a function open(start) that returns the stream from a batch on, or a "
                    "larger keep_batches"
                )
            self._open(number)
        while self._next <= number:
            self._kept.append((self._next, self._read()))
            self._next += 1
        return next(batch for at, batch in self._kept if at == number)

    def _read(self) -> Batch:
        try:
            batch = next(self._stream)
        except StopIteration:
            raise BadInput(
                f"{self._name}: the stream ended before its batch {self._next}; epochs x steps_per_epoch asks for "
                "more: repeat it (tf.data: .repeat()), or ask for fewer"
            ) from None
        try:
            parts = batch_arrays(batch_parts(batch))
        except BadInput as error:
            raise type(error)(f"{self._name}: batch {self._next}: {error}") from error
        found = self._records(parts, self._next)
        if found != self.batch_records and self.batch_records:
            raise BadInput(
                f"{self._name}: batch {self._next} holds {found} records, and the first {self.batch_records}: a stream "
                "without an end needs batches of one size (tf.data: .repeat() before .batch(), or drop_remainder=True)"
            )
        return parts

    def _records(self, parts: Batch, number: int) -> int:
        return records_of(named_parts(parts), f"{self._name}: batch {number}")


class _Pass(Reader):
    """The records of one epoch of a stream."""

    def __init__(self, stream: EndlessReader, number: int) -> None:
        self._stream, self._first = stream, number * len(stream)

    def __len__(self) -> int:
        return len(self._stream)

    def take(self, indices: Int64) -> Batch:
        return self._stream.take_from(self._first, indices)
