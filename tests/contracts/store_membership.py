"""What every store promises of admission and eviction."""

import time

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock, TableState
from elastable.embedding_store.contract.spec import AdmissionSpec, EvictionSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadInput, TableNotFound
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_samples import commit, int64, rows_by_id, update

ADMITTING = TableSpec("admits", 4, optimizer=OptimizerSpec.of("adagrad"), admission=AdmissionSpec(2, 1 << 12))
EVICTING = TableSpec("evicts", 4, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(max_age=2))
TIMED = TableSpec("timed", 4, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(ttl=1.0))


class MembershipContract:
    def test_what_was_refused_and_what_was_evicted_is_counted(self, store: EmbeddingStore) -> None:
        store.create_table(ADMITTING)
        store.create_table(EVICTING)
        commit(store, {"admits": update(int64(1, 2, 3), 4), "evicts": update(int64(1, 2, 3), 4)})
        assert (store.row_count("admits"), list(store.scan("admits"))) == (0, [])
        commit(store, {"admits": update(int64(3, 4), 4), "evicts": update(int64(3), 4)})
        commit(store, {})
        assert [set(rows_by_id(store, name)) for name in ("admits", "evicts")] == [{3}, {1, 2, 3}]
        for _ in range(4):  # a cache has them by then
            assert (store.lookup({"evicts": int64(1, 2)})["evicts"] != initial_rows(EVICTING, int64(1, 2))).any()
        commit(store, {})
        assert set(rows_by_id(store, "evicts")) == {3}
        read = store.lookup({"evicts": int64(1, 2)})["evicts"]
        np.testing.assert_array_equal(read, initial_rows(EVICTING, int64(1, 2)))
        for name, expected in (("admits", (1, 4, 0)), ("evicts", (1, 0, 2))):
            statistics = store.table_statistics(name)
            assert (statistics.rows, statistics.refused, statistics.evicted) == expected

    def test_rows_put_without_touches_wait_for_a_commit(self, store: EmbeddingStore) -> None:
        store.create_table(EVICTING)
        weights, waiting = np.ones((2, 4), np.float32), int64(2**62, 1)
        store.put("evicts", [RowBlock(int64(1, 2), weights, weights)])
        store.reset_version(5)
        touches = [block.touches for block in store.scan("evicts")]
        assert all(some is not None and (some[:, 0] == waiting[0]).all() for some in touches)
        commit(store, {"evicts": update(int64(2), 4)})
        for expected in ({1, 2}, {1, 2}, {1, 2}, {2}):  # touched at version 6, which is left at version 9
            assert set(rows_by_id(store, "evicts")) == expected
            commit(store, {"evicts": update(int64(2), 4)})

    def test_a_commit_without_a_time_has_that_of_the_store(self, store: EmbeddingStore) -> None:
        store.create_table(TIMED)
        commit(store, {"timed": update(int64(1, 2), 4)})
        commit(store, {"timed": update(int64(2), 4)}, time=time.time() + 3600)
        assert set(rows_by_id(store, "timed")) == {2}

    def test_times_that_cannot_be_are_refused(self, store: EmbeddingStore) -> None:
        store.create_table(TIMED)
        for now in (-1.0, float("nan"), float("inf"), 2.0**41):
            with pytest.raises(BadInput, match="its time must be seconds since 1970"):
                commit(store, {"timed": update(int64(1), 4)}, time=now)
        assert store.version() == 0
        with pytest.raises(BadInput, match="'timed': touch times must be"):
            store.put_table_state("timed", TableState(touch_times=np.array([[3, 2, 1]])))
        store.create_table(TableSpec("plain", 4))
        with pytest.raises(BadInput, match="'plain': rows do not go with time"):
            store.put_table_state("plain", TableState(touch_times=np.array([[1, 2, 3]])))

    def test_tables_without_admission_have_no_state(self, store: EmbeddingStore) -> None:
        store.create_table(TableSpec("plain", 4))
        assert not store.table_state("plain")
        assert store.table_statistics("plain").rows == 0
        with pytest.raises(BadInput, match="'plain'"):
            store.put_table_state("plain", TableState(np.zeros(64, np.uint8)))
        with pytest.raises(TableNotFound, match="'nobody'"):
            store.table_statistics("nobody")
        store.create_table(ADMITTING)
        with pytest.raises(BadInput, match=r"'admits'.*uint8 \[4096\]"):
            store.put_table_state("admits", TableState(np.zeros(64, np.uint8)))
