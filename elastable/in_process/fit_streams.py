"""Streams as `model.fit` takes them, with and without an end, as readers."""

from __future__ import annotations

from elastable.embedding_store.errors import BadInput
from elastable.worker.readers import EndlessReader, PassReader, Reader, StreamReader
from elastable.worker.readers.streams.stream_reader import is_endless, is_iterator, is_stream

__all__ = ["is_fit_stream", "train_stream", "validation_stream"]


class _FromEpoch(EndlessReader):
    """A stream whose first batches belong to the epoch at which `fit` begins, as in Keras."""

    def __init__(self, batches: object, batches_per_epoch: int, first_epoch: int) -> None:
        self._first_epoch = first_epoch
        super().__init__(batches, batches_per_epoch)

    def of_pass(self, number: int) -> Reader:
        """The records of epoch `number`."""
        return super().of_pass(max(0, number - self._first_epoch))


def is_fit_stream(data: object) -> bool:
    """Whether `data` gives batches one after the other: a dataset, a loader or an iterator."""
    return is_stream(data) or is_iterator(data)


def train_stream(
    data: object, batches_per_epoch: int | None, first_epoch: int, epochs: int, shuffle: bool, once: bool
) -> Reader:
    """Records to train on; of a stream without an end, an `EndlessReader`.

    Args:
        data: A stream, as `is_fit_stream` says.
        batches_per_epoch: Batches of an epoch; None: all.
        first_epoch: The epoch of the stream's first batch.
        epochs: The epoch to end at.
        shuffle: Whether the batches of a `PyDataset` are shuffled.
        once: Whether a stream with an end is read once, for records by number; False: anew for each pass.

    Raises:
        BadInput: an end that is not known, or no end, without `batches_per_epoch`.
    """
    endless = is_endless(data)
    if endless is False or (endless is None and not batches_per_epoch and not is_iterator(data)):
        if once:
            return StreamReader(data)
        return PassReader(data, shuffle=shuffle, first_pass=first_epoch, goes_on=bool(batches_per_epoch))
    if not batches_per_epoch:
        raise BadInput(
            f"x is a {type(data).__name__}, a stream without an end: say where an epoch ends (steps_per_epoch=), or "
            "which of its batches to take (et.StreamReader(stream, count=...))"
        )
    if endless or is_iterator(data):
        return _FromEpoch(data, batches_per_epoch, first_epoch)
    count = batches_per_epoch * epochs  # no more than are trained: it may have no end
    if once:
        return StreamReader(data, count=count)
    return PassReader(data, count=count, shuffle=shuffle, first_pass=first_epoch, goes_on=True)


def validation_stream(data: object, steps: int | None) -> Reader:
    """Records to evaluate on: the first `steps` batches, each time; None: all.

    Raises:
        BadInput: a stream without an end, or whose end is not known, without `steps`.
    """
    if steps is None and (is_iterator(data) or is_endless(data)):
        raise BadInput(
            f"validation_data is a {type(data).__name__}, a stream without an end: say how many of its batches to "
            "evaluate (validation_steps=)"
        )
    return StreamReader(data, count=None if steps is None else int(steps))
