"""A partitioned store holds, to the bit, the rows and slots of one that is not split."""

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, PartitionedStore, TableUpdate, Unsupported, coalesce
from elastable.embedding_store.contract.spec import EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.tables.row_blocks import fresh_rows
from tests.contracts.store_samples import commit, rows_by_id
from tests.embedding_store.store_kinds import KINDS

VARIANTS = {
    "nesterov": OptimizerSpec.of("sgd", momentum=0.9, nesterov=True),
    "amsgrad": OptimizerSpec.of("adam", amsgrad=True),
    "centered rmsprop": OptimizerSpec.of("rmsprop", centered=True, momentum=0.5),
}
OPTIMIZERS = {**{name: OptimizerSpec.of(name, learning_rate=0.05) for name in sorted(FUSED)}, **VARIANTS}
EDGES = [-(2**63), -(2**63) + 1, -(2**32), -7, -1, 0, 1, 2**31, 2**63 - 2, 2**63 - 1]


def train(store: EmbeddingStore, specs: list[TableSpec]) -> None:
    """Four versions of random gradients for each table, and a lookup of everything."""
    random = np.random.default_rng(8)
    for spec in specs:
        store.create_table(spec)
    for _ in range(4):
        updates = {}
        for spec in specs:
            known = np.arange(50) if spec.vocabulary_size else np.array([*EDGES, *range(100, 130)], np.int64)
            ids = random.choice(known, 25, replace=False)
            updates[spec.name] = TableUpdate(ids, random.normal(size=(25, spec.dim)).astype(np.float32))
        commit(store, updates)


def same(one: EmbeddingStore, other: EmbeddingStore, specs: list[TableSpec]) -> None:
    for spec in specs:
        ids = np.arange(50) if spec.vocabulary_size else np.array([*EDGES, *range(90, 140)], np.int64)
        wanted = {spec.name: ids}
        np.testing.assert_array_equal(one.lookup(wanted, 4)[spec.name], other.lookup(wanted)[spec.name])
        assert rows_by_id(one, spec.name, 9) == rows_by_id(other, spec.name)
        assert one.row_count(spec.name) == other.row_count(spec.name)
        assert one.specs()[spec.name] == spec


SCALED = ("glorot_uniform", "glorot_normal", "he_uniform", "he_normal", "truncated_normal")
NORMAL = InitializerSpec("normal", 0, 0.1)
TABLES: dict[str, list[TableSpec]] = {
    "every optimizer": [
        TableSpec(f"{number}/{dim}", dim, size, initializer=NORMAL, optimizer=optimizer)
        for number, optimizer in enumerate(OPTIMIZERS.values())
        for dim, size in ((1, None), (7, 50), (37, None))
    ],
    "narrow weights, rounded": [
        TableSpec(f"{name}/{dtype}/{dim}", dim, size, dtype, optimizer=OPTIMIZERS[name])
        for name in ("sgd", "adam", "rowwise_adagrad")
        for dtype in ("float16", "bfloat16")
        for dim, size in ((1, None), (9, 50), (37, None))
    ],
    "initial values that depend on the shape": [
        TableSpec(kind, 10, 50, initializer=InitializerSpec(kind, 0.0, 0.1 * (kind[0] == "t"))) for kind in SCALED
    ],
    "a budget of rows": [TableSpec("t", 7, eviction=EvictionSpec(max_rows=30, every=2), optimizer=OPTIMIZERS["adam"])],
}


@pytest.mark.parametrize("tables", TABLES)
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind.startswith(("token", "encoding"))])
def test_a_split_table_is_a_whole_one(kind: str, tables: str, tmp_path: Path) -> None:
    specs = TABLES[tables]
    with KINDS[kind](tmp_path) as split, MemoryStore(threads=1) as plain:
        if tables == "a budget of rows" and "token" in kind:
            with pytest.raises(Unsupported, match="max_rows"):
                train(split, specs)
            return
        for store in (split, plain):
            train(store, specs)
        same(split, plain, specs)
        assert tables != "a budget of rows" or plain.row_count("t") == 30


@pytest.mark.parametrize("strategy", ["token", "encoding"])
def test_a_table_that_starts_at_its_target_is_never_changed(strategy: str) -> None:
    """The host-embedding document's oracle: ones[4, 1024], ids 1, 2, weight 0, target 1: loss 1, same rows."""
    ids, spec = np.array([1, 2], np.int64), TableSpec("t", 1024, 4, initializer=InitializerSpec("ones"))
    with PartitionedStore([MemoryStore(1), MemoryStore(1)], strategy) as store:
        store.create_table(spec)
        for step in range(3):
            rows = store.lookup({"t": ids})["t"]
            weight, target = np.float32(0), np.float32(1)
            output = rows * weight
            losses = np.mean((output - target) ** 2, axis=1)
            gradients = (2 * (output - target) * weight / rows.shape[1]).astype(np.float32)
            if step == 0:
                assert losses.tolist() == [1.0, 1.0]
            commit(store, {"t": TableUpdate(ids, gradients)})
        np.testing.assert_array_equal(store.lookup({"t": np.arange(4)})["t"], np.ones((4, 1024), np.float32))


@pytest.mark.parametrize("strategy", ["token", "encoding"])
@pytest.mark.parametrize(("rows", "dim", "shards"), [(14, 64, 4), (13, 7, 4), (5, 3, 8), (1, 1, 2)])
def test_the_documents_cases_with_duplicates(strategy: str, rows: int, dim: int, shards: int) -> None:
    """Lookups of duplicates, and updates whose duplicates a peer has lost in gather, add, scatter."""
    table = np.arange(rows * dim, dtype=np.float32).reshape(rows, dim)
    spec = TableSpec("t", dim, rows, optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
    random = np.random.default_rng(dim)
    ids = random.integers(0, rows, 3 * rows)
    with PartitionedStore([MemoryStore(1) for _ in range(shards)], strategy) as store:
        store.create_table(spec)
        store.put("t", [fresh_rows(spec, np.arange(rows), table)])
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], table[ids])
        gradients = random.integers(-5, 5, (len(ids), dim)).astype(np.float32)
        commit(store, {"t": coalesce(ids, gradients)})
        expected = table.copy()
        np.subtract.at(expected, ids, gradients)
        np.testing.assert_array_equal(store.lookup({"t": np.arange(rows)})["t"], expected)
