"""Tasks ahead of their turn: when the master is asked for more."""

import threading
from collections.abc import Collection
from typing import cast

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.master.api import Lease, MasterApi, Task, TaskKind
from elastable.worker.runtime import loop
from elastable.worker.runtime.compute import Prepared
from elastable.worker.runtime.loop import TaskFeed
from elastable.worker.step.id_set import IdSets

_WAIT_S = 60.0


class Asked:
    """A master that gives tasks ahead, and an evaluation to whoever asks again."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.called = threading.Semaphore(0)

    def lease_tasks(self, incarnation: str, want: int, wait_s: float, holding: Collection[Task] | None = None) -> Lease:
        self.calls.append((want, wait_s))
        self.called.release()
        if not holding:
            return Lease(tuple(Task(version, TaskKind.TRAIN, version, 0, 0, 1) for version in range(5, 5 + want)))
        return Lease((Task(4, TaskKind.EVALUATE, 0, 0, 0, 1),)) if len(holding) == 4 else Lease()


def test_the_master_is_asked_at_once_when_nothing_that_is_there_can_be_done(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(loop, "_LOOK_EVERY_S", 600.0)
    master = Asked()

    def prepare(task: Task) -> Prepared:
        return Prepared(task, (), cast(IdSets, None), 1)

    feed = TaskFeed(cast(MasterApi, master), "w", prepare, ahead=4)
    feed.start()
    try:
        assert master.called.acquire(timeout=_WAIT_S)
        while (head := feed.head(_WAIT_S)) is None or len(feed._ready) < 4:
            pass
        assert head.task.version == 5
        feed.idle()
        assert master.called.acquire(timeout=_WAIT_S)
        while feed.head(_WAIT_S) is head:
            pass
        first = feed.head(_WAIT_S)
        assert first is not None
        assert first.task.kind is TaskKind.EVALUATE
    finally:
        feed.stop()
    assert [want for want, _ in master.calls] == [4, 0]
    assert all(wait_s > 0 for _, wait_s in master.calls)  # the master may have something in a moment


def test_a_feed_that_failed_is_not_finished() -> None:
    """A worker that took it for finished would end in silence, and its job wait for ever."""

    def prepare(task: Task) -> Prepared:
        raise BadInput("the file is gone")

    feed = TaskFeed(cast(MasterApi, Asked()), "w", prepare, ahead=4)
    feed.start()
    feed._thread.join(_WAIT_S)
    assert not feed.finished()
    with pytest.raises(BadInput, match="the file is gone"):
        feed.head(_WAIT_S)
