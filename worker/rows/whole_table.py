"""`layer.embeddings` of a layer whose table lives in a store: it acts like the Keras variable."""

from __future__ import annotations

import operator
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32
from elastable.worker.rows.saved_rows import all_rows, load_all_rows, require_all_rows
from elastable.worker.rows.store_layer import StoreLayer

__all__ = ["WholeTable"]


def _on_rows(operate: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """A method that applies an operator to the rows as a tensor."""

    def method(self: WholeTable, *others: object) -> tf.Tensor:
        return operate(self.value, *others)

    return method


class WholeTable:
    """All rows of a fixed table, looked up each time they are used as a tensor.

    In a model's forward pass this looks up every id, and gradients reach every row, e.g. for tied weights. The cost
    grows with the table.

    Args:
        layer: A layer whose table is in a store.

    Raises:
        Unsupported: the table takes any id, or is too large (`saved_rows.all_rows`).
    """

    def __init__(self, layer: StoreLayer) -> None:
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
    def _unique_id(self) -> str:
        # What `exclude_from_weight_decay(var_list=)` asks a variable for.
        return self._layer.variable_key

    @property
    def value(self) -> tf.Tensor:
        """The rows as a tensor float32 `[vocabulary, dim]`."""
        return self._layer.all_rows_tensor()

    def numpy(self) -> Float32:
        """The current rows, float32 `[vocabulary, dim]`."""
        return all_rows(self._layer)

    def assign(self, value: npt.ArrayLike) -> None:
        """Writes all rows `[vocabulary, dim]`; slots do not change."""
        load_all_rows(self._layer, np.asarray(value))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Float32:
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __len__(self) -> int:
        return require_all_rows(self._layer)

    __getitem__ = _on_rows(operator.getitem)
    __matmul__ = _on_rows(operator.matmul)
    __rmatmul__ = _on_rows(lambda rows, other: other @ rows)
    __mul__ = __rmul__ = _on_rows(operator.mul)
    __add__ = __radd__ = _on_rows(operator.add)
    __sub__ = _on_rows(operator.sub)
    __rsub__ = _on_rows(lambda rows, other: other - rows)
    __truediv__ = _on_rows(operator.truediv)
    __neg__ = _on_rows(operator.neg)
