"""What the release before `TableState` wrote is read: its decay lies in the last 8 bytes of the admission sketch.

`earlier_release.tar.gz` was written by that release: a checkpoint and a file store of one table (adamw, `lazy=False`,
weight decay, admission) after six commits, and what its rows read.
"""

from __future__ import annotations

import tarfile
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store import MemoryStore
from elastable.embedding_store.contract.row_data import TableState
from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.tiers.files.file_tier import FileTier
from elastable.embedding_store.upgrade.file_upgrade import upgrade_folder
from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.weights import restore_weights
from tests.file_stores import file_store

IDS = np.arange(60, dtype=np.int64)


@pytest.fixture
def written(tmp_path: Path) -> Path:
    with tarfile.open(Path(__file__).with_name("earlier_release.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def require_as_written(store: Snapshot, written: Path) -> TableState:
    np.testing.assert_array_equal(store.lookup({"decays": IDS})["decays"], np.load(written / "read.npy"))
    state = store.table_state("decays")
    assert state.admission_counts is not None
    assert len(state.admission_counts) == 16
    assert state.admission_counts.any()
    assert state.untouched_decay == pytest.approx(6 * np.log1p(-0.1 * 0.05), rel=1e-6)
    return state


def test_its_checkpoints_and_file_stores_are_read(written: Path) -> None:
    checkpoint = open_checkpoint(written / "checkpoint")
    assert upgrade_folder(written / "file_store", lambda new: FileTier(new / "rows"), lambda table, rows: None)
    with MemoryStore(threads=1) as store, file_store(written / "file_store") as files:
        restore_tables(checkpoint, store)
        state = require_as_written(store, written)
        assert checkpoint.table_state("decays") == state
        assert require_as_written(files, written) == state
    with file_store(written / "file_store") as again:  # as this release has written it
        assert require_as_written(again, written) == state


def test_its_weights_are_restored_into_a_job_that_went_on(written: Path) -> None:
    checkpoint = open_checkpoint(written / "checkpoint")
    with MemoryStore(threads=1) as store:
        store.create_table(checkpoint.manifest.tables["decays"].spec)
        restore_weights(checkpoint, store, lambda table, ids: None)
        require_as_written(store, written)
