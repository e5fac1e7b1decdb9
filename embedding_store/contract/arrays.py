"""What arrays hold, as annotations say it. Shapes stand in docstrings."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

__all__ = ["Float32", "Int64", "UInt8", "UInt32", "UInt64"]

Int64 = npt.NDArray[np.int64]
Float32 = npt.NDArray[np.float32]
UInt8 = npt.NDArray[np.uint8]
UInt32 = npt.NDArray[np.uint32]
UInt64 = npt.NDArray[np.uint64]
