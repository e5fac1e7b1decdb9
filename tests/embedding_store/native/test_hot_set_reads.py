"""Rows of hot keys copied by many threads: those that `find` finds, counted as it counts them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import IdOutOfRange
from elastable.embedding_store.native.ids.hot_set import HotSet
from elastable.embedding_store.native.range_pool import RangePool
from tests.file_stores import file_store

SPEC = TableSpec("t", 64, 20_000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))


@pytest.mark.parametrize("threads", [1, 2, 5])
@pytest.mark.parametrize("count", [0, 1, 1024, 1025, 30_000])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("stream", [True, False])
def test_reading_is_finding_and_copying(threads: int, count: int, dense: bool, stream: bool) -> None:
    random = np.random.default_rng(count)
    hot, pool = HotSet(512, dense), RangePool(threads)
    known = random.permutation(2_000)[:400]
    frames, gone, lost = (np.empty(len(known), np.int64) for _ in range(3))
    hot.admit(known, frames, gone, lost)
    keys = random.integers(-5 if dense else 0, 2_000, count)
    rows = random.standard_normal((hot.frames, 64), np.float32)
    frames, cold = np.empty(count, np.int64), np.empty(count, np.int64)
    cold = cold[: hot.find(keys, frames, cold, counted=False)]
    out = np.full((count, 64), 7, np.float32)
    found = hot.read(keys, rows, out, stream, pool)
    pool.close()
    np.testing.assert_array_equal(found, cold)
    np.testing.assert_array_equal(out, np.where(frames[:, None] >= 0, rows[frames], np.float32(7)))


def filled(store: EmbeddingStore) -> EmbeddingStore:
    random = np.random.default_rng(1)
    store.create_table(SPEC)
    ids = np.arange(SPEC.vocabulary_size or 0)
    store.put(
        "t", [RowBlock(ids, random.standard_normal((len(ids), 64), np.float32), np.ones((len(ids), 64), np.float32))]
    )
    return store


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
        with pytest.raises(IdOutOfRange, match="20000"):
            files.lookup({"t": np.array([3, 20_000])})
