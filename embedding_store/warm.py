"""Kernels compiled before they are needed: a store that is warm answers its first lookup as fast as any other."""

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product

import numpy as np

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.optimizers.registry import follows_steps
from elastable.embedding_store.tables.lookups import Bags
from elastable.embedding_store.tables.many_tables import lookup_many
from elastable.embedding_store.tables.table import EmbeddingTable
from elastable.embedding_store.tables.table_update import IndexedSlices

_DIM = 4
_IDS = np.arange(8)
_COMPILED_S = 60.0


def warm_lookups(dtypes: Sequence[str] = ("float32",)) -> float:
    """Compiles every kernel that lookups of tables in memory run, or loads it from numba's cache.

    Args:
        dtypes: Those of the tables that will be looked up.

    Returns:
        Seconds: some tenths where the cache holds them all, several where it is empty.
    """
    began = time.perf_counter()
    for dtype in dtypes:
        with MemoryStore(threads=1) as store:
            _look_up_everything(store, dtype)
    return time.perf_counter() - began


def _look_up_everything(store: MemoryStore, dtype: str) -> None:
    spec = TableSpec("t", _DIM, None, dtype, InitializerSpec("uniform", -1.0, 1.0), optimizer=OptimizerSpec.of("sgd"))
    whole, partial, dynamic = (
        _table(store, replace(spec, name=name, vocabulary_size=size), rows)
        for name, size, rows in (("whole", 8, 8), ("partial", 8, 4), ("dynamic", None, 4))
    )
    for table in (whole, partial, dynamic):
        table.lookup(_IDS)
        table.lookup(_IDS[None], combiner="mean")
        table.lookup(_IDS[None], combiner="sqrtn", weights=np.ones((1, 8), np.float32))
    lookup_many([whole, partial, dynamic], [_IDS] * 3, prepend_columns=_DIM)
    bags = [Bags(_IDS[:, None]), Bags(_IDS[:, None], "sum", weights=np.ones((8, 1), np.float32))]
    lookup_many([whole, dynamic], bags, prepend_columns=_DIM)


def _table(store: MemoryStore, spec: TableSpec, rows: int) -> EmbeddingTable:
    """The table, of which so many rows hold a value."""
    table = store.table(spec)
    table.put([RowBlock(np.arange(rows), np.ones((rows, _DIM), np.float32), np.empty((rows, 0), np.float32))])
    return table


def warm_updates(optimizers: Sequence[OptimizerSpec], dtypes: Sequence[str] = ("float32",)) -> float:
    """Compiles every kernel that updates of tables in memory run, or loads it from numba's cache.

    Args:
        optimizers: Those of the tables that will be updated.
        dtypes: And the tables' own, each with each optimizer.

    Returns:
        Seconds: some tenths where the cache holds them all, several where it is empty.
    """
    began = time.perf_counter()
    ids = np.concatenate([_IDS, _IDS])  # twice each: there is something to sum
    with MemoryStore(threads=1) as store:
        for number, (optimizer, dtype) in enumerate(product(optimizers, dtypes)):
            for name, size in (("fixed", 16), ("dynamic", None)):
                table = store.table(TableSpec(f"{name}{number}", _DIM, size, dtype, optimizer=optimizer))
                for values in (np.ones((16, _DIM), np.float32), np.ones((8, _DIM), np.float32)):
                    for writable in (True, False):  # arrays over what a socket or TensorFlow gave are not
                        values.flags.writeable = writable
                        table.update(None, IndexedSlices(values, ids[: len(values)]))
                if follows_steps(optimizer):  # rows that are behind are read by separate kernels
                    table.lookup(_IDS)

    return time.perf_counter() - began


@contextmanager
def warming(store: EmbeddingStore) -> Iterator[None]:
    """Warms what the store's tables run, in a separate thread, while the block runs; has ended at its end."""
    specs = list(store.specs().values())
    dtypes = sorted({"float32", *(spec.dtype for spec in specs)})
    trained = {(spec.dtype, spec.optimizer) for spec in specs if spec.dtype != "int8"}
    fused = sorted((pair for pair in trained if pair[1].name in FUSED), key=repr)

    def warm() -> None:
        warm_lookups(dtypes)
        for dtype, optimizer in fused:
            warm_updates([optimizer], [dtype])

    thread = threading.Thread(target=warm, name="warm", daemon=True)
    thread.start()
    try:
        yield
    finally:
        thread.join(_COMPILED_S)
