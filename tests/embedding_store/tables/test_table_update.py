"""Updates of tables beyond what every store promises: threads, scratch space, several stores."""

from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from elastable.embedding_store import IndexedSlices, MemoryStore, TableSlices, update_many, update_tables
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.engine import staged_commit
from elastable.embedding_store.errors import BadInput
from elastable.embedding_store.optimizers.fused import FUSED
from elastable.embedding_store.tables import grouping
from tests.contracts.store_samples import create_tables, rows_by_id
from tests.embedding_store.tables.allocations import least_peak
from tests.threads import on_threads


def slices(ids: np.ndarray, dim: int, seed: int = 0) -> IndexedSlices:
    return IndexedSlices(np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32), ids)


@given(
    st.sampled_from(sorted(FUSED)),
    st.integers(1, 9),
    st.integers(1, 4),
    st.integers(1, 20),
    st.lists(st.lists(st.integers(-20, 20), max_size=60), min_size=1, max_size=3),
)
@settings(max_examples=30)
def test_no_thread_or_split_shows(name: str, piece: int, threads: int, dim: int, history: list[list[int]]) -> None:
    spec = TableSpec("t", dim, optimizer=OptimizerSpec(name, (("learning_rate", 0.1),)), seed=1)
    with MemoryStore(1) as alone, MemoryStore(threads) as together:
        for store in (alone, together):
            store.create_table(spec)
        for seed, values in enumerate(history):
            gradient = slices(np.array(values, np.int64), dim, seed)
            update_tables(alone, [TableSlices(spec, gradient)])
            with mock.patch.object(staged_commit, "_PIECE", piece), mock.patch.object(grouping, "_VALUES_A_THREAD", 8):
                update_tables(together, [TableSlices(spec, gradient)])
        assert rows_by_id(alone, "t") == rows_by_id(together, "t")


def test_steps_are_the_store_s_versions_unless_given() -> None:
    spec = TableSpec("t", 2, optimizer=OptimizerSpec.of("adam"))
    found = []
    for steps in ((None, None), (0, 1), (5, 5)):
        with create_tables(MemoryStore(1), spec) as store:
            for seed, step in enumerate(steps):
                update_tables(store, [TableSlices(spec, slices(np.array([1, 2]), 2, seed))], step=step)
            found.append(rows_by_id(store, "t"))
    assert found[0] == found[1]
    assert found[0] != found[2]


def test_threads_that_update_one_store_lose_nothing() -> None:
    spec = TableSpec("t", 4, 50, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))
    ids = np.arange(50).repeat(3)
    rounds = 20
    with create_tables(MemoryStore(1), spec) as store:
        ones = IndexedSlices(np.ones((150, 4), np.float32), ids)
        rate = OptimizerSpec.of("sgd", learning_rate=-1.0)

        def update() -> None:
            for _ in range(rounds):
                update_tables(store, [TableSlices(spec, ones, rate)])

        on_threads([update] * 8)
        assert store.version() == 8 * rounds
        np.testing.assert_array_equal(store.lookup({"t": np.arange(50)})["t"], np.full((50, 4), 3.0 * 8 * rounds))


@pytest.mark.parametrize("vocabulary_size", [9000, None], ids=["fixed", "dynamic"])
def test_a_training_loop_allocates_nothing(vocabulary_size: int | None) -> None:
    spec = TableSpec("t", 16, vocabulary_size, optimizer=OptimizerSpec.of("adam"))
    random = np.random.default_rng(0)
    batches = [slices(random.integers(0, 9000, 20_000 + 50 * seed), 16, seed) for seed in range(6)]
    with create_tables(MemoryStore(1), spec) as store:
        update_tables(store, [TableSlices(spec, slices(np.arange(9000), 16))])
        for gradient in batches:
            update_tables(store, [TableSlices(spec, gradient)])
        peak = least_peak(lambda: [update_tables(store, [TableSlices(spec, each)]) for each in batches])
    # One array of an item for each id would be 72,000 bytes, one for each occurrence 160,000.
    assert peak < 32_768


def test_update_many_makes_one_version_of_each_store() -> None:
    specs = [TableSpec(name, 2, optimizer=OptimizerSpec.of("sgd")) for name in "abc"]
    with MemoryStore(1) as first, MemoryStore(1) as second:
        tables = [store.table(spec) for store, spec in zip((first, second, first), specs, strict=True)]
        gradients = [slices(np.array([number, 7]), 2, number) for number in range(3)]
        assert update_many(tables, None, gradients) == [1, 1, 1]
        assert update_many(tables[:1], OptimizerSpec.of("sgd", learning_rate=0.5), gradients[:1]) == [2]
        assert update_many(tables, [None, None, specs[2].optimizer], gradients) == [3, 2, 3]
        assert [table.row_count for table in tables] == [2, 2, 2]
        with pytest.raises(BadInput, match="of 3 tables: got 1 optimizers and 3 slices"):
            update_many(tables, [None], gradients)
        with pytest.raises(BadInput, match="'c' has the optimizer sgd"):
            update_many(tables, [None, None, OptimizerSpec.of("adam")], gradients)
        assert (first.version(), second.version()) == (3, 2)
        assert update_many([], None, []) == []


def test_whatever_has_values_and_indices_will_do() -> None:
    tensorflow = pytest.importorskip("tensorflow")
    spec = TableSpec("t", 2, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd", learning_rate=1))
    theirs = tensorflow.IndexedSlices(tensorflow.ones((3, 2)), tensorflow.constant([4, 4, 6]))
    with MemoryStore(1) as store:
        table = store.table(spec)
        assert table.update(None, theirs) == 1
        assert table.lookup([4, 6]).tolist() == [[-2, -2], [-1, -1]]
        assert table.update(OptimizerSpec.of("sgd", learning_rate=0.5), theirs, step=7) == 2
        assert table.lookup([4, 6]).tolist() == [[-3, -3], [-1.5, -1.5]]
