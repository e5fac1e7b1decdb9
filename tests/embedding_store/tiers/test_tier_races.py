"""Many threads on rows that come and go between tiers: none is torn, none is of a wrong version."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np

from elastable.embedding_store.contract.row_data import Commit, TableUpdate
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.errors import StaleVersion
from tests.contracts.store_samples import JOIN_S
from tests.file_stores import file_store

ROWS, THREADS, VERSIONS = 20_000, 6, 12
SPEC = TableSpec("t", 64, ROWS, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd"))


def test_lookups_beside_commits_see_one_version_whole(tmp_path: Path) -> None:
    """Every commit adds one to every row, so a lookup's values are all the same number: its version."""
    done, failures, looked = threading.Event(), list[str](), list[int]()

    def read(seed: int) -> None:
        random = np.random.default_rng(seed)
        while not done.is_set() or seed not in looked:
            ids = (ROWS * random.random(5_000) ** 4).astype(np.int64)
            version = store.version() if seed % 2 else None
            try:
                rows = store.lookup({"t": ids}, version)["t"]
            except StaleVersion:
                continue
            if (rows != rows[0, 0]).any() or version not in (None, int(rows[0, 0])):
                failures.append(f"asked for {version}, read {rows.min()} to {rows.max()}")
            looked.append(seed)

    with file_store(tmp_path / "s", 1 << 20, threads=2) as store:
        store.create_table(SPEC)
        readers = [threading.Thread(target=read, args=(seed,), daemon=True) for seed in range(THREADS)]
        for reader in readers:
            reader.start()
        try:
            for version in range(1, VERSIONS + 1):
                gradients = np.full((ROWS, 64), -1, np.float32)
                store.commit(Commit(version, {"t": TableUpdate(np.arange(ROWS), gradients)}, version, {"t": 1.0}))
        finally:
            done.set()
        for reader in readers:
            reader.join(JOIN_S)
            assert not reader.is_alive()
        assert (store.lookup({"t": np.arange(ROWS)}, VERSIONS)["t"] == VERSIONS).all()
    assert failures == []
    assert set(looked) == set(range(THREADS))
