"""Workers compute the next version while this one is logged; it is not published before."""

import threading
import time
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import StoreFailed, Unavailable
from elastable.embedding_store.log.changes import Change, CommitImages
from elastable.master.api import AsyncPushId, Push, PushOutcome, SyncPushId, Task, WorkerIdentity
from elastable.master.core.hooks import Hooks
from elastable.master.master_options import MasterOptions
from tests.master.fakes import VALIDATION, Ahead, Bench, FakeWorker, Unheard, drive, gradient, job_of
from tests.untyped import Keyword
from tests.waiting import until

WAIT_S = 60.0


class Gate(StoreHistory):
    """A history that appends commits up to a version, and further ones once that is let through; or fails."""

    def __init__(self, folder: Path, upto: int = 0) -> None:
        super().__init__(folder)
        self.upto, self.open, self.fails = upto, threading.Event(), False
        self.waiting = threading.Event()
        self.away: set[int] = set()
        """Versions at which it is away, once each."""

    def append(self, change: Change, version: int) -> None:
        if isinstance(change, CommitImages) and version in self.away:
            self.away.discard(version)
            raise Unavailable("it is away for a moment")
        if isinstance(change, CommitImages) and version > self.upto:
            if self.fails:
                raise StoreFailed("the disk is full")
            self.waiting.set()
            assert self.open.wait(WAIT_S)
        super().append(change, version)


class Patient(FakeWorker):
    def work(self, task: Task) -> None:
        while True:
            try:
                super().work(task)
            except Unavailable:
                time.sleep(0.01)
            else:
                return


class Heard(Hooks):
    """Notes what the store had logged when it heard of a version, or of an evaluation of it."""

    def __init__(self, store: MemoryStore, asks: bool = True) -> None:
        self.store, self.logged, self.asks = store, list[tuple[int, int]](), asks

    def waits_for_log(self, version: int) -> bool:
        return self.asks

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if self.asks:
            self.logged.append((version, self.store.version()))

    def on_evaluation_begin(self, version: int) -> None:
        self.logged.append((version, self.store.version()))

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        self.logged.append((8 * (epoch + 1), self.store.version()))


def bench_with(gate: Gate, options: MasterOptions | None = None, **job: Keyword) -> Bench:
    store = Ahead()
    store.keep_history(gate)
    return Bench(job_of(**{"grads_to_wait": 1, "validation_records": 0, **job}), store=store, options=options)


def open_gate(folder: Path) -> Gate:
    gate = Gate(folder)
    gate.open.set()
    return gate


@dataclass
class Unlogged:
    """A job whose first version is being logged, and workers have it."""

    bench: Bench
    gate: Gate
    push: Push
    second: Task


def driven(held: ExitStack, bench: Bench, gate: Gate) -> None:
    """Runs the master in a thread until the test ends, with a worker "w" that has joined."""
    driving = threading.Thread(target=bench.master.run, args=(Unheard(),))

    def end() -> None:
        gate.open.set()
        bench.master.stop("enough")
        driving.join(WAIT_S)
        bench.store.close()

    held.callback(end)
    driving.start()
    bench.master.join(WorkerIdentity("w", "here", 1))


def unlogged_version(held: ExitStack, folder: Path) -> Unlogged:
    gate = Gate(folder)
    bench = bench_with(gate)
    driven(held, bench, gate)
    master = bench.master
    first, second = master.lease_tasks("w", 2, WAIT_S).tasks
    snapshot = master.pull_dense("w", 0, WAIT_S)
    assert snapshot is not None
    push = gradient(bench.job, first, snapshot, bench.store, SyncPushId(0, first.micro_batch))
    assert master.report_gradient(push).outcome is PushOutcome.ACCEPTED
    following = master.pull_dense("w", 1, WAIT_S)
    assert following is not None
    assert (following.version, second.version) == (1, 1)
    return Unlogged(bench, gate, push, second)


def test_a_worker_gets_the_next_version_before_it_is_logged(held: ExitStack, tmp_path: Path) -> None:
    job = unlogged_version(held, tmp_path / "log")
    master, store = job.bench.master, job.bench.store
    status = master.status()
    assert (status.version, status.records_trained, store.version()) == (0, 0, 0)
    job.gate.open.set()
    until(lambda: master.status().version == 1)
    assert (master.status().records_trained, store.version()) == (3, 1)


def test_nobody_gets_the_version_after_one_that_is_not_logged(held: ExitStack, tmp_path: Path) -> None:
    job = unlogged_version(held, tmp_path / "log")
    master, store = job.bench.master, job.bench.store
    push = replace(job.push, id=SyncPushId(1, job.second.micro_batch))
    assert master.report_gradient(push).outcome is PushOutcome.ACCEPTED
    assert master.pull_dense("w", 2, 0.05) is None
    assert (master.status().version, store.version()) == (0, 0)
    job.gate.open.set()
    snapshot = master.pull_dense("w", 2, WAIT_S)
    assert snapshot is not None
    assert snapshot.version == 2
    until(lambda: store.version() == 2)


def test_a_job_that_is_stopped_ends_once_its_version_is_logged(held: ExitStack, tmp_path: Path) -> None:
    job = unlogged_version(held, tmp_path / "log")
    job.bench.master.stop("enough")
    assert not job.bench.master.ended().done()
    job.gate.open.set()
    assert job.bench.master.ended().result(WAIT_S).version == 1
    assert job.bench.store.version() == 1


def test_an_asynchronous_push_is_confirmed_once_its_version_is_logged(held: ExitStack, tmp_path: Path) -> None:
    gate = Gate(tmp_path / "log")
    bench = bench_with(gate, mode="async")
    store = bench.store
    driven(held, bench, gate)
    (task,) = bench.master.lease_tasks("w", 1, WAIT_S).tasks
    snapshot = bench.master.pull_dense("w", None, WAIT_S)
    assert snapshot is not None
    push = gradient(bench.job, task, snapshot, store, AsyncPushId("w", 1, task.micro_batch))
    reply = bench.master.report_gradient_later(push)
    assert gate.waiting.wait(WAIT_S)
    assert bench.master.pull_dense("w", 1, 0.5) is None
    assert (reply.done(), store.version()) == (False, 0)
    gate.open.set()
    assert reply.result(WAIT_S).outcome is PushOutcome.ACCEPTED
    assert store.version() == 1


@pytest.mark.parametrize("concurrent", [True, False])
def test_versions_are_evaluated_once_they_are_logged(concurrent: bool, tmp_path: Path) -> None:
    gate = open_gate(tmp_path / "log")
    gate.away = {2, 4, 8, 9}
    options = MasterOptions(commit_deadline_s=WAIT_S, evaluate_every=1, concurrent_evaluation=concurrent)
    bench = bench_with(gate, options, validation_records=VALIDATION)
    store, plain = bench.store, Bench(bench.job)
    assert isinstance(store, Ahead)
    heard = Heard(store, asks=False)
    drive(bench, [Patient(bench.master, store)], heard)
    drive(plain, [FakeWorker(plain.master, plain.store)])
    assert not gate.away
    assert len(heard.logged) >= 2
    assert all(version == logged for version, logged in heard.logged)
    assert all(map(np.array_equal, bench.everything(), plain.everything()))
    store.close()


def test_the_numbers_do_not_depend_on_the_log(tmp_path: Path) -> None:
    gate = open_gate(tmp_path / "log")
    logged, plain = bench_with(gate), Bench(job_of(grads_to_wait=1, validation_records=0))
    for bench in (logged, plain):
        drive(bench, [FakeWorker(bench.master, bench.store) for _ in range(2)], Unheard())
    assert all(map(np.array_equal, logged.everything(), plain.everything()))
    logged.store.close()


def test_hooks_hear_of_a_version_once_it_is_logged(tmp_path: Path) -> None:
    gate = open_gate(tmp_path / "log")
    bench = bench_with(gate)
    assert isinstance(bench.store, MemoryStore)
    heard = Heard(bench.store)
    drive(bench, [FakeWorker(bench.master, bench.store)], heard)
    assert heard.logged
    assert all(version == logged for version, logged in heard.logged)
    bench.store.close()


def test_a_job_fails_whose_version_cannot_be_logged_and_its_dense_part_is_that_of_the_last_one(tmp_path: Path) -> None:
    gate = Gate(tmp_path / "log", upto=3)
    gate.fails = True
    bench = bench_with(gate, MasterOptions(commit_deadline_s=0.2))
    worker = FakeWorker(bench.master, bench.store)
    with pytest.raises(StoreFailed, match="full"):
        drive(bench, [worker], Unheard())
    worker.join(timeout=WAIT_S)
    assert (bench.master.status().state, bench.dense.steps()[0].number) == ("failed", 3)
    bench.store.close()
