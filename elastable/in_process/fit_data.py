"""What `model.fit` takes as data, as readers: arrays, datasets, weights, splits, steps."""

import json
import math
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import keras
import numpy as np

from elastable.assembly import Assembly
from elastable.embedding_store.composite.locations import LocationSettings
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.in_process.in_process_stores import StoreGiven
from elastable.master.api import JobSpec
from elastable.master.model.dense import DenseModel
from elastable.master.tasks.progress import Progress
from elastable.worker.keras.structures import TensorBatch
from elastable.worker.readers.batch.reader import Reader
from elastable.worker.readers.numpy_reader import NumpyReader, as_reader
from elastable.worker.readers.pass_reader import (
    ClassWeightReader,
    EndlessReader,
    EvaluationReader,
    PartReader,
    PassReader,
)
from elastable.worker.readers.stream_reader import StreamReader, is_endless, is_iterator, is_stream

_BATCH_RECORDS = 32  # as in Keras
_PARTS = ("x", "y", "sample_weight")


@dataclass(slots=True, kw_only=True)
class FitArguments:
    """The arguments of `et.fit`, which says what each means, checked.

    Attributes:
        callbacks: As a sequence, without Keras' own `History`.
        backed_up: Whether `keras.callbacks.BackupAndRestore` is among them.
        verbose: 0: nothing is shown; 1: how far the job is, and a line for every epoch; 2: these lines alone.

    Raises:
        BadInput, Unsupported: what cannot be, by name.
    """

    x: object = None
    y: object = None
    sample_weight: object = None
    class_weight: Mapping[int, float] | None = None
    batch_size: int | None = None
    validation_split: float | None = 0.0
    validation_data: object = None
    steps_per_epoch: int | None = None
    validation_steps: int | None = None
    validation_batch_size: int | None = None
    validation_freq: Any = 1
    grads_to_wait: int | None = None
    epochs: int = 1
    initial_epoch: int = 0
    shuffle: Any = True
    callbacks: Any = ()
    verbose: Any = 1
    seed: int | None = None
    average: str = "mean"
    evaluate_every: int = 0
    linger: float = 5.0
    until: str | None = None
    max_bad_events: int = 100
    store: StoreGiven = None
    locations: LocationSettings | None = None
    offload_embeddings_above: int = 0
    lazy: bool | None = True
    not_finite: str = "refuse"
    continue_from: str | Path | None = None
    leave_out: tuple[str, ...] = ()
    backed_up: bool = False

    def __post_init__(self) -> None:
        if isinstance(self.callbacks, keras.callbacks.CallbackList):
            given = self.callbacks.callbacks
            self.callbacks = tuple(each for each in given if not isinstance(each, keras.callbacks.History))
        else:
            self.callbacks = () if self.callbacks is None else tuple(keras.tree.flatten(self.callbacks))
        if self.verbose not in ("auto", 0, 1, 2):
            raise BadInput(
                f'verbose={self.verbose!r}: need 0 (nothing), 1 or "auto" (progress), or 2 (a line for each epoch)'
            )
        self.verbose = 1 if self.verbose == "auto" else int(self.verbose)
        if self.shuffle == "batch":
            raise Unsupported('shuffle="batch": records are shuffled one by one; use shuffle=True or False')
        self.shuffle, self.leave_out = bool(self.shuffle), tuple(self.leave_out)
        self._check_numbers()
        for callback in self.callbacks:
            if isinstance(callback, keras.callbacks.BackupAndRestore):
                self.backed_up, self.initial_epoch = True, _backed_up_epoch(callback) or self.initial_epoch
        if not 0 <= self.initial_epoch < self.epochs:
            raise BadInput(
                f"initial_epoch={self.initial_epoch}, epochs={self.epochs}: need 0 <= initial_epoch < epochs; epochs "
                "is the epoch to end at"
            )
        if self.continue_from is not None and self.initial_epoch:
            raise BadInput(
                f"continue_from={str(self.continue_from)!r}, initial_epoch={self.initial_epoch}: the first begins a "
                "new fit where another one ended, with epochs from 0; the second goes on with one of this process"
            )
        if self.leave_out and self.continue_from is None:
            raise BadInput("leave_out= needs continue_from=: whose tables and variables are left out")
        if self.evaluate_every < 0:
            raise BadInput(f"evaluate_every={self.evaluate_every}: need a number of versions, or 0")

    def _check_numbers(self) -> None:
        for name in ("batch_size", "steps_per_epoch", "validation_steps", "validation_batch_size"):
            value = getattr(self, name)
            if value is not None and (isinstance(value, bool) or not isinstance(value, int | np.integer) or value < 1):
                raise BadInput(f"{name}={value!r}: need an integer of at least 1, or None")
        split = self.validation_split = 0.0 if self.validation_split is None else self.validation_split
        if not isinstance(split, int | float) or not 0.0 <= split < 1.0:
            raise BadInput(f"validation_split={split!r}: need a share of the records, 0 <= validation_split < 1")
        every = self.validation_freq
        if isinstance(every, Iterable) and not isinstance(every, str):
            self.validation_freq = tuple(every)
            right = all(isinstance(epoch, int | np.integer) for epoch in self.validation_freq)
        else:
            right = isinstance(every, int) and not isinstance(every, bool) and every >= 1
        if not right:
            raise BadInput(f"validation_freq={every!r}: need a number of epochs, at least 1, or a list of epochs")


def _backed_up_epoch(callback: keras.callbacks.BackupAndRestore) -> int:
    """The epoch that Keras' `fit` would begin at: that of a backup; 0: there is none. Raises `BadInput`."""
    file = Path(callback._training_metadata_path)
    if not file.exists():
        return 0
    try:
        epoch = json.loads(file.read_text())["epoch"]
        if type(epoch) is not int or epoch < 0:
            raise ValueError(f"epoch {epoch!r}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise BadInput(
            f"callback BackupAndRestore: {file} is no backup ({error}); delete its folder to begin anew"
        ) from error
    return epoch


@dataclass(frozen=True, slots=True)
class FitData:
    """Records to train on and to evaluate on.

    Attributes:
        validation: To evaluate on; None: nothing is evaluated.
        batch_size: Records in a micro-batch.
        validation_batch_size: Records that are evaluated together.
        steps_per_epoch: Steps of an epoch; 0: a pass over the records.
    """

    train: Reader
    validation: Reader | None
    batch_size: int
    validation_batch_size: int
    steps_per_epoch: int


@dataclass(frozen=True, slots=True)
class BegunFit:
    """A fit before its first version.

    Attributes:
        train: The training records, as the model takes them.
        sample: The first of them.
        parts: Of the model, which reads from the store.
        start: Where the job begins; `store` and `dense` are at that version.
        keras_draws: As of `elastable.worker.runtime.compute.MicroBatchComputer`.
    """

    data: FitData
    train: Reader
    sample: TensorBatch
    parts: Assembly
    job: JobSpec
    store: EmbeddingStore
    dense: DenseModel
    start: Progress
    keras_draws: bool


def fit_data(given: FitArguments) -> FitData:
    """Readers of what was given.

    Raises:
        BadInput: data or numbers that cannot be used, by the name of their argument.
    """
    split = given.validation_split
    reader = _train_reader(given)
    endless = isinstance(reader, EndlessReader)
    if reader.streams:
        _require_no_passes(reader, given)
    elif given.until is not None:
        raise BadInput(f"until={given.until!r}: x is no stream of events: leave it out")
    validation = _validation_reader(given)
    if split and validation is None:
        reader, validation = _split(reader, split)
    if given.class_weight is not None:
        reader = ClassWeightReader(reader, given.class_weight)
    batch_size = given.batch_size or _batch_size(reader, given)
    if given.steps_per_epoch and not reader.streams:
        _warn_if_short(len(reader), batch_size * (given.grads_to_wait or 1), given.steps_per_epoch)
    of_stream = validation.batch_records if isinstance(validation, StreamReader) else None
    together = given.validation_batch_size or of_stream or given.batch_size or batch_size
    if validation is not None and (first := given.validation_steps):
        _warn_if_short(len(validation), together, first, "validation_steps")
        if first * together < len(validation) and not is_stream(given.validation_data):  # which has ended there
            validation = PartReader(validation, 0, first * together)
    steps = 0 if endless else given.steps_per_epoch  # without an end a pass is an epoch
    return FitData(reader, validation, batch_size, together, steps or 0)


def _require_no_passes(reader: Reader, given: FitArguments) -> None:
    """Raises `BadInput` for an argument that has no meaning for a stream of events."""
    for name in ("validation_split", "class_weight", "steps_per_epoch", "initial_epoch"):
        if value := getattr(given, name):
            raise BadInput(
                f"{name}={value!r} with {type(reader).__name__}: of a stream of events there are no last records and "
                "no passes; give validation_data, weight= and steps_per_epoch= of the reader, or continue_from="
            )


def _train_reader(given: FitArguments) -> Reader:
    x, y, weight = _parts(given.x, given.y, given.sample_weight)
    if x is None:
        raise BadInput("x=None: give the records to train on: arrays x and y, a tf.data.Dataset or another Reader")
    if not isinstance(x, Reader | str) and not is_stream(x):
        return _of_arrays(x, y, weight)
    for name, part in (("y", y), ("sample_weight", weight)):
        if part is not None:
            raise BadInput(f"{name}=: {type(x).__name__} as x gives (x, y) or (x, y, sample_weight) by itself")
    if isinstance(x, Reader | str):
        return as_reader(x, endless=True)
    batches = given.steps_per_epoch * (given.grads_to_wait or 1) if given.steps_per_epoch else None
    once = given.batch_size is not None or bool(given.validation_split)  # records of batches that are made here
    reader = train_stream(x, batches, given.initial_epoch, given.epochs, given.shuffle, once)
    if isinstance(reader, EndlessReader) and given.batch_size not in (None, reader.batch_records):
        raise BadInput(
            f"batch_size={given.batch_size}: the batches of the stream without an end hold {reader.batch_records} "
            "records; leave batch_size out"
        )
    return reader


def _validation_reader(given: FitArguments) -> Reader | None:
    data = given.validation_data
    if data is None:
        if given.validation_steps and not given.validation_split:
            raise BadInput(f"validation_steps={given.validation_steps}: there is no validation_data to evaluate on")
        return None
    if isinstance(data, list):  # Keras takes [x, y] for (x, y)
        data = tuple(data)
    if isinstance(data, tuple):
        if not 1 <= len(data) <= 3:
            raise BadInput(f"validation_data is a tuple of {len(data)}; give (x, y) or (x, y, sample_weight)")
        return _of_arrays(*(*data, None, None)[:3])
    if is_stream(data):
        steps = given.validation_steps
        once = is_iterator(data) or is_endless(data)  # each evaluation has the same records then
        if steps is None and once:
            raise BadInput(
                f"validation_data is a {type(data).__name__}, a stream without an end: say how many of its batches to "
                "evaluate (validation_steps=)"
            )
        return (StreamReader if once else EvaluationReader)(data, count=None if steps is None else int(steps))
    if isinstance(data, Reader | str):
        return as_reader(data)
    return _of_arrays(*_parts(data, None, None))


def _parts(x: object, y: object, weight: object) -> tuple[object, object, object]:
    """x, y, sample_weight, which a tuple or a dict as `x` may hold together."""
    if y is not None:
        return x, y, weight
    if isinstance(x, tuple):
        if not 1 <= len(x) <= 3:
            raise BadInput(f"x is a tuple of {len(x)} without y; give x and y, (x, y) or (x, y, sample_weight)")
        found = (*x, None, None)[:3]
    elif isinstance(x, Mapping) and "x" in x and set(x) <= set(_PARTS):
        found = tuple(x.get(part) for part in _PARTS)
    else:
        return x, y, weight
    if weight is not None and found[2] is not None:
        raise BadInput("sample_weight=: x holds weights already")
    return found[0], found[1], found[2] if weight is None else weight


def _of_arrays(x: object, y: object, weight: object) -> Reader:
    if weight is not None and isinstance(y, tuple | list | Mapping) and hasattr(weight, "__array__"):
        weight = _for_each(y, weight)
    return NumpyReader(x, y, weight)


def _for_each(y: object, weight: object) -> object:
    """One weight a record for each of several targets, as Keras does."""
    shape = np.asarray(weight).shape
    if len(shape) > 2 or (len(shape) == 2 and shape[1] != 1):
        raise BadInput(
            f"sample_weight of shape {shape} for several targets: give one weight a record, `[records]`, or one array "
            "for each target"
        )
    if isinstance(y, Mapping):
        return {key: _for_each(part, weight) for key, part in y.items()}
    if isinstance(y, tuple | list):
        return type(y)(_for_each(part, weight) for part in y)
    return weight


def _split(reader: Reader, share: float) -> tuple[Reader, Reader]:
    """All but the last `share` of the records, and these; before anything is shuffled."""
    if isinstance(reader, EndlessReader):
        raise BadInput(f"validation_split={share}: a stream without an end has no last records; give validation_data")
    records = len(reader)
    kept = math.floor(records * (1.0 - share))
    if kept in (0, records):
        raise BadInput(
            f"validation_split={share} of {records} records leaves the training or the validation split empty; give "
            "more records, or another validation_split"
        )
    return PartReader(reader, 0, kept), PartReader(reader, kept, records)


def _batch_size(reader: Reader, given: FitArguments) -> int:
    if together := getattr(reader, "batch_records", 0):
        return int(together)
    if given.steps_per_epoch:
        return math.ceil(len(reader) / (given.steps_per_epoch * (given.grads_to_wait or 1)))
    return _BATCH_RECORDS


def _warn_if_short(records: int, batch: int, steps: int, name: str = "steps_per_epoch") -> None:
    there = math.ceil(records / batch)
    if steps <= there and (name != "steps_per_epoch" or there % steps == 0):
        return
    warnings.warn(
        f"{name}={steps}: the data ends after {there} batches, within an epoch, which is shorter then, as in Keras",
        stacklevel=2,
    )


# Streams as `model.fit` takes them, with and without an end, as readers


def train_stream(
    data: object, batches_per_epoch: int | None, first_epoch: int, epochs: int, shuffle: bool, once: bool
) -> Reader:
    """Records to train on; of a stream without an end, an `EndlessReader`.

    Args:
        data: A stream, as `is_stream` says.
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
        return EndlessReader(data, batches_per_epoch, first_epoch)
    count = batches_per_epoch * epochs  # no more than are trained: it may have no end
    if once:
        return StreamReader(data, count=count)
    return PassReader(data, count=count, shuffle=shuffle, first_pass=first_epoch, goes_on=True)
