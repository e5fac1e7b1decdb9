"""The store contract: how weights are kept, the same in every store."""

from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, Unsupported
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_samples import commit, int64, rows_by_id, update

IDS = np.random.default_rng(3).permutation(np.arange(-60, 60) * 10**15)


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
    assert not refused or (f"'{spec.name}'" in refused and "int8" in refused)
    return not refused


class DtypeContract:
    def test_bags_of_narrow_rows_are_those_of_the_numbers_they_read(self, store: EmbeddingStore) -> None:
        for dtype, combiner in (("float16", "sum"), ("bfloat16", "mean"), ("int8", "sum")):
            spec = replace(narrow(dtype, 6, "sgd"), name=dtype)
            if dtype == "int8" and not takes_int8(store, spec):
                continue
            tables = store.table(spec), store.table(TableSpec(f"as-{dtype}", 6, optimizer=spec.optimizer))
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
