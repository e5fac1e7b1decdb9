"""Lookups of a table of which few rows are in memory, by many threads."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import EmbeddingStore, MemoryStore, OptimizerSpec, TableSpec, lookup_many
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.row_data import RowBlock, UpdateBatch
from elastable.embedding_store.contract.tier import Records
from elastable.embedding_store.errors import IdOutOfRange, StoreBroken
from elastable.embedding_store.log.contract import NoLog
from elastable.embedding_store.tiers.files.file_tier import FileTier
from tests.embedding_store.engine.tiered_stores import tiered_store
from tests.file_stores import file_store

SPEC = TableSpec("t", 64, 20_000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))


def filled(store: EmbeddingStore) -> EmbeddingStore:
    random = np.random.default_rng(1)
    store.create_table(SPEC)
    ids = np.arange(SPEC.vocabulary_size or 0)
    put(store, "t", ids, random.standard_normal((len(ids), 64), np.float32))
    return store


def put(store: EmbeddingStore, table: str, ids: Int64, weights: Float32) -> None:
    """Rows, a few at a time, so that most of them leave memory for the tier again."""
    for start in range(0, len(ids), 500):
        part = slice(start, start + 500)
        store.put(table, [RowBlock(ids[part], weights[part], np.ones((len(ids[part]), 64), np.float32))])
        if isinstance(store, MemoryStore):
            store.flush()


@pytest.mark.parametrize("threads", [1, 3])
def test_a_table_in_files_reads_as_one_in_memory(tmp_path: Path, threads: int) -> None:
    random = np.random.default_rng(2)
    with filled(MemoryStore()) as memory, filled(file_store(tmp_path / "s", 1 << 20, threads=threads)) as files:
        for size in (0, 1, 5_000, 40_000):
            for _ in range(3):  # rows get frames meanwhile
                ids = (20_000 * random.random(size) ** 3).astype(np.int64)
                out = np.empty((size, 64), np.float32)
                files.table("t").lookup(ids, out)
                np.testing.assert_array_equal(out, memory.lookup({"t": ids})["t"])
        for wrong in (20_000, -1, 2**63 - 1, -(2**63)):
            for size in (2, 40_000):
                ids = np.arange(size) % 20_000
                ids[size // 2] = wrong
                with pytest.raises(IdOutOfRange, match=f"{wrong}.*position {size // 2}"):
                    files.lookup({"t": ids})
        some, ids = random.permutation(30_000)[:15_000], random.integers(0, 30_000, 20_000)
        for spec in (
            replace(SPEC, name="few", vocabulary_size=30_000),
            replace(SPEC, name="any", vocabulary_size=None),
        ):
            for store in (memory, files):
                store.create_table(spec)
                put(store, spec.name, some, np.random.default_rng(3).standard_normal((15_000, 64), np.float32))
            for of in (ids, some):
                found, expected = (store.lookup({spec.name: of})[spec.name] for store in (files, memory))
                np.testing.assert_array_equal(found, expected)


@pytest.mark.parametrize(("threads", "mapped"), [(1, True), (3, True), (3, False)])
def test_mapped_files_ask_no_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, threads: int, mapped: bool) -> None:
    """A target whose rows do not lie side by side is read otherwise, as are files that cannot be mapped."""
    asked: list[int] = []

    def read(tier: FileTier, wanted: Sequence[Records]) -> list[Int64]:
        asked.extend(len(records.ids) for records in wanted)
        return reads(tier, wanted)

    reads = FileTier.read
    monkeypatch.setattr(FileTier, "read", read)
    if not mapped:
        monkeypatch.setattr(FileTier, "mapped", lambda tier, table: None)
    ids = np.random.default_rng(4).integers(0, 20_000, 30_000)
    with filled(MemoryStore()) as memory, filled(file_store(tmp_path / "s", 1 << 20, threads=threads)) as files:
        expected = memory.lookup({"t": ids})["t"]
        asked.clear()
        np.testing.assert_array_equal(files.table("t").lookup(ids), expected)
        assert (sum(asked) == 0) is mapped
        asked.clear()
        wider = lookup_many([files.table("t")], [ids], prepend_columns=3)
        np.testing.assert_array_equal(wider[:, 3:], expected)
        assert sum(asked) > 10_000


def test_rows_read_from_files_are_counted_and_those_that_get_frames_are_not(tmp_path: Path) -> None:
    with filled(file_store(tmp_path / "s", 1 << 20, threads=3)) as files:
        assert isinstance(files, MemoryStore)
        table, before = files._tables["t"], files.measures().rows_read["t"]
        frames = table.rows._frames
        assert frames is not None
        expected = 0
        for size in (20_000, 20_000, 300, 40_000, 100):  # some rows come again, and get frames
            ids = np.arange(size) % 20_000
            cold = set(frames.find(ids)[1].tolist())
            files.table("t").lookup(ids)
            expected += len(cold)
            assert files.measures().rows_read["t"] - before == expected
        assert expected > 20_000
        assert files.measures().rows_wanted["t"] == 80_400


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_that_is_torn_in_its_file_is_an_error_for_whichever_thread_reads_it(tmp_path: Path, threads: int) -> None:
    tier = FileTier(tmp_path / "rows", fsync=False)
    with tiered_store(tier, NoLog(), 1 << 20, direct_bytes=1 << 30, threads=threads) as files:
        filled(files)
        files.flush()
        (path,) = (tmp_path / "rows").glob("*.rows")
        content = path.read_bytes()
        path.write_bytes(content[:4096] + bytes(byte ^ 1 for byte in content[4096:]))
        with pytest.raises(StoreBroken, match="corrupt"):
            files.lookup({"t": np.arange(20_000)})
        path.write_bytes(content)
        files.lookup({"t": np.arange(20_000)})


@pytest.mark.parametrize("moved", [False, True])
def test_frames_that_were_found_before_an_update_are_forgotten_when_rows_move(tmp_path: Path, moved: bool) -> None:
    with filled(MemoryStore()) as memory, filled(tiered_store(FileTier(tmp_path / "s"), NoLog(), 1 << 20)) as files:
        assert isinstance(files, MemoryStore)
        assert isinstance(memory, MemoryStore)
        table, positions = files._tables["t"], np.arange(300, 500)
        rows = table.rows
        rows.bring(positions)
        frames = rows.prepare(positions, positions[:0])
        assert frames is not None
        gradients = np.ones((len(positions), 64), np.float32)
        batch = UpdateBatch(positions, positions, gradients, 0, 0.1, frames=frames)
        if moved:
            rows._cold.behind.budget.declare("another table", 1 << 19, lambda share: None)
            rows.bring(np.arange(500, 700))
        for start in (0, 120):
            rows.update(batch.part(start, start + 120))
        expected = memory._tables["t"]
        expected.rows.update(UpdateBatch(positions, positions, gradients, 0, 0.1))
        everywhere = np.arange(1_000)
        for ours, theirs in zip(rows.block(everywhere), expected.rows.block(everywhere), strict=True):
            np.testing.assert_array_equal(ours, theirs)
        assert rows.changed >= len(positions)
