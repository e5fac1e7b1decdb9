"""Lookups of a table of which few rows are in memory, by many threads."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import IdOutOfRange
from tests.file_stores import file_store

SPEC = TableSpec("t", 64, 20_000, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.1))


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
