"""The tables of a model that is trained in this process: discovered, placed, filled, and attached to its layers."""

from __future__ import annotations

from collections.abc import Mapping

import keras

from elastable.callbacks.averages import refuse_averages
from elastable.embedding_store.composite import LocationSettings
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.errors import Unsupported
from elastable.in_process.fit_seeds import FitSeeds
from elastable.in_process.in_process_stores import StoreGiven, refuse_rows_of_others, stores_and_places
from elastable.master.keras.discovery import discover_tables
from elastable.models.table_places import join_stores, on_worker
from elastable.models.tables_in_store import seeded_as_read, tables_in_store
from elastable.worker.layers.model_tables import pretrained_rows, store_layers
from elastable.worker.models.offload import keep_on_worker
from elastable.worker.step.traced.step_plan import StepPlan

__all__ = ["FitTables"]


class FitTables:
    """The model's tables in the stores that hold them.

    Args:
        model: A built, compiled model.
        seeds: Of initial rows.
        lazy: As of `discover_tables`.
        store, locations: As of `et.fit`.
        version: That the store is at then; None: as it is.
        moved: Table name -> float32 `[vocabulary, dim]`: rows of Keras embeddings that moved to the store.
        steps: What the model's own `train_step` does; None: it has Keras' own.

    Attributes:
        specs: Table name -> its spec, of those that are in the store.
        store: Holds them.
        on_worker: Tables that are Keras variables of the model instead.
        optimizers: As of `discover_tables`.

    Raises:
        ElastableError: a table that cannot be, or a store that holds others' rows.
    """

    def __init__(
        self,
        model: keras.Model,
        *,
        seeds: FitSeeds,
        lazy: bool | None,
        store: StoreGiven = None,
        locations: LocationSettings | None = None,
        version: int | None = None,
        moved: Mapping[str, Float32] | None = None,
        steps: StepPlan | None = None,
    ) -> None:
        self.optimizers = {} if steps is None else steps.optimizers()
        tables = _discovered(model, seeds.rows, lazy, self.optimizers)
        tables = seeded_as_read(tables, model, seeds.keras)
        stores, places = stores_and_places(store, locations, tables, model)
        refuse_rows_of_others(model, tables, stores)
        given = {**pretrained_rows(store_layers(model), unseeded=seeds.keras), **(moved or {})}
        self.on_worker = on_worker(places)
        keep_on_worker(model, {name: tables[name] for name in self.on_worker}, given)
        self.specs = {name: spec for name, spec in tables.items() if places[name] != "worker"}
        held = join_stores(stores, places)
        refuse_averages(model.optimizer, held, self.specs)
        begin = held.version() if version is None else version
        self.store = tables_in_store(model, self.specs, held, given, seeds.rows, begin, self.optimizers)


def _discovered(
    model: keras.Model, seed: int, lazy: bool | None, optimizers: Mapping[str, keras.Optimizer]
) -> dict[str, TableSpec]:
    try:
        return discover_tables(model, seed, lazy=lazy, optimizers=optimizers)
    except Unsupported as error:
        if lazy is not None:
            raise
        raise Unsupported(
            f"{error}. model.fit takes lazy=False for a table with input_dim, so that rows which no batch touches have "
            "Keras' numbers; with lazy=True on the layer, and in et.fit, touched rows alone are trained"
        ) from error
