"""Arrays one after the other, as bulk messages, shared-memory channels and log entries hold them."""

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput

MAX_BODY_BYTES = 4 << 30
"""The longest body that a header may declare; split larger calls."""

_MAX_RANK = 32


def raw(array: Array) -> memoryview:
    """The bytes of an array, little-endian; those of a contiguous one are its own memory."""
    if array.dtype.str[0] == ">":
        array = array.astype(array.dtype.newbyteorder("<"))
    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


class BodyPlan:
    """The arrays that a header declares, bounded before any is allocated.

    Args:
        message: Names what they are in, in errors.
        most: Bytes of the whole body.
        align: Each array is followed by zeros up to a multiple of so many bytes.

    Attributes:
        size: Bytes of the whole body.
    """

    def __init__(self, message: str, most: int = MAX_BODY_BYTES, align: int = 1) -> None:
        self._message, self._most, self._align = message, most, align
        self._parts: list[tuple[tuple[int, ...], np.dtype[np.generic], int]] = []
        self.size = 0

    def add(self, what: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        """Declares the next array: `what` names it in errors.

        Raises:
            BadInput: a negative size, more dimensions than an array has, or more bytes than there may be.
        """
        if len(shape) > _MAX_RANK:  # first: the product of a million lengths takes hours, in which nothing else is done
            raise BadInput(f"{self._message}: {what} has {len(shape)} dimensions; an array has at most {_MAX_RANK}")
        size = math.prod(shape) * dtype.itemsize
        size += -size % self._align
        self.size += size
        if (shape and min(shape) < 0) or self.size > self._most or not size:
            self._refuse_impossible(what, shape, dtype)
        self._parts.append((shape, dtype, size))

    def _refuse_impossible(self, what: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        if any(length < 0 for length in shape):
            raise BadInput(f"{self._message}: {what} has a negative size, {list(shape)}")
        # Of an empty array NumPy refuses [0, 2**62], so its other lengths are bounded too.
        declared = math.prod(max(length, 1) for length in shape) * dtype.itemsize
        if max(declared, self.size) > self._most:
            raise BadInput(
                f"{self._message}: {what} of shape {list(shape)} makes a body of more than the "
                f"{self._most} bytes that one call may carry; split the call"
            )

    def allocate(self) -> list[Array]:
        """One uninitialised array for each, in the order they were added."""
        return [np.empty(shape, dtype) for shape, dtype, _ in self._parts]

    def cut(self, body: memoryview, copy: bool = True) -> list[Array]:
        """The arrays in a body of at least `size` bytes: views, or copies: quicker than `allocate` for small ones."""
        arrays: list[Array] = []
        start = 0
        for shape, dtype, size in self._parts:
            array: Array = np.ndarray(shape, dtype, body, start)
            arrays.append(array.copy() if copy else array)
            start += size
        return arrays
