"""A store with a tier is flushed and killed at any moment, with any budget, and nobody can tell it from a plain one."""

from __future__ import annotations

import shutil
import tempfile
from contextlib import ExitStack, suppress
from pathlib import Path
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.tier import Tier
from elastable.embedding_store.engine.frames import rows_in_memory
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.tiered.store_tier import StoreTier
from elastable.embedding_store.errors import Unavailable
from elastable.embedding_store.log.contract import Log
from elastable.embedding_store.log.file_log import FileLog
from tests.embedding_store.engine.failing_tier import FailingTier
from tests.embedding_store.engine.test_store_history import IDS, MOST, NAMES, SPECS, TRAINED, everything, step

TINY, HUGE = 1, 1 << 30


@pytest.fixture(autouse=True)
def _few_frames(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rows_in_memory, "_LEAST_FRAMES", 1)


def opened(tier: Tier, log: Log, budget: int = HUGE, log_bytes: int = 1 << 30, every_s: float = 1e6) -> MemoryStore:
    with ExitStack() as stack:
        stack.enter_context(tier)
        stack.enter_context(log)
        store = stack.enter_context(MemoryStore(1, direct_bytes=100))
        store.keep_tier(StoreTier(tier, log, budget), log_bytes=log_bytes, every_s=every_s, timeout_s=60)
        stack.pop_all()
    return store


class AnyFlush(RuleBasedStateMachine):
    """One store with a tier, and one without; both see the same calls, and only one of them is flushed and killed."""

    def __init__(self) -> None:
        super().__init__()
        self.folder = Path(tempfile.mkdtemp(prefix="elastable-tier-"))
        self.lives = 0
        self.patched = patch.object(rows_in_memory, "_LEAST_FRAMES", 1)
        self.patched.start()

    @initialize(budget=st.sampled_from([TINY, 1_000, HUGE]), keeps_positions=st.booleans())
    def begin(self, budget: int, keeps_positions: bool) -> None:
        self.budget = budget
        self.tier = FailingTier(keeps_positions)
        self.kept = opened(self.tier, FileLog(self.folder / "0"), budget)
        self.plain = MemoryStore(1, direct_bytes=100)
        for store in (self.kept, self.plain):
            for spec in SPECS.values():
                store.create_table(spec)

    @rule(
        ids=IDS,
        seed=st.integers(0, 1 << 20),
        names=st.lists(st.sampled_from(TRAINED), max_size=4, unique=True),
        ends_chapter=st.booleans(),
    )
    def commit(self, ids: list[int], seed: int, names: list[str], ends_chapter: bool) -> None:
        for store in (self.kept, self.plain):
            step(store, ids, seed, names, ends_chapter=ends_chapter)

    @rule(ids=IDS, name=st.sampled_from(NAMES), seed=st.integers(0, 99), touched=st.booleans())
    def put(self, ids: list[int], name: str, seed: int, touched: bool) -> None:
        random, spec = np.random.default_rng(seed), SPECS[name]
        slots = self.plain.read_rows(name, np.array(ids)).slots.shape[1]
        touches = random.integers(0, 3, (len(ids), 2)) if touched and spec.eviction else None
        weights = random.normal(size=(len(ids), spec.dim)).astype(np.float32)
        block = RowBlock(np.array(ids), weights, random.random((len(ids), slots)).astype(np.float32), touches)
        for store in (self.kept, self.plain):
            store.put(name, [block])

    @rule(ids=IDS, name=st.sampled_from(NAMES))
    def delete(self, ids: list[int], name: str) -> None:
        assert self.kept.delete(name, np.array(ids)) == self.plain.delete(name, np.array(ids))

    @rule(name=st.sampled_from(NAMES), again=st.booleans())
    def clear_or_drop(self, name: str, again: bool) -> None:
        for store in (self.kept, self.plain):
            if again:
                store.drop_table(name)
                store.create_table(SPECS[name])
            else:
                store.clear(name)

    @rule(version=st.integers(0, 30))
    def reset(self, version: int) -> None:
        for store in (self.kept, self.plain):
            store.reset_version(version)

    @rule()
    def flush(self) -> None:
        self.kept.flush()
        status = self.kept.flush_status()
        assert status is not None
        assert (status.changed_rows, status.flushed_version) == (0, self.kept.version())

    @rule(left=st.integers(0, 40))
    def flush_breaks_off(self, left: int) -> None:
        self.tier.left = left
        with suppress(Unavailable):
            self.kept.flush()
        self.tier.left = None

    @rule(ids=st.lists(st.integers(0, MOST), max_size=4), name=st.sampled_from(NAMES))
    def look_up(self, ids: list[int], name: str) -> None:
        found = [store.lookup({name: np.array(ids, np.int64)})[name].tobytes() for store in (self.kept, self.plain)]
        assert found[0] == found[1]

    @rule(left=st.integers(0, 20))
    def kill(self, left: int) -> None:
        """What the tier and the files hold now is all that is left."""
        record = self.kept.record()
        self.lives += 1
        folder = self.folder / str(self.lives)
        shutil.copytree(self.folder / str(self.lives - 1), folder)
        tier = self.tier.copy()
        self.tier.left = 0
        with suppress(Unavailable):
            self.kept.close()
        self.tier = tier
        self.kept = opened(tier, FileLog(folder), self.budget)
        assert self.kept.record() == record
        shutil.rmtree(self.folder / str(self.lives - 1))

    @invariant()
    def both_are_the_same(self) -> None:
        if hasattr(self, "kept"):
            assert everything(self.kept) == everything(self.plain)

    def teardown(self) -> None:
        if hasattr(self, "kept"):
            self.tier.left = None
            self.kept.close()
            self.plain.close()
        shutil.rmtree(self.folder)
        self.patched.stop()


TestAnyFlush = AnyFlush.TestCase
TestAnyFlush.settings = settings(
    max_examples=30, stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
