"""Tasks ahead of their turn: when the master is asked for more."""

import threading
from collections.abc import Collection
from typing import cast

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.master.api import Lease, MasterApi, ServedMaster, Task, TaskKind
from elastable.worker.runtime import loop
from elastable.worker.runtime.compute import Prepared
from elastable.worker.runtime.loop import DirectFeed, TaskFeed
from elastable.worker.step.id_set import IdSets

_WAIT_S = 60.0


class Asked:
    """A master that gives tasks ahead, and an evaluation to whoever asks again."""

    def __init__(self) -> None:
        self.calls: list[tuple[int, float]] = []
        self.called = threading.Semaphore(0)
        self.stopped: str | None = None

    def not_ready(self) -> str | None:
        return self.stopped

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


def test_a_reader_that_hangs_does_not_keep_who_stops(monkeypatch: pytest.MonkeyPatch) -> None:
    """As of Ctrl-C in `et.fit`: neither the caller nor the end of the process waits for it."""
    monkeypatch.setattr(loop, "_JOIN_S", 0.0)
    hanging, end = threading.Event(), threading.Event()

    def prepare(task: Task) -> Prepared:
        if task.version > 5:
            hanging.set()
            end.wait()
        return Prepared(task, (), cast(IdSets, None), 1)

    feed = DirectFeed(cast(ServedMaster, Asked()), "w", prepare, ahead=4)
    try:
        head = feed.head(0.0)
        assert head is not None
        assert head.task.version == 5
        assert feed.following(head) is None
        assert hanging.wait(_WAIT_S)
        feed.stop()
        (reading,) = (thread for thread in threading.enumerate() if thread.name == "elastable-task-feed")
        assert reading.daemon
    finally:
        end.set()


def test_a_job_that_is_stopped_does_not_wait_for_its_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its stream may be away for as long as the deadline says; meanwhile the thread of the master is this one."""
    monkeypatch.setattr(loop, "_JOIN_S", 0.0)
    monkeypatch.setattr(loop, "_LOOK_EVERY_S", 0.01)
    hanging, end, master = threading.Event(), threading.Event(), Asked()

    def prepare(task: Task) -> Prepared:
        hanging.set()
        end.wait()
        return Prepared(task, (), cast(IdSets, None), 1)

    def stop() -> None:
        assert hanging.wait(_WAIT_S)
        master.stopped = "terminated"

    feed, stopping = DirectFeed(cast(ServedMaster, master), "w", prepare, ahead=4), threading.Thread(target=stop)
    stopping.start()
    try:
        assert feed.head(0.0) is None
    finally:
        end.set()
        feed.stop()
        stopping.join()
