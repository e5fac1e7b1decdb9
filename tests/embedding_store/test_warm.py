"""Nothing that lookups and updates run is left to be compiled once the process is warm."""

import sys
import threading

import numpy as np
import pytest
from numba.core.dispatcher import Dispatcher

from elastable.embedding_store import Bags, IndexedSlices, MemoryStore, OptimizerSpec, RowBlock, TableSpec, lookup_many
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.warm import warm_lookups, warm_updates, warming
from tests.contracts.store_samples import create_tables


def signatures() -> dict[str, int]:
    """Of every kernel of the package that has been compiled, but for one that waits for other threads."""
    modules = [module for name, module in sys.modules.items() if name.startswith("elastable.embedding_store.")]
    return {
        f"{module.__name__}.{name}": len(kernel.signatures)
        for module in modules
        for name, kernel in vars(module).items()
        if isinstance(kernel, Dispatcher) and kernel.signatures and name != "_nobody_inside"
    }


@pytest.mark.parametrize(
    ("size", "dtype"),
    [(40_000, "float32"), (None, "float32"), (40_000, "bfloat16"), (None, "float16"), (None, "int8")],
)
def test_a_process_that_is_warm_for_lookups_compiles_nothing_more(size: int | None, dtype: str) -> None:
    assert warm_lookups([dtype]) > 0
    before = signatures()
    assert before
    with MemoryStore(threads=2) as store:
        table = store.table(TableSpec("t", 64, size, dtype, optimizer=OptimizerSpec.of("sgd")))
        ids = np.random.default_rng(0).integers(0, 40_000, (40_000, 2))
        for present in (np.arange(0), np.arange(20_000), np.arange(40_000)):
            weights = np.ones((len(present), 64), np.float32)
            table.put([RowBlock(present, weights, np.empty((len(present), 0), np.float32))])
            table.lookup(ids)
            table.lookup(ids, combiner="mean", weights=np.ones(ids.shape, np.float32))
            for strategy in ("sequential", "one-thread-per-table", "preallocated"):
                lookup_many([table, table], [ids[:, 0], Bags(ids)], strategy)  # type: ignore[call-overload]
            lookup_many([table, table], [ids[:, 0], Bags(ids)], prepend_columns=3)
    assert signatures() == before


@pytest.mark.parametrize(("size", "dtype"), [(None, "float32"), (40_000, "bfloat16")])
def test_a_process_that_is_warm_for_updates_compiles_nothing_more(size: int | None, dtype: str) -> None:
    optimizers = [OptimizerSpec(name, ()) for name in FUSED]
    assert warm_updates(optimizers, [dtype]) > 0
    before = signatures()
    random = np.random.default_rng(0)
    with MemoryStore(threads=2) as store:
        for optimizer in optimizers:
            table = store.table(TableSpec(optimizer.name, 12, size, dtype, optimizer=optimizer))
            values = random.normal(size=(40_000, 12)).astype(np.float32)
            table.update(None, IndexedSlices(values, random.integers(0, 40_000, 40_000)))
            values.flags.writeable = False
            table.update(None, IndexedSlices(values, random.permutation(40_000)))
    assert signatures() == before


def test_warming_has_ended_when_its_block_has() -> None:
    with create_tables(MemoryStore(threads=1), TableSpec("t", 8, optimizer=OptimizerSpec.of("adagrad"))) as store:
        with warming(store):
            assert store.row_count("t") == 0
        assert "warm" not in [thread.name for thread in threading.enumerate()]
    assert signatures()
