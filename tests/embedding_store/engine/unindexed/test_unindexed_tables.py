"""Stores whose tier alone knows which rows there are: the bits of a store in memory, whatever is cold or fails."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import Commit, MemoryStore, OptimizerSpec, TableSpec, TableUpdate
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.engine.dense_replay import table_replay
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.optimizers.dense_replay import chapter, table_steps
from tests.embedding_store.engine.failing_tier import IndexedFailingTier
from tests.embedding_store.engine.test_store_history import everything
from tests.embedding_store.engine.tiered_stores import crowded_store, unindexed_store

DIM, MOST = 3, 48
FOLLOWS = TableSpec("t", DIM, optimizer=OptimizerSpec.of("adamw", lazy=False, learning_rate=0.01, weight_decay=0.1))


class TierAway(IndexedFailingTier):
    """Answers nothing while it is told to be away."""

    away = False

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self._require()
        return super().read(wanted)

    def listed(self, table: str, start: int) -> tuple[Int64, int]:
        self._require()
        return super().listed(table, start)

    def _require(self) -> None:
        if self.away:
            raise Unavailable("the tier is away")


def step(store: MemoryStore, name: str, ids: Sequence[int], ends_chapter: bool = False) -> None:
    version = store.version()
    gradients = np.random.default_rng(version).normal(size=(len(ids), DIM)).astype(np.float32)
    updates = {name: TableUpdate(np.array(ids, np.int64), gradients)} if len(ids) else {}
    store.commit(Commit(version + 1, updates, version, {}, ends_chapter=ends_chapter, time=1000.0 + version))


@pytest.fixture
def few_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables remember few steps, so that rows are brought to newer chapters all the time."""
    monkeypatch.setattr(chapter, "_FEWEST", 8)
    monkeypatch.setattr(table_replay, "TableSteps", lambda name, form: table_steps.TableSteps(name, form, most=MOST))


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.usefixtures("few_steps")
def test_a_tier_that_is_away_stops_the_commits_that_need_it_and_breaks_nothing(tmp_path: Path, indexed: bool) -> None:
    """Cold rows that are to follow are read before anything changes."""
    tier = TierAway()
    refused = 0
    with ExitStack() as held, MemoryStore(1) as plain:
        store = held.enter_context(crowded_store(held, tier, tmp_path / "log", 1e6, indexed=indexed))
        for each in (store, plain):
            each.create_table(FOLLOWS)
        for start in range(0, 320, 32):
            for each in (store, plain):
                step(each, "t", range(start, start + 32))
            store.flush()  # the next ones need its frames
        for number in range(150):
            tier.away = number % 3 == 0
            try:
                step(store, "t", [])
            except Unavailable:
                refused += 1
                tier.away = False
                step(store, "t", [])
            step(plain, "t", [])
            tier.away = False
            if number % 10 == 0:
                store.flush()
        assert refused > 5
        assert everything(store) == everything(plain)
        replay = store._tables["t"].replay
        assert replay is not None
        assert replay.steps.first > 60


@pytest.mark.usefixtures("few_steps")
def test_rows_that_follow_leave_memory_again(tmp_path: Path) -> None:
    """Those that dense replay has changed go first, once they are written."""
    rows, hot = 600, list(range(5))
    with ExitStack() as held, unindexed_store(held, IndexedFailingTier(), tmp_path / "log", 1e6) as store:
        store.create_table(FOLLOWS)
        with MemoryStore(1) as plain:
            plain.create_table(FOLLOWS)
            for start in range(0, rows, 100):
                for each in (store, plain):
                    step(each, "t", range(start, start + 100))
                store.flush()
            directory = store._tables["t"]._directory
            assert isinstance(directory, TierDirectory)
            most = 0
            for _ in range(4 * MOST):
                for each in (store, plain):
                    step(each, "t", hot)
                store.flush()
                most = max(most, directory.in_memory)
            assert most < rows // 2
            assert store.row_count("t") == rows
            for table in (store, plain):
                assert sum(len(block.ids) for block in table.scan("t")) == rows
            ids = np.arange(rows)
            np.testing.assert_array_equal(store.lookup({"t": ids})["t"], plain.lookup({"t": ids})["t"])
