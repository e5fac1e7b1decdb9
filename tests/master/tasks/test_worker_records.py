"""What is remembered of workers that have left."""

from __future__ import annotations

from elastable.master.api import WorkerIdentity
from elastable.master.tasks.worker_records import WorkerRecords


def test_workers_that_left_without_having_done_anything_are_forgotten() -> None:
    records = WorkerRecords(lambda: 0.0)
    records.joined("useful")
    records.counted("useful", 10)
    records.left(WorkerIdentity("useful"), 1)
    for number in range(100):
        records.joined(f"w{number}")
        records.left(WorkerIdentity(f"w{number}"), 2)
    assert set(records._records) == {"useful"}
    assert records.contributors == 1
    gone = records.gone()
    assert [(it.identity.incarnation, it.leases, it.micro_batches) for it in gone][-1:] == [("w99", 2, 0)]
    records.joined("useful")
    assert records.status(WorkerIdentity("useful"), 0).micro_batches == 1
