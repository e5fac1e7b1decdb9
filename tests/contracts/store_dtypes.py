"""The store contract: how weights are kept, the same in every store."""

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, RowBlock
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_samples import commit, int64, rows_by_id, update

IDS = np.random.default_rng(3).permutation(np.arange(-60, 60) * 10**15)
HALF_DTYPES = pytest.mark.parametrize("dtype", ["float16", "bfloat16"])


def narrow(dtype: str, dim: int = 5, optimizer: str = "adam") -> TableSpec:
    hyper = () if optimizer == "contract_block" else (("learning_rate", 0.01),)
    return TableSpec("t", dim, None, dtype, InitializerSpec("normal", 0.0, 0.1), 3, OptimizerSpec(optimizer, hyper))


def takes_int8(store: EmbeddingStore, spec: TableSpec) -> bool:
    """Makes the table; a store that splits rows refuses it by name, as one scale a row could not be split."""
    refused = ""
    try:
        store.create_table(spec)
    except Unsupported as error:
        refused = str(error)
    assert not refused or ("'t'" in refused and "int8" in refused)
    return not refused


class DtypeContract:
    @HALF_DTYPES
    @pytest.mark.parametrize("optimizer", ["adam", "sgd", "contract_block"])
    def test_narrow_tables_hold_the_same_bits_everywhere(
        self, store: EmbeddingStore, dtype: str, optimizer: str
    ) -> None:
        spec = narrow(dtype, optimizer=optimizer)
        asked = np.concatenate((IDS, int64(-7, 10**18), IDS[:9]))
        with MemoryStore(threads=1) as plain:
            stores = (store, plain)
            for one in stores:
                assert one.create_table(spec)
                assert one.specs()["t"].dtype == dtype
            for seed in range(3):
                rows = [one.lookup({"t": asked}, seed)["t"] for one in stores]
                np.testing.assert_array_equal(*rows)  # type: ignore[arg-type]
                for one in stores:
                    commit(one, {"t": update(IDS[seed : seed + 80], 5, seed)})
            assert rows_by_id(store, "t", 7) == rows_by_id(plain, "t")
            kept = list(store.scan("t", 7))
            store.clear("t")
            store.put("t", kept)
            assert rows_by_id(store, "t") == rows_by_id(plain, "t")

    @HALF_DTYPES
    def test_narrow_and_wide_tables_side_by_side(self, store: EmbeddingStore, dtype: str) -> None:
        specs = {
            name: TableSpec(name, dim, 50, kind, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
            for name, dim, kind in (("a", 3, dtype), ("b", 5, "float32"), ("c", 1, dtype), ("d", 2, "float32"))
        }
        ids = np.arange(0, 50, 3)
        with MemoryStore(threads=1) as plain:
            for one in (store, plain):
                for spec in specs.values():
                    one.create_table(spec)
                updates = {name: update(ids, spec.dim, spec.dim) for name, spec in specs.items()}
                one.commit(Commit(1, updates, 0, {}))
            asked = {name: np.arange(50) for name in specs}
            found = [one.lookup(asked, 1) for one in (store, plain)]
            for name in specs:
                np.testing.assert_array_equal(found[0][name], found[1][name])

    @pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
    @pytest.mark.parametrize("combiner", ["sum", "mean"])
    def test_bags_of_narrow_rows_are_those_of_the_numbers_they_read(
        self, store: EmbeddingStore, dtype: str, combiner: str
    ) -> None:
        spec = narrow(dtype, 6, "sgd")
        if dtype == "int8" and not takes_int8(store, spec):
            return
        tables = store.table(spec), store.table(TableSpec("wide", 6, optimizer=spec.optimizer))
        random, no_slots = np.random.default_rng(1), np.empty((len(IDS), 0), np.float32)
        tables[0].put([RowBlock(IDS, random.normal(size=(len(IDS), 6)).astype(np.float32), no_slots)])
        tables[1].put([RowBlock(IDS, tables[0].lookup(IDS), no_slots)])
        bags, weights = random.choice(IDS, (40, 7)), random.normal(size=(40, 7)).astype(np.float32)
        for factors in (None, weights):
            found = [table.lookup(bags, combiner=combiner, weights=factors) for table in tables]
            np.testing.assert_array_equal(*found)
        wide = np.zeros((len(IDS), 6), np.float32)
        assert tables[0].lookup(IDS, out=wide) is wide
        np.testing.assert_array_equal(wide, tables[1].lookup(IDS))

    def test_int8_tables_are_written_and_read_and_not_trained(self, store: EmbeddingStore) -> None:
        if not takes_int8(store, narrow("int8", optimizer="sgd")):
            return
        weights = np.random.default_rng(1).normal(size=(len(IDS), 5)).astype(np.float32)
        store.put("t", [RowBlock(IDS, weights, np.empty((len(IDS), 0), np.float32))])
        unseen = int64(-7, 10**18)
        for _ in range(3):  # a store that keeps what was read keeps it as it was
            expected = initial_rows(store.specs()["t"], unseen)
            np.testing.assert_array_equal(store.lookup({"t": unseen})["t"], expected)
        read = store.lookup({"t": IDS})["t"]
        np.testing.assert_array_equal(store.lookup({"t": IDS})["t"], read)
        scales = np.abs(weights).max(axis=1, keepdims=True) / 127
        assert (np.abs(read - weights) <= 0.501 * scales).all()
        assert (read != weights).any()
        kept = rows_by_id(store, "t")
        store.put("t", list(store.scan("t")))
        assert rows_by_id(store, "t") == kept
        with pytest.raises(Unsupported, match=r"'t' keeps int8 weights.*train it in float32, bfloat16.*convert_table"):
            commit(store, {"t": update(IDS[:3], 5)})
        broken = np.full((1, 5), np.nan, np.float32)
        with pytest.raises(BadInput, match=r"'t'.*finite"):
            store.put("t", [RowBlock(int64(1), broken, np.empty((1, 0), np.float32))])
        assert (store.version(), rows_by_id(store, "t")) == (0, kept)
