"""What becomes of a push: taken, counted before, too late, or refused by what is wrong with it."""

import re
from dataclasses import replace

import pytest

from elastable.embedding_store.errors import BadInput, ElastableError, FutureVersion
from elastable.master.api import AsyncPushId, BadEvent, Push, PushOutcome, SyncPushId
from elastable.master.commits.push_protocol import NO_TASK, AsyncPushes, PushProtocol, SyncPushes
from elastable.master.master_options import MasterOptions
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from tests.master.fakes import job_of

BAD = BadEvent("clicks", "1-0", "no JSON")
DUPLICATE, STALE = PushOutcome.DUPLICATE, PushOutcome.STALE


def opened(mode: str, uneven: bool = False) -> PushProtocol:
    """Of a job of 2 epochs; each has 8 micro-batches of 3 records, the last one of 2, and two make a version."""
    kind = AsyncPushes if mode == "async" else SyncPushes
    made = kind(Schedule(job_of(mode=mode)), MasterOptions(uneven=uneven), Progress(), lambda: 0.0)
    made.board.open()
    return made


def sync_push(version: int, micro_batch: int, records: int = 3) -> Push:
    return Push(SyncPushId(version, micro_batch), records)


def async_push(sequence: int, micro_batch: int = NO_TASK, records: int = 3, sender: str = "w") -> Push:
    return Push(AsyncPushId(sender, sequence, micro_batch), records)


def taken(pushes: PushProtocol, push: Push, version: int) -> None:
    assert pushes.judge(push, version) is None
    pushes.take(push, skipped=False)


def verdict(pushes: PushProtocol, push: Push, version: int, outcome: PushOutcome, why: str) -> None:
    found = pushes.judge(push, version)
    assert isinstance(found, tuple), found
    assert found[0] is outcome
    assert re.search(why, found[1]), found[1]


def test_a_synchronous_push_counts_once_and_for_its_version_alone() -> None:
    pushes = opened("sync")
    taken(pushes, sync_push(0, 1), 0)
    verdict(pushes, sync_push(0, 1), 0, DUPLICATE, "micro-batch 1 was counted before")
    taken(pushes, sync_push(0, 0), 0)
    ready = pushes.ready()
    assert ready is not None
    assert [ticket.id.micro_batch for ticket in ready] == [0, 1]
    assert not pushes.commit()
    pushes.board.open()
    verdict(pushes, sync_push(0, 0), 1, STALE, "version 0 is committed; the current version is 1")
    taken(pushes, sync_push(1, 2), 1)


@pytest.mark.parametrize(
    ("push", "kind", "said"),
    [
        (sync_push(1, 2), FutureVersion, "push for version 1, which is not there"),
        (sync_push(0, 2), BadInput, "micro-batch 2 is not of version 0, which is made of 0 to 1"),
        (sync_push(0, 1, 2), BadInput, "micro-batch 1 has 3 records, but the push reports 2"),
        (async_push(1), BadInput, "the job is synchronous"),
        (
            replace(sync_push(0, 1), bad_events=(BAD,)),
            BadInput,
            "1 events that could not be read: the job has no stream of events",
        ),
    ],
)
def test_a_synchronous_push_that_cannot_be(push: Push, kind: type[ElastableError], said: str) -> None:
    with pytest.raises(kind, match=said):
        opened("sync").judge(push, 0)


def test_nothing_is_trained_on_the_last_version() -> None:
    pushes = opened("sync")
    for _ in range(8):
        pushes.board.open()
        pushes.commit()
    verdict(pushes, sync_push(8, 16), 8, STALE, "version 8 is the job's last; nothing is trained on it")


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_stream_has_as_many_records_as_its_push_says(mode: str) -> None:
    push = sync_push(0, 1, 2) if mode == "sync" else async_push(1, 1, 2)
    taken(opened(mode, uneven=True), push, 0)


def test_an_asynchronous_push_of_a_task_counts_once_whoever_sends_it() -> None:
    pushes = opened("async")
    push = async_push(1, 0)
    taken(pushes, replace(push, computed_on=0), 0)
    on_its_way = pushes.judge(push, 0)
    assert not isinstance(on_its_way, tuple)
    assert on_its_way is not None
    assert on_its_way.id == push.id
    verdict(pushes, async_push(1, 0, sender="other"), 0, DUPLICATE, "micro-batch 0 was counted before")
    pushes.commit()
    verdict(pushes, push, 1, DUPLICATE, "micro-batch 0 was counted before")


def test_an_asynchronous_push_of_no_task_counts_once_a_sequence() -> None:
    pushes = opened("async")
    for sequence in (1, 2):
        taken(pushes, async_push(sequence), sequence - 1)
        pushes.commit()
    verdict(pushes, async_push(2), 2, DUPLICATE, "push 2 of 'w' was counted before")
    verdict(pushes, async_push(1), 2, STALE, "push 1 of 'w' comes after its push 2")
    taken(pushes, async_push(1, sender="other"), 2)


@pytest.mark.parametrize(
    ("push", "kind", "said"),
    [
        (async_push(1, records=0), BadInput, "a push of 0 records"),
        (async_push(1, -2), BadInput, "micro-batch -2: a push that is of no task says -1"),
        (async_push(0), BadInput, "push 0 of 'w'"),
        (async_push(1, 16), BadInput, "micro-batch 16 is not of this job, which has 0 to 15"),
        (async_push(1, 8), FutureVersion, "micro-batch 8 is of an epoch that has not begun"),
        (async_push(1, 7, 3), BadInput, "micro-batch 7 has 2 records, but the push reports 3"),
        (replace(async_push(1), computed_on=-1), BadInput, "push computed on version -1"),
        (replace(async_push(1), computed_on=1), FutureVersion, "push computed on version 1, which is not there"),
        (sync_push(0, 0), BadInput, "the job is asynchronous"),
        (
            replace(async_push(1), bad_events=(BAD,)),
            BadInput,
            "1 events that could not be read: the job has no stream of events",
        ),
    ],
)
def test_an_asynchronous_push_that_cannot_be(push: Push, kind: type[ElastableError], said: str) -> None:
    with pytest.raises(kind, match=said):
        opened("async").judge(push, 0)


def test_between_epochs_nothing_is_trained() -> None:
    pushes = opened("async")
    for micro_batch in range(8):
        taken(pushes, async_push(micro_batch + 1, micro_batch, 2 if micro_batch == 7 else 3), micro_batch)
        assert pushes.commit() == (micro_batch == 7)
    verdict(pushes, async_push(9, 8), 8, STALE, "an epoch has ended: nothing is trained before the next one begins")
    verdict(pushes, async_push(9), 8, STALE, "an epoch has ended")
    pushes.board.open()
    taken(pushes, async_push(9, 8), 8)


def test_what_a_skipped_push_was_of_is_done() -> None:
    pushes = opened("sync")
    assert pushes.judge(sync_push(0, 0), 0) is None
    assert pushes.take(sync_push(0, 0), skipped=True).push is None
    assert pushes.board.done() == (0,)
