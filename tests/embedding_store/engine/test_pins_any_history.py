"""Any sequence of pins, releases, lease ends, commits, deletions, evictions and scans half way: dictionaries."""

import shutil
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field

import numpy as np
import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from elastable.embedding_store import MemoryStore, initial_rows
from elastable.embedding_store.contract.row_data import Commit, RowBlock, TableState, TableUpdate
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.engine.pins import StorePins
from elastable.embedding_store.errors import StaleVersion
from tests.contracts.store_samples import create_tables
from tests.embedding_store.engine.test_store_history import IDS, MOST
from tests.embedding_store.engine.test_store_history import SPECS as HISTORY_SPECS
from tests.embedding_store.engine.tiered_stores import crowded_store
from tests.embedding_store.tiers.dict_tier import DictTier
from tests.file_stores import file_store, quick_folder
from tests.plugins.seeds import examples

SPECS = {name: spec for name, spec in HISTORY_SPECS.items() if name not in ("byte", "decayed", "admitted")}
NAMES = sorted(SPECS)
Rows = dict[int, tuple[bytes, bytes, tuple[int, ...] | None]]


def rows_of(blocks: Iterator[RowBlock], rows: Rows | None = None) -> Rows:
    found: Rows = {} if rows is None else rows
    for block in blocks:
        for i, one in enumerate(block.ids.tolist()):
            assert one not in found
            touches = None if block.touches is None else tuple(block.touches[i].tolist())
            found[one] = (block.weights[i].tobytes(), block.slots[i].tobytes(), touches)
    return found


def everything(source: Snapshot) -> dict[str, tuple[Rows, TableState]]:
    state = {}
    for name in NAMES:
        state[name] = (rows_of(source.scan(name, 4)), source.table_state(name))
        assert source.row_count(name) == len(state[name][0])
    return state


@dataclass
class Reader:
    pin: Snapshot
    ends: float  # when its lease does
    rows: dict[str, tuple[Rows, TableState]]  # by table, when the version was pinned first


@dataclass
class HalfScan:
    """A scan that goes on while others do what they like."""

    of: Reader
    table: str
    blocks: Iterator[RowBlock]
    found: Rows = field(default_factory=dict)


class PinsInAnyHistory(RuleBasedStateMachine):
    @initialize(kind=st.sampled_from(["direct", "indexed", "files", "crowded"]))
    def begin(self, kind: str) -> None:
        self.folder = quick_folder()
        self.now = 0.0
        self.held = ExitStack()
        if kind == "files":
            self.store: MemoryStore = file_store(self.folder / "store", 1 << 20, 1)
        elif kind == "crowded":
            self.store = crowded_store(self.held, DictTier(), self.folder / "log")
        else:
            self.store = MemoryStore(2, direct_bytes=0 if kind == "indexed" else 1 << 20)
        self.store._pins = StorePins(self.store._tables, 1 << 30, lambda: self.now)
        create_tables(self.store, *SPECS.values())
        self.readers: list[Reader] = []
        self.scans: list[HalfScan] = []
        self.commit([*range(0, MOST, 2)], set())

    @rule(ids=IDS, but=st.sets(st.sampled_from(NAMES), max_size=2))
    def commit(self, ids: list[int], but: set[str]) -> None:
        version = self.store.version()
        random = np.random.default_rng(version)
        updates = {
            name: TableUpdate(np.array(ids), random.normal(size=(len(ids), SPECS[name].dim)).astype(np.float32))
            for name in NAMES
            if name not in but
        }
        self.store.commit(Commit(version + 1, updates, version, {}, time=1000 + 0.7 * version))

    @rule(ids=IDS)
    def commit_and_pin(self, ids: list[int]) -> None:
        self.commit(ids, set())
        if len(self.readers) < 6:
            self.pin(10.0)

    @rule(name=st.sampled_from(NAMES), ids=st.lists(st.integers(0, MOST), max_size=8))
    def delete(self, name: str, ids: list[int]) -> None:
        self.store.delete(name, np.array(ids, np.int64))

    @rule(name=st.sampled_from(NAMES), ids=IDS, touched=st.booleans())
    def put(self, name: str, ids: list[int], touched: bool) -> None:
        spec = SPECS[name]
        width = self.store.read_rows(name, np.empty(0, np.int64)).slots.shape[1]
        values = np.full((len(ids), spec.dim), 0.5, np.float32)
        touches = np.full((len(ids), 2), 3, np.int64) if touched and spec.eviction is not None else None
        block = RowBlock(np.array(ids), values, np.full((len(ids), width), 2, np.float32), touches)
        self.store.put(name, [block])

    @rule(value=st.integers(0, 3))
    def put_state(self, value: int) -> None:
        self.store.put_table_state("rare", TableState(np.full(64, value, np.uint8)))

    @precondition(lambda self: self.store.version() > 9)
    @rule(seed=st.integers(0, 9))
    def grow(self, seed: int) -> None:
        version = self.store.version()
        ids = np.unique(np.random.default_rng(seed).integers(1000, 2**40, 600))
        update = TableUpdate(ids, np.ones((len(ids), 2), np.float32))
        self.store.commit(Commit(version + 1, {"dynamic": update}, version, {}, time=1000 + 0.7 * version))

    @precondition(lambda self: len(self.readers) < 6)
    @rule(lease=st.sampled_from([1.0, 3.0, 10.0]))
    def pin(self, lease: float) -> None:
        same = [one for one in self.standing() if one.pin.version() == self.store.version()]
        rows = same[0].rows if same else everything(self.store)
        self.readers.append(Reader(self.store.pin(lease_s=lease), self.now + lease, rows))

    @precondition(lambda self: bool(self.standing()) and len(self.readers) < 6)
    @rule(data=st.data())
    def pin_once_more(self, data: st.DataObject) -> None:
        other = data.draw(st.sampled_from(self.standing()))
        pin = self.store.pin(other.pin.version(), 5.0)
        self.readers.append(Reader(pin, self.now + 5.0, other.rows))

    @precondition(lambda self: bool(self.readers))
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        reader = data.draw(st.sampled_from(self.readers))
        reader.pin.close()
        self.readers.remove(reader)
        with pytest.raises(StaleVersion):
            reader.pin.row_count("fixed")
        self.scans = [scan for scan in self.scans if scan.of is not reader]

    @precondition(lambda self: bool(self.standing()))
    @rule(data=st.data(), lease=st.sampled_from([2.0, 20.0]))
    def renew(self, data: st.DataObject, lease: float) -> None:
        reader = data.draw(st.sampled_from(self.standing()))
        reader.pin.renew(lease)
        reader.ends = self.now + lease

    @rule(seconds=st.sampled_from([0.5, 1.0, 4.0]))
    def wait(self, seconds: float) -> None:
        self.now += seconds

    @precondition(lambda self: bool(self.standing()))
    @rule(data=st.data(), table=st.sampled_from(NAMES), block_rows=st.integers(1, 4))
    def begin_to_scan(self, data: st.DataObject, table: str, block_rows: int) -> None:
        reader = data.draw(st.sampled_from(self.standing()))
        self.scans.append(HalfScan(reader, table, reader.pin.scan(table, block_rows)))

    @precondition(lambda self: bool(self.standing()))
    @rule(data=st.data(), table=st.sampled_from(NAMES), block_rows=st.integers(3, 5))
    def scan_while_rows_change(self, data: st.DataObject, table: str, block_rows: int) -> None:
        reader = data.draw(st.sampled_from(self.standing()))
        random, found = np.random.default_rng(block_rows), Rows()
        for block in reader.pin.scan(table, block_rows):
            rows_of(iter([block]), found)
            ids = random.permutation(MOST)[:5]
            self.commit(ids.tolist(), set())
            self.store.delete(table, ids[:2])
        assert found == reader.rows[table][0]

    @precondition(lambda self: bool(self.scans))
    @rule(data=st.data(), blocks=st.integers(1, 3))
    def go_on_with_a_scan(self, data: st.DataObject, blocks: int) -> None:
        scan = data.draw(st.sampled_from(self.scans))
        for _ in range(blocks):
            try:
                block = next(scan.blocks, None)
            except StaleVersion:
                assert scan.of.ends <= self.now
                self.scans.remove(scan)
                return
            if block is None:  # it had given everything, maybe while the pin still held
                assert scan.found == scan.of.rows[scan.table][0]
                self.scans.remove(scan)
                return
            assert scan.of.ends > self.now
            rows_of(iter([block]), scan.found)

    @invariant()
    def every_pin_reads_its_version(self) -> None:
        if not hasattr(self, "readers"):
            return
        ids = np.arange(-1, MOST + 3)
        for reader in self.readers:
            version = reader.pin.version()
            if reader.ends <= self.now:
                with pytest.raises(StaleVersion, match=f"version {version}"):
                    reader.pin.lookup({"fixed": np.arange(3)})
                continue
            assert everything(reader.pin) == reader.rows
            for name, spec in SPECS.items():
                asked = ids[1:-2] if spec.vocabulary_size else ids
                found = reader.pin.lookup({name: asked})[name]
                for one, row, first in zip(asked.tolist(), found, initial_rows(spec, asked), strict=True):
                    held = reader.rows[name][0].get(one)
                    assert row.tobytes() == (first.tobytes() if held is None else held[0])
                if version != self.store.version():
                    np.testing.assert_array_equal(self.store.lookup({name: asked}, version)[name], found)
        assert [pin.version for pin in self.store.pins()] == sorted(one.pin.version() for one in self.standing())

    def standing(self) -> list[Reader]:
        return [reader for reader in self.readers if reader.ends > self.now]

    def teardown(self) -> None:
        if hasattr(self, "store"):
            for reader in self.readers:
                reader.pin.close()
            assert self.store.pins() == ()
            assert all(not table.versions.pinned for table in self.store._tables.values())
            self.store.close()
            self.held.close()
            shutil.rmtree(self.folder, ignore_errors=True)


TestPinsInAnyHistory = PinsInAnyHistory.TestCase
TestPinsInAnyHistory.settings = settings(
    max_examples=examples(30), stateful_step_count=25, deadline=None, suppress_health_check=list(HealthCheck)
)
