"""What a bulk message's header declares of its body, before a byte of it is read."""

from __future__ import annotations

import math

import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.errors import BadInput

__all__ = ["MAX_BODY_BYTES", "BodyPlan"]


MAX_BODY_BYTES = 4 << 30
"""The longest body that a header may declare; split larger calls."""

_MAX_RANK = 32


class BodyPlan:
    """The buffers that a header declares, bounded before any is allocated."""

    def __init__(self, message: str) -> None:
        self._message = message
        self._parts: list[tuple[tuple[int, ...], np.dtype[np.generic], int]] = []
        self._size = 0

    def add(self, what: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        """Declares the next buffer: `what` names it in errors.

        Raises:
            BadInput: a negative size, more dimensions than an array has, or more than `MAX_BODY_BYTES` in all.
        """
        if len(shape) > _MAX_RANK:  # first: the product of a million lengths takes hours, in which nothing else is done
            raise BadInput(f"{self._message}: {what} has {len(shape)} dimensions; an array has at most {_MAX_RANK}")
        size = math.prod(shape) * dtype.itemsize
        self._size += size
        if (shape and min(shape) < 0) or self._size > MAX_BODY_BYTES or not size:
            self._refuse_impossible(what, shape, dtype)
        self._parts.append((shape, dtype, size))

    def _refuse_impossible(self, what: str, shape: tuple[int, ...], dtype: np.dtype[np.generic]) -> None:
        if any(length < 0 for length in shape):
            raise BadInput(f"{self._message}: {what} has a negative size, {list(shape)}")
        # Of an empty buffer NumPy refuses [0, 2**62], so its other lengths are bounded too.
        declared = math.prod(max(length, 1) for length in shape) * dtype.itemsize
        if max(declared, self._size) > MAX_BODY_BYTES:
            raise BadInput(
                f"{self._message}: {what} of shape {list(shape)} makes a body of more than the "
                f"{MAX_BODY_BYTES} bytes that one call may carry; split the call"
            )

    @property
    def size(self) -> int:
        """Bytes of the whole body."""
        return self._size

    def allocate(self) -> list[Array]:
        """One uninitialised array for each buffer, in the order they were added."""
        return [np.empty(shape, dtype) for shape, dtype, _ in self._parts]

    def cut(self, body: memoryview) -> list[Array]:
        """Copies of the buffers in a body of exactly `size` bytes: quicker where they are small."""
        arrays = []
        start = 0
        for shape, dtype, size in self._parts:
            array: Array = np.ndarray(shape, dtype, body, start)
            arrays.append(array.copy())
            start += size
        return arrays
