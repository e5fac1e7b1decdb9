"""How the rows of tables in a store are read and written whole: as a weight, and in Keras files."""

from __future__ import annotations

import os
from collections.abc import Iterator, MutableMapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import replace
from typing import TYPE_CHECKING, TypeAlias

import numpy as np
import numpy.typing as npt
from keras.src.backend.common import global_state

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec, spec_from_json, spec_to_json
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import BadIds, BadInput, Unsupported
from elastable.embedding_store.optimizers.registry import same_slots
from elastable.embedding_store.tables.checks import require_ids
from elastable.embedding_store.tables.row_blocks import fresh_rows, put_weights
from elastable.embedding_store.tables.row_dtypes import rounded_rows
from elastable.worker.rows.initializers import first_rows

if TYPE_CHECKING:
    from elastable.worker.rows.store_backed import StoreBacked

__all__ = [
    "LARGEST_TABLE_BYTES",
    "MATRIX_VARIABLE",
    "PLAIN_ROWS",
    "SavedArrays",
    "all_rows",
    "assign_rows",
    "leaving_rows_out",
    "load_all_rows",
    "load_plain_rows",
    "load_table",
    "refuse_legacy_file",
    "require_all_rows",
    "require_matrix",
    "rows_in_memory",
    "save_table",
    "writing_tables_of",
]

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


def _leaves_out(layer: StoreBacked) -> bool:
    names = _left_out.get()
    if names is not None:
        names.add(layer.table_name)
        layer.note_left_out()
    return names is not None


def all_rows(layer: StoreBacked) -> Float32:
    """float32 `[vocabulary, dim]`: every row of a layer's fixed table, for a file.

    Raises:
        Unsupported: the table is too large (`writing_tables_of`), or takes any id.
    """
    count = require_all_rows(layer)
    _refuse_large(layer, count * layer.output_dim * 4)
    return _read_all(layer, count)


def rows_in_memory(layer: StoreBacked) -> Float32:
    """float32 `[vocabulary, dim]`: every row of a layer's fixed table, for a program that reads its weight.

    Raises:
        Unsupported: as of `require_matrix`.
    """
    return _read_all(layer, require_matrix(layer))


def _read_all(layer: StoreBacked, count: int) -> Float32:
    rows = np.empty((count, layer.output_dim), np.float32)
    for start in range(0, len(rows), _BLOCK_ROWS):
        block = rows[start : start + _BLOCK_ROWS]
        block[:] = layer.read_rows(np.arange(start, start + len(block), dtype=np.int64))
    return rows


def require_all_rows(layer: StoreBacked) -> int:
    """The number of rows of a fixed table; raises `Unsupported` for a table that takes any id."""
    if layer.input_dim is None:
        raise Unsupported(
            f"embedding layer {layer.name!r}: its table takes any int64 id, so it has no matrix of all rows to read or "
            "assign as a weight; use layer.read_rows(ids) and layer.write_rows(ids, rows), or give the layer input_dim"
        )
    return layer.input_dim


def require_matrix(layer: StoreBacked) -> int:
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


def load_all_rows(layer: StoreBacked, rows: npt.ArrayLike) -> None:
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


def assign_rows(layer: StoreBacked, ids: Int64, rows: Float32) -> None:
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


def save_table(layer: StoreBacked, store: SavedArrays) -> None:
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
    blocks = [fresh_rows(spec, np.zeros(0, np.int64), np.zeros((0, spec.dim), np.float32)), *source.scan(name)]
    store["spec"] = np.frombuffer(spec_to_json(spec).encode(), np.uint8)
    store["ids"] = np.concatenate([block.ids for block in blocks])
    store["rows"] = np.concatenate([block.weights for block in blocks])
    store["slots"] = np.concatenate([block.slots for block in blocks])
    store["steps"] = np.array(layer.steps_trained, np.int64)
    state = source.table_state(name)
    if state.admission_counts is not None:
        store["admission_counts"] = state.admission_counts
    if state.untouched_decay is not None:
        store["untouched_decay"] = np.array(state.untouched_decay, np.float64)


def _untouched(layer: StoreBacked) -> EmbeddingStore:
    """A store with the layer's table, all of it initial values."""
    own = MemoryStore()
    own.create_table(layer.table_spec(layer.seed))
    return own


def load_table(layer: StoreBacked, store: SavedArrays) -> None:
    """Reads what `save_table` wrote, or a plain Keras layer.

    A layer without a store gets a new one; otherwise the rows go into its store. Slots are loaded if the file's
    optimizer is like the layer's, as Keras loads the optimizer with the weights; a plain model has them in the
    optimizer's part (`elastable.worker.models.keras_slots`).

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


def load_plain_rows(layer: StoreBacked, store: SavedArrays) -> None:
    """Reads the rows that a plain `keras.layers.Embedding` wrote.

    Raises:
        BadInput: the file holds no such rows, or rows of another shape.
        Unsupported: as of `load_all_rows`.
    """
    if set(store.keys()) != {PLAIN_ROWS}:
        raise BadInput(_no_rows(layer, store))
    load_all_rows(layer, store[PLAIN_ROWS])


def _no_rows(layer: StoreBacked, store: SavedArrays) -> str:
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


def _saved_table(layer: StoreBacked, store: SavedArrays) -> tuple[TableSpec, Int64, MemoryStore]:
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


def _writable(layer: StoreBacked) -> EmbeddingStore:
    if not isinstance(layer.source, EmbeddingStore):
        raise Unsupported(
            f"embedding layer {layer.name!r} reads its rows from elsewhere, and cannot save or load them here: save "
            "the model where it is trained, or take a checkpoint of the job"
        )
    return layer.source


def refuse_legacy_file(layer: StoreBacked) -> None:
    """Raises `Unsupported` while Keras writes an HDF5 file of the old format, which cannot hold tables in a store."""
    if global_state.get_global_attribute("use_legacy_config", None):
        raise Unsupported(
            f"embedding layer {layer.name!r}: a legacy HDF5 file cannot hold a table of a store; save to a .keras "
            "file, or the weights to a .weights.h5 file"
        )


def _refuse_large(layer: StoreBacked, size: int) -> None:
    largest = _largest.get()
    if size > largest:
        raise Unsupported(
            f"embedding layer {layer.name!r}: its rows take {_shown_size(size)}, and tables of at most "
            f"{_shown_size(largest)} are written whole: et.save(model, path, largest_table_bytes={size}) writes it; "
            "a checkpoint of a job (docs/checkpoints.md) holds tables of any size"
        )
