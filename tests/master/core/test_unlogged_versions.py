"""Workers compute the next version while this one is logged: it is not published before, and a master may be killed."""

import shutil
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import NotJoined, StoreFailed, Unavailable
from elastable.embedding_store.log.changes import Change, CommitImages
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import AsyncPushId, DenseSnapshot, Push, PushOutcome, SyncPushId, Task, WorkerIdentity
from elastable.master.commits.version_record import VersionRecord
from elastable.master.core.hooks import Hooks
from elastable.master.master_options import MasterOptions
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from tests.master.fakes import VALIDATION, Ahead, Bench, FakeWorker, Unheard, drive, gradient, job_of
from tests.untyped import Keyword
from tests.waiting import until

WAIT_S = 60.0
VERSION = 4
JOB = job_of(grads_to_wait=1, validation_records=0)
SECRET = bytes(range(16))

#: Where the master is killed, and the version that is found.
POINTS = {
    "its rows are computed, and nobody has seen them": VERSION - 1,
    "workers have it, and nothing of it is in the log": VERSION - 1,
    "workers have it, and its entry is in the log in part": VERSION - 1,
    "workers have it, its entry is in the log, and the store does not know": VERSION,
    "it is in the log, and everybody may see it": VERSION,
}


def passes(version: int) -> None:
    """Whatever the version is."""


class WatchedHistory(StoreHistory):
    """A history that says before and after which version's entry it is."""

    def __init__(self, folder: Path, before: Callable[[int], None], behind: Callable[[int], None]) -> None:
        super().__init__(folder)
        self.before, self.behind = before, behind

    def append(self, change: Change, version: int) -> None:
        if not isinstance(change, CommitImages):
            super().append(change, version)
            return
        self.before(version)
        super().append(change, version)
        self.behind(version)


class Gate(WatchedHistory):
    """A history that appends commits up to a version, and further ones once that is let through; or fails."""

    def __init__(self, folder: Path, upto: int = 0) -> None:
        super().__init__(folder, self.let_through, passes)
        self.upto, self.open, self.fails = upto, threading.Event(), False
        self.waiting = threading.Event()
        self.away: set[int] = set()
        """Versions at which it is away, once each."""

    def let_through(self, version: int) -> None:
        if version in self.away:
            self.away.discard(version)
            raise Unavailable("it is away for a moment")
        if version > self.upto:
            if self.fails:
                raise StoreFailed("the disk is full")
            self.waiting.set()
            assert self.open.wait(WAIT_S)


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
    assert " at version 1 of " in job.bench.master.ended().result(WAIT_S)
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


# -- killed at every step


class Stops:
    """Where a thread of a master stops for good, until the test is over."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def here(self, version: int = VERSION) -> None:
        if version != VERSION:
            return
        self.reached.set()
        assert self.over.wait(2 * WAIT_S)


class StoppingStore(Ahead):
    """A store that stops once it has computed `VERSION`."""

    stops: Stops | None = None

    def _show_ahead(self, version: int) -> bool:
        if version == VERSION and self.stops is not None:
            self.stops.here()
        return super()._show_ahead(version)


class StoppingHooks(Unheard):
    """Stops when it hears of `VERSION`, where that is the point."""

    def __init__(self, stops: Stops | None = None) -> None:
        self.stops = stops

    def waits_for_log(self, version: int) -> bool:
        return self.stops is not None and version == VERSION

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version == VERSION and self.stops is not None:
            self.stops.here()


class Late(Unheard):
    """Offers a gradient that was computed on an unlogged version whenever there is a version of its number."""

    def __init__(self, client: MasterClient, late: Push) -> None:
        self.client, self.late, self.refused = client, late, 0

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version <= VERSION:
            self.offer()

    def offer(self) -> None:
        with pytest.raises(NotJoined):
            self.client.report_gradient(self.late)
        self.refused += 1


def killed_at(point: str, folder: Path, held: ExitStack) -> DenseSnapshot | None:
    """Runs a master until it stops at the point; what a worker has of the version then."""
    places = list(POINTS)
    stops = [Stops() if point == place else None for place in places]
    stop = next(stop for stop in stops if stop is not None)
    store = StoppingStore()
    store.stops = stops[0]
    before, behind = (passes if at is None else at.here for at in (stops[1], stops[2] or stops[3]))
    store.keep_history(WatchedHistory(folder, before, behind))
    bench = Bench(JOB, store=store)
    master = bench.master
    master.join(WorkerIdentity("late"))
    worker = FakeWorker(master, store)
    driving = threading.Thread(target=master.run, args=(StoppingHooks(stops[4]),), daemon=True)

    def end() -> None:
        master.stop("the test is over")
        stop.over.set()
        driving.join(WAIT_S)
        worker.join(WAIT_S)
        store.close()

    held.callback(end)
    driving.start()
    worker.start()
    assert stop.reached.wait(WAIT_S)
    seen = point not in (places[0], places[4])
    assert store.version() == (VERSION if point == places[4] else VERSION - 1)
    return master.pull_dense("late", VERSION, WAIT_S) if seen else None


def late_push(like: DenseSnapshot) -> Push:
    """Of another attempt at the version: it would change every number if it counted."""
    dense = tuple(np.full_like(value, 3.0) for value in like.variables)
    slices = {"t": Slices(np.arange(10), np.full((10, 2), 3.0, np.float32))}
    metrics = (np.full((), 9.0, np.float32), np.full((), 3.0, np.float32))
    return Push(SyncPushId(VERSION, VERSION), 3, dense, slices, like.states, metrics, incarnation="late")


@pytest.mark.parametrize("point", POINTS)
def test_the_numbers_are_those_of_a_job_that_was_not_killed(point: str, tmp_path: Path, held: ExitStack) -> None:
    plain = Bench(JOB)
    drive(plain, [FakeWorker(plain.master, plain.store)])
    seen = killed_at(point, tmp_path / "log", held)
    assert seen is None or seen.version == VERSION
    left = tmp_path / "left"
    shutil.copytree(tmp_path / "log", left)
    if "in part" in point:
        segment = max(left.glob("*.log"))
        segment.write_bytes(segment.read_bytes()[:-100])
    store = held.enter_context(MemoryStore())
    store.keep_history(StoreHistory(left))
    kept = store.record()
    assert kept is not None
    record = VersionRecord.from_bytes(kept)
    assert (store.version(), record.progress.version) == (POINTS[point], POINTS[point])
    bench = Bench(JOB, store=store, start=record.progress, tensors=dict(record.dense))
    server = held.enter_context(GrpcServer("127.0.0.1:0", [store_service(store), master_service(bench.master)]))
    client = held.enter_context(MasterClient(server.address, WAIT_S, session=SECRET))
    hooks = Late(client, late_push(seen or plain.dense.snapshot(VERSION)))
    hooks.offer()
    drive(bench, [FakeWorker(bench.master, store)], hooks)
    assert hooks.refused == 1 + VERSION - POINTS[point]
    assert bench.master.status().version == plain.master.status().version
    assert all(map(np.array_equal, bench.everything(), plain.everything()))
