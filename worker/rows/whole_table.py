"""The rows of a layer with its table in a store, as the one weight that `keras.layers.Embedding` has."""

from __future__ import annotations

import io
import operator
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, NoReturn

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.errors import BadInput, ModelError, Unsupported
from elastable.worker.rows.export_rows import export_format
from elastable.worker.rows.saved_rows import load_all_rows, load_table, require_all_rows, rows_in_memory, save_table
from elastable.worker.rows.scope import StepScope, current_scope

if TYPE_CHECKING:
    from elastable.worker.rows.store_backed import StoreBacked

__all__ = ["TableInCheckpoint", "WholeTable", "rows_listed", "rows_unlisted"]

_unlisted = threading.local()


def rows_listed() -> bool:
    """Whether layers list their rows among their weights.

    Not within `rows_unlisted`, nor in a SavedModel, whose graph holds the rows as constants.
    """
    return not getattr(_unlisted, "depth", 0) and export_format() is None


@contextmanager
def rows_unlisted() -> Iterator[None]:
    """Within the block, in this thread, `layer.weights` and `model.weights` hold no rows of tables."""
    _unlisted.depth = getattr(_unlisted, "depth", 0) + 1
    try:
        yield
    finally:
        _unlisted.depth -= 1


def _on_rows(operate: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """A method that applies an operator to the rows as a tensor."""

    def method(self: WholeTable, *others: object) -> tf.Tensor:
        return operate(self.value, *others)

    return method


class WholeTable:
    """All rows of a table as a weight of its layer: `layer.embeddings`, listed in `weights`.

    Each reading is a lookup of every id at the current version. In a step that trains, gradients reach every row, e.g.
    for tied weights or a penalty over all weights; the cost grows with the table. Optimizers keep nothing for it: the
    slots are the store's.

    A table of any id has no matrix: its weight counts the rows that are there, and is neither read nor assigned.

    Args:
        layer: A layer whose table is in a store.

    Raises:
        Unsupported: where it is read or assigned: the table takes any id, or is larger than
            `saved_rows.largest_matrix_bytes`.
    """

    constraint = None
    dtype = "float32"
    ndim = 2

    def __init__(self, layer: StoreBacked) -> None:
        self.layer = layer
        self.name = "embeddings"
        self.path = f"{getattr(layer, 'path', None) or layer.name}/embeddings"

    def __repr__(self) -> str:
        return f"<rows of table {self.table_name!r}, shape={tuple(self.shape)}>"

    @property
    def table_name(self) -> str:
        """Name of the table: no variable has one (`elastable.embedding_store.contract.row_source.variables_of`)."""
        return self.layer.table_name

    @property
    def shape(self) -> tf.TensorShape:
        """`(vocabulary, dim)`; of a table of any id the number of its rows now."""
        return tf.TensorShape((self.layer.row_count(), self.layer.output_dim))

    @property
    def trainable(self) -> bool:
        """Whether the layer is trained."""
        return bool(self.layer.trainable)

    @trainable.setter
    def trainable(self, value: bool) -> None:
        self.layer.trainable = bool(value)

    @property
    def regularizer(self) -> None:
        """None: a step applies the layer's to the rows that its batch touches, where Keras asks for it."""
        scope = current_scope()
        if isinstance(scope, StepScope):
            scope.losses_read = True

    @property
    def _unique_id(self) -> str:
        # What `exclude_from_weight_decay(var_list=)` asks a variable for.
        return self.layer.variable_key

    _should_act_as_resource_variable = True  # a tape then asks for its handle

    @property
    def handle(self) -> NoReturn:
        """Raises `Unsupported`: rows are in a store, and no tape records them as a variable."""
        raise Unsupported(
            f"embedding layer {self.layer.name!r}: a tape is asked for the gradient of all its rows, which live in a "
            "store; write `with et.step(model) as step:` and `step.apply(tape, loss)`, which takes the gradients of "
            "tables and variables (docs/own-steps.md)"
        )

    @property
    def value(self) -> tf.Tensor:
        """The rows as a tensor float32 `[vocabulary, dim]`."""
        return self.layer.all_rows_tensor()

    def numpy(self) -> Float32:
        """The current rows, float32 `[vocabulary, dim]`."""
        return rows_in_memory(self.layer)

    def assign(self, value: npt.ArrayLike) -> tf.Tensor:
        """Writes all rows `[vocabulary, dim]`, and returns them; slots do not change.

        Raises:
            ModelError: within a step, or in a graph.
            BadInput: rows of another shape.
        """
        if current_scope() is not None or not tf.executing_eagerly() or isinstance(value, keras.KerasTensor):
            raise ModelError(
                f"embedding layer {self.layer.name!r}: its rows are assigned within a step or a compiled function, "
                "which cannot write to a store; assign them outside, as in a callback's on_epoch_end"
            )
        rows = np.asarray(value, np.float32)
        load_all_rows(self.layer, rows)
        return tf.convert_to_tensor(rows)

    def assign_add(self, value: npt.ArrayLike) -> tf.Tensor:
        """Adds `[vocabulary, dim]` to the rows; see `assign`."""
        return self.assign(self.numpy() + self._like(value))

    def assign_sub(self, value: npt.ArrayLike) -> tf.Tensor:
        """Subtracts `[vocabulary, dim]` from the rows; see `assign`."""
        return self.assign(self.numpy() - self._like(value))

    def _like(self, value: npt.ArrayLike) -> Float32:
        array = np.asarray(value, np.float32)
        if np.broadcast_shapes(array.shape, tuple(self.shape)) != tuple(self.shape):
            raise BadInput(
                f"embedding layer {self.layer.name!r}: got an array of shape {array.shape}, its rows have the shape "
                f"{tuple(self.shape)}"
            )
        return array

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> Float32:
        return np.asarray(self.numpy(), dtype)

    def __tf_tensor__(self, dtype: tf.DType | None = None, name: str | None = None) -> tf.Tensor:
        return self.value if dtype is None else tf.cast(self.value, dtype)

    def __len__(self) -> int:
        return require_all_rows(self.layer)

    __getitem__ = _on_rows(operator.getitem)
    __matmul__ = _on_rows(operator.matmul)
    __rmatmul__ = _on_rows(lambda rows, other: other @ rows)
    __mul__ = __rmul__ = _on_rows(operator.mul)
    __add__ = __radd__ = _on_rows(operator.add)
    __sub__ = _on_rows(operator.sub)
    __rsub__ = _on_rows(lambda rows, other: other - rows)
    __truediv__ = _on_rows(operator.truediv)
    __pow__ = _on_rows(operator.pow)
    __neg__ = _on_rows(operator.neg)
    __abs__ = _on_rows(operator.abs)


class TableInCheckpoint(tf.train.experimental.PythonState):  # type: ignore[misc]
    """A layer's table in a `tf.train.Checkpoint`: what a Keras file holds of it, rows and slots.

    Args:
        layer: A layer whose table lives, or will live, in a store.
    """

    def __init__(self, layer: StoreBacked) -> None:
        self.layer = layer

    def serialize(self) -> bytes:
        """What `save_table` writes, as an NPZ file; nothing in a SavedModel, whose graph holds the rows.

        Raises:
            Unsupported: as of `save_table`.
        """
        if self.layer.on_worker or export_format() is not None:
            return b""
        arrays: dict[str, npt.ArrayLike] = {}
        save_table(self.layer, arrays)
        file = io.BytesIO()
        np.savez(file, allow_pickle=False, **arrays)
        return file.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Reads what `serialize` returned."""
        if string_value:
            with np.load(io.BytesIO(string_value), allow_pickle=False) as arrays:
                load_table(self.layer, dict(arrays))
                own = getattr(self.layer, "optimizer", None)
                if own is not None and "steps" in arrays and arrays["steps"] >= 0:
                    own.iterations.assign(arrays["steps"])  # TensorFlow need not have found it
