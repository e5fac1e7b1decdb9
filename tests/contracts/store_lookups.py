"""The store contract: tables, and what a lookup returns."""

from collections.abc import Callable

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadIds, IdOutOfRange, SpecConflict, TableNotFound
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_samples import EXTREMES, commit, dynamic, fixed, int64, rows_by_id, update


class LookupContract:
    def test_create_table_is_idempotent(self, store: EmbeddingStore) -> None:
        assert store.create_table(fixed())
        assert not store.create_table(fixed())
        assert store.specs() == {"cities": fixed()}

    def test_other_spec_of_a_name_is_refused(self, store: EmbeddingStore) -> None:
        store.create_table(fixed(dim=4))
        with pytest.raises(SpecConflict, match=r"'cities'.*dim"):
            store.create_table(fixed(dim=8))
        assert store.specs() == {"cities": fixed(dim=4)}

    def test_unknown_table(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        calls: list[Callable[[], object]] = [
            lambda: store.lookup({"cities": int64(1), "towns": int64(1)}),
            lambda: commit(store, {"cities": update(int64(1), 4), "towns": update(int64(1), 4)}),
            lambda: store.row_count("towns"),
            lambda: list(store.scan("towns")),
            lambda: store.put("towns", []),
            lambda: store.clear("towns"),
        ]
        for call in calls:
            with pytest.raises(TableNotFound, match="'towns'"):
                call()
        assert (store.version(), store.row_count("cities")) == (0, 0)

    @pytest.mark.parametrize("kind", ["zeros", "ones", "constant", "uniform", "normal", "truncated_normal"])
    def test_initial_values_are_the_pure_function(self, store: EmbeddingStore, kind: str) -> None:
        spec = TableSpec("t", 5, None, initializer=InitializerSpec(kind, 0.25, 0.5), seed=11)
        store.create_table(spec)
        ids = int64(5, -3, 5, 2**40, 0)
        np.testing.assert_array_equal(store.lookup({"t": ids})["t"], initial_rows(spec, ids))

    def test_lookup_of_many_tables_with_duplicates(self, store: EmbeddingStore) -> None:
        for spec in (fixed(), dynamic()):
            store.create_table(spec)
        commit(store, {"cities": update(int64(3, 99), 4), "people": update(int64(8, -1), 5)})
        rows = store.lookup({"cities": int64(99, 3, 99, 0), "people": int64(-1, -1, 7)})
        assert (rows["cities"].shape, rows["people"].shape) == ((4, 4), (3, 5))
        assert (rows["cities"].dtype, rows["people"].dtype) == (np.float32, np.float32)
        for name, ids in (("cities", (99, 3, 99, 0)), ("people", (-1, -1, 7))):
            alone = [store.lookup({name: int64(one)})[name][0] for one in ids]
            np.testing.assert_array_equal(rows[name], alone)
        np.testing.assert_array_equal(rows["cities"][3:], initial_rows(fixed(), int64(0)))
        assert not np.array_equal(rows["cities"][:1], initial_rows(fixed(), int64(99)))

    def test_looked_up_rows_are_the_callers_own(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        commit(store, {"cities": update(int64(1), 4)})
        first = store.lookup({"cities": int64(1)})["cities"]
        kept = first.copy()
        first += 1
        np.testing.assert_array_equal(store.lookup({"cities": int64(1)})["cities"], kept)

    def test_no_ids(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        assert store.lookup({}) == {}
        assert store.lookup({"cities": int64()})["cities"].shape == (0, 4)
        commit(store, {"cities": update(int64(), 4)})
        commit(store, {})
        assert (store.version(), store.row_count("cities")) == (2, 0)

    def test_looking_up_unseen_ids_writes_nothing(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        store.create_table(dynamic())
        store.lookup({"cities": np.arange(100), "people": np.arange(-50, 50)})
        assert [store.row_count(name) for name in ("cities", "people")] == [0, 0]
        assert [list(store.scan(name)) for name in ("cities", "people")] == [[], []]

    def test_extreme_ids_of_a_dynamic_table(self, store: EmbeddingStore) -> None:
        spec = dynamic()
        store.create_table(spec)
        np.testing.assert_array_equal(store.lookup({"people": EXTREMES})["people"], initial_rows(spec, EXTREMES))
        change = update(EXTREMES, 5)
        commit(store, {"people": change}, rate=1.0)
        expected = initial_rows(spec, EXTREMES) - change.gradients
        np.testing.assert_array_equal(store.lookup({"people": EXTREMES})["people"], expected)
        assert set(rows_by_id(store, "people")) == set(EXTREMES.tolist())

    @pytest.mark.parametrize(("ids", "bad", "position"), [((3, 99, 100), 100, 2), ((-1, 2), -1, 0)])
    def test_id_out_of_range(self, store: EmbeddingStore, ids: tuple[int, ...], bad: int, position: int) -> None:
        store.create_table(fixed())
        message = rf"'cities'.*\bid {bad}\b.*position {position}\b"
        with pytest.raises(IdOutOfRange, match=message):
            store.lookup({"cities": int64(*ids)})
        with pytest.raises(IdOutOfRange, match=message):
            commit(store, {"cities": update(int64(*ids), 4)})
        assert (store.version(), store.row_count("cities")) == (0, 0)

    @pytest.mark.parametrize("ids", [np.zeros(2, np.float32), np.zeros((2, 2), np.int64)])
    def test_ids_of_a_wrong_kind(self, store: EmbeddingStore, ids: np.ndarray) -> None:
        store.create_table(fixed())
        with pytest.raises(BadIds, match="'cities'"):
            store.lookup({"cities": ids})
        with pytest.raises(BadIds, match="'cities'"):
            commit(store, {"cities": TableUpdate(ids, np.zeros((2, 4), np.float32))})
