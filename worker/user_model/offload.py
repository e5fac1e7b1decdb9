"""Moves the tables of plain Keras embeddings to the store, and small tables of a store to the workers."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import ModelError, Unsupported
from elastable.embedding_store.tables.initial_values import initial_rows
from elastable.master.backend.contract import backend
from elastable.master.backend.lazy import tf
from elastable.worker.keras.keras_methods import patched
from elastable.worker.keras.seeds import layers_of
from elastable.worker.keras.structures import TensorLike
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.rows.saved_rows import (
    PLAIN_ROWS,
    SavedArrays,
    WholeTable,
    all_rows,
    load_plain_rows,
    refuse_legacy_file,
)
from elastable.worker.rows.store_backed import StoreBacked
from elastable.worker.rows.store_layer import first_rows
from elastable.worker.user_model.keras_slots import give_back_slots, wrap_optimizer_files

_log = logging.getLogger(__name__)
_LOADED = -2  # a number of steps that no optimizer has
_SKIPPED = "_elastable_state_skipped"


class OffloadedEmbedding(StoreBacked, keras.layers.Embedding):  # type: ignore[misc]
    """A Keras embedding whose table lives in the store; created by `offloading`.

    Its `__class__`, which Keras uses to write, clone and copy models, is still `keras.layers.Embedding`.

    Attributes:
        variable_path: Path of its former Keras variable; None: it never had one.
    """

    variable_path: str | None = None

    @property  # type: ignore[misc]
    def __class__(self) -> type[keras.layers.Embedding]:
        kind: type[keras.layers.Embedding] = keras.layers.Embedding
        return kind

    def build(self, input_shape: object = None) -> None:
        """Creates no variable: the rows are the store's."""
        self.begin_as_variable()
        self.built = True

    def call(self, inputs: TensorLike, training: bool | None = None) -> tf.Tensor:
        """Rows of `inputs`, integers or floats that are; Keras would cut fractions off."""
        return self.embed(inputs, None, training)

    def get_config(self) -> dict[str, object]:
        """The config of the plain layer."""
        refuse_legacy_file(self)
        return dict(keras.layers.Embedding.get_config(self))

    def save_own_variables(self, store: SavedArrays) -> None:
        """Writes the rows as the plain layer does; raises `Unsupported` if there are too many (`et.save`)."""
        store[PLAIN_ROWS] = all_rows(self)
        optimizer = self.last_optimizer()
        if optimizer is not None and isinstance(self.source, EmbeddingStore):
            give_back_slots(optimizer, self, self.source)  # Keras writes the optimizer after the layers

    def load_own_variables(self, store: SavedArrays) -> None:
        """Reads the rows of a plain layer."""
        load_plain_rows(self, store)
        optimizer = self.last_optimizer()
        if optimizer is not None and self.has_variable_in(optimizer):
            self.note_steps(_LOADED)  # slots are those that Keras loads into the optimizer


def _elements(layer: keras.Layer) -> int:
    return int(layer.input_dim) * int(layer.output_dim)


def _refuse_unsupported(layer: keras.Layer) -> None:
    if layer.lora_rank or layer.quantization_mode:
        raise Unsupported(
            f"embedding layer {layer.name!r}: LoRA and quantized embeddings cannot be offloaded; "
            "raise --offload-embeddings-above over its size"
        )


def _offload(layer: keras.Layer) -> None:
    _refuse_unsupported(layer)
    layer.__class__ = OffloadedEmbedding
    layer.combiner = None
    layer.table = None
    layer.supports_jit = False
    layer.begin()
    _log.info("embedding layer %r (%d elements) lives in the store", layer.name, _elements(layer))


def _load(plain: Callable[..., object], optimizer: keras.Optimizer, store: SavedArrays) -> None:
    # Keras only warns where a file holds the state of more variables than the model has.
    object.__setattr__(optimizer, _SKIPPED, len(store.keys()) != len(optimizer.variables))
    plain(optimizer, store)


@contextmanager
def offloading(above: int) -> Iterator[None]:
    """Within the block, Keras embeddings with more than `above` elements are offloaded when they are built."""
    if above <= 0:
        yield
        return

    def build(plain: Callable[..., object], layer: keras.layers.Embedding, input_shape: object = None) -> None:
        if type(layer) is keras.layers.Embedding and not layer.built and _elements(layer) > above:
            _offload(layer)
            # Keras binds `build` to the instance at creation: call the class's.
            OffloadedEmbedding.build(layer, input_shape)
            return
        plain(layer, input_shape)

    optimizer = keras.optimizers.Optimizer
    with patched(keras.layers.Embedding, "build", build), patched(optimizer, "load_own_variables", _load):
        yield


def refuse_slots_left_out(model: keras.Model) -> None:
    """Refuses a loaded model that is trained on with its optimizer's state, but for the slots of offloaded layers.

    Raises:
        Unsupported: naming the layers.
    """
    layers = sorted(each.name for each in layers_of(model) if isinstance(each, OffloadedEmbedding))
    if layers and (int(model.optimizer.iterations) > 0 or getattr(model.optimizer, _SKIPPED, False)):
        raise Unsupported(
            f"model {model.name!r} was loaded with the state of its optimizer, and what that keeps of the embeddings "
            f"which are offloaded here ({', '.join(layers)}) would be lost: load the model with compile=False and "
            "compile it again, or raise --offload-embeddings-above over their sizes"
        )


def offload_built(model: keras.Model, above: int) -> dict[str, Float32]:
    """Offloads the already built embeddings of a model.

    Returns:
        Table name -> float32 `[vocabulary, dim]`: their values, for the store.
    """
    values = {}
    layers = layers_of(model)
    for layer in layers:
        if type(layer) is keras.layers.Embedding and layer.built and _elements(layer) > above > 0:
            _refuse_unsupported(layer)
            _refuse_held_elsewhere(model, layer)
            variable = layer._embeddings
            values[layer.name] = np.asarray(variable)
            layer._tracker.unlock()
            layer._trainable_variables.remove(layer._embeddings)
            layer._embeddings = None
            if backend().has_graphs:
                layer._delete_tracking("_embeddings")  # of TensorFlow's checkpoints
            else:
                layer._post_untrack_variable(variable)
            layer._tracker.lock()
            _offload(layer)
            layer.trainable = layer.trainable and variable.trainable
            layer.embeddings_regularizer, layer.embeddings_constraint = variable.regularizer, variable.constraint
            layer.variable_path = variable.path
            value = variable.value
            replaced = (value.name, value._unique_id) if backend().has_graphs else (variable.name, variable)
            object.__setattr__(layer, "_replaced", replaced)
            _tie(model, variable, layer.embeddings)
            # What was traced before, as a `tf.function` of the program, reads the variable on: no rows of old.
            variable.assign(np.full(tuple(variable.shape), np.nan))
    for part in layers if values else ():
        if isinstance(part, keras.Model):
            part.predict_function = part.test_function = None
    return values


def _refuse_held_elsewhere(model: keras.Model, layer: keras.Layer) -> None:
    """Raises `Unsupported` if another layer holds the variable as a weight."""
    for other in layers_of(model):
        weights = (*other._trainable_variables, *other._non_trainable_variables)
        if other is not layer and any(weight is layer._embeddings for weight in weights):
            raise Unsupported(
                f"embedding layer {layer.name!r}: layer {other.name!r} holds its variable `embeddings` as a weight of "
                f"its own, so its table cannot be offloaded; hold the layer, and use `layer.embeddings` in call(), or "
                "raise offload_embeddings_above over its size"
            )


def _tie(model: keras.Model, variable: keras.Variable, table: WholeTable) -> None:
    """Replaces the variable by the table in the arguments of a Functional model's operations."""

    def swap(argument: object) -> object:
        return table if argument is variable else argument

    for part in layers_of(model):
        for operation in getattr(part, "operations", ()):
            for node in operation._inbound_nodes:
                arguments = node.arguments
                if any(argument is variable for argument in arguments._flat_arguments):
                    arguments.args = keras.tree.map_structure(swap, arguments.args)
                    arguments.kwargs = keras.tree.map_structure(swap, arguments.kwargs)
                    arguments._flat_arguments = [swap(argument) for argument in arguments._flat_arguments]


def bring_back(layer: OffloadedEmbedding, values: Float32) -> None:
    """Makes the layer a plain Keras embedding again, holding `values` `[vocabulary, dim]`."""
    object.__dict__["__class__"].__set__(layer, keras.layers.Embedding)  # past the property
    layer.supports_jit = True
    layer._tracker.unlock()
    layer.built = False
    keras.layers.Embedding.build(layer)
    layer._tracker.lock()
    layer.set_weights([values])


wrap_optimizer_files()


# Tables so small that they are kept on the workers, as Keras variables


def keep_on_worker(
    model: keras.Model, tables: Mapping[str, TableSpec], initial: Mapping[str, Float32] | None = None
) -> None:
    """Replaces the store of these tables' layers by a Keras variable.

    It starts with the rows that the store would have started with: those in `initial` or of the layer, those that the
    layer already reads, or else the initial values. Layers that share a table share the variable. Call this before the
    optimizer is built.

    Args:
        model: A built model.
        tables: Tables of fixed vocabulary, by name.
        initial: Table name -> float32 `[vocabulary, dim]`, for tables that do not start with initial values.

    Raises:
        ModelError: the optimizer is already built.
        Unsupported: a table with a separate optimizer.
    """
    if tables and getattr(model.optimizer, "built", False):
        raise ModelError(
            f"model {model.name!r}: its optimizer {model.optimizer.name!r} is built, so no table can become a "
            "variable of the workers; create the model again, or compile it again after it was loaded"
        )
    variables: dict[str, keras.Variable] = {}
    for layer in store_layers(model):
        spec = tables.get(layer.table_name)
        if spec is None:
            continue
        if layer.optimizer is not None:
            raise Unsupported(
                f"embedding layer {layer.name!r}: its table {spec.name!r} is placed on the workers, where the "
                "model's optimizer trains it, but the layer has a separate optimizer "
                f"({type(layer.optimizer).__name__}): place the table in a store, or leave optimizer= out"
            )
        rows = _rows_of(layer, spec, (initial or {}).get(spec.name))
        if isinstance(layer, OffloadedEmbedding):
            bring_back(layer, rows)
            continue
        if spec.name not in variables:
            variables[spec.name] = _variable_of(layer, spec, rows)
        layer.keep_on_worker(variables[spec.name])


def _rows_of(layer: StoreBacked, spec: TableSpec, initial: Float32 | None) -> Float32:
    if initial is not None:
        return initial
    assert spec.vocabulary_size is not None
    ids = np.arange(spec.vocabulary_size, dtype=np.int64)
    if layer.source is not None:
        return np.asarray(layer.read_rows(ids), np.float32)
    rows = first_rows(layer, unseeded=False)
    return initial_rows(spec, ids) if rows is None else rows


def _variable_of(layer: keras.Layer, spec: TableSpec, rows: Float32) -> keras.Variable:
    layer._tracker.unlock()
    variable = layer.add_weight(
        shape=rows.shape,
        dtype="float32",
        initializer="zeros",
        name=f"{spec.name.replace('/', '_')}_rows",
        regularizer=layer.embeddings_regularizer,
        constraint=layer.embeddings_constraint,
    )
    layer._tracker.lock()
    variable.assign(rows)
    return variable
