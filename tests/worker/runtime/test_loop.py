"""The worker's loop against real masters over real connections, which are cut; and masters that are started again."""

import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, nullcontext
from dataclasses import replace

import keras
import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.row_data import FlushStatus
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import (
    BadGradient,
    ElastableError,
    FutureVersion,
    JobFailed,
    ShardLost,
    Unavailable,
)
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_source import SharedSource
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.api import JobSpec, Push, PushReply, TaskKind, WorkerIdentity
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_master import Master
from elastable.master.model.dense import DenseState
from elastable.master.model.discovery import create_tables, discover_tables
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.rpc.client import MasterClient, RemoteSession
from elastable.master.rpc.master_service import master_service
from elastable.worker.layers.embedding import Embedding
from elastable.worker.readers.batch.reader import Batch
from elastable.worker.readers.numpy_reader import NumpyReader
from elastable.worker.runtime import work_here
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.loop import Worker
from elastable.worker.runtime.work_here import WorkHere
from elastable.worker.runtime.worker_measures import WorkerMeasures
from elastable.worker.user_model.build import build_model, sample_batch
from tests.ports import free_address
from tests.tcp_proxy import tcp_proxy

RECORDS = 640
IDS = np.random.default_rng(0).integers(0, 50, (RECORDS, 3))
LABELS = (IDS.sum(axis=1) % 2).astype(np.float32)[:, np.newaxis]
READER = NumpyReader(IDS, LABELS)
SAMPLE = sample_batch(READER)
JOB = JobSpec(job="job", micro_batch_size=16, train_records=RECORDS, epochs=2)
VERSIONS = 80


def _model() -> keras.Model:
    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,), dtype="int64")
    flat = keras.layers.Flatten()(Embedding(50, 4, name="items")(inputs))
    flat = keras.layers.BatchNormalization()(flat)
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.2)(flat)))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


def built() -> keras.Model:
    model = _model()
    build_model(model, SAMPLE)
    return model


class Life:
    """One start of a job's master: from version 0, whatever an earlier one had reached."""

    def __init__(
        self, job: JobSpec = JOB, address: str = "", shared: bool = False, store: MemoryStore | None = None
    ) -> None:
        self.model = model = built()
        self.store = store or (SharedMemoryStore() if shared else MemoryStore())
        create_tables(self.store, discover_tables(model, 0))
        self.master = Master(job, self.store, DenseState(model), ModelMetrics(model))
        services = [store_service(self.store), master_service(self.master, channels_of(self.store))]
        self.server = GrpcServer(address or free_address(), services)  # where another life may begin
        self.address = self.server.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def worker(self, reader: NumpyReader = READER, measures: WorkerMeasures | None = None) -> WorkHere:
        """For this thread."""
        of_job = self.master.job, {TaskKind.TRAIN: reader}, SAMPLE, self.store, self.store.specs()
        computer = MicroBatchComputer(self.model, *of_job, shares_model=True)
        return WorkHere(self.master, computer, self.store, deadline_s=3600.0, measures=measures)

    def run(self, hooks: Hooks | None = None, here: bool = False) -> None:
        """Until its end; `here`: with a worker in this thread."""
        try:
            if here:
                with closing(self.worker()) as work:
                    self.master.run(hooks, work)
            else:
                self.master.run(hooks)
            give_up = time.monotonic() + 60
            while self.master.status().workers and time.monotonic() < give_up:
                time.sleep(0.02)  # they are to hear that the job is over
        finally:
            self.server.stop(0)

    def die(self) -> None:
        """As a process does: connections break, nobody hears of it, and what it held is gone."""
        self.server.stop(0)
        self.master.stop("dead")
        self.store.close()

    def rows(self) -> np.ndarray:
        return self.store.lookup({"items": np.arange(50)})["items"]


class Working:
    def __init__(self, worker: Worker, client: MasterClient, source: RowSource) -> None:
        self.failures: list[ElastableError] = []
        self.worker, self.client, self._source = worker, client, source
        self._thread = threading.Thread(target=self._work, daemon=True)

    def start(self) -> "Working":
        self._thread.start()
        return self

    def _work(self) -> None:
        try:
            self.worker.run()
        except ElastableError as error:
            self.failures.append(error)

    def end(self) -> list[ElastableError]:
        self._thread.join(timeout=90)
        self._source.close()
        self.client.close()
        assert not self._thread.is_alive()
        return self.failures


def worker_of(
    address: str, kind: str = "grpc", deadline_s: float = 30.0, client_s: float = 30.0, rows_of: str = ""
) -> Working:
    """A worker of the master at that address, which reads rows in that way; or those of another master."""
    client = MasterClient(address, deadline_s=client_s)
    session = client.join(identity := WorkerIdentity("worker"))
    source: RowSource = (MasterClient(rows_of, deadline_s=30.0) if rows_of else client).store()
    if kind == "shared":
        client.share_memory()
        source = SharedSource(client.store(), required=True)
    computer = MicroBatchComputer(built(), session.job, {TaskKind.TRAIN: READER}, SAMPLE, source, source.specs())
    return Working(Worker(client, computer, source, session, identity, deadline_s=deadline_s), client, source)


class At(Hooks):
    """Calls something at some versions, before the next one begins; it must not wait for the job."""

    def __init__(self, versions: set[int], call: Callable[[], object]) -> None:
        self._versions, self._call = versions, call

    def on_version(self, version: int, logs: object) -> None:
        if version in self._versions:
            self._call()


def dies(life: Life, version: int, then: Callable[[], object]) -> At:
    """Ends a master's life at a version, as if it were killed between two commits."""

    def die() -> None:
        life.die()
        then()

    return At({version}, die)


@contextmanager
def running(life: Life, hooks: Hooks) -> Iterator[None]:
    """A master that goes on until the block ends."""
    thread = threading.Thread(target=lambda: life.run(hooks), daemon=True)
    thread.start()
    yield
    life.master.stop("enough")
    thread.join(timeout=60)


@pytest.mark.parametrize("error", [Unavailable("away"), ShardLost("shard 1 of 2 is lost")])
def test_nobody_waits_for_a_master_that_has_ended_to_hear_of_a_lost_store(
    error: ElastableError, caplog: pytest.LogCaptureFixture
) -> None:
    life = Life()
    working = worker_of(life.address)
    worker, working.client._connection.deadline_s = working.worker, 0.2
    life.server.stop(0.0)
    session = worker._session
    assert isinstance(session, RemoteSession)
    assert session._ended.wait(60)
    worker._report(error)
    assert "could not be informed" not in caplog.text
    worker._report(BadGradient("of the model"))
    assert "could not be informed" in caplog.text


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    life = Life()
    working = worker_of(life.address).start()
    life.run()
    assert working.end() == []
    return life.rows()


def test_a_worker_whose_connection_is_cut_joins_again_and_the_numbers_are_the_same(expected: np.ndarray) -> None:
    life = Life()
    with tcp_proxy(life.port) as proxy:
        cuts: list[int] = []
        working = worker_of(f"127.0.0.1:{proxy.port}").start()
        life.run(At({5, 12, 13, 30}, lambda: cuts.append(proxy.cut())))
        assert working.end() == []
    assert len(cuts) == 4
    assert max(cuts) >= 1, "no connection was there to be cut"
    assert life.master.status().version == VERSIONS
    np.testing.assert_array_equal(life.rows(), expected)


def test_a_master_that_stays_away_is_given_up_by_name_after_the_deadline() -> None:
    life = Life()
    with tcp_proxy(life.port) as proxy:
        working = worker_of(f"127.0.0.1:{proxy.port}", deadline_s=6.0, client_s=6.0).start()
        with running(life, At({5}, proxy.close)):
            (failure,) = working.end()
    assert isinstance(failure, Unavailable)
    assert f"127.0.0.1:{proxy.port}" in str(failure)


@pytest.mark.parametrize(
    ("job", "reasons"),
    [
        (replace(JOB, job="second"), ["another job now (second); this worker was in job"]),
        (
            replace(JOB, seed=1, intra_op_threads=2),
            ["otherwise now (seed was 0 and is 1; intra_op_threads was 1 and is 2)", "start this worker again"],
        ),
    ],
)
def test_a_worker_does_not_carry_on_in_another_job(job: JobSpec, reasons: list[str]) -> None:
    """A fresh master at the same address runs another job: its versions mean other numbers."""
    first, other = Life(), Life(job)
    with tcp_proxy(first.port) as proxy:
        working = worker_of(f"127.0.0.1:{proxy.port}").start()

        def replaced() -> None:
            proxy.server_port = other.port
            first.die()

        first.run(At({5}, replaced))
        (failure,) = working.end()
    other.server.stop(0)
    assert other.master.status().version == 0
    assert isinstance(failure, JobFailed)
    assert all(reason in str(failure) for reason in reasons)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("kind", ["shared", "grpc"])
def test_a_worker_goes_back_with_its_master_and_the_numbers_are_the_same(kind: str, expected: np.ndarray) -> None:
    """The first dies at version 50, the second at 23; the third is at another address of the list."""
    shared = kind == "shared"
    lives = [Life(shared=shared)]
    spare = Life()
    spare.server.stop(0)  # its address, where nobody listens yet
    working = worker_of(f"{lives[0].address},{spare.address}", kind).start()

    def again(address: str) -> None:
        time.sleep(0.3)
        lives.append(Life(address=address, shared=shared))

    lives[0].run(dies(lives[0], 50, lambda: again(lives[0].address)))
    lives[1].run(dies(lives[1], 23, lambda: again(spare.address)))
    lives[2].run()
    assert working.end() == []
    assert lives[2].master.status().version == VERSIONS
    assert lives[2].master.status().records_trained == 2 * RECORDS
    np.testing.assert_array_equal(lives[2].rows(), expected)


def test_a_push_to_a_master_that_was_started_again_in_the_meantime(
    expected: np.ndarray, monkeypatch: pytest.MonkeyPatch
) -> None:
    """That master knows nobody yet: the worker joins it and computes the micro-batch again."""
    lives = [Life()]
    plain = MasterClient.report_gradient

    def late(client: MasterClient, push: Push) -> PushReply:
        if len(lives) == 1 and lives[0].master.status().version == 20:
            lives[0].die()
            lives.append(Life(address=lives[0].address))
            began.set()
        return plain(client, push)

    began = threading.Event()
    monkeypatch.setattr(MasterClient, "report_gradient", late)
    working = worker_of(lives[0].address).start()
    lives[0].run()
    assert began.wait(60)
    lives[1].run()
    assert working.end() == []
    np.testing.assert_array_equal(lives[1].rows(), expected)


def test_a_worker_of_an_asynchronous_job_begins_anew(expected: np.ndarray) -> None:
    job = replace(JOB, mode="async", staleness_bound=2)
    first, again = Life(job), []
    working = worker_of(first.address).start()
    first.run(dies(first, 50, lambda: again.append(Life(job, first.address))))
    (second,) = again
    second.run()
    assert working.end() == []
    assert second.master.status().records_trained == 2 * RECORDS
    # With one worker and nothing lost, an asynchronous job is the synchronous one.
    np.testing.assert_array_equal(second.rows(), expected)


def test_a_master_that_is_never_where_its_store_is_is_given_up() -> None:
    """No restart: its rows stay at an earlier version for longer than the deadline."""
    behind, life, seen = Life(), Life(), list[int]()
    working = worker_of(life.address, deadline_s=5.0, rows_of=behind.address).start()
    with running(life, At({*range(2, VERSIONS)}, lambda: seen.append(1))):
        (failure,) = working.end()
    behind.server.stop(0)
    assert isinstance(failure, FutureVersion)
    assert not seen, "its rows are not those of a later version"


# A worker in its master's thread


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_in_its_masters_thread_the_numbers_are_the_same(mode: str, expected: np.ndarray) -> None:
    life = Life(replace(JOB, mode=mode))
    life.run(here=True)
    assert life.master.contributors == 1
    np.testing.assert_array_equal(life.rows(), expected)


def test_another_worker_joins_the_one_in_its_masters_thread(expected: np.ndarray) -> None:
    life, others = Life(), list[Working]()

    def another() -> None:
        others.append(worker_of(life.address).start())
        give_up = time.monotonic() + 60
        while not all(worker.leases for worker in life.master.status().workers) and time.monotonic() < give_up:
            time.sleep(0.02)

    life.run(At({5}, another), here=True)
    assert others[0].end() == []
    assert life.master.contributors == 2
    np.testing.assert_array_equal(life.rows(), expected)


class _Tiered(MemoryStore):
    """A store whose rows may be cold, as it says, and that counts how often it is to bring some near."""

    asked = 0

    def flush_status(self) -> FlushStatus:
        return FlushStatus(0, 0, 0, 0, 0, 0.0, None)

    def read_ahead(self, ids: Mapping[str, Int64]) -> None:
        self.asked += 1


def test_cold_rows_of_the_next_version_are_read_while_the_step_runs(expected: np.ndarray) -> None:
    life = Life(store=(store := _Tiered()))
    life.run(here=True)
    assert 0 < store.asked < VERSIONS
    np.testing.assert_array_equal(life.rows(), expected)


class _Away(MemoryStore):
    """A store that answers no lookup."""

    asked: Callable[[], object]

    def lookup(self, ids: object, version: int | None = None) -> dict[str, np.ndarray]:
        self.asked()
        raise Unavailable("away")


@pytest.mark.parametrize("failed", [False, True])
def test_a_job_that_ends_does_not_wait_for_the_rows_of_its_thread(failed: bool) -> None:
    """The deadline of the lookup is an hour."""
    store = _Away()
    life = Life(store=store)

    def end() -> None:
        if failed:
            life.master.report_failure("shard", ShardLost("shard 1 of 2 is lost"), fatal=True)
        else:
            life.master.stop("enough")

    store.asked = lambda: threading.Thread(target=end).start()
    with pytest.raises(ShardLost, match="shard 1 of 2") if failed else nullcontext():
        life.run(here=True)
    assert life.master.status().version == 0


class _Hanging(NumpyReader):
    """A reader that does not answer, from its third micro-batch on."""

    def __init__(self) -> None:
        super().__init__(IDS, LABELS)
        self.left, self.hanging, self.end = 2, threading.Event(), threading.Event()

    def take(self, indices: Int64) -> Batch:
        self.left -= 1
        if self.left < 0:
            self.hanging.set()
            self.end.wait()
        return super().take(indices)


def test_a_job_that_is_stopped_waits_for_no_reader(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by Ctrl-C in `et.fit`, of a stream that is away: neither the caller nor the end of the process waits."""
    monkeypatch.setattr(work_here, "_JOIN_S", 0.0)
    life, reader = Life(), _Hanging()

    def stop() -> None:
        assert reader.hanging.wait(60)
        life.master.stop("terminated")

    stopping = threading.Thread(target=stop)
    stopping.start()
    try:
        with closing(life.worker(reader)) as work:
            life.master.run(work_here=work)
        assert life.master.status().version <= 2
        (reading,) = (thread for thread in threading.enumerate() if thread.name == "elastable-task-feed")
        assert reading.daemon
    finally:
        reader.end.set()
        stopping.join()
        life.server.stop(0)


def test_a_micro_batch_leaves_the_masters_model_as_it_was() -> None:
    """Between the micro-batches of a version a job may be interrupted, and writes a checkpoint then."""
    life, counted = Life(replace(JOB, grads_to_wait=2)), WorkerMeasures()
    before = list(map(np.copy, life.model.get_weights()))
    with closing(life.worker(measures=counted)) as work:

        def work_once() -> bool:
            worked = work()
            life.master.stop("interrupted")
            return worked

        life.master.run(work_here=work_once)
    life.server.stop(0)
    assert counted.micro_batches.totals() == {("train", "counted"): 1}
    for one, other in zip(life.model.get_weights(), before, strict=True):
        np.testing.assert_array_equal(one, other)
