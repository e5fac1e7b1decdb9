"""Rows that are in the tier alone are evicted as a store in memory evicts them, whatever happens in between."""

from __future__ import annotations

import copy
import shutil
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastable.embedding_store import AdmissionSpec, Commit, EvictionSpec, MemoryStore, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import EvictionCut, RowBlock, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.spec import ShardOrigin
from elastable.embedding_store.engine.frames import rows_in_memory
from elastable.embedding_store.engine.unindexed import planned_eviction, ranked_rows
from elastable.embedding_store.engine.unindexed.tier_directory import TierDirectory
from elastable.embedding_store.errors import Unavailable, Unsupported
from elastable.embedding_store.log.files.file_log import FileLog
from elastable.embedding_store.shards.shared_budget import cut_of, offer_of
from tests.embedding_store.engine.failing_tier import FailingTier, IndexedFailingTier
from tests.embedding_store.engine.tiered_stores import tiered_store, unindexed_store
from tests.plugins.seeds import examples

DIM, MOST = 2, 15
ADAGRAD = OptimizerSpec.of("adagrad", learning_rate=0.5)
IDS = st.lists(st.integers(-3, MOST), min_size=1, max_size=6, unique=True)

Bits = dict[int, tuple[bytes, bytes, tuple[int, ...]]]


def bits(source: Snapshot) -> tuple[Bits, object]:
    """Every bit of table `t`."""
    found: Bits = {}
    for block in source.scan("t", 4):
        assert block.touches is not None
        for i, one in enumerate(block.ids.tolist()):
            assert one not in found
            found[one] = (block.weights[i].tobytes(), block.slots[i].tobytes(), tuple(block.touches[i].tolist()))
    assert source.row_count("t") == len(found)
    read = source.lookup({"t": np.arange(-3, MOST + 1)})["t"].tobytes()
    return found, (read, source.table_state("t"))


def commit(store: MemoryStore, ids: Sequence[int], **settings_: object) -> None:
    version = store.version()
    gradients = np.random.default_rng(version).normal(size=(len(ids), DIM)).astype(np.float32)
    updates = {"t": TableUpdate(np.array(ids, np.int64), gradients)} if len(ids) else {}
    store.commit(Commit(version + 1, updates, version, {}, time=1000.0 + version, **settings_))  # type: ignore[arg-type]


class ColdEvictions(RuleBasedStateMachine):
    """One store whose tier knows its rows beside one in memory; only the first is flushed, pressed and killed."""

    @initialize(
        max_age=st.sampled_from([None, 1, 2, 5]),
        min_frequency=st.sampled_from([None, None, 1, 2]),
        max_rows=st.sampled_from([None, 1, 6]),
        ttl=st.sampled_from([None, None, 2.0]),
        every=st.integers(1, 3),
        sightings=st.sampled_from([None, None, 2]),
        lazy=st.booleans(),
        budget=st.sampled_from([1, 1, 500, 1 << 30]),
    )
    def begin(
        self,
        max_age: int | None,
        min_frequency: int | None,
        max_rows: int | None,
        ttl: float | None,
        every: int,
        sightings: int | None,
        lazy: bool,
        budget: int,
    ) -> None:
        rules = max_age, min_frequency, max_rows, ttl
        eviction = EvictionSpec(*rules[:3], every, ttl) if any(rules) else EvictionSpec(max_age=3, every=every)
        admission = None if sightings is None else AdmissionSpec(sightings, 1 << 10)
        optimizer = ADAGRAD if lazy else OptimizerSpec.of("adam", lazy=False)
        spec = TableSpec("t", DIM, optimizer=optimizer, admission=admission, eviction=eviction)
        self.folder, self.lives, self.budget = Path(tempfile.mkdtemp(prefix="elastable-cold-")), 0, budget
        self.patched = pytest.MonkeyPatch()
        for module, name, value in (
            (rows_in_memory, "_LEAST_FRAMES", 1),
            (ranked_rows, "_SPARE", 1),
            (planned_eviction, "_SCANNED", 3),
        ):
            self.patched.setattr(module, name, value)
        self.tier: FailingTier = IndexedFailingTier()
        self.kept = tiered_store(self.tier, FileLog(self.folder / "0"), budget, indexed=False)
        self.plain = MemoryStore(1)
        self.pins: list[tuple[Snapshot, Snapshot]] = []
        for store in (self.kept, self.plain):
            store.create_table(spec)

    @rule(ids=IDS, frozen=st.sampled_from([False, False, False, True]))
    def commit(self, ids: list[int], frozen: bool) -> None:
        for store in (self.kept, self.plain):
            commit(store, () if frozen else ids, frozen=("t",) if frozen else ())

    @rule(versions=st.integers(1, 3))
    def nobody_comes(self, versions: int) -> None:
        for _ in range(versions):
            for store in (self.kept, self.plain):
                commit(store, ())

    @rule(ids=IDS, touched=st.booleans(), seed=st.integers(0, 9))
    def put(self, ids: list[int], touched: bool, seed: int) -> None:
        random = np.random.default_rng(seed)
        touches = random.integers(0, self.plain.version() + 3, (len(ids), 2)) if touched else None
        weights = random.normal(size=(len(ids), DIM)).astype(np.float32)
        width = self.plain.read_rows("t", np.empty(0, np.int64)).slots.shape[1]
        slots = random.random((len(ids), width)).astype(np.float32)
        for store in (self.kept, self.plain):
            store.put("t", [RowBlock(np.array(ids), weights, slots, None if touches is None else touches.copy())])

    @rule(ids=IDS)
    def delete(self, ids: list[int]) -> None:
        assert self.kept.delete("t", np.array(ids)) == self.plain.delete("t", np.array(ids))

    @precondition(lambda self: not self.pins)
    @rule(version=st.integers(0, 20))
    def reset(self, version: int) -> None:
        eviction = self.plain.specs()["t"].eviction
        if eviction is not None and eviction.ttl is not None:  # times of versions only ascend
            version = max(version, self.plain.version())
        for store in (self.kept, self.plain):
            store.reset_version(version)

    @precondition(lambda self: not self.pins)
    @rule()
    def clear(self) -> None:
        for store in (self.kept, self.plain):
            store.clear("t")

    @rule(ids=IDS)
    def staged_in_vain(self, ids: list[int]) -> None:
        version, ones = self.kept.version(), np.ones((len(ids), DIM), np.float32)
        self.kept.stage(Commit(version + 1, {"t": TableUpdate(np.array(ids), ones)}, version, {}, time=1e6))

    @rule(ids=IDS)
    def look_up(self, ids: list[int]) -> None:
        self.kept.lookup({"t": np.array(ids)})

    @rule()
    def flush(self) -> None:
        self.kept.flush()

    @rule(left=st.integers(0, 20))
    def flush_breaks_off(self, left: int) -> None:
        self.tier.left = left
        with suppress(Unavailable):
            self.kept.flush()
        self.tier.left = None

    @precondition(lambda self: len(self.pins) < 3)
    @rule()
    def pin(self) -> None:
        self.pins.append((self.kept.pin(), self.plain.pin()))

    @rule()
    def unpin(self) -> None:
        if self.pins:
            for pin in self.pins.pop(0):
                pin.close()

    @rule(left=st.integers(0, 20), indexed=st.sampled_from([False, False, True]))
    def kill(self, left: int, indexed: bool) -> None:
        """What tier and log hold now is all that is left; the next store may know all of its rows."""
        while self.pins:
            self.unpin()
        self.lives += 1
        folder = self.folder / str(self.lives)
        shutil.copytree(self.folder / str(self.lives - 1), folder)
        tier = copy.deepcopy(self.tier)
        self.tier.left, tier.left = 0, None
        with suppress(Unavailable):
            self.kept.close()
        self.tier = tier
        self.kept = tiered_store(tier, FileLog(folder), self.budget, indexed=indexed)
        self.kept.delete("t", np.empty(0, np.int64))  # it is the one that writes from now on
        shutil.rmtree(self.folder / str(self.lives - 1))

    @invariant()
    def both_are_the_same(self) -> None:
        if hasattr(self, "pins"):
            assert bits(self.kept) == bits(self.plain)
            for ours, theirs in self.pins:
                assert bits(ours) == bits(theirs)

    def teardown(self) -> None:
        if hasattr(self, "pins"):
            while self.pins:
                self.unpin()
            self.tier.left = None
            self.kept.close()
            self.plain.close()
            shutil.rmtree(self.folder)
            self.patched.undo()


TestColdEvictions = ColdEvictions.TestCase
TestColdEvictions.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)


class RanksAway(IndexedFailingTier):
    """Says nothing of ranks while it is told to be away."""

    away = False

    def lowest(self, table: str, low: int, high: int, most: int | None = None) -> tuple[Int64, Int64]:
        if self.away:
            raise Unavailable("the tier is away")
        return super().lowest(table, low, high, most)


def test_a_look_at_rows_fails_while_the_tier_is_away_and_breaks_nothing(tmp_path: Path) -> None:
    spec = TableSpec("t", DIM, optimizer=ADAGRAD, eviction=EvictionSpec(max_age=3, max_rows=9))
    tier = RanksAway()
    with ExitStack() as held, unindexed_store(held, tier, tmp_path, 1e6) as store, MemoryStore(1) as plain:
        for each in (store, plain):
            each.create_table(spec)
            commit(each, range(10))
        store.flush()
        for number in range(6):
            commit(plain, [number + 10])
            tier.away = True
            before = store.version()
            with pytest.raises(Unavailable):
                commit(store, [number + 10])
            assert store.version() == before
            tier.away = False
            commit(store, [number + 10])
            store.flush()
            assert bits(store) == bits(plain)
        assert store.table_statistics("t").evicted == plain.table_statistics("t").evicted > 5


def test_a_table_that_is_created_while_a_commit_is_staged_keeps_its_rows(tmp_path: Path) -> None:
    spec = TableSpec("t", DIM, optimizer=ADAGRAD, eviction=EvictionSpec(max_rows=1))
    with ExitStack() as held, unindexed_store(held, IndexedFailingTier(), tmp_path, 1e6) as store:
        finish = store.stage(Commit(1, {}, 0, {}))
        store.create_table(spec)
        finish()
        commit(store, range(3))
        assert store.row_count("t") == 1


def test_many_cold_rows_go_and_only_those_in_memory_take_some(tmp_path: Path) -> None:
    rows, most = 3_000, 500
    eviction = EvictionSpec(max_age=20, max_rows=most, every=5)
    spec = TableSpec("t", DIM, optimizer=ADAGRAD, eviction=eviction)
    with ExitStack() as held, unindexed_store(held, IndexedFailingTier(), tmp_path, 1e6) as store:
        plain = held.enter_context(MemoryStore(1))
        random = np.random.default_rng(1)
        for each in (store, plain):
            each.create_table(spec)
        for _ in range(40):
            ids = np.unique(random.integers(-rows, rows, 60)).tolist()
            for each in (store, plain):
                commit(each, ids)
            store.flush()
            assert bits(store) == bits(plain)
            directory = store._tables["t"]._directory
            assert isinstance(directory, TierDirectory)
            assert directory.in_memory < 200
        assert store.row_count("t") == most


@pytest.mark.parametrize("min_frequency", [None, 2])
def test_shards_offer_the_rows_that_a_store_in_memory_offers(tmp_path: Path, min_frequency: int | None) -> None:
    eviction = EvictionSpec(max_age=9, min_frequency=min_frequency, max_rows=12, every=2)
    whole = TableSpec("t", DIM, optimizer=ADAGRAD, eviction=eviction)
    with ExitStack() as held:
        shards: list[list[MemoryStore]] = []
        for number in range(2):
            origin = ShardOrigin(2, number, table=whole, shards=2)
            spec = TableSpec("t", DIM, optimizer=ADAGRAD, eviction=eviction, origin=origin)
            plain = held.enter_context(MemoryStore(1))
            cold = held.enter_context(unindexed_store(held, IndexedFailingTier(), tmp_path / str(number), 1e6))
            for store in (plain, cold):
                store.create_table(spec)
            shards.append([plain, cold])
        random = np.random.default_rng(2)
        for version in range(1, 31):
            commits = []
            for _ in shards:
                ids = np.unique(random.integers(-20, 20, 6))
                gradients = random.normal(size=(len(ids), DIM)).astype(np.float32)
                commits.append(Commit(version, {"t": TableUpdate(ids, gradients)}, version - 1, {}, time=1.0))
            cuts: dict[str, EvictionCut] = {}
            if not version % 2:
                offered = []
                for stores, its in zip(shards, commits, strict=True):
                    plain_rows, rows = (store.staying_rows(its)["t"] for store in stores)
                    pairs = sorted(zip(rows.versions.tolist(), rows.ids.tolist(), strict=True))
                    assert pairs == sorted(zip(plain_rows.versions.tolist(), plain_rows.ids.tolist(), strict=True))
                    offered.append(rows)
                ask = lambda most, ids, offered=offered: [offer_of(rows, most, ids) for rows in offered]  # noqa: E731
                cuts = {"t": cut_of(12, ask(5, None), ask)}
            for stores, its in zip(shards, commits, strict=True):
                for store in stores:
                    store.commit(Commit(version, its.updates, its.step, {}, time=1.0, cuts=cuts))
                stores[1].flush()
                assert bits(stores[1]) == bits(stores[0])
            if not version % 2:
                assert sum(stores[0].row_count("t") for stores in shards) <= 12


def test_versions_that_ranks_do_not_tell_apart_are_refused(tmp_path: Path) -> None:
    """Else rows of all later versions would go at once."""
    with ExitStack() as held, unindexed_store(held, IndexedFailingTier(), tmp_path, 1e6) as store:
        store.create_table(TableSpec("t", DIM, eviction=EvictionSpec(max_age=8)))
        store.reset_version(2**52 - 4)
        for one in range(3):
            version = store.version()
            update = {"t": TableUpdate(np.array([one]), np.ones((1, DIM), np.float32))}
            store.commit(Commit(version + 1, update, version, {}))
            store.flush()
        assert store.row_count("t") == 3
        with pytest.raises(Unsupported, match=r"up to version 2\*\*52 - 1"):
            store.commit(Commit(2**52, {}, 2**52 - 1, {}))
        assert (store.version(), store.row_count("t")) == (2**52 - 1, 3)
