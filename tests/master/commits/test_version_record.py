"""What is recorded with a version: the very place and the very dense part, in the store's own moment."""

from collections.abc import Mapping

import ml_dtypes
import numpy as np
import pytest

from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import CheckpointError
from elastable.master.api import JobSpec
from elastable.master.commits.version_record import VersionRecord, job_as_json
from elastable.master.core.hooks import Hooks
from elastable.master.tasks.progress import Progress
from tests.master.fakes import Bench, FakeWorker, StopAt, drive, job_of
from tests.untyped import Keywords


class Keeping(MemoryStore):
    """A store in memory that keeps records, as one does that outlives its committer."""

    keeps_records = True

    kept: bytes | None = None

    def commit(self, commit: Commit) -> None:
        assert commit.record is not None
        super().commit(commit)
        self.kept = commit.record

    def record(self) -> bytes | None:
        return self.kept

    def recover(self, version: int | None = None) -> int:
        return 0


class Compare(Hooks):
    """At every version: what was recorded is what is current."""

    def __init__(self, bench: Bench, store: Keeping, assigns: bool) -> None:
        self.bench, self.store, self.versions, self.assigns = bench, store, 0, assigns

    def may_assign(self) -> bool:
        return self.assigns

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        assert self.store.kept is not None
        record = VersionRecord.from_bytes(self.store.kept)
        standing = self.bench.master.progress()
        assert same(record.progress, standing), (record.progress, standing)
        assert record.progress.version == version
        assert record.job["job"] == "test"
        tensors = self.bench.dense.tensors()
        assert record.dense.keys() == tensors.keys()
        for key, tensor in tensors.items():
            np.testing.assert_array_equal(record.dense[key], tensor, strict=True)
        self.versions += 1


def same(a: Progress, b: Progress) -> bool:
    tensors = zip(a.metrics, b.metrics, strict=True)
    others = ("version", "evaluated", "records", "epoch", "done", "sequences", "logs")
    return all(x.dtype == y.dtype and np.array_equal(x, y) for x, y in tensors) and all(
        getattr(a, name) == getattr(b, name) for name in others
    )


@pytest.mark.parametrize("assigns", [False, True])
@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_record_is_of_the_very_version_that_it_stands_with(mode: str, assigns: bool) -> None:
    store = Keeping()
    bench = Bench(job_of(mode=mode), store=store)
    hooks = Compare(bench, store, assigns)
    drive(bench, [FakeWorker(bench.master, store) for _ in range(3)], hooks)
    assert hooks.versions == bench.master.progress().version > 4


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_job_goes_on_from_a_record(mode: str) -> None:
    """Killed at once after any version: another master takes over, and in sync mode nothing differs in the end."""
    undisturbed = Bench(job_of(mode=mode))
    drive(undisturbed, [FakeWorker(undisturbed.master, undisturbed.store)])
    store = Keeping()
    start, tensors, masters = Progress(), None, 0
    while True:
        bench = Bench(job_of(mode=mode), store=store, start=start, tensors=tensors)
        drive(bench, [FakeWorker(bench.master, store)], StopAt(bench, start.version + 2))
        masters += 1
        if bench.master.stop_reason is None:
            break
        assert store.kept is not None
        record = VersionRecord.from_bytes(store.kept)
        start, tensors = record.progress, dict(record.dense)
    assert masters > 3
    assert bench.master.progress().records == undisturbed.master.progress().records
    if mode == "sync":
        for ours, theirs in zip(bench.everything(), undisturbed.everything(), strict=True):
            np.testing.assert_array_equal(ours, theirs, strict=True)


def test_any_tensor_comes_back_to_the_bit() -> None:
    dense: Keywords = {
        "variables/00000": np.array([[1.5, -0.0], [np.nan, np.inf]], np.float32).T,
        "states/00000": np.array(3, np.int64),
        "optimizer/00000": np.arange(3).astype(ml_dtypes.bfloat16),
        "optimizer/00001": np.zeros((0, 4), bool),
    }
    progress = Progress(7, True, 21, (np.array([0.1, 2.0]), np.array(4)), 1, (3, 5), {"a": 9}, {"loss": 0.1})
    job = JobSpec(job="j", store_url="redis://user:secret@here:6379")
    record = VersionRecord(job_as_json(job), progress, dense).to_bytes()
    assert b"secret" not in record
    found = VersionRecord.from_bytes(record)
    assert same(found.progress, progress)
    for key, tensor in dense.items():
        assert found.dense[key].dtype == tensor.dtype
        assert found.dense[key].tobytes() == tensor.tobytes()


@pytest.mark.parametrize("record", [b"", b"x" * 40, VersionRecord({}, Progress(), {}).to_bytes()[:-3]])
def test_other_bytes_are_refused(record: bytes) -> None:
    with pytest.raises(CheckpointError, match=f"{len(record)} bytes in the store"):
        VersionRecord.from_bytes(record)
