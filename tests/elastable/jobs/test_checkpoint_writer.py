"""Checkpoints during training: what fails is warned of, and made up for by the next."""

import logging
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

import pytest

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import CheckpointError, StoreFailed
from elastable.jobs.master_process import CheckpointWriter
from elastable.master.api import Tensor
from elastable.master.checkpoints.checkpoint import list_checkpoints, open_checkpoint
from elastable.master.checkpoints.restoring import restore_tables
from elastable.master.checkpoints.series import CheckpointSeries
from elastable.master.checkpoints.storage.checkpoint_files import LocalFiles
from elastable.master.tasks.progress import Progress
from tests.master.checkpoints.jobs import DYNAMIC, JOB, commit, created, progress_of, rows


class Disk(LocalFiles):
    """A folder on a disk that may be full, and may wait."""

    def __init__(self, home: Path) -> None:
        super().__init__(home)
        self.full = False
        self.goes_on = threading.Event()
        self.goes_on.set()

    def _sync(self, number: int) -> None:
        assert self.goes_on.wait(60.0)
        if self.full:
            raise OSError(28, "No space left on device")
        super()._sync(number)


def writer_of(store: EmbeddingStore, disk: Disk) -> tuple[CheckpointWriter, CheckpointSeries]:
    series = CheckpointSeries(disk, store)

    def begin(source: Snapshot, dense: Mapping[str, Tensor], progress: Progress) -> Callable[[], str]:
        return series.begin(source, dense, JOB, progress)

    return CheckpointWriter(store, begin), series


def save(writer: CheckpointWriter, store: EmbeddingStore) -> None:
    writer.begin({}, progress_of(store.version()))


def test_training_goes_on_beside_writing_and_full_disks(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(tmp_path)
    with created(MemoryStore(), [DYNAMIC]) as store, MemoryStore() as other:
        writer, series = writer_of(store, disk)
        series.committed(commit(store, {"dynamic": list(range(50))}))
        disk.goes_on.clear()
        save(writer, store)
        series.committed(commit(store, {"dynamic": [1]}))  # while it waits
        disk.goes_on.set()
        writer.wait()
        disk.full = True
        with caplog.at_level(logging.WARNING):
            save(writer, store)
            writer.wait()
        assert "no checkpoint of version 2: checkpoint" in caplog.text
        assert "No space left on device" in caplog.text
        assert disk.names() == ["ckpt-0000000001"]
        disk.full = False
        series.committed(commit(store, {"dynamic": [2]}))
        save(writer, store)
        writer.close()
        found = open_checkpoint(tmp_path)
        assert (found.version, found.manifest.kind, found.manifest.tables["dynamic"].written) == (3, "increment", 2)
        restore_tables(found, other)
        assert rows(other) == rows(store)


def test_the_last_one_raises(tmp_path: Path) -> None:
    disk = Disk(tmp_path)
    disk.full = True
    with created(MemoryStore(), [DYNAMIC]) as store:
        writer, _ = writer_of(store, disk)
        with pytest.raises(CheckpointError, match="No space left"):
            writer.finish({}, progress_of(0))
        writer.close()


def test_training_waits_for_the_one_after_a_pin_was_given_up(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    disk = Disk(tmp_path)
    with created(MemoryStore(), [DYNAMIC]) as store:
        writer, series = writer_of(store, disk)
        pinned: list[Snapshot] = []

        def begin(source: Snapshot, dense: Mapping[str, Tensor], progress: Progress) -> Callable[[], str]:
            write = series.begin(source, dense, JOB, progress)
            if source.pinned:
                pinned.append(source)
                source.close()  # as a store does that keeps too much for it
            return write

        writer = CheckpointWriter(store, begin)
        series.committed(commit(store, {"dynamic": [1]}))
        with caplog.at_level(logging.WARNING):
            save(writer, store)
            writer.wait()
        assert "no checkpoint of version 1" in caplog.text
        save(writer, store)
        assert [one.address for one in list_checkpoints(tmp_path)] == [str(tmp_path / "ckpt-0000000001")]
        assert len(pinned) == 1
        save(writer, store)  # from a pin again
        assert len(pinned) == 2
        writer.close()


def test_a_store_that_cannot_be_pinned_now_ends_no_job(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Away(MemoryStore):
        def pin(self, version: int | None = None, lease_s: float = 60.0) -> Snapshot:
            raise StoreFailed("away for a while")

    with created(Away(), [DYNAMIC]) as store, caplog.at_level(logging.WARNING):
        writer, _ = writer_of(store, Disk(tmp_path))
        save(writer, store)
        writer.close()
    assert "no checkpoint of version 0, it cannot be pinned: away for a while" in caplog.text
