"""Which tables of a model live where, and the stores to hold them."""

from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

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
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.support.store_url import refuse_remote_shards
from elastable.embedding_store.wire.access.credentials import Credentials

Places = Mapping[str, str]
"""Table name -> its storage, "worker" included."""


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
) -> EmbeddingStore:
    """Opens the stores that the places need, as one store.

    Args:
        locations: With the URLs.
        places: Of every table.
        default: URL of the store for what is nowhere else.
        shared, deadline_s, on_broken, credentials: As of `open_store`.

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
            store = open_store(url, shared=shared, deadline_s=deadline_s, on_broken=on_broken, credentials=credentials)
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


def on_worker(places: Places) -> tuple[str, ...]:
    """Names of the tables that stay on the workers, sorted."""
    found = []
    for table, place in places.items():
        if place == "worker":
            found.append(table)
    return tuple(sorted(found))
