"""Updates from gradients by occurrence: what every store makes of them."""

from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadGradient, BadIds, BadInput, IdOutOfRange, NotFinite, TableNotFound
from elastable.embedding_store.tables.table_update import IndexedSlices, SparseGradient, TableSlices, update_tables
from tests.contracts.store_samples import dynamic, fixed, int64, rows_by_id
from tests.embedding_store.dictionary_model import ModelTable


def slices(ids: np.ndarray, dim: int, seed: int = 0) -> IndexedSlices:
    return IndexedSlices(np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32), ids)


class UpdateContract:
    def test_sgd_example_of_embedding_tables_jl(self, store: EmbeddingStore) -> None:
        # Source: the tests of EmbeddingTables.jl: learning rate 0.1 on zeros, rows 0, 2 and 3.
        spec = TableSpec("t", 4, 4, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))
        store.create_table(spec)
        values = np.arange(1, 13, dtype=np.float32).reshape(3, 4)
        rate = OptimizerSpec.of("sgd", learning_rate=0.1)
        assert update_tables(store, [TableSlices(spec, IndexedSlices(values, int64(0, 2, 3)), rate)]) == 1
        expected = np.zeros((4, 4), np.float32)
        expected[[0, 2, 3]] -= values * np.float32(0.1)
        np.testing.assert_array_equal(store.lookup({"t": np.arange(4)})["t"], expected)

    @pytest.mark.parametrize("name", ["sgd", "adagrad", "adam"])
    def test_duplicates_are_summed_before_the_optimizer(self, store: EmbeddingStore, name: str) -> None:
        optimizer = OptimizerSpec.of(name, learning_rate=0.25)
        spec = TableSpec("t", 5, optimizer=optimizer, seed=3)
        store.create_table(spec)
        model = ModelTable(spec)
        random = np.random.default_rng(5)
        for step in range(4):
            ids = random.integers(-6, 6, 40)
            gradient = slices(ids, 5, step)
            assert update_tables(store, [TableSlices(spec, gradient)]) == step + 1
            model.commit(step + 1, list(zip(ids.tolist(), gradient.values, strict=True)), step)
        assert rows_by_id(store, "t") == model.bytes_by_id()

    def test_tables_are_updated_in_one_version(self, store: EmbeddingStore) -> None:
        people, cities = dynamic(), fixed()
        store.create_table(people)
        store.create_table(cities)
        both = [TableSlices(people, slices(int64(3, 3, 9), 5)), TableSlices(cities, slices(int64(99, 0), 4))]
        assert update_tables(store, both) == 1
        assert (store.version(), store.row_count("people"), store.row_count("cities")) == (1, 2, 2)

    def test_slices_that_do_not_fit_change_nothing(self, store: EmbeddingStore) -> None:
        people, cities = dynamic(), fixed()
        store.create_table(people)
        store.create_table(cities)
        good = TableSlices(people, slices(int64(1), 5))
        values = np.ones((2, 4), np.float32)
        for error, message, bad in (
            (IdOutOfRange, r"'cities'.*\bid 100\b.*position 1", IndexedSlices(values, int64(7, 100))),
            (BadIds, r"'cities': id 1\.5 is no integer", SimpleNamespace(values=values, indices=[1.0, 1.5])),
            (
                NotFinite,
                "'cities'.*id 2 .*nan in column 0",
                IndexedSlices(values * np.array([[1], [np.nan]], np.float32), int64(1, 2)),
            ),
            (NotFinite, "'cities'.*id 1 .*inf in column 0", IndexedSlices(values * np.float32(3e38), int64(1, 1))),
            (BadGradient, r"'cities'.*float32 \[2, 4\], got float32 \[2, 3\]", slices(int64(1, 2), 3)),
            (BadGradient, r"'cities'.*got float64", SimpleNamespace(values=np.ones((2, 4)), indices=int64(1, 2))),
            (BadInput, "'cities'.*IndexedSlices.*got dict", {"values": values, "indices": int64(1, 2)}),
        ):
            with pytest.raises(error, match=message):
                update_tables(store, [good, TableSlices(cities, cast(SparseGradient, bad))])
        with pytest.raises(BadInput, match="'people' appears twice"):
            update_tables(store, [good, good])
        with pytest.raises(TableNotFound, match="'towns'"):
            update_tables(store, [good, TableSlices(fixed("towns"), slices(int64(1), 4))])
        assert (store.version(), store.row_count("people"), store.row_count("cities")) == (0, 0, 0)

    def test_only_the_learning_rate_may_differ(self, store: EmbeddingStore) -> None:
        spec = fixed(optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5))
        store.create_table(spec)
        same = OptimizerSpec.of("adagrad", learning_rate=0.125, epsilon=1e-7)  # 1e-7 is the default
        update_tables(store, [TableSlices(spec, slices(int64(1), 4), same)])
        for other in (OptimizerSpec.of("adam"), OptimizerSpec.of("adagrad", epsilon=0.5)):
            with pytest.raises(BadInput, match=r"'cities' has the optimizer adagrad\(epsilon=1e-07.* with ada"):
                update_tables(store, [TableSlices(spec, slices(int64(1), 4), other)])
        assert store.version() == 1
