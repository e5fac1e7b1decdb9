"""A worker whose master is started again: at an earlier version, at another address, with other memory."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from elastable.embedding_store.closing import Closing
from elastable.embedding_store.contract.row_source import RowSource
from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import ElastableError, FutureVersion, JobFailed
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_source import SharedSource
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.api import JobSpec, Push, PushReply, TaskKind, WorkerIdentity
from elastable.master.jobs.hooks import Hooks
from elastable.master.jobs.job_master import Master
from elastable.master.keras.dense import DenseState
from elastable.master.keras.discovery import create_tables, discover_tables
from elastable.master.keras.metrics import ModelMetrics
from elastable.master.master_options import MasterOptions
from elastable.master.wire.client import MasterClient
from elastable.master.wire.master_service import master_service
from elastable.worker.models.build import build_model, sample_batch
from elastable.worker.readers import NumpyReader
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.loop import Worker
from tests.ports import free_address
from tests.tcp_proxy import tcp_proxy
from tests.worker.runtime.test_loop import IDS, LABELS, RECORDS, _model

READER = NumpyReader(IDS, LABELS)
SAMPLE = sample_batch(READER)
JOB = JobSpec(job="job", micro_batch_size=16, train_records=RECORDS, epochs=2)
VERSIONS = 80


class Life:
    """One start of a job's master: from version 0, whatever an earlier one had reached."""

    def __init__(self, job: JobSpec = JOB, address: str = "", shared: bool = False) -> None:
        model = _model()
        build_model(model, SAMPLE)
        self.store: MemoryStore = SharedMemoryStore() if shared else MemoryStore()
        create_tables(self.store, discover_tables(model, 0))
        options = MasterOptions(no_worker_timeout_s=60)
        self.master = Master(job, self.store, DenseState(model), ModelMetrics(model), options=options)
        services = [store_service(self.store), master_service(self.master, channels_of(self.store))]
        self.server = GrpcServer(address or free_address(), services)  # where another life may begin
        self.address = self.server.address

    @property
    def port(self) -> int:
        return int(self.address.rpartition(":")[2])

    def run(self, hooks: Hooks | None = None) -> None:
        try:
            self.master.run(hooks)
            give_up = time.monotonic() + 60
            while self.master.status().workers and time.monotonic() < give_up:
                time.sleep(0.02)  # they are to hear that the job is over
        finally:
            self.server.stop(0)

    def die(self) -> None:
        """As a process does: connections break, nobody is told anything, and what it held is gone."""
        self.server.stop(0)
        self.master.stop("dead")
        self.store.close()

    def rows(self) -> np.ndarray:
        return self.store.lookup({"items": np.arange(50)})["items"]


class Working:
    """A worker at work in a thread."""

    def __init__(self, worker: Worker, *held: Closing) -> None:
        self.failures: list[ElastableError] = []
        self._worker, self._held = worker, held
        self._thread = threading.Thread(target=self._work, daemon=True)
        self._thread.start()

    def _work(self) -> None:
        try:
            self._worker.run()
        except ElastableError as error:
            self.failures.append(error)

    def end(self) -> None:
        self._thread.join(timeout=90)
        for one in self._held:
            one.close()
        assert not self._thread.is_alive()


def at_work(address: str, kind: str, deadline_s: float = 30.0) -> Working:
    """A worker of the master at that address, which reads rows in that way."""
    client = MasterClient(address, deadline_s=deadline_s)
    session = client.join(identity := WorkerIdentity("worker"))
    source: RowSource = client.store()
    if kind == "shared":
        client.share_memory()
        source = SharedSource(client.store(), required=True)
    model = _model()
    build_model(model, SAMPLE)
    computer = MicroBatchComputer(model, session.job, {TaskKind.TRAIN: READER}, SAMPLE, source, source.specs())
    return Working(Worker(client, computer, source, session, identity, deadline_s=deadline_s), source, client)


class Dies(Hooks):
    """Ends a master's life at a version, as if it were killed between two commits."""

    def __init__(self, life: Life, version: int, then: Callable[[], object]) -> None:
        self._life, self._version, self._then = life, version, then

    def on_version(self, version: int, logs: object) -> None:
        if version == self._version:
            self._life.die()
            self._then()


@pytest.fixture(scope="module")
def expected() -> np.ndarray:
    life = Life()
    working = at_work(life.address, "grpc")
    life.run()
    working.end()
    assert working.failures == []
    return life.rows()


@pytest.mark.parametrize("kind", ["shared", "grpc"])
def test_a_worker_goes_back_with_its_master_and_the_numbers_are_the_same(kind: str, expected: np.ndarray) -> None:
    """The first dies at version 50, the second at 23; the third stands at another address of the list."""
    shared = kind == "shared"
    lives = [Life(shared=shared)]
    spare = Life()
    spare.server.stop(0)  # its address, where nobody listens yet
    working = at_work(f"{lives[0].address},{spare.address}", kind)

    def again(address: str) -> None:
        time.sleep(0.3)
        lives.append(Life(address=address, shared=shared))

    lives[0].run(Dies(lives[0], 50, lambda: again(lives[0].address)))
    lives[1].run(Dies(lives[1], 23, lambda: again(spare.address)))
    lives[2].run()
    working.end()
    assert working.failures == []
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
    working = at_work(lives[0].address, "grpc")
    lives[0].run()
    assert began.wait(60)
    lives[1].run()
    working.end()
    assert working.failures == []
    np.testing.assert_array_equal(lives[1].rows(), expected)


def test_a_worker_of_an_asynchronous_job_begins_anew(expected: np.ndarray) -> None:
    job = replace(JOB, mode="async", staleness_bound=2)
    first, again = Life(job), []
    working = at_work(first.address, "grpc")
    first.run(Dies(first, 50, lambda: again.append(Life(job, first.address))))
    (second,) = again
    second.run()
    working.end()
    assert working.failures == []
    assert second.master.status().records_trained == 2 * RECORDS
    # With one worker and nothing lost, an asynchronous job is the synchronous one.
    np.testing.assert_array_equal(second.rows(), expected)


def test_a_worker_does_not_carry_on_in_a_job_with_other_numbers() -> None:
    first, other = Life(), Life(replace(JOB, seed=1, intra_op_threads=2))
    with tcp_proxy(first.port) as proxy:
        working = at_work(f"127.0.0.1:{proxy.port}", "grpc")

        class Turns(Hooks):
            def on_version(self, version: int, logs: object) -> None:
                if version == 5:
                    proxy.server_port = other.port
                    first.die()

        first.run(Turns())
        working.end()
    other.server.stop(0)
    assert [type(failure) for failure in working.failures] == [JobFailed]
    assert "otherwise now (seed was 0 and is 1; intra_op_threads was 1 and is 2)" in str(working.failures[0])
    assert "start this worker again" in str(working.failures[0])


def test_a_master_that_is_never_where_its_store_is_is_given_up() -> None:
    """No restart: its rows stay at an earlier version for longer than the deadline."""
    behind = Life()
    life = Life()
    client = MasterClient(life.address, deadline_s=30)
    session = client.join(identity := WorkerIdentity("worker"))
    stale = MasterClient(behind.address, deadline_s=30)
    source = stale.store()
    model = _model()
    build_model(model, SAMPLE)
    computer = MicroBatchComputer(model, JOB, {TaskKind.TRAIN: READER}, SAMPLE, source, source.specs())
    working = Working(Worker(client, computer, source, session, identity, deadline_s=1.0), client, stale)

    class Ends(Hooks):
        def on_version(self, version: int, logs: object) -> None:
            assert version == 1, "its rows are not those of that version"

    thread = threading.Thread(target=lambda: life.run(Ends()), daemon=True)
    thread.start()
    working.end()
    life.master.stop("enough")
    thread.join(timeout=60)
    behind.server.stop(0)
    assert [type(failure) for failure in working.failures] == [FutureVersion]
