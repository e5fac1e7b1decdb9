"""Any sequence of lookups, updates, growth, deletion, re-partitioning and moves between backends: dictionaries."""

import shutil

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from elastable.embedding_store import AdmissionSpec, Commit, EvictionSpec, InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.composite.moving import repartition
from elastable.embedding_store.tables.grouping import coalesce
from tests.contracts.store_samples import rows_by_id
from tests.embedding_store.dictionary_model import ModelTable
from tests.embedding_store.store_kinds import KINDS
from tests.file_stores import quick_folder
from tests.plugins.seeds import examples

SPECS = [
    TableSpec("fixed", 5, 40, optimizer=OptimizerSpec.of("adam", learning_rate=0.1), seed=1),
    TableSpec("dynamic", 3, initializer=InitializerSpec("normal", 0, 1), optimizer=OptimizerSpec.of("adagrad")),
    TableSpec("narrow", 1, optimizer=OptimizerSpec.of("sgd", learning_rate=0.5), seed=3),
    TableSpec("rowwise", 6, optimizer=OptimizerSpec.of("rowwise_adagrad", learning_rate=0.5), seed=4),
    TableSpec("rare", 2, admission=AdmissionSpec(2, 1 << 16), eviction=EvictionSpec(max_age=3, every=2)),
    TableSpec("both", 1, admission=AdmissionSpec(3, 1 << 16), eviction=EvictionSpec(2, 2, every=2)),
    TableSpec("often", 2, optimizer=OptimizerSpec.of("adam"), eviction=EvictionSpec(min_frequency=2, every=3)),
    TableSpec("timed", 2, optimizer=OptimizerSpec.of("adagrad"), eviction=EvictionSpec(ttl=1.0, every=2)),
]
EDGES = [-(2**63), -(2**63) + 1, -(2**31) - 1, 2**31, 2**32, 2**62, 2**63 - 2, 2**63 - 1]


def known_ids(spec: TableSpec) -> st.SearchStrategy[int]:
    if spec.vocabulary_size is not None:
        return st.integers(0, spec.vocabulary_size - 1)
    return st.integers(-12, 12) | st.sampled_from(EDGES) | st.integers(-(2**63), 2**63 - 1)


def batches(most: int) -> st.SearchStrategy[dict[str, list[int]]]:
    """Table -> ids; tables may be missing."""
    return st.fixed_dictionaries({}, optional={spec.name: st.lists(known_ids(spec), max_size=most) for spec in SPECS})


class AnyHistory(RuleBasedStateMachine):
    """A store, and the dictionaries that it has to equal."""

    @initialize(backend=st.sampled_from(sorted(KINDS)))
    def begin(self, backend: str) -> None:
        self.folder = quick_folder()
        self.store = KINDS[backend](self.folder)
        self.version, self.now_ms = 0, 1_000_000
        self.tables: dict[str, ModelTable] = {}
        for spec in SPECS:
            self.store.create_table(spec)
            self.tables[spec.name] = ModelTable(spec)

    @rule(batch=batches(20), named=st.booleans())
    def look_up(self, batch: dict[str, list[int]], named: bool) -> None:
        ids = {name: np.array(of, np.int64) for name, of in batch.items()}
        rows = self.store.lookup(ids, self.version if named else None)
        assert list(rows) == list(ids)
        for name, of in batch.items():
            spec = next(spec for spec in SPECS if spec.name == name)
            expected = np.array([self.tables[name].read(one) for one in of], np.float32).reshape(len(of), spec.dim)
            np.testing.assert_array_equal(rows[name], expected)

    @rule(batch=batches(12), seed=st.integers(0, 1000))
    def commit(self, batch: dict[str, list[int]], seed: int) -> None:
        random = np.random.default_rng(seed)
        self.version += 1
        updates = {}
        for name, of in batch.items():
            dim = next(spec.dim for spec in SPECS if spec.name == name)
            gradients = random.integers(-4, 5, (len(of), dim)).astype(np.float32)
            updates[name] = coalesce(np.array(of, np.int64), gradients)
            self.tables[name].commit(self.version, list(zip(of, gradients, strict=True)), self.version - 1)
        self.now_ms += seed % 700
        for table in self.tables.values():
            table.evict(self.version, self.now_ms)
        self.store.commit(Commit(self.version, updates, self.version - 1, {}, time=self.now_ms / 1000 + 1e-5))

    @rule(rows=st.integers(600, 1500), seed=st.integers(0, 1000))
    def grow(self, rows: int, seed: int) -> None:
        ids = np.unique(np.random.default_rng(seed).integers(-(2**40), 2**40, rows))
        self.version += 1
        gradients = np.ones((len(ids), 1), np.float32)
        update = {"narrow": coalesce(ids, gradients)}
        self.store.commit(Commit(self.version, update, self.version - 1, {}, time=self.now_ms / 1000 + 1e-5))
        pairs = list(zip(ids.tolist(), gradients, strict=True))
        self.tables["narrow"].commit(self.version, pairs, self.version - 1)
        for table in self.tables.values():
            table.evict(self.version, self.now_ms)

    @rule(name=st.sampled_from([spec.name for spec in SPECS]), data=st.data())
    def delete(self, name: str, data: st.DataObject) -> None:
        spec, table = next(spec for spec in SPECS if spec.name == name), self.tables[name]
        some = known_ids(spec) if not table.rows else known_ids(spec) | st.sampled_from(sorted(table.rows))
        ids = data.draw(st.lists(some, max_size=8))
        present = len({one for one in ids if one in table.rows})
        assert self.store.delete(name, np.array(ids, np.int64)) == present
        for one in ids:
            table.delete(one)

    @rule(name=st.sampled_from([spec.name for spec in SPECS]))
    def clear(self, name: str) -> None:
        self.store.clear(name)
        self.tables[name].clear()

    @rule(backend=st.sampled_from(sorted(KINDS)))
    def move(self, backend: str) -> None:
        target = KINDS[backend](self.folder)
        copied = repartition(self.store, target)
        assert copied == {name: len(table.rows) for name, table in self.tables.items()}
        self.store.close()
        self.store = target

    @rule(data=st.data())
    def read_whole_rows(self, data: st.DataObject) -> None:
        spec = data.draw(st.sampled_from(SPECS))
        table = self.tables[spec.name]
        ids = data.draw(st.lists(known_ids(spec), max_size=10, unique=True))
        block = self.store.read_rows(spec.name, np.array(ids, np.int64))
        assert block.ids.tolist() == [one for one in ids if one in table.rows]
        for one, weights, slots in zip(block.ids.tolist(), block.weights, block.slots, strict=True):
            np.testing.assert_array_equal(weights, table.rows[one][0])
            np.testing.assert_array_equal(slots, table.rows[one][1])

    @rule(block_rows=st.integers(1, 50))
    def scan(self, block_rows: int) -> None:
        for name, table in self.tables.items():
            if len(table.rows) > 100 * block_rows:
                continue
            assert rows_by_id(self.store, name, block_rows) == table.bytes_by_id()

    @invariant()
    def versions_and_counts(self) -> None:
        assert self.store.version() == self.version
        assert all(self.store.row_count(name) == len(table.rows) for name, table in self.tables.items())

    def teardown(self) -> None:
        if hasattr(self, "store"):
            self.store.close()
            shutil.rmtree(self.folder, ignore_errors=True)


TestAnyHistory = AnyHistory.TestCase
TestAnyHistory.settings = settings(
    max_examples=examples(40), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
