"""Ragged and sparse arrays: records of different lengths, without padding and without TensorFlow."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from elastable.embedding_store.contract.arrays import Array, Int64
from elastable.embedding_store.errors import BadInput


@dataclass(frozen=True, slots=True, eq=False)
class RaggedArray:
    """Records that are lists: record i holds `values[splits[i]:splits[i + 1]]`.

    The model sees it as a `tf.RaggedTensor`.

    Attributes:
        values: The elements of all records, one after another; an array `[elements, ...]`, or another RaggedArray for
            lists of lists.
        splits: int64 `[records + 1]`, from 0 to `len(values)`, ascending.

    Raises:
        BadInput: splits that do not match the values.
    """

    values: "Array | RaggedArray"
    splits: Int64

    def __post_init__(self) -> None:
        splits = np.asarray(self.splits)
        if splits.ndim != 1 or splits.dtype.kind not in "iu" or splits.size == 0:
            raise BadInput(f"RaggedArray: splits must be integers [records + 1], got {splits.dtype}{[*splits.shape]}")
        splits = splits.astype(np.int64, copy=False)
        if splits[0] != 0 or splits[-1] != len(self.values) or (np.diff(splits) < 0).any():
            raise BadInput(
                f"RaggedArray: splits must rise from 0 to {len(self.values)}, the number of values; "
                f"they go from {splits[0]} to {splits[-1]}"
            )
        object.__setattr__(self, "splits", splits)

    @classmethod
    def of_lengths(cls, values: "Array | RaggedArray", lengths: Array) -> "RaggedArray":
        """Records of `lengths` `[records]` elements each."""
        return cls(values, splits_of(np.asarray(lengths, np.int64)))

    def __len__(self) -> int:
        return len(self.splits) - 1

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the elements."""
        return self.values.dtype


@dataclass(frozen=True, slots=True, eq=False)
class SparseArray:
    """Records with values at some positions only; the model sees it as a `tf.SparseTensor`.

    Record i holds `values[splits[i]:splits[i + 1]]` at the positions `indices[splits[i]:splits[i + 1]]`.

    Attributes:
        indices: int64 `[elements, rank - 1]`: position of a value in its record.
        values: `[elements]`.
        splits: int64 `[records + 1]`.
        shape: Shape of one record; rank - 1 sizes.
    """

    indices: Int64
    values: Array
    splits: Int64
    shape: tuple[int, ...]

    def __len__(self) -> int:
        return len(self.splits) - 1

    @property
    def dtype(self) -> np.dtype[np.generic]:
        """Dtype of the elements."""
        return self.values.dtype


Leaf = Array | RaggedArray | SparseArray


def taken(leaf: Leaf, rows: Int64) -> Leaf:
    """Copies of the records at int64 `[n]` `rows`, in that order."""
    if isinstance(leaf, RaggedArray | SparseArray):
        starts, lengths = leaf.splits[rows], np.diff(leaf.splits)[rows]
        elements = ranges(starts, lengths)
        if isinstance(leaf, RaggedArray):
            values = taken(leaf.values, elements)
            assert not isinstance(values, SparseArray)
            return RaggedArray.of_lengths(values, lengths)
        return SparseArray(leaf.indices[elements], leaf.values[elements], splits_of(lengths), leaf.shape)
    return np.asarray(leaf[rows])


def other_length(found: int, wanted: int) -> str:
    """What is wrong with a list of `found` values for an input that takes `wanted`."""
    return (
        f"a list of {found} values, and the model's input takes {wanted}, keras.Input(({wanted},)): make all lists as "
        "long, or the input keras.Input((None,)) for lists of any length"
    )


def concatenated(leaves: Sequence[Leaf]) -> Leaf:
    """The records of several leaves of one kind, one after another."""
    ragged = [leaf for leaf in leaves if isinstance(leaf, RaggedArray)]
    if ragged:
        values = concatenated([leaf.values for leaf in ragged])
        assert not isinstance(values, SparseArray)
        return RaggedArray.of_lengths(values, np.concatenate([np.diff(leaf.splits) for leaf in ragged]))
    sparse = [leaf for leaf in leaves if isinstance(leaf, SparseArray)]
    if sparse:
        return SparseArray(
            np.concatenate([leaf.indices for leaf in sparse]),
            np.concatenate([leaf.values for leaf in sparse]),
            splits_of(np.concatenate([np.diff(leaf.splits) for leaf in sparse])),
            tuple(max(sizes) for sizes in zip(*(leaf.shape for leaf in sparse), strict=True)),
        )
    return np.concatenate([leaf for leaf in leaves if isinstance(leaf, np.ndarray)])


def map_values(function: Callable[[Array], Array], leaf: Leaf) -> Leaf:
    """The leaf with `function` applied to the array of its elements."""
    if isinstance(leaf, RaggedArray):
        values = map_values(function, leaf.values)
        assert not isinstance(values, SparseArray)
        return RaggedArray(values, leaf.splits)
    if isinstance(leaf, SparseArray):
        return SparseArray(leaf.indices, function(leaf.values), leaf.splits, leaf.shape)
    return function(leaf)


def ranges(starts: Int64, lengths: Int64) -> Int64:
    """starts[0], starts[0] + 1, ... for lengths[0] of them, then those from starts[1], and so on."""
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    return np.repeat(starts - (ends - lengths), lengths) + np.arange(total)


def splits_of(lengths: Int64) -> Int64:
    """int64 `[records + 1]`: where the elements of records of these lengths begin and end."""
    return np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths, dtype=np.int64)])
