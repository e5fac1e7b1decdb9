"""A store made ready for a job that begins: empty, and then with the tables of the job."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from contextlib import suppress

from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, ShardLost, TableNotFound
from elastable.master.keras.discovery import create_tables

__all__ = ["claim_store", "create"]

_log = logging.getLogger(__name__)

_PINS_END_S = 90.0  # longer than the leases of a master that died


def claim_store(store: EmbeddingStore, overwrite: bool) -> None:
    """Makes sure that a job begins with an empty store.

    Args:
        store: The store.
        overwrite: Whether tables that are there are dropped.

    Raises:
        BadInput: tables of an earlier job are there, and are not to be dropped.
    """
    held = store.specs()
    if not held and store.version() == 0:
        return
    if not overwrite:
        raise BadInput(
            f"the store holds {len(held)} tables at version {store.version()} ({', '.join(sorted(held)[:5])}): go on "
            "from its checkpoint with --resume, drop them with --overwrite, or use another ?namespace= in its URL"
        )
    _await_pins(store)
    for name in held:
        store.drop_table(name)
    store.reset_version(0)


def create(store: EmbeddingStore, tables: Mapping[str, TableSpec], overwrite: bool) -> None:
    """Makes the tables of a job that begins; what is left of tables of which a shard was lost may be dropped first."""
    try:
        create_tables(store, tables)
    except ShardLost:
        if not overwrite:
            raise
        for name in tables:
            with suppress(TableNotFound):
                store.drop_table(name)
        store.reset_version(0)
        create_tables(store, tables)


def _await_pins(store: EmbeddingStore) -> None:
    """Until what a master that died had pinned has run out: no table is dropped before. Readers that live go on."""
    give_up = time.monotonic() + _PINS_END_S
    warned = False
    while (pins := store.pins()) and time.monotonic() < give_up:
        left = max(pin.lease_left_s for pin in pins)
        if not warned:
            warned = True
            _log.warning(
                "versions %s of the store are pinned; if it was by a master that died they are free in %.0f s",
                ", ".join(map(str, sorted({pin.version for pin in pins}))),
                left,
            )
        time.sleep(min(max(left, 0.01), 0.25))
