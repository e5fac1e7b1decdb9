"""A store in Redis that a second process opens: only who changes it writes to it, and takes it from the first."""

from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store import Commit, EmbeddingStore, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.errors import SpecConflict, TakenOver
from elastable.embedding_store.open_store import open_store
from tests.contracts.store_samples import create_tables, rows_by_id
from tests.embedding_store.engine.tiered_stores import flushed
from tests.waiting import until

SPEC = TableSpec("t", 64, 5_000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))
SELDOM, OFTEN = "flush=100000", "flush=0.005"


def commit(store: EmbeddingStore, rows: int = 50) -> None:
    version = store.version() + 1
    ids = np.random.default_rng(version).choice(5_000, rows, replace=False)
    gradients = np.ones((rows, 64), np.float32)
    store.commit(Commit(version, {"t": TableUpdate(np.sort(ids), gradients)}, version - 1, {}))


def opened(url: str, options: str) -> MemoryStore:
    store = open_store(f"{url}?{options}")
    assert isinstance(store, MemoryStore)
    return store


def after_passes(store: MemoryStore) -> None:
    """Waits until the store has had its turn to write."""
    flusher = store._flusher
    assert flusher is not None
    wanted = flusher._passes + 3
    until(lambda: flusher._passes >= wanted)


def test_who_only_reads_takes_the_store_from_nobody(redis_url: str) -> None:
    with create_tables(opened(redis_url, SELDOM), SPEC) as first:
        commit(first)
        commit(first)
        with opened(redis_url, OFTEN) as second:
            rows = second.lookup({"t": np.arange(5_000)})["t"]
            after_passes(second)
            commit(first)  # the store is its own all the time
            first.flush()
            assert (flushed(second).flushed_version, second.version(), first.version()) == (0, 2, 3)
            np.testing.assert_array_equal(second.lookup({"t": np.arange(5_000)})["t"], rows)
        first.require_owner()
        expected = rows_by_id(first, "t")
    with opened(redis_url, SELDOM) as again:
        assert (again.version(), rows_by_id(again, "t")) == (3, expected)


def test_who_asks_for_a_table_that_is_there_takes_the_store_from_nobody(redis_url: str) -> None:
    with create_tables(opened(redis_url, SELDOM), SPEC) as first:
        commit(first)
        with opened(redis_url, OFTEN) as second:
            assert not second.create_table(SPEC)
            with pytest.raises(SpecConflict):
                second.create_table(replace(SPEC, dim=32))
            commit(first)
            assert second.create_table(replace(SPEC, name="mine"))
        with pytest.raises(TakenOver):
            commit(first)


def test_a_table_that_another_process_has_made_meanwhile_is_found(redis_url: str) -> None:
    first = opened(redis_url, SELDOM)
    with opened(redis_url, SELDOM) as second:
        first.create_table(SPEC)
        commit(first)
        first.close()
        assert not second.create_table(SPEC)
        assert second.version() == 1


def test_who_opens_a_log_with_more_rows_than_its_budget_takes_the_store_from_nobody(redis_url: str) -> None:
    with create_tables(opened(redis_url, SELDOM), SPEC) as first:
        commit(first, 4_900)  # 2.4 MiB
        with opened(redis_url, f"{OFTEN}&budget=1MiB") as second:
            after_passes(second)
            commit(first)
            assert second.version() == 1
        first.require_owner()


def test_a_flush_of_what_another_process_left_changes_no_version_and_gives_up_no_pin(redis_url: str) -> None:
    first = create_tables(opened(redis_url, SELDOM), SPEC)
    commit(first)
    with opened(redis_url, SELDOM) as second:
        with second.pin() as pin:
            second.flush()
            status = flushed(second)
            assert (status.flushed_version, status.changed_rows) == (1, 0)
            before = pin.lookup({"t": np.arange(100)})["t"]
            commit(second)
            np.testing.assert_array_equal(pin.lookup({"t": np.arange(100)})["t"], before)
        with pytest.raises(TakenOver):
            commit(first)
    first.close()


def test_a_store_whose_log_is_full_is_written_before_the_first_change(redis_url: str) -> None:
    first = create_tables(opened(redis_url, SELDOM), SPEC)
    for _ in range(4):
        commit(first, 2_000)
    with opened(redis_url, "log_bytes=64KiB&flush=100000") as second:
        commit(second)
        second.flush()
        status = flushed(second)
        assert (status.version, status.flushed_version) == (5, 5)
    with pytest.raises(TakenOver):  # it would write what it has not written yet
        first.close()
