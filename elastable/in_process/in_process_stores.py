"""The stores of a job in the current process: by URL, by object, or one in memory."""

import atexit
import contextlib
import threading
from collections.abc import Mapping
from pathlib import Path
from weakref import WeakSet

import keras

from elastable.assembly import Assembly, as_there, join_stores, seeded_as_read
from elastable.embedding_store.composite.locations import (
    LocationSettings,
    plan_tables,
    storage_of_tables,
    storage_of_url,
)
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, ElastableError, Unsupported
from elastable.embedding_store.open_store import open_store
from elastable.master.model.discovery import discover_tables
from elastable.master.model.keras_optimizer import learning_rate_of
from elastable.worker.keras.same_optimizer import kept_traces, optimizers_of, require_same_optimizer
from elastable.worker.keras.seeds import FitSeeds
from elastable.worker.keras.structures import BatchSpec
from elastable.worker.layers.model_tables import pretrained_rows, store_layers

StoreGiven = EmbeddingStore | str | Mapping[str, EmbeddingStore | str] | None
"""What `et.fit(store=)` takes."""

_RIGHT = 'give a URL such as "redis://localhost:6379" or "file:///folder", a store such as et.MemoryStore(), or None'

_lock = threading.Lock()
_opened: dict[str, EmbeddingStore] = {}
_read: set[str] = set()  # of these, which a model may read from
_own: WeakSet[MemoryStore] = WeakSet()


def _stores_and_places(
    given: StoreGiven, locations: LocationSettings | None, tables: Mapping[str, TableSpec]
) -> tuple[dict[str, EmbeddingStore], dict[str, str]]:
    """Storage -> store, and table -> storage.

    A store given by URL is opened once in a process, stays open for the layers that read from it, and is closed when
    the process ends.
    """
    if given is None:
        stores: dict[str, EmbeddingStore] = {"memory": _memory()}
    elif isinstance(given, Mapping):
        stores = {storage: _store(store) for storage, store in given.items()}
    else:
        stores = {storage_of_url(given) if isinstance(given, str) else "memory": _store(given)}
    if not stores:
        raise BadInput("store={}: give at least one store, or None")
    if locations is not None:
        return stores, storage_of_tables(plan_tables(tables, locations))
    return stores, dict.fromkeys(tables, next(iter(stores)))


def _refuse_rows_of_others(
    model: keras.Model, tables: Mapping[str, TableSpec], stores: Mapping[str, EmbeddingStore]
) -> None:
    """Refuses a store with rows that the model's layers do not read: they would be its initial values.

    A store that was opened by its URL for this model is closed then, so that it can be opened and attached.
    """
    read = {}
    for layer in store_layers(model):
        read[layer.table_name] = layer.source
    for storage, store in stores.items():
        there = store.specs()
        for name in tables:
            if name not in there or read.get(name) is not None or not (rows := store.row_count(name)):
                continue
            with _lock:
                urls = [url for url, store in _opened.items() if store in stores.values() and url not in _read]
                unread = [_opened.pop(url) for url in urls]
            for opened in unread:
                opened.close()
            raise BadInput(
                f"the {storage} store holds {rows} rows of table {name!r} already, which this model has not read: to "
                "go on with them open that store by et.open_store, call layer.attach(store), and give et.fit the same "
                f"store; to begin anew call store.drop_table({name!r})"
            )
    with _lock:
        for url, store in _opened.items():
            if store in stores.values():
                _read.add(url)


def _store(given: object) -> EmbeddingStore:
    if isinstance(given, EmbeddingStore):
        return given
    if not isinstance(given, str):
        raise BadInput(f"store={given!r}: a {type(given).__name__} is no store; {_RIGHT}")
    if given == "memory":
        return _memory()
    with _lock:
        if given not in _opened or _opened[given].closed:  # by whoever has it from a layer
            _opened[given] = open_store(given)
        return _opened[given]


def _memory() -> MemoryStore:
    store = MemoryStore()
    _own.add(store)
    return store


def _before(parts: Assembly, given: StoreGiven) -> tuple[EmbeddingStore | None, bool]:
    """The store that all layers read from, and whether all of their tables go on in it as they are.

    None where it is not the one given, or, if none is, not of an earlier call with the tables as they are to be.
    """
    held: EmbeddingStore | None = None
    goes_on = True
    for layer, optimizer in parts.trained_layers():
        source, spec = layer.source, parts.tables.get(layer.table_name)
        if spec is None or not isinstance(source, EmbeddingStore) or held not in (None, source):
            return None, False
        held = source
        there = held.specs().get(spec.name)
        if as_there(spec, there) != there:
            return None, False
        goes_on &= layer.trained_by(optimizer) and layer.goes_on_with(optimizer, spec)
    return (held, goes_on) if (held in _own if given is None else held is given) else (None, False)


@atexit.register
def _close() -> None:
    with _lock:
        stores = list(_opened.values())
        _opened.clear()
    for store in stores:
        with contextlib.suppress(ElastableError):
            store.close()


def parts_for_fit(model: keras.Model, spec: BatchSpec, seeds: FitSeeds, lazy: bool | None) -> Assembly:
    """The parts of a built, compiled model that is trained in this process; `lazy` as of `discover_tables`."""
    parts = Assembly(model, spec, seeds.rows, seeds.keras)
    require_same_optimizer(model, parts.planned)
    parts.tables = seeded_as_read(_discovered(model, seeds.rows, lazy, parts.optimizers), model, seeds.keras)
    return parts


def placed_in_stores(
    parts: Assembly,
    store: StoreGiven = None,
    locations: LocationSettings | None = None,
    version: int | None = None,
    moved: Mapping[str, Float32] | None = None,
    continue_from: str | Path | None = None,
) -> EmbeddingStore:
    """The stores that hold the tables then, as one; they are filled, and attached to the layers.

    Args:
        store, locations: As of `et.fit`.
        version: That the store is at then; None: as it is.
        moved: Table name -> float32 `[vocabulary, dim]`: rows of Keras embeddings that moved to the store.
        continue_from: As of `et.fit`: `continue_job` fills them then.

    Raises:
        ElastableError: a table that cannot be, or a store that holds others' rows.
    """
    before, goes_on = _before(parts, store)
    if before is not None and goes_on and locations is None and continue_from is None and not moved:
        if version not in (None, before.version()):
            before.reset_version(version)
        return before
    stores, places = _stores_and_places(before if store is None else store, locations, parts.tables)
    tables = {} if continue_from is not None and continue_from == store else parts.tables
    _refuse_rows_of_others(parts.model, tables, stores)
    given = {**pretrained_rows(store_layers(parts.model), unseeded=parts.as_keras), **(moved or {})}
    parts.place(places, given)
    held = join_stores(stores, places)
    if continue_from is None:
        parts.fill(held, held.version() if version is None else version, given)
    return held


def _discovered(
    model: keras.Model, seed: int, lazy: bool | None, optimizers: Mapping[str, keras.Optimizer]
) -> dict[str, TableSpec]:
    """As `discover_tables`, once as long as the model stays compiled and no learning rate is assigned."""
    kept = {} if optimizers else kept_traces(model)
    form = ("tables", seed, lazy)
    rates, found = kept.get(form, ((), {}))
    if rates and rates == list(map(learning_rate_of, optimizers_of(model))):
        return dict(found)
    try:
        found = discover_tables(model, seed, lazy=lazy, optimizers=optimizers)
    except Unsupported as error:
        if lazy is not None:
            raise
        raise Unsupported(
            f"{error}. model.fit takes lazy=False for a table with input_dim, so that rows which no batch touches have "
            "Keras' numbers; with lazy=True on the layer, and in et.fit, touched rows alone are trained"
        ) from error
    kept[form] = list(map(learning_rate_of, optimizers_of(model))), found
    return found
