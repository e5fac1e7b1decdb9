"""The table of a layer: its spec and initial values, where its rows are read, and what has trained it."""

from __future__ import annotations

import copy
import weakref
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
    variance_scaling,
)
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.native.string_ids import hash_ids
from elastable.embedding_store.optimizers.registry import row_optimizer, same_slots
from elastable.embedding_store.tables.checks import as_ids, require_ids
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.embedding_store.tables.row_dtypes import rounded_rows
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_methods import guard_slots
from elastable.worker.rows.model_inputs import is_text


def initializer_spec(
    layer: str, initializer: keras.Initializer, vocabulary_size: int | None, dim: int
) -> InitializerSpec:
    """The distribution from which a Keras initializer draws `[vocabulary_size, dim]`.

    Raises:
        Unsupported: an initializer that cannot be computed per (id, column), or one scaled by the vocabulary for a
            table without one.
    """
    kinds = keras.initializers
    known = (kinds.Zeros, kinds.Ones, kinds.Constant, kinds.RandomUniform, kinds.RandomNormal, kinds.TruncatedNormal)
    # A subclass counts as its base, unless it overrides how it draws.
    bases = (base for base in (*known, kinds.VarianceScaling) if isinstance(initializer, base))
    kind = next((base for base in bases if type(initializer).__call__ is base.__call__), None)
    if kind is kinds.Zeros:
        return InitializerSpec("zeros")
    if kind is kinds.Ones:
        return InitializerSpec("ones")
    if kind is kinds.Constant:
        return _constant(layer, initializer.value, vocabulary_size, dim)
    if kind is kinds.RandomUniform:
        return InitializerSpec("uniform", float(initializer.minval), float(initializer.maxval))
    if kind in (kinds.RandomNormal, kinds.TruncatedNormal):
        name = "normal" if kind is kinds.RandomNormal else "truncated_normal"
        return InitializerSpec(name, float(initializer.mean), float(initializer.stddev))
    if kind is kinds.VarianceScaling:
        return _scaled(layer, initializer, vocabulary_size, dim)
    name = getattr(initializer, "__name__", type(initializer).__name__)
    raise Unsupported(
        f"embedding layer {layer!r}: initializer {name} cannot be computed row by row; use zeros, ones, "
        "Constant, RandomUniform, RandomNormal, TruncatedNormal or a Glorot, He, LeCun or VarianceScaling one; give a "
        "matrix of all rows as keras.initializers.Constant(matrix)"
    )


def _constant(layer: str, value: npt.ArrayLike, vocabulary_size: int | None, dim: int) -> InitializerSpec:
    if not np.ndim(value):
        return InitializerSpec("constant", float(np.asarray(value)))
    if vocabulary_size is None:
        raise Unsupported(
            f"embedding layer {layer!r}: Constant of shape {np.shape(value)} for a table of any id; use one number, or "
            "write rows by id with layer.write_rows(ids, rows)"
        )
    return InitializerSpec("zeros")  # all rows are given (`elastable.worker.rows.store_layer.first_rows`)


def _scaled(layer: str, initializer: keras.Initializer, vocabulary_size: int | None, dim: int) -> InitializerSpec:
    if vocabulary_size is None and initializer.mode != "fan_out":
        raise Unsupported(
            f"embedding layer {layer!r}: {type(initializer).__name__} scales with the size of the vocabulary, and "
            "input_dim=None has none; give input_dim, or an initializer with a scale of its own: "
            'VarianceScaling(mode="fan_out"), which scales with output_dim alone, or RandomUniform(-limit, limit)'
        )
    rows = float(vocabulary_size or 1)
    return InitializerSpec(*variance_scaling(initializer.scale, initializer.mode, initializer.distribution, rows, dim))


def seed_of(initializer: keras.Initializer, otherwise: int) -> int:
    """The user's seed of the initializer, or `otherwise`.

    Without a seed Keras draws one at random, which would differ in every process; the config contains only the user's
    seed.
    """
    return int(initializer.get_config()["seed"]) if was_seeded(initializer) else otherwise


def was_seeded(initializer: keras.Initializer) -> bool:
    """Whether the user gave the initializer an integer seed."""
    return isinstance(initializer.get_config().get("seed"), int)


class StoreLayer:
    """A layer whose table lives in a store, as the modules that read, save and train it see it.

    `elastable.worker.rows.store_backed.StoreBacked` makes a Keras layer of it.
    """

    name: str
    trainable: bool
    output_dim: int
    input_dim: int | None
    embeddings_initializer: keras.Initializer
    embeddings_regularizer: keras.Regularizer | None
    embeddings_constraint: keras.constraints.Constraint | None
    mask_zero: bool
    table: str | None
    table_dtype: str | None = None
    pretrained: Float32 | None = None
    admission: AdmissionSpec | None = None
    eviction: EvictionSpec | None = None
    lazy: bool | None = None
    optimizer: keras.optimizers.Optimizer | None = None
    variable_dtype: str
    _replaced: tuple[str, str | keras.Variable] | None = None
    """Name and key of the variable that the table has replaced; it is the key itself where there are no graphs."""
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
        """What the Keras variable that the table replaces is called by optimizers, which match patterns with it."""
        if self._replaced is not None:
            return self._replaced[0]
        made = getattr(self._stand_in, "_value", None) if backend().has_graphs else None
        return "embeddings" if made is None else str(made.name)

    @property
    def variable_key(self) -> str | int:
        """What Keras optimizers keep of the variable that the table replaces, in lists of variables."""
        if backend().has_graphs:
            return f"elastable_{id(self)}" if self._replaced is None else str(self._replaced[1])
        return id(self.embeddings if self._replaced is None else self._replaced[1])

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

    def row_count(self) -> int:
        """The vocabulary; of a table of any id the rows that it has now."""
        if self.input_dim is not None:
            return self.input_dim
        return self._source.row_count(self.table_name) if isinstance(self._source, EmbeddingStore) else 0

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

    def worker_rows(self) -> Float32:
        """A copy of all rows `[input_dim, output_dim]` of a table on the worker."""
        return np.array(self._here[0], np.float32)

    @property
    @abstractmethod
    def embeddings(self) -> keras.Variable:
        """All rows as one weight."""

    @abstractmethod
    def all_rows_tensor(self) -> tf.Tensor:
        """Every row of a fixed table, float32 `[vocabulary, dim]`."""


def _is_text(values: npt.ArrayLike) -> bool:
    try:
        return is_text(np.asarray(values))
    except ValueError:  # lists of different lengths
        return False


def _own(array: np.ndarray) -> np.ndarray:
    return array if isinstance(array, np.memmap) or not array.flags.writeable else array.copy()


# Initial rows that are not a function of each id: given by the user, or drawn by Keras


LARGEST_DRAW = 1 << 22
"""Elements (16 MiB) of the largest table that is drawn whole."""

_DRAWN = "_elastable_drawn"


def first_rows(layer: StoreLayer, unseeded: bool) -> Float32 | None:
    """All initial rows of a layer's table, if they are not `initial_rows` of its spec.

    They are the layer's `weights=`, the array of a `Constant`, or what Keras' own layer would draw with the
    initializer's seed. Without a seed Keras chooses one, by `keras.utils.set_random_seed` if that was called.

    Args:
        unseeded: Whether to draw also from an initializer without a seed.

    Returns:
        float32 `[input_dim, output_dim]`. None for rows that are not random, tables of any ids, and more than
            `LARGEST_DRAW` elements.

    Raises:
        BadSpec: a `Constant` whose array does not fit the table.
    """
    if layer.pretrained is not None:
        return np.asarray(layer.pretrained, np.float32)
    if np.ndim(getattr(layer.embeddings_initializer, "value", 0)):
        return _constant_rows(layer)
    if not unseeded and not was_seeded(layer.embeddings_initializer):
        return None
    drawn = vars(layer).get(_DRAWN)
    if drawn is None:
        rows = _draw(layer)
        drawn = () if rows is None else (rounded_rows(layer.table_dtype or "float32", rows),)
        object.__setattr__(layer, _DRAWN, drawn)  # past Keras' tracking
    return drawn[0] if drawn else None


def _draw(layer: StoreLayer) -> Float32 | None:
    initializer = layer.embeddings_initializer
    # A SeedGenerator counts the draws of everything that shares it: what Keras would draw is unknown here.
    if layer.input_dim is None or not isinstance(getattr(initializer, "seed", None), int):
        return None
    if layer.input_dim * layer.output_dim > LARGEST_DRAW:
        return None
    return np.asarray(initializer((layer.input_dim, layer.output_dim), dtype=layer.variable_dtype), np.float32)


def _constant_rows(layer: StoreLayer) -> Float32:
    """Of an array that is no matrix, as one row for all, only up to `LARGEST_DRAW` elements are made."""
    array = np.asarray(layer.embeddings_initializer.value, np.float32)
    shape = (layer.input_dim or 0, layer.output_dim)
    fits = array.shape == shape or (shape[0] * shape[1] <= LARGEST_DRAW and _broadcasts(array.shape, shape))
    if not fits:
        raise BadSpec(
            f"embedding layer {layer.name!r}: Constant of shape {array.shape} for a table of shape {shape}: give all "
            "rows, or one number"
        )
    return rounded_rows(layer.table_dtype or "float32", np.ascontiguousarray(np.broadcast_to(array, shape)))


def _broadcasts(given: tuple[int, ...], shape: tuple[int, int]) -> bool:
    try:
        return np.broadcast_shapes(given, shape) == shape
    except ValueError:
        return False
