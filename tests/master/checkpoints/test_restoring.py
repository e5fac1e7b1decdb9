"""Checkpoints restored in another dtype, of some tables, into another model, and compared."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableUpdate
from elastable.embedding_store.contract.spec import (
    AdmissionSpec,
    EvictionSpec,
    InitializerSpec,
    OptimizerSpec,
    TableSpec,
)
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import CheckpointError, SpecConflict
from elastable.master.checkpoints.checkpoint import Checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from elastable.master.checkpoints.restoring import refuse_other_model, restore_tables, warm_start
from tests.master.checkpoints.jobs import (
    ADAGRAD,
    AGED,
    DYNAMIC,
    FIXED,
    SEEN,
    SPECS,
    commit,
    created,
    dense_of,
    rows,
    saved,
    shards,
    train,
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    with created(MemoryStore()) as store:
        train(store, 7)
        return saved(tmp_path_factory.mktemp("whole"), store)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16", "int8"])
def test_another_dtype(whole: Checkpoint, dtype: str) -> None:
    with MemoryStore() as store, MemoryStore() as other:
        restore_tables(whole, store)
        assert restore_tables(whole, other, dtype=dtype) == restore_tables(whole, store)
        for name, spec in other.specs().items():
            assert spec.dtype == dtype
            ids = np.arange(60)
            exact, rounded = store.lookup({name: ids})[name], other.lookup({name: ids})[name]
            assert np.abs(exact - rounded).max() <= np.abs(exact).max() / 100
            if dtype != "int8":
                ours, theirs = rows(other), rows(store)
                assert {key: row[1:] for key, row in ours.items() if key[0] == name} == {
                    key: row[1:] for key, row in theirs.items() if key[0] == name
                }
                assert other.table_state(name) == store.table_state(name)


def test_rows_that_were_put_into_a_frozen_table_wait_for_its_next_version(tmp_path: Path) -> None:
    with created(MemoryStore(), [AGED]) as store, MemoryStore() as other:
        commit(store, {"aged": [1, 2]})
        weights = np.ones((1, AGED.dim), np.float32)
        store.put("aged", [RowBlock(np.array([7]), weights, weights)])
        store.commit(Commit(2, {}, 1, {}, frozen=("aged",)))
        restore_tables(saved(tmp_path, store), other)
        assert rows(other) == rows(store)
        for each in (store, other):
            commit(each, {}, frozen=("aged",))
        assert rows(other) == rows(store)
        for ids in ([1], [2], [2], [1], [2], [1], [2]):
            for each in (store, other):
                commit(each, {"aged": ids})
            assert rows(other) == rows(store)


def test_a_table_with_another_spec_is_refused_and_keeps_its_rows(whole: Checkpoint) -> None:
    with created(MemoryStore(), [replace(FIXED, seed=4)]) as store:
        commit(store, {"fixed": [1, 2]})
        before = rows(store)
        with pytest.raises(SpecConflict, match="fixed"):
            restore_tables(whole, store)
        assert rows(store) == before


@pytest.mark.parametrize(
    ("tables", "message"),
    [
        ({**{spec.name: spec for spec in SPECS}, "new": FIXED}, "the model has a table 'new', and the checkpoint"),
        ({spec.name: spec for spec in SPECS[1:]}, "the checkpoint has a table 'fixed', and the model has none"),
        (
            {**{spec.name: spec for spec in SPECS}, "fixed": replace(FIXED, dim=5, vocabulary_size=9)},
            "table 'fixed' has in the checkpoint and in the model: dim 3 and 5; vocabulary_size 500 and 9",
        ),
    ],
)
def test_another_model_is_known_by_its_table(whole: Checkpoint, tables: dict[str, TableSpec], message: str) -> None:
    refuse_other_model(whole, {spec.name: spec for spec in SPECS})
    with pytest.raises(CheckpointError, match=f"is of another model: {message}"):
        refuse_other_model(whole, tables)


def test_a_warm_start_takes_weights_and_fitting_slots(whole: Checkpoint) -> None:
    ours = (
        replace(FIXED, vocabulary_size=900, seed=5, initializer=InitializerSpec("zeros")),
        replace(DYNAMIC, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.5)),
        AGED,
        TableSpec("mine", 3, optimizer=ADAGRAD),
    )
    with created(MemoryStore(), ours) as store, MemoryStore() as other:
        restore_tables(whole, other)
        there = rows(other)
        started = warm_start(whole, store, store.specs())
        assert sorted(started) == ["aged", "dynamic", "fixed"]
        assert store.version() == 0
        here = rows(store)
        assert {key: row[0] for key, row in here.items()} == {k: row[0] for k, row in there.items() if k[0] in started}
        for key, row in here.items():
            fresh = np.full(2, 0.1, np.float32).tobytes()
            assert row[1] == (fresh if key[0] == "dynamic" else there[key][1])
        # Of version 1, the next one: as if it were touched for the first time.
        assert {np.frombuffer(row[2], np.int64)[0] for key, row in here.items() if key[0] == "aged"} == {1}


@pytest.mark.parametrize(
    ("ours", "names", "message"),
    [
        ([FIXED], ["other"], "warm start of table 'other': the checkpoint has aged, dynamic, fixed, seen"),
        ([FIXED], ["seen"], "warm start of table 'seen': the model has fixed"),
        ([replace(FIXED, dim=4)], [], "table 'fixed': its rows have 3 values in the checkpoint and 4 in the model"),
        ([replace(SEEN, admission=None, vocabulary_size=8)], [], "table 'seen': its vocabulary is any id in the ch"),
        ([replace(FIXED, vocabulary_size=8)], [], "table 'fixed': its vocabulary is 500 in the checkpoint and only 8"),
        (
            [TableSpec("x", 1)],
            [],
            "has no table of this model: its tables are aged, dynamic, fixed, seen, the model's x",
        ),
    ],
)
def test_a_warm_start_that_does_not_fit_puts_nothing(
    whole: Checkpoint, ours: list[TableSpec], names: list[str], message: str
) -> None:
    with created(MemoryStore(), ours) as store:
        with pytest.raises(CheckpointError, match=message):
            warm_start(whole, store, store.specs(), names)
        assert rows(store) == {}


def test_differences_are_reported_with_their_size(tmp_path: Path) -> None:
    with created(MemoryStore(), [FIXED, DYNAMIC]) as store:
        commit(store, {"fixed": [1, 2, 3], "dynamic": [7, 8]})
        first = saved(tmp_path, store)
        before = store.lookup({"fixed": np.array([2])})["fixed"]
        commit(store, {"fixed": [2, 30]})
        store.delete("dynamic", np.array([8]))
        created(store, [TableSpec("new", 2)])
        second = saved(tmp_path, store)
        moved = float(np.abs(store.lookup({"fixed": np.array([2])})["fixed"].astype(np.float64) - before).max())
    dynamic, fixed, new = compare_tables(first, second)
    assert (dynamic.table, dynamic.only_first, dynamic.only_second, dynamic.weights) == ("dynamic", 1, 0, 0)
    assert (fixed.only_first, fixed.only_second, fixed.weights, fixed.slots) == (0, 1, 1, 1)
    assert (fixed.largest_weight, fixed.first_ids) == (moved, (2,))
    assert new.spec == {"table": ("missing", "there")}
    iterations, variables = compare_dense(first, second)
    assert (iterations.key, iterations.difference, iterations.largest) == ("optimizer/00000", "values", 1.0)
    gap = np.abs(dense_of(1)["variables/00000"].astype(np.float64) - dense_of(2)["variables/00000"])
    assert (variables.largest, variables.values) == (float(gap.max()), 12)


TIMED = TableSpec("timed", 2, optimizer=ADAGRAD, eviction=EvictionSpec(ttl=2.0))
TOUCHED = replace(AGED, eviction=EvictionSpec(max_age=3, min_frequency=1))
SIGHTED = replace(SEEN, admission=AdmissionSpec(3, 1 << 12))


def go_on(store: EmbeddingStore, versions: int) -> None:
    """Versions at times of their own: rows are sighted, admitted, touched and evicted."""
    for version in range(store.version(), store.version() + versions):
        random = np.random.default_rng(version)
        ids = np.unique(random.integers(-30, 30, 12))
        update = TableUpdate(ids, random.normal(size=(len(ids), 2)).astype(np.float32))
        store.commit(Commit(version + 1, dict.fromkeys(store.specs(), update), version, {}, time=1000 + 0.75 * version))


@pytest.mark.parametrize(("version", "of"), [(1, 1), (4, 1), (7, 1), (5, 2)])
def test_a_restored_job_evicts_and_admits_as_if_nothing_had_happened(tmp_path: Path, version: int, of: int) -> None:
    with created(MemoryStore() if of == 1 else shards(of, "token"), [TOUCHED, SIGHTED, DYNAMIC, TIMED]) as store:
        go_on(store, version)
        checkpoint, before = saved(tmp_path, store), weights_and_slots(store)
        go_on(store, 8)
        for other in (MemoryStore(), shards(2, "token"), shards(2, "encoding"), shards(3, "token")):
            with other:
                restore_tables(checkpoint, other)
                assert weights_and_slots(other) == before
                go_on(other, 8)
                assert weights_and_slots(other) == weights_and_slots(store)


def weights_and_slots(store: EmbeddingStore) -> dict[tuple[str, int], tuple[bytes, ...]]:
    return {key: row[:2] for key, row in rows(store).items()}
