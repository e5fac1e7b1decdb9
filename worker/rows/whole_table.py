"""`layer.embeddings` of a layer whose table lives in a store: a stand-in for the Keras variable."""

from __future__ import annotations

from typing import Any

import numpy as np
import tensorflow as tf

from elastable.worker.rows.saved_rows import all_rows, load_all_rows

__all__ = ["WholeTable"]


class WholeTable:
    """All rows of a fixed table, looked up whenever they are used as a tensor.

    Within a model's forward pass that is a lookup of every id, and gradients
    reach every row, as where weights are tied. Its cost goes with the table.

    Args:
        layer: A layer whose table is in a store.

    Raises:
        Unsupported: the table takes any id, or is too large (`saved_rows.all_rows`).
    """

    def __init__(self, layer: Any) -> None:
        self._layer = layer
        self.shape = (layer.input_dim, layer.output_dim)
        self.dtype = "float32"
        self.ndim = 2
        self.name = self.path = f"{layer.name}/embeddings"

    def __repr__(self) -> str:
        return f"<rows of table {self._layer.table_name!r}, shape={self.shape}>"

    @property
    def trainable(self) -> bool:
        """Whether the layer is trained."""
        return bool(self._layer.trainable)

    @property
    def value(self) -> Any:
        """The rows as a tensor float32 `[vocabulary, dim]`."""
        return self._layer.all_rows_tensor()

    def numpy(self) -> np.ndarray[Any, Any]:
        """The rows as they are now, float32 `[vocabulary, dim]`."""
        return all_rows(self._layer)

    def assign(self, value: Any) -> None:
        """Gives the table these rows, `[vocabulary, dim]`; slots stay as they are."""
        load_all_rows(self._layer, np.asarray(value))

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray[Any, Any]:
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: Any = None, name: str | None = None) -> Any:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __len__(self) -> int:
        return int(self.shape[0])

    def __getitem__(self, where: Any) -> Any:
        return self.value[where]

    def __matmul__(self, other: Any) -> Any:
        return self.value @ other

    def __rmatmul__(self, other: Any) -> Any:
        return other @ self.value

    def __mul__(self, other: Any) -> Any:
        return self.value * other

    __rmul__ = __mul__

    def __add__(self, other: Any) -> Any:
        return self.value + other

    __radd__ = __add__

    def __sub__(self, other: Any) -> Any:
        return self.value - other

    def __rsub__(self, other: Any) -> Any:
        return other - self.value

    def __truediv__(self, other: Any) -> Any:
        return self.value / other

    def __neg__(self) -> Any:
        return -self.value
