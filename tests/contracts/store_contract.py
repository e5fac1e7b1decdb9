"""What every embedding store must do, whatever holds its rows.

A backend's test subclasses `StoreContract` and gives it `make_store`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import ClassVar

import numpy as np
import pytest

from embedding_store.errors import (
    BadGradient,
    BadIds,
    BadInput,
    FutureVersion,
    IdOutOfRange,
    SpecConflict,
    StaleVersion,
    TableNotFound,
)
from embedding_store.initial_values import initial_rows
from embedding_store.row_optimizer import RowOptimizer, SlotSpec, register_row_optimizer
from embedding_store.spec import InitializerSpec, OptimizerSpec, TableSpec
from embedding_store.store import Commit, EmbeddingStore, RowBlock, TableUpdate
from tests.contracts.reference_optimizers import adagrad_row, adam_row, sgd_row

MakeStore = Callable[[], EmbeddingStore]
EXTREMES = np.array([-(2**63), -1, 0, 2**63 - 1], np.int64)
JOIN_S = 60.0


def int64(*ids: int) -> np.ndarray:
    return np.array(ids, np.int64)


def fixed(name: str = "cities", dim: int = 4, size: int = 100, optimizer: OptimizerSpec | None = None) -> TableSpec:
    return TableSpec(name, dim, size, optimizer=optimizer or OptimizerSpec.of("sgd", learning_rate=0.5), seed=7)


def dynamic(name: str = "people", dim: int = 5, optimizer: OptimizerSpec | None = None) -> TableSpec:
    initializer = InitializerSpec("normal", 0.0, 0.1)
    return TableSpec(name, dim, None, "float32", initializer, 3, optimizer or OptimizerSpec.of("sgd"))


def update(ids: np.ndarray, dim: int, seed: int = 0) -> TableUpdate:
    return TableUpdate(ids, np.random.default_rng(seed).normal(size=(len(ids), dim)).astype(np.float32))


def commit(store: EmbeddingStore, updates: dict[str, TableUpdate], rate: float | None = None) -> None:
    """Commits the next version, with steps counted as versions are."""
    version = store.version()
    rates = {} if rate is None else dict.fromkeys(updates, rate)
    store.commit(Commit(version + 1, updates, version, rates))


def rows_by_id(store: EmbeddingStore, table: str, block_rows: int = 65_536) -> dict[int, tuple[bytes, bytes]]:
    """Every row of its own: id -> the bytes of weights and slots."""
    found: dict[int, tuple[bytes, bytes]] = {}
    for block in store.scan(table, block_rows):
        assert len(block.ids) <= block_rows
        assert (block.weights.dtype, block.slots.dtype) == (np.float32, np.float32)
        for row, weights, slots in zip(block.ids.tolist(), block.weights, block.slots, strict=True):
            assert row not in found
            found[row] = (weights.tobytes(), slots.tobytes())
    return found


class BlockSign(RowOptimizer):
    """Not fused: `w -= lr sign(g)`, counting a row's updates; it wants a block of its own."""

    fused = False
    default_learning_rate = 0.25
    slots = (SlotSpec("updates", 10.0, columns=1),)

    def __init__(self, spec: OptimizerSpec) -> None:
        self.spec = spec

    def apply(
        self,
        weights: np.ndarray,
        slots: np.ndarray,
        positions: np.ndarray,
        gradients: np.ndarray,
        step: int,
        learning_rate: float,
    ) -> None:
        np.testing.assert_array_equal(positions, np.arange(len(weights)))
        if not np.isfinite(gradients).all():
            raise ArithmeticError("this optimizer fails on purpose")
        weights -= np.float32(learning_rate) * np.sign(gradients)
        slots += 1


register_row_optimizer("contract_block", BlockSign)


class StoreContract:
    """The suite. Subclasses override `make_store`, and say what they do not promise."""

    sees_whole_commits: ClassVar[bool] = True
    """Whether a lookup of many rows never mixes two versions; else single rows never do."""

    @pytest.fixture
    def make_store(self) -> MakeStore:
        raise NotImplementedError("a backend's test gives its own make_store")

    @pytest.fixture
    def store(self, make_store: MakeStore) -> Iterator[EmbeddingStore]:
        with make_store() as store:
            yield store

    # -- tables

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
        with pytest.raises(TableNotFound, match="'towns'"):
            store.lookup({"cities": int64(1), "towns": int64(1)})
        with pytest.raises(TableNotFound, match="'towns'"):
            commit(store, {"cities": update(int64(1), 4), "towns": update(int64(1), 4)})
        with pytest.raises(TableNotFound, match="'towns'"):
            store.row_count("towns")
        with pytest.raises(TableNotFound, match="'towns'"):
            list(store.scan("towns"))
        with pytest.raises(TableNotFound, match="'towns'"):
            store.put("towns", [])
        with pytest.raises(TableNotFound, match="'towns'"):
            store.clear("towns")
        assert (store.version(), store.row_count("cities")) == (0, 0)

    # -- lookups

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
        told = rf"'cities'.*\bid {bad}\b.*position {position}\b"
        with pytest.raises(IdOutOfRange, match=told):
            store.lookup({"cities": int64(*ids)})
        with pytest.raises(IdOutOfRange, match=told):
            commit(store, {"cities": update(int64(*ids), 4)})
        assert (store.version(), store.row_count("cities")) == (0, 0)

    @pytest.mark.parametrize("ids", [np.zeros(2, np.float32), np.zeros((2, 2), np.int64)])
    def test_ids_of_a_wrong_kind(self, store: EmbeddingStore, ids: np.ndarray) -> None:
        store.create_table(fixed())
        with pytest.raises(BadIds, match="'cities'"):
            store.lookup({"cities": ids})
        with pytest.raises(BadIds, match="'cities'"):
            commit(store, {"cities": TableUpdate(ids, np.zeros((2, 4), np.float32))})

    # -- commits

    def test_commit_equals_the_reference(self, store: EmbeddingStore) -> None:
        optimizers = {
            "sgd": (OptimizerSpec.of("sgd", learning_rate=0.5), sgd_row),
            "adagrad": (OptimizerSpec.of("adagrad", learning_rate=0.1), adagrad_row),
            "adam": (OptimizerSpec.of("adam", learning_rate=0.01), adam_row),
        }
        specs = {name: dynamic(name, optimizer=spec) for name, (spec, _) in optimizers.items()}
        models: dict[str, dict[int, tuple[np.ndarray, np.ndarray]]] = {name: {} for name in specs}
        for spec in specs.values():
            store.create_table(spec)
        random = np.random.default_rng(5)
        for step in range(4):  # slots must outlive a commit
            ids = random.permutation(np.arange(-20, 20) * 10**15)[:25]
            change = update(ids, 5, seed=step)
            commit(store, dict.fromkeys(specs, change))
            for name, (optimizer, step_row) in optimizers.items():
                model, rate = models[name], np.float32(optimizer.get("learning_rate", 0))
                for one, gradient in zip(ids.tolist(), change.gradients, strict=True):
                    before = model.get(one) or (initial_rows(specs[name], int64(one))[0], None)
                    model[one] = step_row(*before, gradient, step, rate)
        for name, model in models.items():
            ids = np.array(list(model), np.int64)
            weights = np.stack([weights for weights, _ in model.values()])
            np.testing.assert_array_equal(store.lookup({name: ids})[name], weights)
            expected = {one: (w.tobytes(), s.tobytes()) for one, (w, s) in model.items()}
            assert rows_by_id(store, name) == expected

    def test_learning_rate_of_a_commit(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        ids, ones = int64(1, 2), np.ones((2, 4), np.float32)
        before = store.lookup({"cities": ids})["cities"]
        commit(store, {"cities": TableUpdate(ids, ones)}, rate=0.125)
        np.testing.assert_array_equal(store.lookup({"cities": ids})["cities"], before - np.float32(0.125))
        commit(store, {"cities": TableUpdate(ids, ones)})
        expected = (before - np.float32(0.125)) - np.float32(0.5)
        np.testing.assert_array_equal(store.lookup({"cities": ids})["cities"], expected)

    def test_optimizer_that_is_not_fused(self, store: EmbeddingStore) -> None:
        spec = dynamic(optimizer=OptimizerSpec("contract_block", ()))
        store.create_table(spec)
        for seed in range(2):
            commit(store, {"people": update(int64(4, -9, 6), 5, seed)})
        signs = [np.sign(update(int64(4, -9, 6), 5, seed).gradients) for seed in range(2)]
        expected = initial_rows(spec, int64(4, -9, 6)) - np.float32(0.25) * signs[0] - np.float32(0.25) * signs[1]
        np.testing.assert_array_equal(store.lookup({"people": int64(4, -9, 6)})["people"], expected)
        blocks = list(store.scan("people"))
        assert [block.slots.tolist() for block in blocks] == [[[12.0]] * 3]

    def test_optimizer_that_fails_changes_nothing(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        store.create_table(dynamic(optimizer=OptimizerSpec("contract_block", ())))
        commit(store, {"cities": update(int64(1), 4), "people": update(int64(1), 5)})
        before = [rows_by_id(store, name) for name in ("cities", "people")]
        broken = TableUpdate(int64(1, 2), np.full((2, 5), np.nan, np.float32))
        with pytest.raises(ArithmeticError, match="on purpose"):
            commit(store, {"cities": update(int64(1, 2), 4), "people": broken})
        assert [rows_by_id(store, name) for name in ("cities", "people")] == before
        assert store.version() == 1
        commit(store, {"cities": update(int64(1, 2), 4)})

    @pytest.mark.parametrize(
        "gradients",
        [
            np.zeros((2, 3), np.float32),
            np.zeros((1, 5), np.float32),
            np.zeros((2, 5), np.float64),
            np.zeros(10, np.float32),
        ],
    )
    def test_wrong_gradient_leaves_the_store_as_it_was(self, store: EmbeddingStore, gradients: np.ndarray) -> None:
        store.create_table(fixed())
        store.create_table(dynamic())
        commit(store, {"cities": update(int64(1), 4)})
        before = rows_by_id(store, "cities")
        with pytest.raises(BadGradient, match="'people'"):
            commit(store, {"cities": update(int64(1, 2), 4), "people": TableUpdate(int64(1, 2), gradients)})
        assert rows_by_id(store, "cities") == before
        assert (store.version(), store.row_count("people")) == (1, 0)

    # -- versions

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

    def test_reset_version(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        store.reset_version(41)
        assert store.version() == 41
        commit(store, {"cities": update(int64(1), 4)})
        store.lookup({"cities": int64(1)}, version=42)

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

    def test_a_cleared_row_starts_anew(self, store: EmbeddingStore) -> None:
        spec = dynamic(optimizer=OptimizerSpec.of("adagrad"))
        store.create_table(spec)
        change = update(int64(4, 5), 5)
        store.commit(Commit(1, {"people": change}, 0, {}))
        first = rows_by_id(store, "people")
        store.clear("people")
        store.commit(Commit(2, {"people": change}, 0, {}))
        assert rows_by_id(store, "people") == first

    def test_put_refuses_what_does_not_fit(self, store: EmbeddingStore) -> None:
        store.create_table(fixed(optimizer=OptimizerSpec.of("adagrad")))
        good = RowBlock(int64(1), np.ones((1, 4), np.float32), np.ones((1, 4), np.float32))
        with pytest.raises(IdOutOfRange, match=r"'cities'.*\bid 100\b"):
            store.put("cities", [RowBlock(int64(100), good.weights, good.slots)])
        with pytest.raises(BadInput, match="'cities'"):
            store.put("cities", [RowBlock(int64(1), np.ones((1, 3), np.float32), good.slots)])
        with pytest.raises(BadInput, match="'cities'"):
            store.put("cities", [RowBlock(int64(1), good.weights, np.ones((1, 3), np.float32))])
        assert store.row_count("cities") == 0

    # -- many at once, and the end

    def test_lookups_beside_commits_see_no_half_commit(self, store: EmbeddingStore) -> None:
        zeros = InitializerSpec("zeros")
        store.create_table(TableSpec("t", 8, 256, initializer=zeros, optimizer=OptimizerSpec.of("sgd")))
        ids, versions = np.arange(256), 30
        done, failures = threading.Event(), list[str]()

        def read() -> None:
            newest = 0.0
            while not done.is_set():
                rows = store.lookup({"t": ids})["t"]
                if (rows != rows[:, :1]).any() or (self.sees_whole_commits and (rows != rows[0, 0]).any()):
                    failures.append(f"torn: values from {rows.min()} to {rows.max()}")
                if rows.min() < newest:
                    failures.append(f"went back from {newest} to {rows.min()}")
                newest = float(rows.min())

        readers = [threading.Thread(target=read, daemon=True) for _ in range(2)]
        for reader in readers:
            reader.start()
        try:
            for _ in range(versions):
                commit(store, {"t": TableUpdate(ids, np.full((256, 8), -1, np.float32))}, rate=1.0)
        finally:
            done.set()
        for reader in readers:
            reader.join(JOIN_S)
            assert not reader.is_alive()
        assert failures == []
        assert (store.lookup({"t": ids}, version=versions)["t"] == versions).all()

    def test_closing_twice_is_harmless(self, make_store: MakeStore) -> None:
        store = make_store()
        store.create_table(fixed())
        store.close()
        store.close()
