"""Rows of a store as constants of an exported graph, which runs without a store."""

from __future__ import annotations

import sys

import numpy as np

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.tables.initial_values import table_key
from elastable.embedding_store.tables.row_blocks import joined_rows
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import TensorLike
from elastable.worker.rows.saved_rows import all_rows
from elastable.worker.rows.scope import export_format
from elastable.worker.rows.store_layer import StoreLayer

#: Rows are constants of the graph, and TensorFlow keeps graphs below 2 GiB.
LARGEST_EXPORTED_BYTES = 1 << 28

_EXACT_FLOATS = 1 << 24
_WORD, _SHIFT = 0xFFFFFFFF, 32
_M0, _M1 = 0xD2511F53, 0xCD9E8D57
_W0, _W1 = 0x9E3779B9, 0xBB67AE85
_SHARE_BELOW = 0.02275013194817921
_HALVES = ("float16", "bfloat16")


def integer_ids_in_export(layer: StoreLayer, inputs: TensorLike) -> TensorLike:
    """Casts floats where a model is exported with them; other ids are returned unchanged.

    A float input of the model, and the default signature of floats that Keras traces for a subclassed model besides the
    user's own: small ids are cast, as Keras casts them. If floats cannot hold all ids, the default signature fails when
    it is called.

    Raises:
        Unsupported: floats that cannot hold all ids in the user's own signature; explains how to pass one.
    """
    if not inputs.dtype.is_floating or export_format() is None:
        return inputs
    if layer.input_dim is not None and layer.input_dim <= _EXACT_FLOATS:
        return tf.cast(inputs, tf.int64)
    shape = [None, *inputs.shape.as_list()[1:]]
    message = (
        f"embedding layer {layer.name!r}: Keras exports subclassed models with float inputs, as it does not know what "
        f"they take: model.export(path, input_signature=[tf.TensorSpec({shape}, tf.int64)]) says it, with an entry for "
        "each input of the model"
    )
    if not _is_default_signature():
        raise Unsupported(message)
    with tf.control_dependencies([tf.debugging.Assert(False, [message])]):
        return tf.cast(inputs, tf.int64)


def _is_default_signature() -> bool:
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code.co_name in ("serving_default", "tf__serving_default"):  # AutoGraph's name for it
            return True
        frame = frame.f_back  # type: ignore[assignment]
    return False


def exported_rows(layer: StoreLayer, ids: tf.Tensor, kind: str) -> tf.Tensor:
    """float32 `[n, dim]`: the rows of int64 `[n]` ids, as part of the traced graph.

    All rows of a fixed table are a constant; or the rows of a table of any ids and their sorted ids, which are
    searched. An id without a row gets its initial value (`elastable.embedding_store.tables.initial_values`).

    Raises:
        Unsupported: the table is too large, or takes any ids and the format is not SavedModel.
    """
    rows = layer.input_dim
    if rows is None:
        if kind != "tf_saved_model":
            raise Unsupported(
                f"embedding layer {layer.name!r}: its table takes any int64 id, and format={kind!r} has no lookup for "
                "that; export a SavedModel (model.export(path)), or give the layer input_dim"
            )
        return _searched(layer, ids)
    spec = None if layer.source is None else layer.source.specs()[layer.table_name]
    _refuse_large(layer, spec, rows)
    return _gathered(all_rows(layer), "float32" if spec is None else spec.dtype, ids)


def _gathered(rows: Float32, dtype: str, places: tf.Tensor) -> tf.Tensor:
    """float32: rows of a constant that keeps them as the table does."""
    if dtype == "int8":
        scales = np.abs(rows).max(axis=1, keepdims=True, initial=0.0) / np.float32(127)
        whole = np.rint(rows / np.where(scales > 0, scales, np.float32(1))).astype(np.int8)
        return tf.cast(tf.gather(tf.constant(whole), places), tf.float32) * tf.gather(tf.constant(scales), places)
    kept = tf.constant(rows.astype(tf.as_dtype(dtype).as_numpy_dtype))
    return tf.cast(tf.gather(kept, places), tf.float32)


def _searched(layer: StoreLayer, ids: tf.Tensor) -> tf.Tensor:
    known, weights, spec, kept = _trained(layer)
    fresh = _initial_values(spec, ids) * tf.constant(kept)
    if not len(known):
        return fresh
    place = tf.minimum(tf.searchsorted(known, ids), len(known) - 1)
    there = tf.equal(tf.gather(tf.constant(known), place), ids)
    return tf.where(there[:, tf.newaxis], _gathered(weights, spec.dtype, place), fresh)


def _trained(layer: StoreLayer) -> tuple[Int64, Float32, TableSpec, np.float32]:
    """Sorted ids, their rows, the table's spec, and the decay factor of ids without a row."""
    source, name = layer.source, layer.table_name
    if source is None:
        spec = layer.table_spec(layer.seed)
        return np.zeros(0, np.int64), np.zeros((0, spec.dim), np.float32), spec, np.float32(1)
    if not isinstance(source, EmbeddingStore):
        raise Unsupported(
            f"embedding layer {layer.name!r} reads its rows from elsewhere: export the model where it is trained"
        )
    spec = source.specs()[name]
    _refuse_large(layer, spec, source.row_count(name))
    rows = joined_rows(spec, list(source.scan(name)))
    order, decay = np.argsort(rows.ids), source.table_state(name).untouched_decay
    return rows.ids[order], rows.weights[order], spec, np.float32(1 if decay is None else np.exp(decay))


def _refuse_large(layer: StoreLayer, spec: TableSpec | None, rows: int) -> None:
    size = rows * (layer.output_dim * 4 if spec is None else spec.weight_bytes)
    if size > LARGEST_EXPORTED_BYTES:
        raise Unsupported(
            f"embedding layer {layer.name!r}: its {rows} rows take {size / 2**20:.0f} MiB, and an exported graph holds "
            f"tables of at most {LARGEST_EXPORTED_BYTES / 2**20:.0f} MiB; write a .keras file (et.save, or "
            "et.export_keras for et.Embedding), and export what keras.models.load_model makes of it; of a job "
            "`elastable export --format serving` writes any size"
        )


def _initial_values(spec: TableSpec, ids: tf.Tensor) -> tf.Tensor:
    """`initial_rows` in TensorFlow: the same bits; normal values differ by a rounding of float32 at most."""
    kind, a, b = spec.initializer.kind, spec.initializer.a, spec.initializer.b
    if kind in ("zeros", "ones", "constant"):
        value = {"zeros": 0.0, "ones": 1.0}.get(kind, a)
        return tf.fill([tf.shape(ids)[0], spec.dim], np.float32(value))
    words = _philox_words(ids, spec)
    if kind == "uniform":
        share = tf.cast(tf.bitwise.right_shift(words, np.uint64(8)), tf.float32) * np.float32(2.0**-24)
        values = np.float32(a) + np.float32(b - a) * share
    else:
        p = (tf.cast(words, tf.float64) + 0.5) * 2.0**-32
        p = _SHARE_BELOW + p * (1.0 - 2.0 * _SHARE_BELOW) if kind == "truncated_normal" else p
        values = tf.cast(a + b * tf.math.ndtri(p), tf.float32)
    half = tf.as_dtype(spec.dtype) if spec.dtype in _HALVES else None
    return values if half is None else tf.cast(tf.cast(values, half), tf.float32)


def _philox_words(ids: tf.Tensor, spec: TableSpec) -> tf.Tensor:
    """uint64 `[n, dim]`: the 32 random bits of every value; see `initial_values._philox`."""
    unsigned = tf.bitcast(ids, tf.uint64)
    word, shift = tf.constant(_WORD, tf.uint64), tf.constant(_SHIFT, tf.uint64)
    low, high = tf.bitwise.bitwise_and(unsigned, word), tf.bitwise.right_shift(unsigned, shift)
    keys = table_key(spec.seed, spec.name)
    columns = []
    for block in range((spec.dim + 3) // 4):
        zeros = tf.zeros_like(low)
        c0, c1, c2, c3 = low, high, zeros + tf.constant(block, tf.uint64), zeros
        k0, k1 = (int(key) for key in keys)
        for _ in range(10):
            p0, p1 = tf.constant(_M0, tf.uint64) * c0, tf.constant(_M1, tf.uint64) * c2
            c0, c1, c2, c3 = (
                _mixed(tf.bitwise.right_shift(p1, shift), c1, k0),
                tf.bitwise.bitwise_and(p1, word),
                _mixed(tf.bitwise.right_shift(p0, shift), c3, k1),
                tf.bitwise.bitwise_and(p0, word),
            )
            k0, k1 = (k0 + _W0) & _WORD, (k1 + _W1) & _WORD
        columns += [c0, c1, c2, c3]
    return tf.stack(columns[: spec.dim], axis=1)


def _mixed(one: tf.Tensor, other: tf.Tensor, key: int) -> tf.Tensor:
    return tf.bitwise.bitwise_xor(tf.bitwise.bitwise_xor(one, other), tf.constant(key, tf.uint64))
