"""A master is killed at every step of a version that its workers already compute on; the next one makes the numbers."""

import shutil
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.engine.store_history import StoreHistory
from elastable.embedding_store.errors import NotJoined
from elastable.embedding_store.log.changes import Change, CommitImages
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import DenseSnapshot, Push, SyncPushId, WorkerIdentity
from elastable.master.commits.version_record import VersionRecord
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from tests.master.fakes import Ahead, Bench, FakeWorker, Unheard, drive, job_of

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


class Stops:
    """Where a thread of a master stops for good, until the test is over."""

    def __init__(self) -> None:
        self.reached, self.over = threading.Event(), threading.Event()

    def here(self) -> None:
        self.reached.set()
        assert self.over.wait(2 * WAIT_S)


class StoppingHistory(StoreHistory):
    """A history that stops before or after the entry of `VERSION`."""

    def __init__(self, folder: Path, before: Stops | None, behind: Stops | None) -> None:
        super().__init__(folder)
        self.before, self.behind = before, behind

    def append(self, change: Change, version: int) -> None:
        mine = isinstance(change, CommitImages) and version == VERSION
        if mine and self.before is not None:
            self.before.here()
        super().append(change, version)
        if mine and self.behind is not None:
            self.behind.here()


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
    store.keep_history(StoppingHistory(folder, stops[1], stops[2] or stops[3]))
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
