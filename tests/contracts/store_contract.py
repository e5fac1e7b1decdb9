"""What every embedding store must do, whatever holds its rows."""

import threading
from collections.abc import Iterator

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    IdOutOfRange,
    NotFinite,
    SpecConflict,
    StaleVersion,
    TableNotFound,
)
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_bags import BagContract
from tests.contracts.store_commits import CommitContract
from tests.contracts.store_deletions import DeletionContract
from tests.contracts.store_dtypes import DtypeContract
from tests.contracts.store_lookups import LookupContract
from tests.contracts.store_membership import MembershipContract
from tests.contracts.store_pins import PinContract
from tests.contracts.store_samples import MakeStore, commit, dynamic, fixed, int64, rows_by_id, update
from tests.contracts.store_updates import UpdateContract
from tests.threads import on_threads
from tests.untyped import Keywords


class StoreContract(
    LookupContract,
    BagContract,
    CommitContract,
    DeletionContract,
    MembershipContract,
    UpdateContract,
    DtypeContract,
    PinContract,
):
    """The suite. Subclasses override `make_store`."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError("a backend's test gives its own make_store")

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Iterator[EmbeddingStore]:
        with make_store() as store:
            yield store

    # -- scan, put, clear

    @pytest.mark.parametrize("spec", [fixed("t", 4), dynamic("t", 4)], ids=["fixed", "dynamic"])
    def test_scan_and_put_are_inverse(self, store: EmbeddingStore, make_store: MakeStore, spec: TableSpec) -> None:
        spec = TableSpec("t", 4, spec.vocabulary_size, optimizer=OptimizerSpec.of("adam"), seed=2)
        ids = np.random.default_rng(1).permutation(100)[:61].astype(np.int64)
        store.create_table(spec)
        commit(store, {"t": update(ids, 4)})
        assert store.row_count("t") == 61
        whole = rows_by_id(store, "t", block_rows=7)
        assert set(whole) == set(ids.tolist())
        copies = [RowBlock(b.ids.copy(), b.weights.copy(), b.slots.copy()) for b in store.scan("t", 10)]
        store.clear("t")
        assert (store.row_count("t"), list(store.scan("t")), store.version()) == (0, [], 1)
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], initial_rows(spec, ids))
        store.put("t", iter(copies))
        assert (store.row_count("t"), rows_by_id(store, "t")) == (61, whole)
        store.put("t", iter(copies))
        assert rows_by_id(store, "t") == whole

    @pytest.mark.parametrize("spec", [fixed("t", 4), dynamic("t", 4)], ids=["fixed", "dynamic"])
    def test_rows_are_read_with_their_slots(self, store: EmbeddingStore, spec: TableSpec) -> None:
        spec = TableSpec("t", 4, spec.vocabulary_size, optimizer=OptimizerSpec.of("adam"), seed=2)
        store.create_table(spec)
        commit(store, {"t": update(np.arange(3, 90, 3), 4)})
        ids = np.array([60, 4, 87, 3, 0, 30], np.int64)
        whole, read = rows_by_id(store, "t"), store.read_rows("t", ids)
        assert read.ids.tolist() == [60, 87, 3, 30]
        assert [whole[one] for one in read.ids.tolist()] == [
            (weights.tobytes(), slots.tobytes()) for weights, slots in zip(read.weights, read.slots, strict=True)
        ]
        none = store.read_rows("t", int64(1, 2))
        assert (none.ids.shape, none.weights.shape, none.slots.shape) == ((0,), (0, 4), (0, 8))
        assert (none.weights.dtype, none.slots.dtype) == (np.float32, np.float32)
        with pytest.raises(BadIds, match="'t'"):
            store.read_rows("t", np.zeros(1, np.int32))
        with pytest.raises(TableNotFound, match="'towns'"):
            store.read_rows("towns", ids)

    def test_block_sizes_and_versions_that_cannot_be(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        commit(store, {"cities": update(int64(4, 5), 4)})
        for size in (0, -1):
            with pytest.raises(BadInput, match="block_rows"):
                list(store.scan("cities", size))
        with pytest.raises(BadInput, match="negative"):
            store.reset_version(-1)
        assert (store.version(), store.row_count("cities")) == (1, 2)

    def test_a_view_of_a_table_that_was_made_anew_otherwise(self, store: EmbeddingStore) -> None:
        view = store.table(dynamic(dim=4))
        store.drop_table("people")
        store.create_table(dynamic(dim=9))
        forms: tuple[Keywords, ...] = ({}, {"combiner": "sum"})
        for bags in forms:
            with pytest.raises(SpecConflict, match=r"'people'.*9.*4"):
                view.lookup(np.arange(6).reshape(3, 2), **bags)
        with pytest.raises(BadGradient, match="'people'"):
            commit(store, {"people": update(int64(1), 4)})

    def test_a_cleared_row_starts_anew(self, store: EmbeddingStore) -> None:
        spec = dynamic(optimizer=OptimizerSpec.of("adagrad"))
        store.create_table(spec)
        change = update(int64(4, 5), 5)
        store.commit(Commit(1, {"people": change}, 0, {}))
        first = rows_by_id(store, "people")
        store.clear("people")
        store.commit(Commit(2, {"people": change}, 0, {}))
        assert rows_by_id(store, "people") == first

    def test_a_dropped_table_is_gone_and_can_be_made_anew(self, store: EmbeddingStore) -> None:
        store.create_table(dynamic(optimizer=OptimizerSpec.of("adagrad")))
        store.create_table(fixed())
        commit(store, {"people": update(int64(4, 5), 5)})
        store.drop_table("people")
        assert set(store.specs()) == {"cities"}
        with pytest.raises(TableNotFound, match="'people'"):
            store.lookup({"people": int64(4)})
        with pytest.raises(TableNotFound, match="'people'"):
            store.drop_table("people")
        other = TableSpec("people", 3, optimizer=OptimizerSpec.of("sgd"))
        assert store.create_table(other)
        assert store.row_count("people") == 0
        np.testing.assert_array_equal(store.lookup({"people": int64(4)})["people"], initial_rows(other, int64(4)))

    def test_put_refuses_what_does_not_fit(self, store: EmbeddingStore) -> None:
        store.create_table(fixed(optimizer=OptimizerSpec.of("adagrad")))
        good = RowBlock(int64(1), np.ones((1, 4), np.float32), np.ones((1, 4), np.float32))
        with pytest.raises(IdOutOfRange, match=r"'cities'.*\bid 100\b"):
            store.put("cities", [RowBlock(int64(100), good.weights, good.slots)])
        with pytest.raises(BadInput, match="'cities'"):
            store.put("cities", [RowBlock(int64(1), np.ones((1, 3), np.float32), good.slots)])
        with pytest.raises(BadInput, match="'cities'"):
            store.put("cities", [RowBlock(int64(1), good.weights, np.ones((1, 3), np.float32))])
        with pytest.raises(NotFinite, match=r"'cities'.*weight of id 1 \(position 0\) is nan in column 0"):
            store.put("cities", [RowBlock(int64(1), good.weights * np.nan, good.slots)])
        with pytest.raises(NotFinite, match=r"'cities'.*slot 'accumulator' of id 1 .* is inf"):
            store.put("cities", [RowBlock(int64(1), good.weights, good.slots * np.inf)])
        with pytest.raises(BadInput, match=r"'cities'.*slot 'accumulator' of id 1 .* is -1.0"):
            store.put("cities", [RowBlock(int64(1), good.weights, -good.slots)])
        with pytest.raises(BadIds, match=r"'cities'.*id 1 appears at positions 0 and 1"):
            store.put("cities", [RowBlock(int64(1, 1), np.ones((2, 4), np.float32), np.ones((2, 4), np.float32))])
        assert store.row_count("cities") == 0
        store.put("cities", [RowBlock(int64(1), good.weights * np.inf, good.slots, trained=True)])  # as a store held it
        (overflowed,) = store.scan("cities")
        store.put("cities", [overflowed])
        assert np.isinf(store.read_rows("cities", int64(1)).weights).all()

    # -- many at once, and the end

    @pytest.mark.parametrize("named", [False, True])
    def test_lookups_beside_commits_see_one_version_whole(self, store: EmbeddingStore, named: bool) -> None:
        """The one that they name, or fail; without a name none before that of the last lookup."""
        zeros = InitializerSpec("zeros")
        store.create_table(TableSpec("t", 8, 256, initializer=zeros, optimizer=OptimizerSpec.of("sgd")))
        ids, versions, done = np.arange(256), 30, threading.Event()

        def read() -> None:
            newest = 0.0
            while not done.is_set():
                version = store.version() if named else None
                try:
                    rows = store.lookup({"t": ids}, version)["t"]
                except StaleVersion:
                    assert named
                    continue
                assert (rows == rows[0, 0]).all(), f"torn: values from {rows.min()} to {rows.max()}"
                assert rows[0, 0] >= newest, f"went back from {newest} to {rows[0, 0]}"
                assert version is None or rows[0, 0] == version
                newest = float(rows[0, 0])

        def train() -> None:
            for _ in range(versions):
                commit(store, {"t": TableUpdate(ids, np.full((256, 8), -1, np.float32))}, rate=1.0)
            done.set()

        on_threads([train, read, read], done)
        assert (store.lookup({"t": ids}, version=versions)["t"] == versions).all()

    def test_closing_twice_is_harmless(self, make_store: MakeStore) -> None:
        store = make_store()
        store.create_table(fixed())
        store.close()
        store.close()
