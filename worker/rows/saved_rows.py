"""All rows of tables in a store, read and written whole: as a weight, and in Keras files."""

from __future__ import annotations

import io
import operator
import os
from collections.abc import Callable, Iterator, MutableMapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import Any, NoReturn, TypeAlias

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadIds, BadInput, ModelError, Unsupported
from elastable.embedding_store.optimizers.registry import same_slots
from elastable.embedding_store.tables.checks import require_ids
from elastable.embedding_store.tables.row_blocks import joined_rows, put_weights
from elastable.embedding_store.tables.row_dtypes import rounded_rows
from elastable.master.backend.contract import BackendTensor, backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_methods import are_unlisted
from elastable.worker.keras.seeds import writes_legacy_file
from elastable.worker.rows.scope import current_scope, export_format
from elastable.worker.rows.store_layer import StoreLayer, first_rows

SavedArrays: TypeAlias = MutableMapping[str, npt.ArrayLike]
"""The part of a Keras file that belongs to one layer: name -> array."""

#: A larger table is written only within `writing_tables_of`.
LARGEST_TABLE_BYTES = 1 << 30

#: Under which a plain Keras layer writes its one variable.
PLAIN_ROWS = "0"

MATRIX_VARIABLE = "ELASTABLE_LARGEST_MATRIX_BYTES"
_LARGEST_MATRIX_BYTES = 1 << 28

_BLOCK_ROWS = 1 << 16
_largest: ContextVar[int] = ContextVar("largest_table_bytes", default=LARGEST_TABLE_BYTES)
_left_out: ContextVar[set[str] | None] = ContextVar("tables_left_out", default=None)


@contextmanager
def writing_tables_of(largest_table_bytes: int) -> Iterator[None]:
    """Within the block, tables of up to this many bytes (float32 rows) are written into Keras files."""
    token = _largest.set(largest_table_bytes)
    try:
        yield
    finally:
        _largest.reset(token)


@contextmanager
def leaving_rows_out() -> Iterator[set[str]]:
    """Within the block, rows are neither loaded from Keras files nor assigned: whoever has them is another process.

    Yields:
        The names of the tables whose rows were left out.
    """
    names: set[str] = set()
    token = _left_out.set(names)
    try:
        yield names
    finally:
        _left_out.reset(token)


def _leaves_out(layer: StoreLayer) -> bool:
    names = _left_out.get()
    if names is not None:
        names.add(layer.table_name)
        layer.note_left_out()
    return names is not None


def all_rows(layer: StoreLayer) -> Float32:
    """float32 `[vocabulary, dim]`: every row of a layer's fixed table, for a file.

    Raises:
        Unsupported: the table is too large (`writing_tables_of`), or takes any id.
    """
    count = require_all_rows(layer)
    _refuse_large(layer, count * layer.output_dim * 4)
    return _read_all(layer, count)


def rows_in_memory(layer: StoreLayer) -> Float32:
    """float32 `[vocabulary, dim]`: every row of a layer's fixed table, for a program that reads its weight.

    Raises:
        Unsupported: as of `require_matrix`.
    """
    return _read_all(layer, require_matrix(layer))


def _read_all(layer: StoreLayer, count: int) -> Float32:
    rows = np.empty((count, layer.output_dim), np.float32)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        block[:] = layer.read_rows(np.arange(start, start + len(block), dtype=np.int64))
    return rows


def require_all_rows(layer: StoreLayer) -> int:
    """The number of rows of a fixed table; raises `Unsupported` for a table that takes any id."""
    if layer.input_dim is None:
        raise Unsupported(
            f"embedding layer {layer.name!r}: its table takes any int64 id, so it has no matrix of all rows to read or "
            "assign as a weight; use layer.read_rows(ids) and layer.write_rows(ids, rows), or give the layer input_dim"
        )
    return layer.input_dim


def require_matrix(layer: StoreLayer) -> int:
    """The number of rows of a fixed table that may be read in one go.

    Raises:
        Unsupported: the table takes any id, or its rows take more than the environment's
            `ELASTABLE_LARGEST_MATRIX_BYTES`; the default is 256 MiB.
    """
    count, largest = require_all_rows(layer), _largest_matrix_bytes()
    size = count * layer.output_dim * 4
    if size > largest:
        raise Unsupported(
            f"embedding layer {layer.name!r}: all its rows take {_shown_size(size)}, and a weight of at most "
            f"{_shown_size(largest)} is read in one go; read rows by id with layer.read_rows(ids), or set "
            f"{MATRIX_VARIABLE}={size} in the environment"
        )
    return count


def _shown_size(size: int) -> str:
    """A number of bytes for a message."""
    return f"{size / 2**20:,.0f} MiB" if size >= 10 * 2**20 else f"{size:,} bytes"


def _largest_matrix_bytes() -> int:
    text = os.environ.get(MATRIX_VARIABLE, "").strip()
    if text and not text.isdecimal():
        raise BadInput(f"{MATRIX_VARIABLE}={text!r}: need a number of bytes, such as {_LARGEST_MATRIX_BYTES}")
    return int(text) if text else _LARGEST_MATRIX_BYTES


def load_all_rows(layer: StoreLayer, rows: npt.ArrayLike) -> None:
    """Writes all rows of a fixed table; slots do not change, as when a Keras variable is assigned.

    Args:
        layer: A layer whose table lives, or will live, in a store.
        rows: float32 `[vocabulary, dim]`.

    Raises:
        BadInput: rows of another shape.
        Unsupported: the table takes any id, or the layer's source is not writable.
    """
    require_all_rows(layer)
    if _leaves_out(layer):
        return
    rows = np.ascontiguousarray(rows, np.float32)
    if rows.shape != (layer.input_dim, layer.output_dim):
        raise BadInput(
            f"embedding layer {layer.name!r}: got rows of shape {rows.shape}, its table has "
            f"({layer.input_dim}, {layer.output_dim})"
        )
    if layer.on_worker:
        layer.embeddings.assign(rows)
    elif layer.source is None:
        layer.pretrained = rounded_rows(layer.table_dtype or "float32", rows.copy())
    else:
        source = _writable(layer)
        for start in range(0, len(rows), _BLOCK_ROWS):
            ids = np.arange(start, min(start + _BLOCK_ROWS, len(rows)), dtype=np.int64)
            put_weights(source, layer.table_name, ids, rows[ids])


def assign_rows(layer: StoreLayer, ids: Int64, rows: Float32) -> None:
    """Writes rows by id; slots do not change.

    Args:
        layer: A layer whose table lives, or will live, in a store.
        ids: int64 `[n]`, each once.
        rows: float32 `[n, dim]`.

    Raises:
        BadIds, IdOutOfRange: ids that repeat, or outside of the vocabulary.
        BadInput: rows of another shape.
        Unsupported: the layer's source is not writable.
    """
    if _leaves_out(layer):
        return
    spec = layer.table_spec(layer.seed)
    ids, rows = np.ascontiguousarray(ids, np.int64), np.ascontiguousarray(rows, np.float32)
    require_ids(spec, ids)
    if len(np.unique(ids)) < len(ids):
        raise BadIds(f"embedding layer {layer.name!r}: write_rows takes each id once, got some of {len(ids)} twice")
    if rows.shape != (len(ids), layer.output_dim):
        raise BadInput(
            f"embedding layer {layer.name!r}: got rows of shape {rows.shape} for {len(ids)} ids, need "
            f"({len(ids)}, {layer.output_dim})"
        )
    whole = layer.worker_rows() if layer.on_worker else None
    if whole is None and layer.source is None:
        whole = first_rows(layer, unseeded=True)
    if whole is not None:
        whole = whole.copy()
        whole[ids] = rows
        load_all_rows(layer, whole)
        return
    if layer.source is None:
        layer.attach(_untouched(layer))
    put_weights(_writable(layer), layer.table_name, ids, rows)


def save_table(layer: StoreLayer, store: SavedArrays) -> None:
    """Writes the table of an `et.Embedding` into its part of a Keras file: if it was never trained as the plain layer.

    Raises:
        Unsupported: the table is too large, or its store is not in this process.
    """
    if layer.on_worker or (layer.source is None and first_rows(layer, unseeded=True) is not None):
        store[PLAIN_ROWS] = all_rows(layer)
        return
    source, name = _writable(layer) if layer.source is not None else _untouched(layer), layer.table_name
    _refuse_large(layer, source.row_count(name) * layer.output_dim * 4)
    spec = source.specs()[name]
    rows = joined_rows(spec, list(source.scan(name)))
    store["spec"] = np.frombuffer(spec_to_json(spec).encode(), np.uint8)
    store["ids"], store["rows"], store["slots"] = rows.ids, rows.weights, rows.slots
    store["steps"] = np.array(layer.steps_trained, np.int64)
    state = source.table_state(name)
    if state.admission_counts is not None:
        store["admission_counts"] = state.admission_counts
    if state.untouched_decay is not None:
        store["untouched_decay"] = np.array(state.untouched_decay, np.float64)


def _untouched(layer: StoreLayer) -> EmbeddingStore:
    """A store with the layer's table, all of it initial values."""
    own = MemoryStore()
    own.create_table(layer.table_spec(layer.seed))
    return own


def load_table(layer: StoreLayer, store: SavedArrays) -> None:
    """Reads what `save_table` wrote, or a plain Keras layer.

    A layer without a store gets a new one; otherwise the rows go into its store. Slots are loaded if the file's
    optimizer is like the layer's, as Keras loads the optimizer with the weights; a plain model has them in the
    optimizer's part (`elastable.worker.user_model.keras_slots`).

    Raises:
        BadInput: the file contains another table, or none.
        Unsupported: the file contains a matrix of rows, and the table takes any id.
    """
    if set(store.keys()) == {PLAIN_ROWS}:
        load_plain_rows(layer, store)
        return
    if "spec" not in store:
        raise BadInput(_no_rows(layer, store))
    if _leaves_out(layer):
        return
    (spec, ids, saved), steps = _saved_table(layer, store), int(np.asarray(store["steps"]))
    there = layer.source.specs().get(layer.table_name) if isinstance(layer.source, EmbeddingStore) else None
    if there is None or (spec.vocabulary_size is None and there.seed != spec.seed):
        layer.attach(saved)
        layer.note_steps(steps)
        return
    source, name = _writable(layer), layer.table_name
    for block in list(source.scan(name)):
        gone = np.setdiff1d(block.ids, ids)
        if len(gone):
            source.delete(name, gone)
    with_slots = steps >= 0 and same_slots(there.optimizer, spec.optimizer)
    for block in saved.scan(name):
        if with_slots:
            source.put(name, [replace(block, touches=None)])
        else:
            put_weights(source, name, block.ids, block.weights)
    _put_untouched(source, spec, ids, saved)
    if with_slots:
        layer.note_steps(steps)


def load_plain_rows(layer: StoreLayer, store: SavedArrays) -> None:
    """Reads the rows that a plain `keras.layers.Embedding` wrote.

    Raises:
        BadInput: the file holds no such rows, or rows of another shape.
        Unsupported: as of `load_all_rows`.
    """
    if set(store.keys()) != {PLAIN_ROWS}:
        raise BadInput(_no_rows(layer, store))
    load_all_rows(layer, store[PLAIN_ROWS])


def _no_rows(layer: StoreLayer, store: SavedArrays) -> str:
    found = f"{', '.join(sorted(store.keys()))} in its place" if len(store.keys()) else "nothing in its place"
    return (
        f"embedding layer {layer.name!r}: the file holds no rows for its table ({found}): another kind of layer, or "
        "another model, wrote it. Load it into such a model, and write the rows with layer.set_weights([rows]) or "
        "layer.write_rows(ids, rows)"
    )


def _put_untouched(source: EmbeddingStore, spec: TableSpec, with_rows: Int64, saved: EmbeddingStore) -> None:
    """Restores ids of a fixed table that had no row when it was saved: they read the same values as then."""
    name, vocabulary = spec.name, spec.vocabulary_size or 0
    for start in range(0, vocabulary, _BLOCK_ROWS):
        ids = np.arange(start, min(start + _BLOCK_ROWS, vocabulary), dtype=np.int64)
        ids = np.setdiff1d(ids, with_rows)
        read, expected = source.lookup({name: ids})[name], saved.lookup({name: ids})[name]
        other = np.flatnonzero((read != expected).any(axis=1))
        if len(other):
            put_weights(source, name, ids[other], expected[other])


def _saved_table(layer: StoreLayer, store: SavedArrays) -> tuple[TableSpec, Int64, MemoryStore]:
    """A table's spec, ids, and a new store with what the file holds of it."""
    spec = replace(spec_from_json(np.asarray(store["spec"], np.uint8).tobytes()), name=layer.table_name)
    ours = layer.table_spec()
    for what in ("dim", "vocabulary_size", "dtype"):
        mine, theirs = getattr(ours, what), getattr(spec, what)
        if mine != theirs:
            raise BadInput(f"embedding layer {layer.name!r}: its table has {what} {mine}, the file's has {theirs}")
    own = MemoryStore()
    own.create_table(spec)
    ids = np.asarray(store["ids"], np.int64)
    rows, slots = np.asarray(store["rows"], np.float32), np.asarray(store["slots"], np.float32)
    own.put(spec.name, [RowBlock(ids, rows, slots)])
    counts = np.asarray(store["admission_counts"], np.uint8) if "admission_counts" in store else None
    decay = float(np.asarray(store["untouched_decay"])) if "untouched_decay" in store else None
    own.put_table_state(spec.name, TableState(counts, decay))
    return spec, ids, own


def _writable(layer: StoreLayer) -> EmbeddingStore:
    if not isinstance(layer.source, EmbeddingStore):
        raise Unsupported(
            f"embedding layer {layer.name!r} reads its rows from elsewhere, and cannot save or load them here: save "
            "the model where it is trained, or take a checkpoint of the job"
        )
    return layer.source


def refuse_legacy_file(layer: StoreLayer) -> None:
    """Raises `Unsupported` while Keras writes an HDF5 file of the old format, which cannot hold tables in a store."""
    if writes_legacy_file():
        raise Unsupported(
            f"embedding layer {layer.name!r}: a legacy HDF5 file cannot hold a table of a store; save to a .keras "
            "file, or the weights to a .weights.h5 file"
        )


def _refuse_large(layer: StoreLayer, size: int) -> None:
    largest = _largest.get()
    if size > largest:
        raise Unsupported(
            f"embedding layer {layer.name!r}: its rows take {_shown_size(size)}, and tables of at most "
            f"{_shown_size(largest)} are written whole: et.save(model, path, largest_table_bytes={size}) writes it; "
            "a checkpoint of a job (docs/checkpoints.md) holds tables of any size"
        )


# All rows as the one weight that `keras.layers.Embedding` has


def rows_listed() -> bool:
    """Whether layers list their rows among their weights.

    Not within `rows_unlisted`, nor in a SavedModel, whose graph holds the rows as constants.
    """
    return not are_unlisted() and (not backend().has_graphs or export_format() is None)


def _on_rows(operate: Callable[..., tf.Tensor]) -> Callable[..., tf.Tensor]:
    """A method that applies an operator to the rows as a tensor."""

    def method(self: WholeTable, *others: object) -> tf.Tensor:
        return operate(self.value, *others)

    return method


# What `tf.train.Checkpoint` finds on a model.
_Tracked: type = tf.train.experimental.PythonState if keras.config.backend() == "tensorflow" else object


def _as_array(value: npt.ArrayLike) -> Float32:
    """float32; a tensor of PyTorch, which may be computed from the rows, without what it is computed from."""
    return np.asarray(keras.ops.convert_to_numpy(value) if keras.ops.is_tensor(value) else value, np.float32)


class WholeTable(_Tracked):  # type: ignore[misc]
    """All rows of a table as a weight of its layer: `layer.embeddings`, listed in `weights`.

    Each reading is a lookup of every id at the current version. In a step that trains, gradients reach every row, e.g.
    for tied weights or a penalty over all weights; the cost grows with the table. Optimizers keep nothing for it: the
    slots are the store's.

    A table of any id has no matrix: its weight counts the rows that are there, and is neither read nor assigned.

    A `tf.train.Checkpoint` of weights, as `Checkpoint(v=model.weights)`, holds its rows.

    Args:
        layer: A layer whose table is in a store.

    Raises:
        Unsupported: where it is read or assigned: the table takes any id, or is larger than
            `saved_rows.largest_matrix_bytes`.
    """

    dtype = "float32"
    ndim = 2

    def __init__(self, layer: StoreLayer) -> None:
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
    def shape(self) -> tf.TensorShape | tuple[int, int]:
        """`(vocabulary, dim)`; of a table of any id the number of its rows now."""
        shape = (self.layer.row_count(), self.layer.output_dim)
        return tf.TensorShape(shape) if backend().has_graphs else shape

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
        if scope is not None:
            scope.losses_read = True

    @regularizer.setter
    def regularizer(self, value: keras.Regularizer | None) -> None:
        self.layer.embeddings_regularizer = keras.regularizers.get(value)

    @property
    def constraint(self) -> keras.constraints.Constraint | None:
        """The layer's `embeddings_constraint`, of the rows that a batch touches."""
        return self.layer.embeddings_constraint

    @constraint.setter
    def constraint(self, value: keras.constraints.Constraint | None) -> None:
        self.layer.embeddings_constraint = keras.constraints.get(value)

    def serialize(self) -> bytes:
        """The rows, as bytes; nothing in a SavedModel, whose graph holds them."""
        return b"" if export_format() is not None else self.numpy().tobytes()

    def deserialize(self, string_value: bytes) -> None:
        """Assigns what `serialize` returned. Raises `BadInput` for rows of another shape."""
        if string_value:
            self.assign(np.frombuffer(string_value, np.float32).reshape(-1, self.layer.output_dim))

    @property
    def _shared_name(self) -> str:
        # How TensorFlow's checkpoints name what acts as a variable.
        return self.path

    @property
    def _unique_id(self) -> str | int:
        # What `exclude_from_weight_decay(var_list=)` asks a variable for.
        return self.layer.variable_key

    _should_act_as_resource_variable = True  # a tape then asks for its handle

    @property
    def handle(self) -> NoReturn:
        """Raises `Unsupported`: rows are in a store, and no tape records them as a variable."""
        raise Unsupported(
            f"embedding layer {self.layer.name!r}: a tape is asked for the gradient of all its rows, which live in a "
            "store; write `with et.step(model) as step:` and `step.apply(tape, loss)`, which takes the gradients of "
            "tables and variables (docs/fit.md#your-own-training-steps)"
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
        traced = backend().has_graphs and not tf.executing_eagerly()
        if current_scope() is not None or traced or isinstance(value, keras.KerasTensor):
            raise ModelError(
                f"embedding layer {self.layer.name!r}: its rows are assigned within a step or a compiled function, "
                "which cannot write to a store; assign them outside, as in a callback's on_epoch_end"
            )
        rows = _as_array(value)
        load_all_rows(self.layer, rows)
        return keras.ops.convert_to_tensor(rows)

    def assign_add(self, value: npt.ArrayLike) -> tf.Tensor:
        """Adds `[vocabulary, dim]` to the rows; see `assign`."""
        return self.assign(self.numpy() + self._like(value))

    def assign_sub(self, value: npt.ArrayLike) -> tf.Tensor:
        """Subtracts `[vocabulary, dim]` from the rows; see `assign`."""
        return self.assign(self.numpy() - self._like(value))

    def _like(self, value: npt.ArrayLike) -> Float32:
        array = _as_array(value)
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

    def __jax_array__(self) -> BackendTensor:
        return self.value

    @classmethod
    def __torch_function__(
        cls, function: Callable[..., object], types: object, args: Sequence[Any] = (), kwargs: Any = None
    ) -> object:
        """What a function of PyTorch is of the rows, as of a Keras variable."""
        values = keras.tree.map_structure(lambda each: each.value if type(each) is cls else each, (args, kwargs or {}))
        return function(*values[0], **values[1])

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        # On PyTorch `keras.ops` reads the value of a variable, and of anything else an array, which has no gradient.
        in_step = current_scope() is not None and backend().name == "torch"
        return keras.Variable if in_step else WholeTable

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


class TableInCheckpoint(_Tracked):  # type: ignore[misc]
    """A layer's table in a `tf.train.Checkpoint`: what a Keras file holds of it, rows and slots.

    Args:
        layer: A layer whose table lives, or will live, in a store.
    """

    def __init__(self, layer: StoreLayer) -> None:
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
