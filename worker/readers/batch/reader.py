"""The Reader class: numbered records, any of which can be fetched."""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.errors import BadInput

Batch = tuple[Any, ...]
"""(x,), (x, y) or (x, y, sample_weight): arrays or pytrees of arrays whose first axis is
the records. Ragged and sparse leaves are `RaggedArray` and
`SparseArray`."""


@dataclass(frozen=True, slots=True)
class ModelInputs:
    """What a model takes.

    Attributes:
        dtypes: Name of an input -> its dtype, such as "int64", "float32" or "string"; none of a model without named
            inputs.
        lengths: Name of an input -> number of values in each of its lists, where its shape says one.
        own_step: Whether a `train_step` of the model's own reads the batches: then targets may be text, and features
            be used that are no input.
    """

    dtypes: Mapping[str, str] = field(default_factory=dict)
    lengths: Mapping[str, int] = field(default_factory=dict)
    own_step: bool = True


class Reader(ABC):
    """Numbered records 0 .. len - 1, the same on every process of a job.

    The job decides in which order records are trained; a reader only fetches the records it is asked for.

    Attributes:
        shuffle_block: Number of records that are read together; None (the default): any record can be fetched cheaply.
            A job shuffles such blocks, and the records within each, so that a micro-batch reads few blocks.
        in_order: Whether records are trained in the order of their numbers, even if the job shuffles.
        batches: Batches in a pass, of any sizes, if the reader itself makes them (`batch`); None: the job makes them.
        streams: Whether its records are events that come (`EventReader`), and it gives spans of them.
        parts: Records of each part, if a pass goes through several, one after the other (`PartsReader`).
    """

    shuffle_block: int | None = None
    in_order: bool = False
    batches: int | None = None
    streams: bool = False
    parts: tuple[int, ...] = ()

    @abstractmethod
    def __len__(self) -> int:
        """The number of records, at least 1."""

    def batch(self, number: int) -> Batch:
        """Batch `number` of a reader that makes them itself."""
        raise NotImplementedError(f"{type(self).__name__} makes no batches")

    def of_pass(self, number: int) -> "Reader":
        """The records of a pass, counted from 0; of a reader with parts, those of the part whose turn it is.

        They are the same each time, unless it is a stream.
        """
        return self

    def of_evaluation(self, version: int) -> "Reader":
        """The records that a version is evaluated on."""
        return self

    def for_inputs(self, inputs: ModelInputs) -> "Reader":
        """The same records for a model with these inputs: of files, each column is read as its input wants it."""
        return self

    def digest(self) -> str:
        """Tells whether another process has other records, of a source that does not say so itself; else ""."""
        return ""

    @abstractmethod
    def take(self, indices: Int64) -> Batch:
        """Fetches records.

        Args:
            indices: int64 `[n]`, in any order, repeats allowed.

        Returns:
            The records in the order of `indices`.

        Raises:
            BadInput: an index outside `0 <= index < len`, or a source that has changed.
        """


def source_of(reader: Reader) -> str:
    """What errors call a reader's records."""
    own = not type(reader).__module__.startswith("elastable.worker.readers.")
    return f"{type(reader).__name__}.take()" if own else "the data"


def checked_indices(indices: npt.ArrayLike, records: int, source: str) -> Int64:
    """`indices` as int64 `[n]`.

    Raises:
        BadInput: not a vector of integers, or an index outside `0 <= index < records`.
    """
    vector = np.asarray(indices)
    if vector.ndim != 1 or (vector.size and vector.dtype.kind not in "iu"):
        raise BadInput(f"{source}: record indices must be integers [n], got {vector.dtype}{list(vector.shape)}")
    outside = np.flatnonzero((vector < 0) | (vector >= records))
    if outside.size:
        position = int(outside[0])
        raise BadInput(
            f"{source}: record index {vector[position]} at position {position}; "
            f"it holds {records} records, 0 to {records - 1}"
        )
    return vector.astype(np.int64, copy=False)
