"""The base class of Keras layers whose tables live in a store."""

from __future__ import annotations

import copy
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

import keras
import numpy as np
import numpy.typing as npt
import tensorflow as tf
from tensorflow.python.eager import record

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, ModelError, Unsupported
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.optimizers.registry import row_optimizer, same_slots
from elastable.embedding_store.tables.checks import as_ids, require_ids
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.worker.keras.keras_methods import guard_slots, wrap_model_methods
from elastable.worker.keras.seeds import global_seed
from elastable.worker.keras.structures import TensorLike
from elastable.worker.rows.export_rows import exported_rows, integer_ids_in_export
from elastable.worker.rows.id_values import flatten_ids, require_id_dtype, shape_rows
from elastable.worker.rows.initializers import first_rows, initializer_spec, seed_of
from elastable.worker.rows.model_inputs import is_text, wrap_reading_methods
from elastable.worker.rows.saved_rows import (
    TableInCheckpoint,
    WholeTable,
    assign_rows,
    require_all_rows,
    require_matrix,
    rows_listed,
)
from elastable.worker.rows.scope import ALL_ROWS, current_scope, export_format


class StoreBacked:
    """Base of every layer with its table in a store; mixed into Keras layers.

    The rows are the layer's one weight (`WholeTable`). Each call reads its rows from the current scope
    (`elastable.worker.rows.scope`), or else from the attached source, or else they are the initial values.
    """

    takes_ids = True
    """Models with such a layer look at what their integer inputs are given."""
    name: str
    trainable: bool
    output_dim: int
    input_dim: int | None
    embeddings_initializer: keras.Initializer
    embeddings_regularizer: keras.Regularizer | None
    embeddings_constraint: keras.constraints.Constraint | None
    combiner: str | None
    mask_zero: bool
    table: str | None
    table_dtype: str | None = None
    pretrained: Float32 | None = None
    admission: AdmissionSpec | None = None
    eviction: EvictionSpec | None = None
    lazy: bool | None = None
    optimizer: keras.optimizers.Optimizer | None = None
    compute_dtype: str
    variable_dtype: str
    _replaced: tuple[str, str] | None = None
    """Name and key of the TensorFlow variable that the table has replaced."""
    _stand_in: keras.Variable | None = None
    _source: RowSource | None
    _seed: int | None
    _keras_seed: int
    """Keras' global seed when the layer was created: it is per thread, and graphs read rows in other threads."""
    _trained_by: weakref.ref[keras.optimizers.Optimizer] | None = None
    _trainers: weakref.WeakSet[keras.optimizers.Optimizer]
    """Every optimizer that has trained the table."""
    _steps: int | None = None
    _left_out = False
    _in_fit: str | None = None
    """Name of the model whose `fit` trains the table now."""
    _id_kind: str | None = None
    _here: tuple[keras.Variable, ...] = ()
    """The variable of a table that is kept on the worker."""
    _whole: WholeTable | None = None
    _penalised: tf.Tensor | None = None
    """Unique ids of this forward pass whose rows' penalty is among the layer's losses."""
    built: bool
    losses: list[tf.Tensor]
    add_loss: Callable[[tf.Tensor], None]

    @property
    def table_name(self) -> str:
        """Name of the table in the store."""
        return self.table if self.table is not None else self.name

    @property
    def table_is_explicit(self) -> bool:
        """Whether the user named the table, so that layers may share it."""
        return self.table is not None

    def table_spec(self, seed: int | None = None, optimizer: OptimizerSpec | None = None) -> TableSpec:
        """The table this layer needs.

        Args:
            seed: Seed of the initial values, unless the initializer has one. None: Keras' global seed when the layer
                was created, else 0.
        """
        spec = initializer_spec(self.name, self.embeddings_initializer, self.input_dim, self.output_dim)
        optimizer = optimizer or OptimizerSpec()
        return TableSpec(
            name=self.table_name,
            dim=self.output_dim,
            vocabulary_size=self.input_dim,
            dtype=self.table_dtype or "float32",
            initializer=spec,
            seed=seed_of(self.embeddings_initializer, self._keras_seed if seed is None else seed),
            optimizer=optimizer if self.lazy is None else replace(optimizer, lazy=self.lazy),
            admission=self.admission,
            eviction=self.eviction,
            ids=self._id_kind or "int64",
        )

    @property
    def variable_name(self) -> str:
        """What TensorFlow calls the Keras variable that the table replaces: optimizers match patterns with it."""
        if self._replaced is not None:
            return self._replaced[0]
        made = getattr(self._stand_in, "_value", None)
        return "embeddings" if made is None else str(made.name)

    @property
    def variable_key(self) -> str:
        """What Keras optimizers keep of the variable that the table replaces, in lists of variables."""
        return f"elastable_{id(self)}" if self._replaced is None else self._replaced[1]

    def begin_as_variable(self) -> None:
        """What `build` of a layer with a variable does: copies the rows that are given, and names it.

        Keras makes a scalar: a variable's name depends on where and when it is made. Arrays in files are not copied.
        """
        if self.pretrained is not None:
            self.pretrained = _own(self.pretrained)
        elif isinstance(getattr(self.embeddings_initializer, "value", None), np.ndarray):
            self.embeddings_initializer = copy.copy(self.embeddings_initializer)
            self.embeddings_initializer.value = _own(self.embeddings_initializer.value)
        stand_in = keras.Variable("zeros", shape=(), dtype="int32", trainable=False, name="embeddings")
        object.__setattr__(self, "_stand_in", stand_in)  # past Keras' tracking: it is no weight

    @property
    def on_worker(self) -> bool:
        """Whether the table is a Keras variable on the worker instead of in a store."""
        return bool(self._here)

    def keep_on_worker(self, variable: keras.Variable) -> None:
        """Reads rows from a Keras variable `[input_dim, output_dim]` from now on instead of a store."""
        # Past Keras' tracking: the variable belongs to the first of the layers that share it.
        object.__setattr__(self, "_here", (variable,))

    def begin(self) -> None:
        """Reads initial values from now on, of Keras' current seed."""
        self._keras_seed = global_seed()
        self.attach(None)
        object.__setattr__(self, "_trainers", weakref.WeakSet())  # past Keras' tracking
        # TensorFlow tracks it: `tf.train.Checkpoint(model)` holds the table. It may be restored here and now.
        self.table_in_checkpoint = TableInCheckpoint(self)

    def attach(self, source: RowSource | None, seed: int | None = None) -> None:
        """Reads rows from `source` from now on (None: initial values of `seed`, see `table_spec`)."""
        self._source = source
        self._seed = seed

    def last_optimizer(self) -> keras.optimizers.Optimizer | None:
        """The optimizer that trained the table last in this process, while it exists; Keras would save a property."""
        return None if self._trained_by is None else self._trained_by()

    @property
    def was_trained(self) -> bool:
        """Whether the table was trained in this process, or loaded with trained rows."""
        return self._trained_by is not None or self._steps is not None

    def trained_by(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether this very optimizer trained the table last, so that it can continue with the rows' slots.

        For loaded rows it is the optimizer that was loaded with them, recognised by its number of steps, which grows
        where it trains on at once.
        """
        last = self.last_optimizer() is optimizer
        if self._steps is None:
            return last
        steps = int(optimizer.iterations)
        return steps == self._steps or (last and steps > self._steps >= 0)

    def note_trained_by(self, optimizer: keras.optimizers.Optimizer) -> None:
        """Records that this optimizer trains the table."""
        # Past Keras' tracking.
        object.__setattr__(self, "_trained_by", weakref.ref(optimizer))
        self._trainers.add(optimizer)
        self._steps = None
        guard_slots(optimizer)

    def goes_on_with(self, optimizer: keras.optimizers.Optimizer, spec: TableSpec) -> bool:
        """Whether this optimizer, of the table's spec, may go on with the rows as they are."""
        if self._in_fit is not None:
            return False
        return self.trained_by(optimizer) or not row_optimizer(spec.optimizer).slots

    def has_variable_in(self, optimizer: keras.optimizers.Optimizer) -> bool:
        """Whether the optimizer was built with the layer's former variable, and has slots for it."""
        path = getattr(self, "variable_path", None)
        return path is not None and path in [each.path for each in getattr(optimizer, "_trainable_variables", ())]

    def note_left_out(self) -> None:
        """Records that its rows were given in this process, and not taken (`leaving_rows_out`)."""
        object.__setattr__(self, "_left_out", True)  # past Keras' tracking

    @contextmanager
    def in_fit(self, model: keras.Model) -> Iterator[None]:
        """Within the block nothing else trains the table: versions would be counted twice."""
        object.__setattr__(self, "_in_fit", model.name)  # past Keras' tracking
        try:
            yield
        finally:
            object.__setattr__(self, "_in_fit", None)

    def require_trainable_by(self, optimizer: keras.optimizers.Optimizer, spec: TableSpec) -> None:
        """To be called before an optimizer begins to train the table, whose spec it gives.

        Raises:
            Unsupported: it is trained by a fit at this moment. Or this optimizer trained it before, and another one has
                since: a Keras optimizer keeps separate slots for each variable; rows have those of the last alone.
                Or it needs other slots now.
        """
        if self._in_fit is not None:
            raise Unsupported(
                f"embedding layer {self.name!r}: its table is being trained by fit of model {self._in_fit!r}; train it "
                "otherwise before or after that, not in a callback"
            )
        if self._steps is None and optimizer in self._trainers and not self.goes_on_with(optimizer, spec):
            raise Unsupported(
                f"embedding layer {self.name!r}: the optimizer {optimizer.name!r} trained its table before, and "
                "another one since, whose slots the rows have now; compile the model with a new optimizer, train the "
                "table with one optimizer only (et.Embedding(optimizer=)), or use two layers"
            )
        there = self._source.specs().get(self.table_name) if isinstance(self._source, EmbeddingStore) else None
        if there is None or self._steps is not None or not self.trained_by(optimizer):
            return
        if there.optimizer != spec.optimizer and not same_slots(there.optimizer, spec.optimizer):
            raise Unsupported(
                f"embedding layer {self.name!r}: the optimizer {optimizer.name!r} has other hyperparameters than when "
                "it trained the table, with which it needs slots that it does not have; compile the model with a new "
                "optimizer"
            )

    @property
    def steps_trained(self) -> int:
        """Steps of the optimizer that trained the table, saved with the rows; -1: it no longer exists."""
        if (optimizer := self.last_optimizer()) is not None:
            return int(optimizer.iterations)
        return -1 if self._steps is None else self._steps

    def note_steps(self, steps: int) -> None:
        """Records that the rows were loaded with the slots of an optimizer that has made this many steps."""
        self._steps = steps

    def _lookup_dependency(self, name: str, *cached: object) -> object:
        """What TensorFlow restores a part of a checkpoint to: a plain layer's has another than ours."""
        if name == "_embeddings" and not self._here:
            raise Unsupported(
                f"embedding layer {self.name!r}: the tf.train.Checkpoint holds the variable of a plain Keras layer, "
                "and its rows would be left out; write the plain model with model.save_weights, and load that file "
                "with load_weights"
            )
        return super()._lookup_dependency(name, *cached)  # type: ignore[misc]

    @property
    def embeddings(self) -> keras.Variable | WholeTable:
        """All rows of the table, like the variable of a `keras.layers.Embedding`: always the same object."""
        if self._here:
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
        return [self.embeddings] if self.built and not self._here and rows_listed() else []

    def set_weights(self, weights: Sequence[npt.ArrayLike]) -> None:
        """Writes the rows, as in Keras; raises `Unsupported` for a table of any id."""
        if self.input_dim is None:
            require_all_rows(self)
        super().set_weights(weights)  # type: ignore[misc]

    def row_count(self) -> int:
        """The vocabulary; of a table of any id the rows that it has now."""
        if self.input_dim is not None:
            return self.input_dim
        return self._source.row_count(self.table_name) if isinstance(self._source, EmbeddingStore) else 0

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
        return tf.identity(self.rows_of(tf.range(self.input_dim, dtype=tf.int64), None), name=ALL_ROWS)

    @property
    def seed(self) -> int:
        """Seed of the initial values while no source is attached."""
        return self._keras_seed if self._seed is None else self._seed

    @property
    def source(self) -> RowSource | None:
        """The source of rows outside of training, if one is attached."""
        return self._source

    def ids_of(self, values: npt.ArrayLike) -> Int64:
        """Ids of any shape as int64: integers (`as_ids`), or of a table of any id strings, by their hash."""
        if self.input_dim is None and _is_text(values):
            return hash_ids(values)
        return as_ids(values, self.table_name)

    def read_rows(self, ids: npt.ArrayLike) -> Float32:
        """The rows of ids of any shape (`ids_of`), as float32: their shape + `[dim]`."""
        given = self.ids_of(ids)
        return self._read(np.ascontiguousarray(given).reshape(-1)).reshape(*given.shape, self.output_dim)

    def _read(self, ids: Int64) -> Float32:
        """The rows of int64 `[n]` ids as float32 `[n, dim]`."""
        if self._here:
            require_ids(self.table_spec(self._seed), ids)
            return self.worker_rows()[ids]
        if self._source is None:
            spec = self.table_spec(self._seed)
            require_ids(spec, ids)
            rows = first_rows(self, unseeded=self._seed is None)
            return initial_rows(spec, ids) if rows is None else rows[ids]
        return self._source.lookup({self.table_name: ids})[self.table_name]

    def embed(
        self, inputs: TensorLike, weights: TensorLike | None, training: bool | None
    ) -> tf.Tensor | tf.RaggedTensor:
        """The forward pass of one call."""
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
        if self.embeddings_regularizer is None or self._here or not self.trainable or current_scope() is not None:
            return
        # Keras drops the losses when the outermost layer is called again: those there are of this pass.
        seen = self._penalised if self._penalised is not None and self.losses else ids[:0]
        unique, places = tf.unique(tf.concat([seen, ids], 0))
        count = tf.shape(seen)[0]
        shape = tf.stack([tf.shape(unique)[0], self.output_dim])
        once = tf.tensor_scatter_nd_update(tf.zeros(shape, rows.dtype), places[count:, tf.newaxis], rows)
        self.add_loss(self.embeddings_regularizer(once[count:]))
        object.__setattr__(self, "_penalised", unique)  # past Keras' tracking

    def vocabulary_here(self) -> int | None:
        """The vocabulary to hold ids against in this call; None: any id, or a step looks at its ids by itself."""
        if tf.executing_eagerly():
            return self.input_dim
        if (current_scope() is not None and not self._here) or export_format() is not None:
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

    def worker_rows(self) -> Float32:
        """A copy of all rows `[input_dim, output_dim]` of a table on the worker."""
        return np.array(self._here[0], np.float32)

    def rows_of(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        """float32 `[n, dim]`: the rows of int64 `[n]` ids in a call, from where the scope says; see the class."""
        if self._here:
            return tf.gather(self._here[0].value, ids)
        scope = current_scope()
        if scope is None or scope.leaves_out(self):
            if scope is not None and self._left_out and self._source is None:
                raise ModelError(
                    f"embedding layer {self.name!r}: the model does not know the layer, because a function calls it, "
                    "and a worker of a job has no rows of it: make its model an attribute of the one that is trained"
                )
            return self._read_in_graph(ids, training and scope is None)
        return scope.rows(self, ids)

    def _read_in_graph(self, ids: tf.Tensor, training: bool | None) -> tf.Tensor:
        if training:
            raise ModelError(
                f"embedding layer {self.name!r}: its table lives in a store, which Keras' own train step cannot "
                "train; use model.fit, et.fit(model, x, y, ...) or elastable train, or in a loop of your own `with "
                "et.step(model) as step:` and `step.apply(tape, loss)` (docs/fit.md#your-own-training-steps). If you "
                "did, the model does not know the layer, because a Lambda or a function calls it: make it an attribute "
                "of the layer that calls it"
            )
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


def _is_text(values: npt.ArrayLike) -> bool:
    try:
        return is_text(np.asarray(values))
    except ValueError:  # lists of different lengths
        return False


wrap_model_methods()
wrap_reading_methods()


def _own(array: np.ndarray) -> np.ndarray:
    return array if isinstance(array, np.memmap) or not array.flags.writeable else array.copy()
