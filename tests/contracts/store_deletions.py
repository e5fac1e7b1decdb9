"""What every store promises when rows are deleted by hand."""

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, IdOutOfRange, TableNotFound
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_samples import EXTREMES, commit, dynamic, fixed, int64, rows_by_id, update


class DeletionContract:
    @pytest.mark.parametrize("spec", [fixed("t", 4), dynamic("t", 4)], ids=["fixed", "dynamic"])
    def test_deleted_rows_read_their_initial_values(self, store: EmbeddingStore, spec: TableSpec) -> None:
        spec = TableSpec("t", 4, spec.vocabulary_size, optimizer=OptimizerSpec.of("adam"), seed=2)
        store.create_table(spec)
        ids = np.arange(50)
        commit(store, {"t": update(ids, 4)})
        before = rows_by_id(store, "t")
        gone, kept = int64(3, 7, 7, 49, 60), np.setdiff1d(ids, int64(3, 7, 49))
        assert store.delete("t", gone) == 3  # an id may repeat, and may have no row
        assert (store.row_count("t"), store.version()) == (47, 1)
        assert rows_by_id(store, "t", block_rows=7) == {one: before[one] for one in kept.tolist()}
        np.testing.assert_array_equal(store.lookup({"t": gone})["t"], initial_rows(spec, gone))
        assert store.delete("t", gone) == 0
        assert store.delete("t", int64()) == 0

    def test_a_deleted_row_starts_anew(self, store: EmbeddingStore) -> None:
        store.create_table(dynamic(optimizer=OptimizerSpec.of("adagrad")))
        change = update(EXTREMES, 5)
        store.commit(Commit(1, {"people": change}, 0, {}))
        first = rows_by_id(store, "people")
        assert store.delete("people", EXTREMES) == 4
        assert (store.row_count("people"), list(store.scan("people"))) == (0, [])
        store.commit(Commit(2, {"people": change}, 0, {}))
        assert rows_by_id(store, "people") == first

    def test_others_take_the_place_of_deleted_rows(self, store: EmbeddingStore) -> None:
        store.create_table(dynamic(optimizer=OptimizerSpec.of("adagrad")))
        store.create_table(dynamic("never", optimizer=OptimizerSpec.of("adagrad")))
        both = ("people", "never")
        commit(store, {name: update(np.arange(100) * 977 - 9_000, 5, 1) for name in both[:1]})
        store.delete("people", np.arange(100) * 977 - 9_000)
        for seed in range(2, 4):
            commit(
                store, {name: update(np.random.default_rng(seed).integers(0, 10**12, 150), 5, seed) for name in both}
            )
        deleted = rows_by_id(store, "people")
        assert len(deleted) == 300
        assert set(deleted) == set(rows_by_id(store, "never"))

    def test_deleting_refuses_what_does_not_fit(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        commit(store, {"cities": update(int64(1, 2), 4)})
        with pytest.raises(TableNotFound, match="'nobody'"):
            store.delete("nobody", int64(1))
        with pytest.raises(IdOutOfRange, match=r"'cities'.*\bid 100\b"):
            store.delete("cities", int64(1, 100))
        with pytest.raises(BadIds, match="'cities'"):
            store.delete("cities", np.ones(2, np.float32))
        assert store.row_count("cities") == 2
