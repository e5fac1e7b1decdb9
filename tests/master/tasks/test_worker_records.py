"""What is remembered of workers that have left or failed."""

from elastable.embedding_store.errors import BadInput, ModelError
from elastable.master.api import Refusal, WorkerIdentity
from elastable.master.tasks.worker_records import Refusals, WorkerRecords
from tests.master.fakes import Bench


def test_workers_that_left_without_having_done_anything_are_forgotten() -> None:
    records = WorkerRecords(lambda: 0.0)
    records.joined(WorkerIdentity("useful"))
    records.counted("useful", 10)
    records.left(WorkerIdentity("useful"), 1)
    for number in range(100):
        records.joined(WorkerIdentity(f"w{number}"))
        records.left(WorkerIdentity(f"w{number}"), 2)
    assert set(records._records) == {"useful"}
    assert records.contributors == 1
    gone = records.gone()
    assert [(it.identity.incarnation, it.leases, it.micro_batches) for it in gone][-1:] == [("w99", 2, 0)]
    records.joined(WorkerIdentity("useful"))
    assert records.status(WorkerIdentity("useful"), 0).micro_batches == 1


ONE, OTHER = WorkerIdentity("a", "host", 1), WorkerIdentity("b", "host", 2)


def test_workers_that_say_the_same_are_counted_together() -> None:
    refusals = Refusals()
    refusals.note(ONE, ModelError("another file"))
    refusals.note(ONE, BadInput("other data"))
    refusals.note(OTHER, ModelError("another file"))
    assert refusals.latest() == (
        Refusal(ONE, "BadInput", "other data"),
        Refusal(OTHER, "ModelError", "another file", count=2),
    )


def test_no_more_than_a_few_reasons_are_kept() -> None:
    refusals = Refusals()
    for number in range(100):
        refusals.note(ONE, BadInput(f"{number}" + 2_000 * "."))
    assert [refusal.message[:2] for refusal in refusals.latest()] == [str(number) for number in range(84, 100)]
    assert max(len(refusal.message) for refusal in refusals.latest()) == 1_000


def test_a_master_that_waits_says_why() -> None:
    master = Bench().master
    session = master.join(ONE)
    master.report_failure("a", ModelError("another file"), fatal=False)
    session.close()
    master.report_failure("nobody", BadInput("other data"), fatal=False)
    status = master.status()
    assert status.state == "waiting"
    assert status.refusals == (
        Refusal(ONE, "ModelError", "another file"),
        Refusal(WorkerIdentity("nobody"), "BadInput", "other data"),
    )
