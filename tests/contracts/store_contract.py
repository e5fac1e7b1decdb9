"""What every embedding store must do, whatever holds its rows."""

import threading
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from types import SimpleNamespace
from typing import cast

import numpy as np
import pytest

from elastable.embedding_store import (
    Bags,
    Commit,
    EmbeddingStore,
    MemoryStore,
    RowBlock,
    TableUpdate,
    initial_rows,
    lookup_many,
)
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    FutureVersion,
    IdOutOfRange,
    NotFinite,
    SpecConflict,
    StaleVersion,
    StoreFailed,
    TableNotFound,
)
from elastable.embedding_store.tables.table_update import IndexedSlices, SparseGradient, TableSlices, update_tables
from tests.contracts.store_dtypes import DtypeContract
from tests.contracts.store_history import HistoryContract
from tests.contracts.store_membership import MembershipContract
from tests.contracts.store_pins import PinContract
from tests.contracts.store_samples import (
    EXTREMES,
    FAILS,
    MakeStore,
    commit,
    create_tables,
    dynamic,
    fixed,
    int64,
    rows_by_id,
    update,
)
from tests.embedding_store.dictionary_model import ModelTable
from tests.threads import on_threads
from tests.untyped import Keywords

IDS = int64(5, 3, 5, 99, 0, 7, 3, 3)
OFFSETS = int64(0, 3, 3, 8)
WEIGHTS = np.array([1, 0.5, 2, 0.25, 3, 1, 0.125, 7], np.float32)


def folded(rows: Float32, weights: Float32 | None) -> Float32:
    """The sums of three bags, as left folds in float32."""
    out = np.zeros((3, rows.shape[1]), np.float32)
    for bag in range(3):
        for i in range(OFFSETS[bag], OFFSETS[bag + 1]):
            out[bag] += rows[i] if weights is None else rows[i] * weights[i]
    return out


def slices(ids: np.ndarray, dim: int, seed: int = 0) -> IndexedSlices:
    return IndexedSlices(np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32), ids)


class StoreContract(HistoryContract, MembershipContract, DtypeContract, PinContract):
    """The suite. Subclasses override `make_store`."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError("a backend's test gives its own make_store")

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Iterator[EmbeddingStore]:
        with make_store() as store:
            yield store

    # -- tables

    def test_tables_are_made_once_dropped_and_made_anew_otherwise(self, store: EmbeddingStore) -> None:
        assert store.create_table(fixed())
        assert not store.create_table(fixed())
        with pytest.raises(SpecConflict, match=r"'cities'.*dim"):
            store.create_table(fixed(dim=8))
        view = store.table(dynamic(dim=4))
        commit(store, {"people": update(int64(4, 5), 4)})
        store.drop_table("people")
        assert store.specs() == {"cities": fixed()}
        for call in (lambda: store.lookup({"people": int64(4)}), lambda: store.drop_table("people")):
            with pytest.raises(TableNotFound, match="'people'"):
                call()
        other = dynamic(dim=9, optimizer=OptimizerSpec.of("adagrad"))
        assert store.create_table(other)
        assert store.row_count("people") == 0
        np.testing.assert_array_equal(store.lookup({"people": int64(4)})["people"], initial_rows(other, int64(4)))
        forms: tuple[Keywords, ...] = ({}, {"combiner": "sum"})
        for bags in forms:
            with pytest.raises(SpecConflict, match=r"'people'.*9.*4"):
                view.lookup(np.arange(6).reshape(3, 2), **bags)
        with pytest.raises(BadGradient, match="'people'"):
            commit(store, {"people": update(int64(1), 4)})

    # -- rows

    def test_rows_are_read_with_their_slots_and_are_the_callers_own(self, store: EmbeddingStore) -> None:
        store.create_table(dynamic("t", 4, optimizer=OptimizerSpec.of("adam")))
        commit(store, {"t": update(np.arange(3, 90, 3), 4)})
        whole, read = rows_by_id(store, "t"), store.read_rows("t", int64(60, 4, 87, 3, 0, 30))
        assert read.ids.tolist() == [60, 87, 3, 30]
        assert [whole[one] for one in read.ids.tolist()] == [
            (weights.tobytes(), slots.tobytes()) for weights, slots in zip(read.weights, read.slots, strict=True)
        ]
        none = store.read_rows("t", int64(1, 2))
        assert (none.ids.shape, none.weights.shape, none.slots.shape) == ((0,), (0, 4), (0, 8))
        assert (none.weights.dtype, none.slots.dtype) == (np.float32, np.float32)
        store.lookup({"t": read.ids})["t"][:] = 7
        np.testing.assert_array_equal(store.lookup({"t": read.ids})["t"], read.weights)
        with pytest.raises(BadIds, match="'t'"):
            store.read_rows("t", np.zeros(1, np.int32))

    def test_no_ids(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        assert store.lookup({}) == {}
        assert store.lookup({"cities": int64()})["cities"].shape == (0, 4)
        commit(store, {"cities": update(int64(), 4)})
        commit(store, {})
        assert (store.version(), store.row_count("cities"), store.delete("cities", int64())) == (2, 0, 0)

    def test_block_sizes_and_versions_that_cannot_be(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        commit(store, {"cities": update(int64(4, 5), 4)})
        for size in (0, -1):
            with pytest.raises(BadInput, match="block_rows"):
                list(store.scan("cities", size))
        with pytest.raises(BadInput, match="negative"):
            store.reset_version(-1)
        assert (store.version(), store.row_count("cities")) == (1, 2)

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

    def test_put_keeps_what_training_made(self, store: EmbeddingStore) -> None:
        store.create_table(fixed(optimizer=OptimizerSpec.of("adagrad")))
        infinite, ones = np.full((1, 4), np.inf, np.float32), np.ones((1, 4), np.float32)
        store.put("cities", [RowBlock(int64(1), infinite, ones, trained=True)])  # as a store held it
        (overflowed,) = store.scan("cities")
        store.put("cities", [overflowed])
        assert np.isinf(store.read_rows("cities", int64(1)).weights).all()

    # -- many at once, and the end

    def test_threads_that_commit_look_up_and_disturb_see_whole_versions(self, store: EmbeddingStore) -> None:
        """No update is lost, no row torn; a lookup sees the version that it names, or fails, and none before the
        last."""
        zeros = InitializerSpec("zeros")
        create_tables(store, TableSpec("t", 8, initializer=zeros, optimizer=OptimizerSpec.of("sgd")), dynamic())
        ids, each, done = np.array([*EXTREMES, *range(1, 250)]), 15, threading.Event()
        change = {"t": TableUpdate(ids, np.full((len(ids), 8), -1, np.float32)), "people": update(np.arange(40), 5)}

        def train() -> None:
            left = each
            while left:
                version = store.version()
                with suppress(StaleVersion, FutureVersion):  # another thread was first
                    store.commit(Commit(version + 1, change, version, {"t": 1.0}))
                    left -= 1
            if store.version() == 2 * each:
                done.set()

        def read(named: bool) -> None:
            newest = 0.0
            while not done.is_set():
                version = store.version() if named else None
                with suppress(*[StaleVersion] * named):
                    rows = store.lookup({"t": ids}, version)["t"]
                    assert (rows == rows[0, 0]).all(), f"torn: values from {rows.min()} to {rows.max()}"
                    assert rows[0, 0] >= newest, f"went back from {newest} to {rows[0, 0]}"
                    assert version is None or rows[0, 0] == version
                    newest = float(rows[0, 0])

        def disturb() -> None:
            while not done.is_set():
                block = store.read_rows("t", ids[::7])
                assert (block.weights == block.weights[:1]).all()
                assert store.row_count("t") in (0, len(ids))
                store.delete("people", np.arange(0, 40, 3))
                rows_by_id(store, "people", 9)

        on_threads([train, train, partial(read, False), partial(read, False), partial(read, True), disturb], done)
        assert store.version() == 2 * each
        assert (store.lookup({"t": ids}, 2 * each)["t"] == 2 * each).all()

    def test_closing_twice_is_harmless(self, make_store: MakeStore) -> None:
        store = make_store()
        store.create_table(fixed())
        store.close()
        store.close()

    def test_unknown_table(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        calls: list[Callable[[], object]] = [
            lambda: store.lookup({"cities": int64(1), "towns": int64(1)}),
            lambda: commit(store, {"cities": update(int64(1), 4), "towns": update(int64(1), 4)}),
            lambda: store.row_count("towns"),
            lambda: list(store.scan("towns")),
            lambda: store.put("towns", []),
            lambda: store.clear("towns"),
            lambda: store.read_rows("towns", int64(1)),
            lambda: store.delete("towns", int64(1)),
        ]
        for call in calls:
            with pytest.raises(TableNotFound, match="'towns'"):
                call()
        assert (store.version(), store.row_count("cities")) == (0, 0)

    def test_initial_values_are_the_pure_function(self, store: EmbeddingStore) -> None:
        ids = int64(5, -3, 5, 2**40, 0)
        for kind in ("zeros", "ones", "constant", "uniform", "normal", "truncated_normal"):
            spec = TableSpec(kind, 5, None, initializer=InitializerSpec(kind, 0.25, 0.5), seed=11)
            store.create_table(spec)
            np.testing.assert_array_equal(store.lookup({kind: ids})[kind], initial_rows(spec, ids))

    def test_id_out_of_range(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        for ids, bad, position in ((int64(3, 99, 100), 100, 2), (int64(-1, 2), -1, 0)):
            calls: tuple[Callable[[], object], ...] = (
                partial(store.lookup, {"cities": ids}),
                partial(commit, store, {"cities": update(ids, 4)}),
                partial(store.delete, "cities", ids),
            )
            for call in calls:
                with pytest.raises(IdOutOfRange, match=rf"'cities'.*\bid {bad}\b.*position {position}\b"):
                    call()
        kinds: tuple[np.ndarray, ...] = (np.zeros(2, np.float32), np.zeros((2, 2), np.int64))
        for of in kinds:
            with pytest.raises(BadIds, match="'cities'"):
                store.lookup({"cities": of})
        assert (store.version(), store.row_count("cities")) == (0, 0)

    def test_bags_are_left_folds_of_rows(self, store: EmbeddingStore) -> None:
        for spec in (fixed(), dynamic()):
            table = store.table(spec)
            commit(store, {spec.name: update(int64(3, 5, 98), spec.dim)})
            rows = store.lookup({spec.name: IDS})[spec.name]
            np.testing.assert_array_equal(table.lookup(IDS.reshape(2, 4)), rows.reshape(2, 4, spec.dim))
            for weights in (None, WEIGHTS):
                expected = folded(rows, weights)
                out = np.full((3, spec.dim), np.nan, np.float32)
                assert table.lookup(IDS, out, combiner="sum", offsets=OFFSETS, weights=weights) is out
                np.testing.assert_array_equal(out, expected)
                divisors = np.array([3, 1, 5] if weights is None else [3.5, 1, 11.375], np.float32)
                mean = table.lookup(IDS, combiner="mean", offsets=OFFSETS, weights=weights)
                np.testing.assert_array_equal(mean, expected / divisors[:, None])
            assert table.row_count == 3

    def test_many_tables_in_one_buffer(self, store: EmbeddingStore) -> None:
        cities, people = store.table(fixed()), store.table(dynamic())
        commit(store, {"cities": update(int64(3, 5), 4), "people": update(int64(0, 7), 5)})
        bags = Bags(IDS, "sqrtn", OFFSETS, WEIGHTS)
        wanted: list[Int64 | Bags] = [int64(3, 99, 3), bags, bags]
        tables = [cities, people, cities]
        joined = np.concatenate([table.lookup(of) for table, of in zip(tables, wanted, strict=True)], axis=1)
        found = lookup_many(tables, wanted, prepend_columns=3, version=store.version())
        np.testing.assert_array_equal(found[:, 3:], joined)
        assert not found[:, :3].any()

    def test_bags_that_cannot_be(self, store: EmbeddingStore) -> None:
        cities = store.table(fixed())
        with pytest.raises(IdOutOfRange, match=r"'cities'.*\bid 100\b.*position 1\b"):
            cities.lookup([[1, 100]], combiner="sum")
        with pytest.raises(BadInput, match="ascend"):
            cities.lookup([1, 2], combiner="sum", offsets=[0, 2, 1, 2])
        with pytest.raises(FutureVersion):
            cities.lookup([[1, 2]], combiner="sum", version=1)
        assert len(cities) == 0

    def test_duplicates_are_summed_before_the_optimizer(self, store: EmbeddingStore) -> None:
        spec = TableSpec("t", 5, optimizer=OptimizerSpec.of("adam", learning_rate=0.25), seed=3)
        store.create_table(spec)
        model = ModelTable(spec)
        random = np.random.default_rng(5)
        for step in range(4):
            ids = random.integers(-6, 6, 40)
            gradient = slices(ids, 5, step)
            assert update_tables(store, [TableSlices(spec, gradient)]) == step + 1
            model.commit(step + 1, list(zip(ids.tolist(), gradient.values, strict=True)), step)
        assert rows_by_id(store, "t") == model.bytes_by_id()

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
        assert update_tables(store, [good, TableSlices(cities, slices(int64(99, 0, 99), 4))]) == 1
        assert (store.version(), store.row_count("people"), store.row_count("cities")) == (1, 1, 2)

    def test_only_the_learning_rate_may_differ(self, store: EmbeddingStore) -> None:
        spec = fixed(optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5))
        store.create_table(spec)
        same = OptimizerSpec.of("adagrad", learning_rate=0.125, epsilon=1e-7)  # 1e-7 is the default
        update_tables(store, [TableSlices(spec, slices(int64(1), 4), same)])
        for other in (OptimizerSpec.of("adam"), OptimizerSpec.of("adagrad", epsilon=0.5)):
            with pytest.raises(BadInput, match=r"'cities' has the optimizer adagrad\(epsilon=1e-07.* with ada"):
                update_tables(store, [TableSlices(spec, slices(int64(1), 4), other)])
        assert store.version() == 1

    def test_optimizer_that_is_not_fused(self, store: EmbeddingStore) -> None:
        spec = dynamic(optimizer=OptimizerSpec("contract_block", ()))
        store.create_table(spec)
        for seed in range(2):
            commit(store, {"people": update(int64(4, -9, 6), 5, seed)})
        signs = [np.sign(update(int64(4, -9, 6), 5, seed).gradients) for seed in range(2)]
        expected = initial_rows(spec, int64(4, -9, 6)) - np.float32(0.25) * signs[0] - np.float32(0.25) * signs[1]
        np.testing.assert_array_equal(store.lookup({"people": int64(4, -9, 6)})["people"], expected)
        assert [slots for block in store.scan("people") for slots in block.slots.tolist()] == [[12.0]] * 3

    def test_optimizer_that_fails_changes_nothing(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        store.create_table(dynamic(optimizer=OptimizerSpec("contract_block", ())))
        commit(store, {"cities": update(int64(1), 4), "people": update(int64(1), 5)})
        before = [rows_by_id(store, name) for name in ("cities", "people")]
        broken = TableUpdate(int64(1, 2), np.full((2, 5), FAILS, np.float32))
        with pytest.raises((ArithmeticError, StoreFailed), match="on purpose"):
            commit(store, {"cities": update(int64(1, 2), 4), "people": broken})
        assert [rows_by_id(store, name) for name in ("cities", "people")] == before
        assert store.version() == 1
        commit(store, {"cities": update(int64(1, 2), 4)})

    def test_versions(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        ids = {"cities": int64(1)}
        assert store.version() == 0
        store.lookup(ids, version=0)
        with pytest.raises(FutureVersion):
            store.lookup(ids, version=1)
        commit(store, {"cities": update(int64(1), 4)})
        assert store.version() == 1
        store.lookup(ids, version=1)
        with pytest.raises(StaleVersion):
            store.lookup(ids, version=0)
        before = rows_by_id(store, "cities")
        with pytest.raises(StaleVersion):
            store.commit(Commit(1, {"cities": update(int64(1), 4)}, 1, {}))
        with pytest.raises(FutureVersion):
            store.commit(Commit(3, {"cities": update(int64(1), 4)}, 1, {}))
        assert (rows_by_id(store, "cities"), store.version()) == (before, 1)

    def test_a_staged_commit_changes_nothing_until_it_is_finished(self, store: EmbeddingStore) -> None:
        for spec in (fixed(), dynamic(optimizer=OptimizerSpec.of("adam"))):
            store.create_table(spec)
        commit(store, {"cities": update(int64(1), 4), "people": update(int64(7), 5)})
        updates = {"cities": update(int64(1, 2), 4, 1), "people": update(int64(7, -8), 5, 1)}
        before = [rows_by_id(store, name) for name in updates]
        for version, error in ((1, StaleVersion), (3, FutureVersion)):
            with pytest.raises(error):
                store.stage(Commit(version, updates, 1, {}))
        store.stage(Commit(2, updates, 1, {}))  # and is let go
        finish = store.stage(Commit(2, updates, 1, {}))
        assert [rows_by_id(store, name) for name in updates] == before
        assert store.version() == 1
        finish()
        assert store.version() == 2
        with create_tables(MemoryStore(1), fixed(), dynamic(optimizer=OptimizerSpec.of("adam"))) as plain:
            commit(plain, {"cities": update(int64(1), 4), "people": update(int64(7), 5)})
            plain.commit(Commit(2, updates, 1, {}))
            for name in updates:
                assert rows_by_id(store, name) == rows_by_id(plain, name)

    def test_a_lookup_of_a_version_to_come(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        ids = {"cities": int64(1, 2)}
        with pytest.raises(FutureVersion, match="version 1"):
            store.lookup_when(ids, 1, 0.01)
        commit(store, {"cities": update(int64(1), 4)})
        np.testing.assert_array_equal(store.lookup_when(ids, 1, 10.0)["cities"], store.lookup(ids)["cities"])
        commit(store, {"cities": update(int64(1), 4)})
        with pytest.raises(StaleVersion, match="version 1 is past"):
            store.lookup_when(ids, 1, 10.0)

    def test_deleting_refuses_what_does_not_fit(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        commit(store, {"cities": update(int64(1, 2), 4)})
        with pytest.raises(IdOutOfRange, match=r"'cities'.*\bid 100\b"):
            store.delete("cities", int64(1, 100))
        with pytest.raises(BadIds, match="'cities'"):
            store.delete("cities", np.ones(2, np.float32))
        assert store.row_count("cities") == 2
