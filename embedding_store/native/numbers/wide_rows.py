"""Rows that are some columns of a wider buffer, as kernels are fast on them."""

from __future__ import annotations

import numpy as np

from elastable.embedding_store.contract.arrays import Float32

__all__ = ["with_gaps"]


def with_gaps(rows: Float32) -> Float32:
    """Rows float32 `[n, dim]` with what lies between them, as C-contiguous `[n, at least dim]`.

    For kernels that write the first dim columns alone: numba vectorises loops
    over C-contiguous arrays only. Columns must lie side by side; what does not
    is handed back as it is. Beyond the last row's dim there may be no memory.
    """
    row, column = rows.strides
    if rows.flags.c_contiguous or column != rows.itemsize or row % column or row < column * rows.shape[1]:
        return rows
    return np.lib.stride_tricks.as_strided(rows, (len(rows), row // column), (row, column))
