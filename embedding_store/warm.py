"""Kernels compiled before they are needed: a store that is warm answers its first lookup as fast as any other."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np

from embedding_store.lookup_request import Bags
from embedding_store.many_tables import lookup_many
from embedding_store.memory import MemoryStore
from embedding_store.spec import InitializerSpec, OptimizerSpec, TableSpec
from embedding_store.store import RowBlock
from embedding_store.table import EmbeddingTable
from embedding_store.table_update import IndexedSlices

__all__ = ["warm_lookups", "warm_updates"]

_DIM = 4
_IDS = np.arange(8)


def warm_lookups() -> float:
    """Compiles every kernel that lookups of float32 tables in memory run, or loads it from numba's cache.

    Returns:
        Seconds: some tenths where the cache holds them all, several where it is empty.
    """
    began = time.perf_counter()
    initializer = InitializerSpec("uniform", -1.0, 1.0)
    with MemoryStore(threads=1) as store:
        whole, partial, dynamic = (
            _table(store, TableSpec(name, _DIM, size, initializer=initializer, optimizer=OptimizerSpec.of("sgd")), rows)
            for name, size, rows in (("whole", 8, 8), ("partial", 8, 4), ("dynamic", None, 4))
        )
        for table in (whole, partial, dynamic):
            table.lookup(_IDS)
            table.lookup(_IDS[None], combiner="mean")
            table.lookup(_IDS[None], combiner="sqrtn", weights=np.ones((1, 8), np.float32))
        lookup_many([whole, partial, dynamic], [_IDS] * 3, prepend_columns=_DIM)
        bags = [Bags(_IDS[:, None]), Bags(_IDS[:, None], "sum", weights=np.ones((8, 1), np.float32))]
        lookup_many([whole, dynamic], bags, prepend_columns=_DIM)
    return time.perf_counter() - began


def _table(store: MemoryStore, spec: TableSpec, rows: int) -> EmbeddingTable:
    """The table, of which so many rows hold values of their own."""
    table = store.table(spec)
    table.put([RowBlock(np.arange(rows), np.ones((rows, _DIM), np.float32), np.empty((rows, 0), np.float32))])
    return table


def warm_updates(optimizers: Sequence[OptimizerSpec]) -> float:
    """Compiles every kernel that updates of float32 tables in memory run, or loads it from numba's cache.

    Args:
        optimizers: Those of the tables that will be updated.

    Returns:
        Seconds: some tenths where the cache holds them all, several where it is empty.
    """
    began = time.perf_counter()
    ids = np.concatenate([_IDS, _IDS])  # twice each: there is something to sum
    with MemoryStore(threads=1) as store:
        for number, optimizer in enumerate(optimizers):
            for name, size in (("fixed", 16), ("dynamic", None)):
                table = store.table(TableSpec(f"{name}{number}", _DIM, size, optimizer=optimizer))
                for values in (np.ones((16, _DIM), np.float32), np.ones((8, _DIM), np.float32)):
                    for writable in (True, False):  # arrays over what a socket or TensorFlow gave are not
                        values.flags.writeable = writable
                        table.update(None, IndexedSlices(values, ids[: len(values)]))
    return time.perf_counter() - began
