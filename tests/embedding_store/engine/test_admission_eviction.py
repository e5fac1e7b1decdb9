"""Tables that admit and evict, against a dictionary; and what survives a checkpoint."""

import threading
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastable.embedding_store import AdmissionSpec, EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import Commit, TableStatistics, TableUpdate
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, StaleVersion
from elastable.embedding_store.tables.initial_values import initial_rows
from tests.threads import on_threads

ADAGRAD = OptimizerSpec.of("adagrad", learning_rate=0.5, initial_accumulator_value=0.0)


def table(name: str = "t", admission: AdmissionSpec | None = None, eviction: EvictionSpec | None = None) -> TableSpec:
    return TableSpec(
        name,
        3,
        initializer=InitializerSpec("normal", 0.0, 1.0),
        optimizer=ADAGRAD,
        admission=admission,
        eviction=eviction,
    )


def commit(store: EmbeddingStore, **ids: list[int]) -> None:
    version = store.version()
    updates = {
        name: TableUpdate(np.array(some, np.int64), np.ones((len(some), 3), np.float32)) for name, some in ids.items()
    }
    store.commit(Commit(version + 1, updates, version, {}))


def rows(store: EmbeddingStore, name: str = "t") -> dict[int, tuple[bytes, bytes, tuple[int, int] | None]]:
    found = {}
    for block in store.scan(name, 7):
        for i, one in enumerate(block.ids.tolist()):
            assert one not in found
            touches = None if block.touches is None else (int(block.touches[i, 0]), int(block.touches[i, 1]))
            found[one] = (block.weights[i].tobytes(), block.slots[i].tobytes(), touches)
    return found


def copied(store: EmbeddingStore, name: str = "t") -> MemoryStore:
    copy = MemoryStore(threads=1)
    copy.create_table(store.specs()[name])
    copy.put(name, list(store.scan(name, 5)))
    copy.put_table_state(name, store.table_state(name))
    copy.reset_version(store.version())
    return copy


@dataclass
class Kept:
    """A row of the model: updates since it began, the version of the last, and how many since the last look."""

    updates: int
    version: int
    times: int


class TenancyMachine(RuleBasedStateMachine):
    """Commits, deletions and restores on one thread and on four, against a dictionary that counts exactly."""

    @initialize(
        sightings=st.sampled_from([None, 1, 2, 3]),
        max_age=st.sampled_from([None, 1, 2, 5]),
        min_frequency=st.sampled_from([None, 1, 2]),
        max_rows=st.sampled_from([None, 1, 6]),
        every=st.integers(1, 3),
    )
    def make(
        self, sightings: int | None, max_age: int | None, min_frequency: int | None, max_rows: int | None, every: int
    ) -> None:
        nothing = max_age is None and min_frequency is None and max_rows is None
        self.eviction = None if nothing else EvictionSpec(max_age, min_frequency, max_rows, every)
        self.sightings = sightings
        admission = None if sightings is None else AdmissionSpec(sightings, 1 << 14)
        self.spec = table("t", admission, self.eviction)
        self.stores = [MemoryStore(threads=1), MemoryStore(threads=4)]
        for store in self.stores:
            store.create_table(self.spec)
        self.model: dict[int, Kept] = {}
        self.seen: dict[int, int] = {}
        self.version = 0

    @rule(ids=st.lists(st.integers(-4, 20), unique=True, max_size=12))
    def commits(self, ids: list[int]) -> None:
        self.version += 1
        for store in self.stores:
            commit(store, t=ids)
        for one in ids:
            if one not in self.model:
                self.seen[one] = self.seen.get(one, 0) + 1
                if self.sightings is not None and self.seen[one] < self.sightings:
                    continue
                self.model[one] = Kept(0, 0, 0)
            kept = self.model[one]
            kept.updates, kept.version, kept.times = kept.updates + 1, self.version, kept.times + 1
        self._evict()

    def _evict(self) -> None:
        rule = self.eviction
        if rule is None or self.version % rule.every:
            return
        for one, kept in list(self.model.items()):
            old = rule.max_age is not None and self.version - kept.version > rule.max_age
            if old or (rule.min_frequency is not None and kept.times < rule.min_frequency):
                del self.model[one]
        order = sorted(self.model, key=lambda one: (-self.model[one].version, one))
        for one in order[rule.max_rows :] if rule.max_rows is not None else []:
            del self.model[one]
        for kept in self.model.values():
            kept.times = 0

    @rule(ids=st.lists(st.integers(-4, 20), max_size=4))
    def deletes(self, ids: list[int]) -> None:
        gone = sum(self.model.pop(one, None) is not None for one in ids)
        for store in self.stores:
            assert store.delete("t", np.array(ids, np.int64)) == gone

    @rule()
    def restores(self) -> None:
        self.stores[0] = copied(self.stores[1])

    @rule()
    def clears(self) -> None:
        self.model.clear()
        self.seen.clear()
        for store in self.stores:
            store.clear("t")

    @invariant()
    def is_the_dictionary(self) -> None:
        if not hasattr(self, "stores"):
            return
        first, second = (rows(store) for store in self.stores)
        assert first == second
        assert set(first) == set(self.model)
        for one, (_, slots, touches) in first.items():
            kept = self.model[one]
            assert np.frombuffer(slots, np.float32).tolist() == [kept.updates] * 3  # the sum of squares
            if self.eviction is None:
                assert touches is None
            else:
                counted = kept.times if self.eviction.min_frequency is not None else 0
                assert touches == (kept.version, counted)
        without = np.array([one for one in range(-4, 21) if one not in self.model], np.int64)
        for store in self.stores:
            assert store.row_count("t") == len(self.model)
            np.testing.assert_array_equal(store.lookup({"t": without})["t"], initial_rows(self.spec, without))


TestTenancyMachine = TenancyMachine.TestCase
TestTenancyMachine.settings = settings(max_examples=40, stateful_step_count=15, deadline=None)


def test_statistics() -> None:
    with MemoryStore() as store:
        store.create_table(table("a", admission=AdmissionSpec(2, 1 << 12)))
        store.create_table(table("e", eviction=EvictionSpec(max_rows=2)))
        commit(store, a=[1, 2, 3], e=[1, 2, 3])
        commit(store, a=[1, 2], e=[9])
        admitting, evicting = store.table_statistics("a"), store.table_statistics("e")
        assert (admitting.rows, admitting.refused, admitting.evicted) == (2, 3, 0)
        assert (evicting.rows, evicting.refused, evicting.evicted) == (2, 0, 2)
        assert admitting.bytes is not None
        assert admitting.bytes >= 1 << 12
        store.clear("a")
        assert store.table_statistics("a") == TableStatistics(0, admitting.bytes - 2 * (8 + 24), written=3)
        store.put("e", [block := store.read_rows("e", np.array([9]))])
        assert store.delete("e", np.array([9, 77])) == len(block.ids) == 1
        statistics = store.table_statistics("e")
        assert (statistics.deleted, statistics.written) == (1, 1)


def test_a_commit_that_fails_counts_and_evicts_nothing() -> None:
    with MemoryStore() as store:
        store.create_table(table("t", AdmissionSpec(2), EvictionSpec(max_age=1)))
        commit(store, t=[1])
        commit(store, t=[1, 2])
        commit(store)
        before, counts = rows(store), store.table_state("t")
        assert counts
        bad = TableUpdate(np.array([2, 3]), np.ones((1, 3), np.float32))
        good = TableUpdate(np.array([2, 3]), np.ones((2, 3), np.float32))
        with pytest.raises(BadInput, match="'t'"):
            store.commit(Commit(4, {"t": bad}, 0, {}))
        with pytest.raises(StaleVersion):
            store.commit(Commit(3, {"t": good}, 0, {}))
        store.stage(Commit(4, {"t": good}, 0, {}))  # and never carried out
        assert (rows(store), store.version(), store.table_statistics("t").refused) == (before, 3, 2)
        assert store.table_state("t") == counts


def test_no_room_for_a_row_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    from elastable.embedding_store.engine.eviction import RowTouches

    def no_room(kept: RowTouches, count: int) -> None:
        raise MemoryError("no room")

    with MemoryStore() as store:
        store.create_table(table("t", AdmissionSpec(1), EvictionSpec(max_rows=1)))
        commit(store, t=[1])
        before = rows(store)
        with monkeypatch.context() as broken:
            broken.setattr(RowTouches, "grow", no_room)
            with pytest.raises(MemoryError):
                commit(store, t=[2, 3])
        assert (rows(store), store.version()) == (before, 1)
        commit(store, t=[2, 3])
        assert set(rows(store)) == {2}


def test_rows_are_evicted_while_others_look_them_up() -> None:
    ids: Int64 = np.arange(20_000)
    spec = TableSpec(
        "t", 8, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"), eviction=EvictionSpec(1)
    )
    done = threading.Event()
    with MemoryStore() as store:
        store.create_table(spec)

        def read() -> None:
            while not done.is_set():
                found = store.lookup({"t": ids})["t"]
                assert (found == found[:, :1]).all(), "torn row"
                # Each version touches one third, and lets go of the third that was touched two versions before.
                assert len(np.unique(found[:, 0])) <= 3, f"two versions at once: {np.unique(found[:, 0])}"

        def train() -> None:
            for version in range(30):
                some = ids[version % 3 :: 3]
                update = TableUpdate(some, np.full((len(some), 8), -1, np.float32))
                store.commit(Commit(version + 1, {"t": update}, version, {"t": 1.0}))
            done.set()

        on_threads([train, *[read] * 8], done)
        assert store.row_count("t") == len(ids[29 % 3 :: 3]) + len(ids[28 % 3 :: 3])
