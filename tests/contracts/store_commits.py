"""The store contract: what a commit changes, and versions."""

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import OptimizerSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.errors import BadGradient, FutureVersion, StaleVersion, StoreFailed
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.contracts.store_samples import FAILS, commit, dynamic, fixed, int64, rows_by_id, update
from tests.embedding_store.dictionary_model import ModelTable


class CommitContract:
    def test_commit_equals_the_reference(self, store: EmbeddingStore) -> None:
        specs = [
            dynamic(name, optimizer=OptimizerSpec.of(name, learning_rate=0.125)) for name in ("sgd", "adagrad", "adam")
        ]
        models = {spec.name: ModelTable(spec) for spec in specs}
        for spec in specs:
            store.create_table(spec)
        random = np.random.default_rng(5)
        for step in range(4):  # slots must outlive a commit
            ids = random.permutation(np.arange(-20, 20) * 10**15)[:25]
            change = update(ids, 5, seed=step)
            commit(store, dict.fromkeys(models, change))
            for model in models.values():
                model.commit(step + 1, list(zip(ids.tolist(), change.gradients, strict=True)), step)
        for name, model in models.items():
            ids = np.array(list(model.rows), np.int64)
            np.testing.assert_array_equal(store.lookup({name: ids})[name], [model.read(one) for one in ids.tolist()])
            assert rows_by_id(store, name) == model.bytes_by_id()

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
        staged = [rows_by_id(store, name) for name in updates]
        assert store.version() == 2
        for name, rows in zip(updates, before, strict=True):
            blocks = [
                RowBlock(
                    int64(one),
                    np.frombuffer(weights, np.float32)[np.newaxis],
                    np.frombuffer(slots, np.float32)[np.newaxis],
                )
                for one, (weights, slots) in rows.items()
            ]
            store.clear(name)
            store.put(name, blocks)
        store.reset_version(1)
        store.commit(Commit(2, updates, 1, {}))
        assert [rows_by_id(store, name) for name in updates] == staged

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

    def test_reset_version(self, store: EmbeddingStore) -> None:
        store.create_table(fixed())
        store.reset_version(41)
        assert store.version() == 41
        commit(store, {"cities": update(int64(1), 4)})
        store.lookup({"cities": int64(1)}, version=42)
