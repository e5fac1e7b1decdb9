"""Tables of float16 and bfloat16: half the memory, no step lost, the same bits everywhere."""

from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store import InitializerSpec, MemoryStore, OptimizerSpec, TableSpec, initial_rows
from elastable.embedding_store.contract.row_data import RowBlock, TableUpdate, UpdateBatch
from elastable.embedding_store.errors import BadInput, NotFinite
from elastable.embedding_store.native.number_formats import HALF_DTYPES, round_half
from elastable.embedding_store.optimizers.registry import row_optimizer
from elastable.embedding_store.tables.row_dtypes import round_update
from tests.contracts.store_samples import commit, create_tables, update

pytestmark = pytest.mark.parametrize("dtype", HALF_DTYPES)
ADAM = OptimizerSpec.of("adam", learning_rate=0.01)
DIM = 5


def table(dtype: str, size: int | None = None, dim: int = DIM, **other: object) -> TableSpec:
    return TableSpec("t", dim, size, dtype, **{"optimizer": ADAM, "seed": 3, **other})  # type: ignore[arg-type]


def nearest(dtype: str, values: np.ndarray) -> np.ndarray:
    rounded = values.astype(np.float32)
    round_half(HALF_DTYPES[dtype], rounded, np.arange(len(rounded)))
    return rounded


def test_an_unseen_id_reads_the_same_before_and_after_it_is_written(dtype: str) -> None:
    ids = np.array([-(2**63), 7, 2**40])
    for spec in (table(dtype), table(dtype, initializer=InitializerSpec("constant", 0.1))):
        whole = initial_rows(replace(spec, dtype="float32"), ids)
        with create_tables(MemoryStore(threads=1), spec) as store:
            before = store.lookup({"t": ids})["t"]
            np.testing.assert_array_equal(before, nearest(dtype, whole))
            assert (before != whole).any()
            commit(store, {"t": TableUpdate(ids, np.zeros((3, DIM), np.float32))})
            assert store.row_count("t") == 3
            np.testing.assert_array_equal(store.lookup({"t": ids})["t"], before)


@pytest.mark.parametrize("optimizer", ["sgd", "adagrad", "rowwise_adagrad", "adam", "contract_block"])
def test_an_update_is_the_optimizers_in_float32_then_rounded(dtype: str, optimizer: str) -> None:
    hyper = () if optimizer == "contract_block" else (("learning_rate", 0.1),)
    spec = table(dtype, optimizer=OptimizerSpec(optimizer, hyper))
    ids = np.random.default_rng(0).permutation(np.arange(-30_000, 30_000))  # more than one piece of work
    applied = row_optimizer(spec.optimizer)
    weights, slots = initial_rows(spec, ids), np.tile(applied.initial_slots(DIM), (len(ids), 1))
    with create_tables(MemoryStore(threads=2), spec) as store:
        for step in range(3):
            change = update(ids, DIM, seed=step)
            commit(store, {"t": change})
            rate = applied.default_learning_rate
            applied.apply(weights, slots, UpdateBatch(ids, np.arange(len(ids)), change.gradients, step, rate))
            round_update(spec, ids, step, weights)
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], weights)
        found = store.read_rows("t", ids)
        np.testing.assert_array_equal(found.slots, slots)
        np.testing.assert_array_equal(nearest(dtype, found.weights), found.weights)


def test_steps_that_nearest_rounding_would_lose_add_up(dtype: str) -> None:
    # A step of 2e-5 on weights of 1, whose neighbours are 1e-3 (float16) and 8e-3 (bfloat16) away.
    spec = table(dtype, 500, 64, optimizer=OptimizerSpec.of("sgd"), initializer=InitializerSpec("ones"))
    ids, rate, steps = np.arange(500), 2e-5, 1000
    ones = np.ones((500, 64), np.float32)
    assert (nearest(dtype, ones - np.float32(rate)) == 1).all()
    with create_tables(MemoryStore(threads=1), spec) as store:
        for _ in range(steps):
            commit(store, {"t": TableUpdate(ids, ones)}, rate)
        moved = 1 - store.lookup({"t": ids})["t"].astype(np.float64)
    deviation = moved.std() / moved.size**0.5
    assert abs(moved.mean() - steps * rate) < 5 * deviation
    assert deviation < 0.01 * steps * rate


def test_rows_that_are_put_are_rounded_to_nearest(dtype: str) -> None:
    ids, random = np.arange(100), np.random.default_rng(2)
    with create_tables(MemoryStore(threads=1), table(dtype)) as store:
        weights, slots = random.normal(size=(100, DIM)).astype(np.float32), np.ones((100, 2 * DIM), np.float32)
        store.put("t", [RowBlock(ids, weights, slots)])
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], nearest(dtype, weights))


def test_weights_take_half_the_memory_and_slots_what_they_took(dtype: str) -> None:
    with create_tables(MemoryStore(), table(dtype), TableSpec("wide", DIM, optimizer=ADAM)) as store:
        commit(store, {name: update(np.arange(1000), DIM) for name in ("t", "wide")})
        narrow, wide = (store.table_statistics(name).bytes for name in ("t", "wide"))
        assert narrow is not None
        assert wide is not None
        assert wide - narrow == 1000 * DIM * 2


def test_a_weight_that_float16_cannot_hold_is_refused(dtype: str) -> None:
    ids = np.array([3, 4])
    weights = np.array([[1, 2, 3, 4, 5], [1, 65519, 65520, 4, 5]], np.float32)
    with create_tables(MemoryStore(threads=1), table(dtype)) as store:
        block = RowBlock(ids, weights, np.ones((2, 2 * DIM), np.float32))
        if dtype == "bfloat16":
            store.put("t", [block])
            return
        with pytest.raises(BadInput, match=r"'t'.*id 4 \(position 1\) is 65520.0 in column 2; float16.*65504"):
            store.put("t", [block])
        infinite = np.where(weights == 65520, np.inf, weights).astype(np.float32)
        with pytest.raises(NotFinite, match=r"'t'.*id 4 \(position 1\) is inf in column 2"):
            store.put("t", [RowBlock(ids, infinite, block.slots)])
