"""The tables of a model in the store that it is trained with, holding the rows that the model had before."""

from collections.abc import Iterator, Mapping
from dataclasses import replace

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import Unsupported
from elastable.embedding_store.optimizers.registry import decays_untouched_rows, same_slots
from elastable.embedding_store.tables.row_blocks import fresh_rows
from elastable.worker.layers.model_tables import store_layers
from elastable.worker.user_model.keras_slots import keras_slots

_BLOCK_ROWS = 1 << 16
_NO_DECAY = 0.0  # the logarithm of 1


def seeded_as_read(tables: Mapping[str, TableSpec], model: keras.Model, keras: bool) -> dict[str, TableSpec]:
    """The tables with the seeds of the rows that the model reads already: rows not yet touched stay what they are.

    Args:
        model: A built model, whose layers read from stores or read initial values.
        keras: Whether tables that are in no store yet begin as in Keras, by the global seed under which their layers
            were made.
    """
    found = dict(tables)
    for layer in reversed(store_layers(model)):  # of those that share a table the first counts
        spec = tables.get(layer.table_name)
        there = layer.source.specs().get(layer.table_name) if isinstance(layer.source, EmbeddingStore) else None
        if spec is not None and there is not None:
            found[spec.name] = spec if spec.seed == there.seed else replace(spec, seed=there.seed)
        elif spec is not None and keras and layer.source is None:
            found[spec.name] = replace(spec, seed=layer.table_spec().seed)
    return found


def tables_in_store(
    model: keras.Model,
    tables: Mapping[str, TableSpec],
    held: EmbeddingStore,
    given: Mapping[str, Float32],
    seed: int,
    version: int,
    optimizers: Mapping[str, keras.Optimizer] | None = None,
) -> EmbeddingStore:
    """Makes the tables, fills them, and attaches the model's layers.

    Rows come from where the layers read them before, with their slots where the very same optimizer trains on; a new
    one begins with new slots, as in Keras.

    Args:
        model: A built, compiled model.
        tables: That it needs, by name.
        held: The store that it is trained with.
        given: Table name -> float32 `[vocabulary, dim]`: rows to begin with, of tables that are not in a store yet.
        seed: Of the initial values.
        version: That the store is at then.
        optimizers: As of `discover_tables`.

    Returns:
        `held`.

    Raises:
        SpecConflict: the store has a table of that name with another spec.
        Unsupported: see `_state`, and `StoreBacked.require_trainable_by`.
    """
    layers = store_layers(model)
    before = {}
    for layer in layers:
        if isinstance(layer.source, EmbeddingStore):
            before[layer.table_name] = layer, layer.source
        if layer.table_name in tables:
            layer.require_trainable_by(optimizer_of_layer(layer, model, optimizers), tables[layer.table_name])
    there = held.specs()
    # Every version names its learning rate: a table made at an earlier point of a schedule is the same table.
    for name, spec in tables.items():
        held.create_table(as_there(spec, there.get(name)))
    for name, spec in tables.items():
        if name in before:
            layer, source = before[name]
            goes_on = layer.trained_by(optimizer_of_layer(layer, model, optimizers))
            if source is not held or (layer.was_trained and not goes_on):
                _carry(source, held, spec, goes_on)
        elif name in given:
            held.put(name, [fresh_rows(spec, np.arange(len(given[name]), dtype=np.int64), given[name])])
    for layer in layers:
        trained_by = optimizer_of_layer(layer, model, optimizers)
        if not layer.trained_by(trained_by):
            _take_slots(trained_by, layer, held)
    if held.version() != version:
        held.reset_version(version)
    for layer in layers:
        layer.attach(held, seed)
    note_trained(model, optimizers)
    return held


def _take_slots(optimizer: keras.Optimizer, layer: keras.Layer, held: EmbeddingStore) -> None:
    """Gives the rows of an offloaded layer the slots that Keras has for them, if it has trained them."""
    name = layer.table_name
    slots = keras_slots(optimizer, layer, held.specs()[name])
    if slots is None:
        return
    for start in range(0, len(slots), _BLOCK_ROWS):
        ids = np.arange(start, min(start + _BLOCK_ROWS, len(slots)), dtype=np.int64)
        held.put(name, [RowBlock(ids, held.lookup({name: ids})[name], slots[ids])])


def note_trained(model: keras.Model, optimizers: Mapping[str, keras.Optimizer] | None = None) -> None:
    """Its tables are trained by the model's optimizer from now on, or by the layer's own; see `tables_in_store`."""
    for layer in store_layers(model):
        optimizer = optimizer_of_layer(layer, model, optimizers)
        layer.note_trained_by(optimizer)
        # As Keras' optimizers hold the variables that they train: `tf.train.Checkpoint` finds layers in lists, too.
        setattr(optimizer, f"table_{layer.table_name}", layer.table_in_checkpoint)


def optimizer_of_layer(
    layer: keras.Layer, model: keras.Model, optimizers: Mapping[str, keras.Optimizer] | None
) -> keras.Optimizer:
    """What trains a layer's table; `optimizers` as of `discover_tables`."""
    return layer.optimizer or (optimizers or {}).get(layer.table_name, model.optimizer)


def as_there(spec: TableSpec, there: TableSpec | None) -> TableSpec:
    """The spec, with the learning rate that the table in the store was made with."""
    if there is None or there.optimizer == spec.optimizer or not there.optimizer.same_but_rate(spec.optimizer):
        return spec
    return replace(spec, optimizer=there.optimizer)


def _carry(source: EmbeddingStore, held: EmbeddingStore, spec: TableSpec, goes_on: bool) -> None:
    """Puts the rows of a table into another store, or into the same one with new slots."""
    there = source.specs()[spec.name]
    with_slots = goes_on and same_slots(there.optimizer, spec.optimizer)
    same = with_slots and there.optimizer.same_but_rate(spec.optimizer)
    if not same:
        held.put(spec.name, (fresh_rows(spec, block.ids, block.weights) for block in _rows(source, there)))
    if with_slots:
        held.put(spec.name, source.scan(spec.name))
    state = source.table_state(spec.name) if same else _state(source, there, spec)
    if state and source is not held:
        held.put_table_state(spec.name, state)


def _rows(source: EmbeddingStore, there: TableSpec) -> Iterator[RowBlock]:
    """Every row that is not its initial value, in blocks."""
    if there.vocabulary_size is None or not decays_untouched_rows(there.optimizer):
        yield from source.scan(there.name)
        return
    # Decay has reached rows that were never updated, too.
    for start in range(0, there.vocabulary_size, _BLOCK_ROWS):
        ids = np.arange(start, min(start + _BLOCK_ROWS, there.vocabulary_size), dtype=np.int64)
        yield fresh_rows(there, ids, source.lookup({there.name: ids})[there.name])


def _state(source: EmbeddingStore, there: TableSpec, spec: TableSpec) -> TableState:
    """What a table that gets another optimizer keeps of its admission counts and of the decay of untouched rows.

    Raises:
        Unsupported: rows of any ids have decayed, and would not under the new optimizer.
    """
    if there.vocabulary_size is not None:
        return TableState()
    decayed, decays = decays_untouched_rows(there.optimizer), decays_untouched_rows(spec.optimizer)
    if decayed and not decays:
        raise Unsupported(
            f"table {there.name!r}: weight_decay with lazy=False has reached rows of ids that were never updated, and "
            "the new optimizer has no place for that: keep weight_decay and lazy=False, or give the table input_dim"
        )
    state = source.table_state(there.name)
    counts = None if spec.admission is None else state.admission_counts
    return TableState(counts, state.untouched_decay if decayed else _NO_DECAY if decays else None)
