"""Puts the parts of a job together: a model's step, its tables, the stores that hold them, its dense part."""

from collections.abc import Container, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path

import keras
import numpy as np

from elastable.embedding_store.broken_store import OnBroken
from elastable.embedding_store.composite.locations import (
    Locations,
    LocationSettings,
    TensorLocation,
    TensorLocationSettings,
    read_locations,
    storage_of_url,
)
from elastable.embedding_store.composite.partitioned_store import PlacedStore
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.optimizers.registry import decays_untouched_rows, same_slots
from elastable.embedding_store.support.store_url import refuse_remote_shards
from elastable.embedding_store.tables.row_blocks import fresh_rows
from elastable.embedding_store.wire.access.credentials import Credentials
from elastable.master.model.dense import DenseModel, dense_part
from elastable.master.model.discovery import discover_tables
from elastable.master.model.keras_optimizer import inner_optimizer
from elastable.master.model.wrapping_optimizers import keeps_averages
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.layers.model_tables import pretrained_rows, store_layers
from elastable.worker.rows.store_backed import StoreBacked
from elastable.worker.step.step_plan import plan_step
from elastable.worker.user_model.keras_slots import keras_slots
from elastable.worker.user_model.offload import keep_on_worker

_BLOCK_ROWS = 1 << 16
_NO_DECAY = 0.0  # the logarithm of 1

Places = Mapping[str, str]
"""Table name -> its storage, "worker" included."""


class Assembly:
    """A built, compiled model on its way into a job.

    Attributes:
        steps: What the model's own `train_step` does; None: it has Keras' own.
        optimizers: As of `discover_tables`.
        planned: Those of the updates of `steps`.
        tables: Table name -> its spec, of those that go into a store.
        on_worker: Names of those that are Keras variables of the model instead, sorted.

    Args:
        model: Or a part of one, with the optimizer that trains it.
        spec: TypeSpecs of its training batches; None: it is known to have no `train_step` of its own.
        seed: Of initial rows.
        as_keras: As `keras` of `seeded_as_read`.

    Raises:
        ModelError, Unsupported: as `plan_step`.
    """

    def __init__(self, model: keras.Model, spec: BatchSpec | None, seed: int, as_keras: bool = False) -> None:
        self.model, self._spec, self._seed, self.as_keras = model, spec, seed, as_keras
        self.steps = None if spec is None else plan_step(model, spec)
        self.optimizers = {} if self.steps is None else self.steps.optimizers()
        self.planned = [] if self.steps is None else [apply.optimizer for apply in self.steps.applies]
        self.tables: dict[str, TableSpec] = {}
        self.on_worker: tuple[str, ...] = ()

    def find_tables(self, lazy: bool | None = True) -> None:
        """Finds the tables that the model needs; `lazy`, and what is raised, as of `discover_tables`."""
        found = discover_tables(self.model, self._seed, lazy=lazy, optimizers=self.optimizers)
        self.tables = seeded_as_read(found, self.model, self.as_keras)

    def place(self, places: Places, given: Mapping[str, Float32] | None = None) -> None:
        """Makes the tables that stay on the workers variables of the model; `given`: as of `fill`."""
        kept = {}
        for name in sorted(places):
            if places[name] == "worker":
                kept[name] = self.tables.pop(name)
        self.on_worker = tuple(kept)
        if kept:
            keep_on_worker(self.model, kept, given)
            # They are variables now.
            self.steps = None if self._spec is None else plan_step(self.model, self._spec)

    def fill(
        self,
        held: EmbeddingStore,
        version: int,
        given: Mapping[str, Float32] | None = None,
        others: Container[str] = (),
    ) -> None:
        """Makes the tables, fills them, and attaches the model's layers.

        Rows come from where the layers read them before, with their slots where the very same optimizer trains on; a
        new one begins with new slots, as in Keras.

        Args:
            held: The store that the model is trained with.
            version: That it is at then.
            given: Table name -> float32 `[vocabulary, dim]`: rows to begin with, of tables that are in no store yet;
                None: those that the layers have.
            others: Tables whose rows are another job's: they are made, and stay as they are.

        Raises:
            SpecConflict: the store has a table of that name with another spec.
            Unsupported: see `refuse_averages`, `_state`, and `StoreBacked.require_trainable_by`.
        """
        refuse_averages(self.model.optimizer, held, self.tables)
        if given is None:
            given = pretrained_rows(store_layers(self.model), unseeded=self.as_keras)
        before = {}
        for layer, optimizer in self.trained_layers():
            if isinstance(layer.source, EmbeddingStore) and layer.table_name in layer.source.specs():  # else dropped
                before[layer.table_name] = layer, layer.source, optimizer
            if layer.table_name in self.tables:
                layer.require_trainable_by(optimizer, self.tables[layer.table_name])
        there = held.specs()
        # Every version names its learning rate: a table made at an earlier point of a schedule is the same table.
        for name, spec in self.tables.items():
            held.create_table(as_there(spec, there.get(name)))
        for name, spec in self.tables.items():
            if name in others:
                continue
            if name in before:
                layer, source, optimizer = before[name]
                goes_on = layer.trained_by(optimizer)
                if source is not held or (layer.was_trained and not goes_on):
                    _carry(source, held, spec, goes_on)
            elif name in given:
                held.put(name, [fresh_rows(spec, np.arange(len(given[name]), dtype=np.int64), given[name])])
        for layer, optimizer in self.trained_layers():
            if layer.table_name not in others and not layer.trained_by(optimizer):
                _take_slots(optimizer, layer, held)
        if held.version() != version:
            held.reset_version(version)
        self.attach(held)

    def attach(self, held: EmbeddingStore | None = None) -> None:
        """Has the model's layers read from a store that holds their tables; None: from where they read already.

        Their tables are trained by the model's optimizer from now on, or by the layer's own; see `fill`.
        """
        for layer, optimizer in self.trained_layers():
            if held is not None:
                layer.attach(held, self._seed)
            layer.note_trained_by(optimizer)
            # As Keras' optimizers hold the variables that they train: `tf.train.Checkpoint` finds layers in lists, too.
            setattr(optimizer, f"table_{layer.table_name}", layer.table_in_checkpoint)

    def trained_layers(self) -> list[tuple[StoreBacked, keras.Optimizer]]:
        """The layers with tables in a store, each with what trains its rows."""
        found = []
        for layer in store_layers(self.model):
            found.append((layer, layer.optimizer or self.optimizers.get(layer.table_name, self.model.optimizer)))
        return found

    def dense(self) -> DenseModel:
        """The master's part of the model: variables, optimizer, states."""
        return dense_part(self.model, self.steps)


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


def refuse_averages(optimizer: keras.Optimizer, store: EmbeddingStore, tables: Mapping[str, TableSpec]) -> None:
    """Raises where averages could not be put in the place of weights so that a job goes on from them.

    Raises:
        Unsupported: the store keeps a record of its last version, which holds the variables as they were trained.
    """
    if not store.keeps_records:
        return
    having = ["the model's optimizer"] if inner_optimizer(optimizer).use_ema else []
    for name, spec in tables.items():
        if keeps_averages(spec.optimizer):
            having.append(f"table {name!r}")
    if having:
        raise Unsupported(
            f"use_ema=True ({', '.join(having)}): at the end of training weights become their averages, and the store "
            "keeps a record of its last version, which a resumed job would go on from, with other weights; keep the "
            "tables in a store without a log (--store memory), or leave use_ema out"
        )


def _take_slots(optimizer: keras.Optimizer, layer: keras.Layer, held: EmbeddingStore) -> None:
    """Gives the rows of an offloaded layer the slots that Keras has for them, if it has trained them."""
    name = layer.table_name
    slots = keras_slots(optimizer, layer, held.specs()[name])
    if slots is None:
        return
    for start in range(0, len(slots), _BLOCK_ROWS):
        ids = np.arange(start, min(start + _BLOCK_ROWS, len(slots)), dtype=np.int64)
        held.put(name, [RowBlock(ids, held.lookup({name: ids})[name], slots[ids])])


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


# Which stores hold the tables


def locations_of(file: Path | None, store: str) -> Locations:
    """The settings of a location file; without one every table is in `store`.

    Raises:
        BadInput, BadSpec: the file cannot be used.
    """
    if file is not None:
        return read_locations(file, store)
    everywhere = TensorLocationSettings(TensorLocation(storage_of_url(store)), min_elements_for_off_worker=0)
    return Locations(LocationSettings(everywhere, everywhere), {storage_of_url(store): store})


def open_places(
    locations: Locations,
    places: Places,
    default: str,
    shared: bool = False,
    deadline_s: float | None = None,
    on_broken: OnBroken | None = None,
    credentials: Credentials | None = None,
    acknowledged_in: Path | None = None,
    accept_version: int | None = None,
) -> EmbeddingStore:
    """Opens the stores that the places need, as one store.

    Args:
        locations: With the URLs.
        places: Of every table.
        default: URL of the store for what is nowhere else.
        shared, deadline_s, on_broken, credentials, acknowledged_in, accept_version: As of `open_store`.

    Raises:
        BadInput: a table is placed where the locations name no store, or a store that `refuse_remote_shards` refuses.
    """
    needed = {storage for storage in places.values() if storage != "worker"} or {storage_of_url(default)}
    with ExitStack() as opened:
        stores: dict[str, EmbeddingStore] = {}
        for storage in sorted(needed):
            if storage not in locations.stores:
                placed = ", ".join(sorted(table for table, place in places.items() if place == storage))
                raise BadInput(
                    f"tables are placed in {storage} ({placed}): name its URL in [stores] of the location file"
                )
            url = locations.stores[storage]
            refuse_remote_shards(url)
            store = open_store(url, None, shared, deadline_s, on_broken, credentials, acknowledged_in, accept_version)
            stores[storage] = opened.enter_context(store)
        opened.pop_all()
    return join_stores(stores, places)


def refuse_beside_servers(file: Path, locations: Locations, places: Places, servers: str) -> None:
    """Refuses a location file that places tables neither on the workers nor on the job's store servers.

    Args:
        file: For messages.
        locations: Its content, read with the servers' URL as the store of everything else.
        places: Of every table.
        servers: That URL.

    Raises:
        BadInput: naming what is placed elsewhere, and what to write instead.
    """
    own = sorted(storage for storage, url in locations.stores.items() if url != servers)
    elsewhere = sorted(table for table, place in places.items() if place not in ("worker", storage_of_url(servers)))
    if own or elsewhere:
        what = f"places {', '.join(elsewhere)} in {places[elsewhere[0]]}" if elsewhere else f"names a store, {own[0]}"
        raise BadInput(
            f"--locations {file} {what}, and with --stores the servers hold every table that is not on the workers: "
            "leave [stores] and every storage but worker out of the file, and start each server with the --store "
            "that it is to keep its rows in"
        )


def join_stores(stores: Mapping[str, EmbeddingStore], places: Places) -> EmbeddingStore:
    """One store of several; the one itself where it is alone.

    Raises:
        BadInput: a place without a store.
    """
    if len(stores) == 1 and set(places.values()) - {"worker"} <= set(stores):
        return next(iter(stores.values()))
    in_stores = {table: place for table, place in places.items() if place != "worker"}
    return PlacedStore(stores, in_stores, default=next(iter(stores)))
