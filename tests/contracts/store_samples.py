"""Tables, updates and an optimizer for the store contract."""

from collections.abc import Callable
from typing import TypeVar

import numpy as np

from elastable.embedding_store.contract.row_data import Commit, TableUpdate, UpdateBatch
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.optimizers.base import RowOptimizer, SlotSpec
from elastable.embedding_store.optimizers.registry import register_row_optimizer

Store = TypeVar("Store", bound=EmbeddingStore)
MakeStore = Callable[[], EmbeddingStore]
EXTREMES = np.array([-(2**63), -1, 0, 2**63 - 1], np.int64)


def int64(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def fixed(name: str = "cities", dim: int = 4, size: int = 100, optimizer: OptimizerSpec | None = None) -> TableSpec:
    return TableSpec(name, dim, size, optimizer=optimizer or OptimizerSpec.of("sgd", learning_rate=0.5), seed=7)


def dynamic(name: str = "people", dim: int = 5, optimizer: OptimizerSpec | None = None) -> TableSpec:
    initializer = InitializerSpec("normal", 0.0, 0.1)
    return TableSpec(name, dim, None, "float32", initializer, 3, optimizer or OptimizerSpec.of("sgd"))


def create_tables(store: Store, *specs: TableSpec) -> Store:
    for spec in specs:
        store.create_table(spec)
    return store


def update(ids: np.ndarray, dim: int, seed: int = 0) -> TableUpdate:
    return TableUpdate(ids, np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32))


def commit(
    store: EmbeddingStore, updates: dict[str, TableUpdate], rate: float | None = None, time: float | None = None
) -> None:
    """Commits the next version, with steps counted as versions are."""
    version = store.version()
    rates = {} if rate is None else dict.fromkeys(updates, rate)
    store.commit(Commit(version + 1, updates, version, rates, time=time))


def rows_by_id(store: EmbeddingStore, table: str, block_rows: int = 65_536) -> dict[int, tuple[bytes, bytes]]:
    """Every stored row: id -> the bytes of weights and slots."""
    found: dict[int, tuple[bytes, bytes]] = {}
    for block in store.scan(table, block_rows):
        assert len(block.ids) <= block_rows
        assert (block.weights.dtype, block.slots.dtype) == (np.float32, np.float32)
        for row, weights, slots in zip(block.ids.tolist(), block.weights, block.slots, strict=True):
            assert row not in found
            found[row] = (weights.tobytes(), slots.tobytes())
    return found


FAILS = 404.0
"""A gradient on which `BlockSign` fails."""


class BlockSign(RowOptimizer):
    """Not fused: `w -= lr sign(g)`, counting a row's updates; it needs a separate block."""

    fused = False
    whole_rows = False  # said, so that the encoding partition takes it
    default_learning_rate = 0.25
    slots = (SlotSpec("updates", 10.0, columns=1),)

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec

    def apply(self, weights: np.ndarray, slots: np.ndarray, batch: UpdateBatch) -> None:
        np.testing.assert_array_equal(batch.positions, np.arange(len(weights)))
        if (batch.gradients == FAILS).any():
            raise ArithmeticError("this optimizer fails on purpose")
        weights -= np.float32(batch.rate) * np.sign(batch.gradients)
        slots += 1


register_row_optimizer("contract_block", BlockSign)
