"""Arrays that a loop uses again and again, so that its steps allocate nothing."""

from __future__ import annotations

from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

__all__ = ["Scratch"]

S = TypeVar("S", bound=np.generic)


class Scratch(Generic[S]):
    """One array that is handed out anew each time, and only grows. Not for two users at once."""

    def __init__(self, dtype: type[S]) -> None:
        self._array: npt.NDArray[S] = np.empty(0, dtype)

    def take(self, rows: int, columns: int | None = None) -> npt.NDArray[S]:
        """`[rows]` or `[rows, columns]`, C-contiguous, holding anything; the array taken before is void."""
        size = rows if columns is None else rows * columns
        if size > len(self._array):
            # An eighth more than needed: batches whose sizes vary a little settle at once.
            self._array = np.empty(size + size // 8, self._array.dtype)
        flat = self._array[:size]
        return flat if columns is None else flat.reshape(rows, columns)
