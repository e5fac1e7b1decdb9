"""Rows that go with time, while the clock of the system is set ahead and back."""

import logging
import time
from collections.abc import Callable
from contextlib import ExitStack

import pytest

from elastable.embedding_store import EmbeddingStore, EvictionSpec, MemoryStore, TableSpec
from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.measures import CLOCK, Clock
from tests.contracts.store_samples import commit, int64, rows_by_id, update

TIMED = TableSpec("timed", 4, eviction=EvictionSpec(ttl=60.0))
YEAR_S = 365 * 86_400.0


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the system's clock ahead by so many seconds of the true time."""
    return lambda seconds: monkeypatch.setattr(CLOCK, "_system", lambda: time.time() + seconds)


def touched(store: EmbeddingStore, *ids: int) -> None:
    commit(store, {"timed": update(int64(*ids), 4)})


def memory(held: ExitStack) -> EmbeddingStore:
    return held.enter_context(MemoryStore(1))


def of_two(held: ExitStack) -> EmbeddingStore:
    return held.enter_context(PartitionedStore([MemoryStore(1), MemoryStore(1)], "token"))


@pytest.mark.parametrize("opened", [memory, of_two])
def test_a_clock_that_jumps_takes_no_row_and_keeps_none(
    held: ExitStack,
    opened: Callable[[ExitStack], EmbeddingStore],
    ahead: Callable[[float], None],
    caplog: pytest.LogCaptureFixture,
) -> None:
    store = opened(held)
    store.create_table(TIMED)
    touched(store, 1, 2)
    for seconds in (YEAR_S, -YEAR_S):
        ahead(seconds)
        touched(store, 2)
        touched(store, 2)
        assert set(rows_by_id(store, "timed")) == {1, 2}
    said = [record.getMessage() for record in caplog.records if "the system's clock was set" in record.getMessage()]
    assert [text.split(";")[0][:40] for text in said] == [
        "the system's clock was set ahead by 3153",
        "the system's clock was set back by 63072",
    ]
    ahead(0.0)
    touched(store, 2)


def test_time_goes_on_after_a_jump() -> None:
    system, passed = 1_000.0, 50.0
    clock = Clock(lambda: system, lambda: passed)
    assert clock.now() == 1_000.0
    system += YEAR_S
    passed += 70.0
    assert clock.now() == 1_070.0
    system -= 2 * YEAR_S
    passed += 1.0
    assert clock.now() == 1_071.0


def test_a_store_whose_versions_lie_ahead_says_so(held: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    store = memory(held)
    store.create_table(TIMED)
    commit(store, {"timed": update(int64(1), 4)}, time=time.time() + YEAR_S)
    with caplog.at_level(logging.WARNING):
        touched(store, 2)
        touched(store, 2)
    said = [record.getMessage() for record in caplog.records if "ahead of the clock here" in record.getMessage()]
    assert len(said) == 1
    assert "table 'timed'" in said[0]
