"""Rows that lookups read again and again from files are given frames; a pass over all rows gives frames to none."""

from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, OptimizerSpec, RowBlock, TableSpec
from elastable.embedding_store.composite.partitioned_store import PartitionedStore
from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.tier import MappedRecords, Records
from elastable.embedding_store.engine import table_rows
from elastable.embedding_store.engine.store_tier import StoreTier
from elastable.embedding_store.log.contract import NoLog
from elastable.embedding_store.tables.lookups import lookup_request
from elastable.embedding_store.tiers.files.file_tier import FileTier
from tests.embedding_store.engine.tiered_stores import tiered_store
from tests.embedding_store.tiers.dict_tier import DictTier, Kept

ROWS, DIM = 4_000, 16
WEIGHTS = np.random.default_rng(5).standard_normal((ROWS, DIM), dtype=np.float32)


class CountingTier(FileTier):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder, fsync=False)
        self.asked = list[tuple[int, int]]()

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self.asked += [(len(records.ids), records.rows.shape[1]) for records in wanted]
        return super().read(wanted)

    def mapped(self, table: str) -> MappedRecords | None:
        return None  # so that lookups ask


@pytest.fixture(params=["float32", "float16"])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[tuple[MemoryStore, CountingTier]]:
    """A table with room for a quarter of its rows in memory."""
    tier = CountingTier(tmp_path / "rows")
    row_bytes = (4 if request.param == "float32" else 2) * DIM + 4 * DIM
    with MemoryStore(1) as store:
        store.keep_tier(StoreTier(tier, NoLog(), ROWS * row_bytes // 4), every_s=1e6)
        spec = TableSpec("t", DIM, ROWS, dtype=request.param, optimizer=OptimizerSpec.of("adagrad"))
        store.create_table(spec)
        for ids in np.split(np.arange(ROWS), 20):
            store.put("t", [RowBlock(ids, WEIGHTS[ids], np.ones((len(ids), DIM), np.float32))])
        store.flush()
        yield store, tier


def lookup(store: MemoryStore, ids: Int64) -> None:
    expected = WEIGHTS[ids] if store.specs()["t"].dtype == "float32" else WEIGHTS[ids].astype(np.float16)
    np.testing.assert_array_equal(store.lookup({"t": ids})["t"], expected)


def test_rows_that_come_again_are_read_from_memory(store: tuple[MemoryStore, CountingTier]) -> None:
    memory, tier = store
    hot, every = np.arange(0, ROWS, 8), np.arange(ROWS)
    # Which rows are hot at first depends on when rows were written behind. Frames are given out every 4,096 reads of
    # cold rows, of which a lookup may have but a few, and only as many as one turn of the clock finds.
    for _ in range(3_000):
        tier.asked.clear()
        lookup(memory, hot)
        if not tier.asked:
            break
    assert tier.asked == []
    for part in np.split(every, 8):  # one pass over all rows
        lookup(memory, part)
    assert sum(count for count, _ in tier.asked) >= ROWS - 2_000
    tier.asked.clear()
    lookup(memory, hot)
    assert sum(count for count, _ in tier.asked) < len(hot) // 10


def test_lookups_read_the_weights_alone(store: tuple[MemoryStore, CountingTier]) -> None:
    memory, tier = store
    tier.asked.clear()
    lookup(memory, np.arange(ROWS))
    assert tier.asked
    weights = {"float32": 4 * DIM, "float16": 2 * DIM}[memory.specs()["t"].dtype]
    assert {width for _, width in tier.asked} == {weights}


def test_rows_that_are_deleted_are_read_for_a_pin_alone(store: tuple[MemoryStore, CountingTier]) -> None:
    memory, tier = store
    lookup(memory, np.arange(2_000, ROWS))  # the first rows are cold
    tier.asked.clear()
    assert memory.delete("t", np.arange(100)) == 100
    assert tier.asked == []
    with memory.pin() as pin:
        assert memory.delete("t", np.arange(200, 300)) == 100
        assert sum(count for count, _ in tier.asked) == 100
        np.testing.assert_array_equal(
            pin.lookup({"t": np.arange(200, 300)})["t"],
            WEIGHTS[200:300].astype(np.float16 if memory.specs()["t"].dtype == "float16" else np.float32),
        )


def test_rows_that_were_deleted_since_get_no_frames(tmp_path: Path) -> None:
    """Their positions were counted while they were there, and may be another row's by now, or nobody's."""
    ids = np.arange(ROWS) * 7 - 1
    with MemoryStore(1) as store:
        store.keep_tier(StoreTier(FileTier(tmp_path / "rows", fsync=False), NoLog(), ROWS * 8 * DIM // 4), every_s=1e6)
        store.create_table(TableSpec("t", DIM, None, optimizer=OptimizerSpec.of("adagrad")))
        for part in np.split(np.arange(ROWS), 20):
            store.put("t", [RowBlock(ids[part], WEIGHTS[part], np.ones((len(part), DIM), np.float32))])
            store.flush()
        for _ in range(2):
            np.testing.assert_array_equal(store.lookup({"t": ids[:2_000]})["t"], WEIGHTS[:2_000])
        store.delete("t", ids[:1_000])
        store.flush()
        new = np.arange(500) * 7
        store.put("t", [RowBlock(new, -WEIGHTS[:500], np.ones((500, DIM), np.float32))])
        for _ in range(8):
            np.testing.assert_array_equal(store.lookup({"t": ids[1_000:]})["t"], WEIGHTS[1_000:])
            np.testing.assert_array_equal(store.lookup({"t": new})["t"], -WEIGHTS[:500])


SPECS = {name: TableSpec(name, 4, None) for name in ("a", "b")}


class CountingDicts(DictTier):
    reads = 0

    def read(self, wanted: Sequence[Records]) -> list[Int64]:
        self.reads += 1
        return super().read(wanted)


def test_cold_rows_of_all_requests_are_one_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_rows, "_LEAST_FRAMES", 1)
    kept = Kept()
    values = {name: np.arange(400 * 4, dtype=np.float32).reshape(400, 4) + n for n, name in enumerate(SPECS)}
    with tiered_store(DictTier(kept), NoLog(), 1) as store:
        for name, spec in SPECS.items():
            store.create_table(spec)
            store.put(name, [RowBlock(np.arange(400), values[name], np.empty((400, 0), np.float32))])
    tier = CountingDicts(kept)
    with tiered_store(tier, NoLog(), 1) as store:  # opened again, so that all rows are cold
        parts = [np.arange(start, start + 100) for start in (0, 100, 200)]
        requests = [lookup_request(spec, part) for spec in SPECS.values() for part in parts]
        before = tier.reads
        assert len(list(store.lookup_in_order(iter(requests), store.version()))) == len(requests)
        assert tier.reads - before == 1
        for request in requests:
            np.testing.assert_array_equal(request.out, values[request.table][request.ids])


@pytest.mark.parametrize("count", [1, 2])
def test_what_is_read_ahead_is_near(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows that are not in memory, of one store or of several, while a step runs; those of the lookup are current."""
    monkeypatch.setattr(table_rows, "_LEAST_FRAMES", 1)
    kept, ids = [Kept() for _ in range(count)], np.arange(100)

    def opened() -> tuple[list[CountingDicts], EmbeddingStore]:
        tiers = [CountingDicts(each) for each in kept]
        stores = [tiered_store(tier, NoLog(), 1) for tier in tiers]
        return tiers, stores[0] if count == 1 else PartitionedStore(stores)

    _, store = opened()
    with store:
        store.create_table(SPECS["a"])
        store.put("a", [RowBlock(ids, np.ones((100, 4), np.float32), np.empty((100, 0), np.float32))])
    tiers, store = opened()  # again, so that all rows are cold
    with store:
        store.read_ahead({"a": ids})
        before = [tier.reads for tier in tiers]
        assert all(before)
        np.testing.assert_array_equal(store.lookup({"a": ids})["a"], np.ones((100, 4)))
        assert [tier.reads for tier in tiers] == before
        store.read_ahead({"a": ids})
        store.put("a", [RowBlock(ids[:1], np.zeros((1, 4), np.float32), np.empty((1, 0), np.float32))])
        np.testing.assert_array_equal(store.lookup({"a": ids})["a"][:, 0], ids > 0)
