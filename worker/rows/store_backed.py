"""The base class of Keras layers whose tables live in a store; and their rows in an exported graph."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, ModelError, Unsupported
from elastable.embedding_store.tables.initial_values import table_key
from elastable.embedding_store.tables.row_blocks import joined_rows
from elastable.master.backend.contract import BackendTensor, backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_methods import wrap_model_methods
from elastable.worker.keras.seeds import global_seed
from elastable.worker.keras.structures import TensorLike
from elastable.worker.rows import array_calls
from elastable.worker.rows.id_values import flatten_ids, require_id_dtype, shape_rows
from elastable.worker.rows.model_inputs import wrap_reading_methods
from elastable.worker.rows.saved_rows import (
    TableInCheckpoint,
    WholeTable,
    all_rows,
    assign_rows,
    require_all_rows,
    require_matrix,
    rows_listed,
)
from elastable.worker.rows.scope import ALL_ROWS, current_scope, export_format, record
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


class StoreBacked(StoreLayer):
    """Base of every layer with its table in a store; mixed into Keras layers.

    The rows are the layer's one weight (`WholeTable`). Each call reads its rows from the current scope
    (`elastable.worker.rows.scope`), or else from the attached source, or else they are the initial values.
    """

    takes_ids = True
    """Models with such a layer look at what their integer inputs are given."""
    combiner: str | None
    mask_zero: bool
    compute_dtype: str
    _whole: WholeTable | None = None
    _penalised: BackendTensor | None = None
    built: bool
    losses: list[tf.Tensor]
    add_loss: Callable[[tf.Tensor], None]

    def begin(self) -> None:
        """Reads initial values from now on, of Keras' current seed."""
        self._keras_seed = global_seed()
        self.attach(None)
        object.__setattr__(self, "_trainers", weakref.WeakSet())  # past Keras' tracking
        # TensorFlow tracks it: `tf.train.Checkpoint(model)` holds the table. It may be restored here and now.
        self.table_in_checkpoint = TableInCheckpoint(self)

    def _lookup_dependency(self, name: str, *cached: object) -> object:
        """What TensorFlow restores a part of a checkpoint to: a plain layer's has another than ours."""
        if name == "_embeddings" and not self.on_worker:
            raise Unsupported(
                f"embedding layer {self.name!r}: the tf.train.Checkpoint holds the variable of a plain Keras layer, "
                "and its rows would be left out; write the plain model with model.save_weights, and load that file "
                "with load_weights"
            )
        return super()._lookup_dependency(name, *cached)  # type: ignore[misc]

    @property
    def embeddings(self) -> keras.Variable | WholeTable:
        """All rows of the table, like the variable of a `keras.layers.Embedding`: always the same object."""
        if self.on_worker:
            return self._here[0]
        if self._whole is None:
            object.__setattr__(self, "_whole", WholeTable(self))  # past Keras' tracking
        return self._whole

    @property
    def weights(self) -> list[keras.Variable | WholeTable]:
        """The rows as one weight, once the layer is built, as of a `keras.layers.Embedding`."""
        return [*self._listed(), *super().weights]  # type: ignore[misc]

    @property
    def variables(self) -> list[keras.Variable | WholeTable]:
        """The rows, and what else Keras lists."""
        return [*self._listed(), *super().variables]  # type: ignore[misc]

    def _listed(self) -> list[keras.Variable | WholeTable]:
        return [self.embeddings] if self.built and not self.on_worker and rows_listed() else []

    def set_weights(self, weights: Sequence[npt.ArrayLike]) -> None:
        """Writes the rows, as in Keras; raises `Unsupported` for a table of any id."""
        if self.input_dim is None:
            require_all_rows(self)
        super().set_weights(weights)  # type: ignore[misc]

    def write_rows(self, ids: npt.ArrayLike, rows: Float32) -> None:
        """Writes float32 `[n, dim]` rows of `[n]` ids (`ids_of`), each once; slots do not change.

        Raises:
            BadIds, IdOutOfRange: ids that repeat, or outside of the vocabulary.
            BadInput: rows of another shape.
            Unsupported: the layer reads its rows from where they cannot be written.
        """
        assign_rows(self, self.ids_of(ids), rows)

    def all_rows_tensor(self) -> tf.Tensor:
        """Every row, looked up as in any other call; raises `Unsupported` as of `require_matrix`."""
        require_matrix(self)
        if not backend().has_graphs:
            return array_calls.rows_of(self, keras.ops.arange(self.input_dim, dtype="int32"))
        return tf.identity(self.rows_of(tf.range(self.input_dim, dtype=tf.int64), None), name=ALL_ROWS)

    def embed(
        self, inputs: TensorLike, weights: TensorLike | None, training: bool | None
    ) -> tf.Tensor | tf.RaggedTensor:
        """The forward pass of one call."""
        if not backend().has_graphs:
            return array_calls.embed(self, inputs, weights, training)
        inputs = integer_ids_in_export(self, inputs)
        self.note_ids(inputs.dtype.name)
        flat = flatten_ids(
            self.name, inputs, weights, self.combiner, self.mask_zero, self.input_dim, self.vocabulary_here()
        )
        rows = self.rows_of(flat.ids, training)
        self.add_penalty(flat.ids, rows)
        return tf.cast(shape_rows(flat, rows, self.combiner, self.output_dim), self.compute_dtype)

    def add_penalty(self, ids: tf.Tensor, rows: tf.Tensor) -> None:
        """Adds the regularizer's loss on rows that a forward pass touches, each once, where Keras runs it.

        In an `evaluate`, that is; a step of ours computes it from the Batch Embedding Tensors.
        """
        if self.embeddings_regularizer is None or self.on_worker or not self.trainable or current_scope() is not None:
            return
        # Keras drops the losses when the outermost layer is called again: those there are of this pass.
        seen = self._penalised if self._penalised is not None and self.losses else ids[:0]
        unique, places = tf.unique(tf.concat([seen, ids], 0))
        count = tf.shape(seen)[0]
        shape = tf.stack([tf.shape(unique)[0], self.output_dim])
        once = tf.tensor_scatter_nd_update(tf.zeros(shape, rows.dtype), places[count:, tf.newaxis], rows)
        self.add_loss(self.embeddings_regularizer(once[count:]))
        self.see_ids(unique)

    @property
    def seen_ids(self) -> BackendTensor | None:
        """Ids of this forward pass whose rows' penalty is among the layer's losses."""
        return self._penalised

    def see_ids(self, ids: BackendTensor) -> None:
        """Notes these."""
        object.__setattr__(self, "_penalised", ids)  # past Keras' tracking

    def vocabulary_here(self) -> int | None:
        """The vocabulary to hold ids against in this call; None: any id, or a step looks at its ids by itself."""
        if tf.executing_eagerly():
            return self.input_dim
        if (current_scope() is not None and not self.on_worker) or export_format() is not None:
            return None
        return self.input_dim

    def note_ids(self, dtype: str) -> None:
        """Records at the first call whether the table's ids are integers or strings.

        Raises:
            BadIds: not a dtype of ids, or strings and numbers in different calls.
        """
        require_id_dtype(self.name, dtype, self.input_dim)
        kind = "farmhash64" if dtype == "string" else "int64"
        if self._id_kind not in (None, kind):
            raise BadIds(
                f"embedding layer {self.name!r}: called on strings and on integers, which cannot share rows; hash "
                "the strings before (et.hash_ids), or use two layers"
            )
        # Past Keras' tracking, which refuses changes to a built layer.
        object.__setattr__(self, "_id_kind", kind)

    def rows_of(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of int64 `[n]` ids in a call, from where the scope says; see the class."""
        if self._here:
            return tf.gather(self._here[0].value, ids)
        scope = current_scope()
        if scope is None or scope.leaves_out(self):
            if scope is not None and self._left_out and self.source is None:
                raise ModelError(
                    f"embedding layer {self.name!r}: the model does not know the layer, because a function calls it, "
                    "and a worker of a job has no rows of it: make its model an attribute of the one that is trained"
                )
            return self._read_in_graph(ids, training and scope is None)
        return scope.rows(self, ids)

    def refuse_untrained(self, training: bool | None) -> None:
        """Raises `ModelError` for a call that trains, outside of the steps that train tables."""
        if training:
            raise ModelError(
                f"embedding layer {self.name!r}: its table lives in a store, which Keras' own train step cannot "
                "train; use model.fit, et.fit(model, x, y, ...) or elastable train, or in a loop of your own `with "
                "et.step(model) as step:` and `step.apply(tape, loss)` (docs/fit.md#your-own-training-steps). If you "
                "did, the model does not know the layer, because a Lambda or a function calls it: make it an attribute "
                "of the layer that calls it"
            )

    def _read_in_graph(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        self.refuse_untrained(training)
        if getattr(self, "trainable", True) and record.could_possibly_record():
            # Its rows would be constants to the tape, and the table would never learn.
            raise ModelError(
                f"embedding layer {self.name!r} is called under a tf.GradientTape outside of a step that trains its "
                "table; use model.fit, et.fit(model, x, y, ...), or et.step(model) for your own loop, or set "
                "trainable=False on the layer if its rows are meant to be constants"
            )
        if tf.executing_eagerly():
            return tf.convert_to_tensor(self.read_rows(ids.numpy()))
        kind = export_format()
        if kind is not None:
            return exported_rows(self, ids, kind)
        unique, inverse = tf.unique(ids)
        rows = tf.numpy_function(self._read, [unique], tf.float32, stateful=True)
        return tf.gather(tf.ensure_shape(rows, [None, self.output_dim]), inverse)


wrap_model_methods()
wrap_reading_methods()
