"""`et.Embedding`: a Keras layer whose table lives in an embedding store."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, TypeVar

import keras
import numpy as np
import numpy.typing as npt

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec
from elastable.embedding_store.errors import BadSpec, Unsupported
from elastable.embedding_store.native.row_fold import COMBINERS
from elastable.embedding_store.tables.row_dtypes import rounded_rows
from elastable.master.backend.contract import BackendTensor, backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.structures import TensorLike
from elastable.worker.rows.array_calls import ArrayScope
from elastable.worker.rows.id_values import plain_ids
from elastable.worker.rows.saved_rows import SavedArrays, load_table, refuse_legacy_file, save_table
from elastable.worker.rows.scope import current_scope
from elastable.worker.rows.store_backed import StoreBacked

_OBJECTS = np.dtype(object)


@keras.saving.register_keras_serializable(package="elastable")
class Embedding(StoreBacked, keras.layers.Layer):  # type: ignore[misc]
    """Turns integer ids, or strings, into rows of a table that lives in an embedding store.

    Like `keras.layers.Embedding`, but also supports any int64 ids, strings, ragged and sparse ids, combiners, tables
    shared between layers, and tables larger than this process's memory. The rows are its one weight; train it with
    `model.fit`, `et.fit` or `elastable train`.

    Arguments have Keras' order, so only the name of the layer changes.

    Args:
        input_dim: Size of the vocabulary, ids are `0 <= id < input_dim`; None: any int64 id, or strings, whose ids are
            `et.hash_ids` of them.
        output_dim: Columns of a row.
        embeddings_initializer: Distribution of the rows, by Keras' names.
        embeddings_regularizer: Applied to the rows a batch touches, once per layer; in Keras it applies to the whole
            table.
        embeddings_constraint: Applied to the rows a batch touches, after their update; an untouched row keeps its
            initial value.
        mask_zero: Id 0, or the empty string, is padding: masked as in Keras, skipped by a combiner.
        weights: Initial rows `[input_dim, output_dim]`, as in Keras; written when training creates the table.
        combiner: None, "sum", "mean" or "sqrtn": reduces the last axis of the ids. Sparse ids need one; with
            `input_dim` sparse integers below 0 are left out.
        table: Name of the table; layers that name the same one share it. Default: the layer's own name.
        admission: An `et.AdmissionSpec`: when an id gets a stored row; until then it reads its initial value and its
            gradients are dropped. None: at the first gradient. Not with `input_dim`.
        eviction: An `et.EvictionSpec`: which rows are removed, and when; their ids read their initial values again.
            None: no eviction. Not with `input_dim`.
        lazy: False: each step also updates rows that the batch does not touch, as in Keras; True: it does not; None:
            the job's setting (`et.fit(lazy=)`).
        optimizer: What trains the table: a Keras optimizer, its name or its config, with a separate learning rate (or
            schedule), weight decay and clipping. None: the optimizer of `compile()`.
        table_dtype: Dtype of the rows in the store: None or "float32", "bfloat16" or "float16". The layer always reads
            float32; `dtype` is its compute dtype, as in Keras.

    Call arguments:
        inputs: Integers, floats that are integers, or strings: a dense tensor of any rank, ragged, or sparse of rank
            2; an array or a list.
        weights: With a combiner, the weight of every id; shaped as the ids.

    Returns:
        Ids' shape + `[output_dim]`; with a combiner, ids' shape without its last axis + `[output_dim]`.

    Raises:
        BadSpec: dimensions that are not positive integers, an unknown combiner or table_dtype,
            admission or eviction with a fixed vocabulary, or an optimizer unknown to Keras.
        Unsupported: LoRA or quantization.
        BadIds: ids that are neither integers nor strings, floats that are no integers or that their dtype may have
            rounded, or strings for a fixed vocabulary.
        IdOutOfRange: ids outside of a fixed vocabulary.
    """

    def __init__(
        self,
        input_dim: int | None,
        output_dim: int | None = None,
        embeddings_initializer: keras.Initializer | str = "uniform",
        embeddings_regularizer: keras.Regularizer | None = None,
        embeddings_constraint: keras.constraints.Constraint | None = None,
        mask_zero: bool = False,
        weights: npt.ArrayLike | None = None,
        combiner: str | None = None,
        table: str | None = None,
        table_dtype: str | None = None,
        admission: AdmissionSpec | Mapping[str, object] | None = None,
        eviction: EvictionSpec | Mapping[str, object] | None = None,
        lazy: bool | None = None,
        optimizer: keras.optimizers.Optimizer | str | dict[str, object] | None = None,
        **kwargs: object,
    ) -> None:
        _refuse_keras_only(kwargs)
        super().__init__(**kwargs)
        output_dim = _require_arguments(self.name, input_dim, output_dim, mask_zero, combiner, table_dtype)
        _refuse_half_variables(self)
        self.output_dim = output_dim
        self.input_dim = input_dim
        self.embeddings_initializer = keras.initializers.get(embeddings_initializer)
        self.embeddings_regularizer = keras.regularizers.get(embeddings_regularizer)
        self.embeddings_constraint = keras.constraints.get(embeddings_constraint)
        self.combiner = combiner
        self.mask_zero = mask_zero
        self.table = table
        self.table_dtype = table_dtype
        self.admission = _membership_spec(self.name, AdmissionSpec, admission, input_dim)
        self.eviction = _membership_spec(self.name, EvictionSpec, eviction, input_dim)
        self.lazy = lazy
        self.optimizer = None if optimizer is None else _keras_optimizer_of(self.name, optimizer)
        self.pretrained = None if weights is None else _initial_weights(self.name, weights, input_dim, output_dim)
        if self.pretrained is not None:
            self.pretrained = rounded_rows(table_dtype or "float32", self.pretrained)
        self.supports_masking = mask_zero
        # Ids are integers at every precision, and a lookup is no XLA operation.
        self.autocast = False
        self.supports_jit = False
        self.begin()

    def build(self, input_shape: object = None) -> None:
        """Checks the table's spec; its rows are made when they are used."""
        self.table_spec()
        self.begin_as_variable()
        self.built = True

    def __call__(self, inputs: TensorLike, *args: object, **kwargs: object) -> tf.Tensor | tf.RaggedTensor:
        """Calls the layer, also on lists and objects; a Sequential model that starts with it takes integer ids."""
        _take_integer_ids(inputs)
        if not backend().has_graphs:
            return self._call_exactly(inputs, *args, **kwargs)
        masked_or_objects = isinstance(inputs, np.ma.MaskedArray) or getattr(inputs, "dtype", None) is _OBJECTS
        if masked_or_objects or isinstance(inputs, list | tuple | int | float):
            inputs = plain_ids(self.name, inputs)
        return super().__call__(inputs, *args, **kwargs)

    def _call_exactly(self, inputs: npt.ArrayLike, *args: object, **kwargs: object) -> BackendTensor:
        """A call on JAX or PyTorch: arrays and lists as int64, which JAX would cut to 32 bits."""
        outermost = current_scope() is None and isinstance(inputs, np.ndarray | np.generic | list | tuple | int | float)
        if not outermost:
            return super().__call__(inputs, *args, **kwargs)
        with backend().exact_ids():
            return super().__call__(self.ids_of(inputs), *args, **kwargs)

    def call(
        self, inputs: TensorLike, weights: TensorLike | None = None, training: bool | None = None
    ) -> tf.Tensor | tf.RaggedTensor:
        """Rows of `inputs`; see the class."""
        return self.embed(inputs, weights, training)

    def compute_mask(self, inputs: TensorLike, mask: tf.Tensor | None = None) -> tf.Tensor | None:
        """True where ids are not 0, and strings not empty, under `mask_zero` and without a combiner."""
        if not self.mask_zero or self.combiner is not None:
            return None
        scope = current_scope()
        if isinstance(scope, ArrayScope) and scope.mask is not None:
            return scope.mask
        return keras.ops.not_equal(inputs, "" if inputs.dtype == "string" else 0)

    def compute_output_spec(
        self, inputs: TensorLike, weights: TensorLike | None = None, training: bool | None = None
    ) -> keras.KerasTensor:
        """Symbolic output of symbolic ids."""
        dtype = keras.backend.standardize_dtype(inputs.dtype)
        if dtype == "string" or "int" in dtype:  # floats are refused when the layer is called on values
            self.note_ids(dtype)
        ragged = bool(getattr(inputs, "ragged", False)) and self.combiner is None
        return keras.KerasTensor(self.compute_output_shape(inputs.shape), dtype=self.compute_dtype, ragged=ragged)

    def compute_output_shape(self, input_shape: Sequence[int | None]) -> tuple[int | None, ...]:
        """Shape of the output for ids of `input_shape`."""
        return (*(input_shape if self.combiner is None else input_shape[:-1]), self.output_dim)

    def get_config(self) -> dict[str, object]:
        """Everything needed to create the layer again."""
        refuse_legacy_file(self)
        return {
            **super().get_config(),
            "input_dim": self.input_dim,
            "output_dim": self.output_dim,
            "embeddings_initializer": keras.initializers.serialize(self.embeddings_initializer),
            "embeddings_regularizer": keras.regularizers.serialize(self.embeddings_regularizer),
            "embeddings_constraint": keras.constraints.serialize(self.embeddings_constraint),
            "mask_zero": self.mask_zero,
            "combiner": self.combiner,
            "table": self.table,
            "table_dtype": self.table_dtype,
            "admission": None if self.admission is None else asdict(self.admission),
            "eviction": None if self.eviction is None else asdict(self.eviction),
            "lazy": self.lazy,
            "optimizer": None if self.optimizer is None else keras.optimizers.serialize(self.optimizer),
        }

    def save_own_variables(self, store: SavedArrays) -> None:
        """Writes the table into a Keras file; raises `Unsupported` for one that is too large (`et.save`)."""
        save_table(self, store)

    def load_own_variables(self, store: SavedArrays) -> None:
        """Reads what `save_own_variables` wrote."""
        load_table(self, store)


# Checks of the arguments of `et.Embedding`


Spec = TypeVar("Spec", AdmissionSpec, EvictionSpec)
_TABLE_DTYPES = ("float32", "bfloat16", "float16")


def _refuse_keras_only(arguments: dict[str, object]) -> None:
    """Removes arguments that only Keras' layer supports; refuses them if they are set."""
    for name in ("lora_rank", "lora_alpha", "quantization_config"):
        value = arguments.pop(name, None)
        if value is not None:
            raise Unsupported(
                f"et.Embedding({name}={value!r}): a table in a store has neither LoRA nor quantization; for such a "
                "table use keras.layers.Embedding, or table_dtype= for rows of 16 bits"
            )


def _refuse_half_variables(layer: keras.Layer) -> None:
    """Raises `Unsupported` for a layer whose rows would be a variable of 16 bits: Keras rounds it at every step."""
    if layer.variable_dtype in ("float16", "bfloat16"):
        raise Unsupported(
            f"embedding layer {layer.name!r}: dtype={layer.variable_dtype!r} keeps weights in 16 bits, and rows are "
            f"trained in float32; use dtype='mixed_{layer.variable_dtype}', which computes in 16 bits, or "
            f"table_dtype={layer.variable_dtype!r} with it for rows that are stored in 16 bits"
        )


def _initial_weights(layer: str, weights: npt.ArrayLike, input_dim: int | None, output_dim: int) -> Float32:
    """The initial rows from Keras' argument `weights`: an array, or a list of one array."""
    only = weights[0] if isinstance(weights, list) and len(weights) == 1 else weights
    rows = np.ascontiguousarray(only, dtype=np.float32)
    if rows.shape != (input_dim, output_dim):
        raise BadSpec(
            f"embedding layer {layer!r}: weights have shape {rows.shape}, its table ({input_dim}, {output_dim}); "
            "weights need a fixed table of their own shape"
        )
    return rows


def _require_arguments(
    layer: str,
    input_dim: int | None,
    output_dim: int | None,
    mask_zero: object,
    combiner: str | None,
    table_dtype: str | None,
) -> int:
    """`output_dim`; raises `BadSpec` if one of the arguments of `et.Embedding` is missing or invalid."""
    message = f"embedding layer {layer!r}"
    if output_dim is None:
        raise BadSpec(
            f"{message}: output_dim is missing; the order is Keras' own, et.Embedding(input_dim, output_dim), "
            f"input_dim=None for any int64 id: (None, {input_dim!r})"
        )
    if mask_zero not in (False, True):
        raise BadSpec(
            f"{message}: mask_zero must be True or False, got {mask_zero!r}; give combiner by its name, combiner="
        )
    _require_size(layer, "output_dim", output_dim)
    if input_dim is not None:
        _require_size(layer, "input_dim", input_dim)
    if combiner is not None and combiner not in COMBINERS:
        raise BadSpec(f"{message}: combiner {combiner!r}; known ones are None, {', '.join(COMBINERS)}")
    _require_table_dtype(layer, table_dtype)
    return output_dim


def _require_table_dtype(layer: str, table_dtype: object) -> None:
    if table_dtype is None or table_dtype in _TABLE_DTYPES:
        return
    message = f"embedding layer {layer!r}: table_dtype {table_dtype!r}; a layer's table is kept in "
    hint = ": int8 tables are served, not trained (embedding_store.convert_table)" if table_dtype == "int8" else ""
    raise BadSpec(message + ", ".join(_TABLE_DTYPES) + hint)


def _require_size(layer: str, argument: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise BadSpec(f"embedding layer {layer!r}: {argument} must be a positive integer, got {value!r}")


def _keras_optimizer_of(layer: str, optimizer: object) -> keras.optimizers.Optimizer:
    """The Keras optimizer from an instance, a name or a config; raises `BadSpec` if Keras cannot make one."""
    try:
        return keras.optimizers.get(optimizer)
    except (ValueError, TypeError) as error:
        raise BadSpec(
            f"embedding layer {layer!r}: optimizer {optimizer!r} is no Keras optimizer ({error}); give an instance "
            'such as keras.optimizers.Adagrad(0.1), a name such as "adagrad", or the config of an optimizer'
        ) from error


def _membership_spec(layer: str, kind: type[Spec], value: object, input_dim: int | None) -> Spec | None:
    """`admission` or `eviction` of a table of any ids, from None, a spec, or a dict of its fields; raises `BadSpec`."""
    argument = "admission" if kind is AdmissionSpec else "eviction"
    message = f"embedding layer {layer!r}: {argument}"
    if value is None:
        return None
    if input_dim is not None:
        raise BadSpec(f"{message} is for tables of any ids: leave input_dim out (it is {input_dim})")
    if isinstance(value, kind):
        return value
    if not isinstance(value, Mapping):
        raise BadSpec(f"{message} must be None or an et.{kind.__name__}, got {value!r}")
    try:
        return kind(**value)
    except TypeError as error:
        raise BadSpec(f"{message}: {dict(value)} are no fields of et.{kind.__name__}: {error}") from error


# Makes Sequential models that start with an embedding take integer ids where Keras would assume floats


_SEQUENTIAL_BUILD = keras.Sequential.build.__code__


def _take_integer_ids(ids: TensorLike) -> None:
    """Makes the symbolic float input int64 of every Sequential model that is being built and passes it on unchanged."""
    if not isinstance(ids, keras.KerasTensor) or not ids.dtype.startswith("float"):
        return
    for local in _sequentials_being_built():
        if local.get("x") is not ids:
            return  # it has a layer before this one
        layer, ids = local["self"]._layers[0], local["inputs"]
        layer._dtype = "int64"
        ids._dtype = "int64"
        # A Sequential around this one hands its own input to it, which is another tensor.
        ids = _input_of(local["self"])


def _input_of(model: keras.Model) -> keras.KerasTensor | None:
    """The tensor that the model is called with in the Sequential that is being built around it."""
    for local in _sequentials_being_built():
        if local.get("layer") is model:
            return local.get("x")
    return None


def _sequentials_being_built() -> Iterator[dict[str, keras.Layer]]:
    """The variables of every running `Sequential.build`, the innermost first."""
    frame = sys._getframe()
    while frame is not None:
        if frame.f_code is _SEQUENTIAL_BUILD:
            yield frame.f_locals
        frame = frame.f_back  # type: ignore[assignment]


# `et.Embedding` with the argument names of ElasticDL


@keras.saving.register_keras_serializable(package="elastable")
class EdlEmbedding(Embedding):
    """`(batch, n)` integer ids to `(batch, n, embedding_dim)` rows.

    Args:
        embedding_size: Size of the vocabulary; None: any int64 id.
        embedding_dim: Columns of a row.
        name: Of the layer and of its table.
        embedding_initializer: Distribution of the rows, by Keras' names.
    """

    def __init__(
        self,
        embedding_size: int | None,
        embedding_dim: int,
        name: str | None = None,
        embedding_initializer: keras.Initializer | str = "uniform",
        **kwargs: Any,
    ) -> None:
        super().__init__(
            embedding_size, embedding_dim, embeddings_initializer=embedding_initializer, name=name, **kwargs
        )

    def get_config(self) -> dict[str, object]:
        """Everything needed to make the layer again, by this class's names."""
        config = super().get_config()
        config["embedding_size"] = config.pop("input_dim")
        config["embedding_dim"] = config.pop("output_dim")
        config["embedding_initializer"] = config.pop("embeddings_initializer")
        return config
