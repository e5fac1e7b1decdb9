"""What arrays hold, as annotations say it, and memory for them. Docstrings give the shapes."""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]
Bools = npt.NDArray[np.bool_]
Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
Float64 = npt.NDArray[np.float64]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]

_ALIGNMENT = 64  # bytes: what begins elsewhere, TensorFlow and JAX copy


def aligned(shape: tuple[int, ...], dtype: npt.DTypeLike) -> Array:
    """A new array, not filled, whose memory frameworks take as it is."""
    kind = np.dtype(dtype)
    size = math.prod(shape) * kind.itemsize
    room = np.empty(size + _ALIGNMENT, np.uint8)
    return room[-room.ctypes.data % _ALIGNMENT :][:size].view(kind).reshape(shape)


def is_aligned(array: Array) -> bool:
    """Whether frameworks take the array's memory as it is; numbers of C order alone, which may be written."""
    plain = array.flags.c_contiguous and array.flags.writeable and array.dtype.kind in "fiu"
    return plain and array.size > 0 and array.ctypes.data % _ALIGNMENT == 0
