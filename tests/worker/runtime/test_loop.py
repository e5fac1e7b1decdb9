"""The worker's loop against a real master over a real connection, which gets cut."""

from __future__ import annotations

import threading
from collections.abc import Callable

import keras
import numpy as np
import pytest

from elastable.embedding_store.engine import MemoryStore
from elastable.embedding_store.errors import BadGradient, ElastableError, JobFailed, ShardLost, Unavailable
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import JobSpec, TaskKind, WorkerIdentity
from elastable.master.jobs.hooks import Hooks
from elastable.master.jobs.job_master import Master
from elastable.master.keras.dense import DenseState
from elastable.master.keras.discovery import create_tables, discover_tables
from elastable.master.keras.metrics import ModelMetrics
from elastable.master.wire.client import MasterClient, RemoteSession
from elastable.master.wire.master_service import master_service
from elastable.worker.layers.embedding import Embedding
from elastable.worker.models.build import build_model, sample_batch
from elastable.worker.readers import NumpyReader
from elastable.worker.runtime.compute import MicroBatchComputer
from elastable.worker.runtime.loop import Worker
from tests.tcp_proxy import TcpProxy, tcp_proxy

RECORDS = 640
IDS = np.random.default_rng(0).integers(0, 50, (RECORDS, 3))
LABELS = (IDS.sum(axis=1) % 2).astype(np.float32)[:, np.newaxis]


def _model() -> keras.Model:
    keras.utils.set_random_seed(4)
    inputs = keras.Input((3,), dtype="int64")
    flat = keras.layers.Flatten()(Embedding(50, 4, name="items")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1)(keras.layers.Dropout(0.2)(flat)))
    model.compile(keras.optimizers.Adagrad(0.1), "mse")
    return model


class _Job:
    """A master of 40 versions, served; and a worker that reaches it through `address`."""

    def __init__(self, name: str = "job") -> None:
        self.reader = NumpyReader(IDS, LABELS)
        self.sample = sample_batch(self.reader)
        model = _model()
        build_model(model, self.sample)
        self.job = JobSpec(job=name, micro_batch_size=16, train_records=RECORDS)
        self.tables = discover_tables(model, 0)
        self.store = MemoryStore()
        self.ended = threading.Event()
        create_tables(self.store, self.tables)
        self.master = Master(self.job, self.store, DenseState(model), ModelMetrics(model))
        self.server = GrpcServer("127.0.0.1:0", [store_service(self.store), master_service(self.master)])

    @property
    def port(self) -> int:
        return int(self.server.address.rpartition(":")[2])

    def worker(self, port: int, deadline_s: float = 60.0) -> Worker:
        client = MasterClient(f"127.0.0.1:{port}", deadline_s=deadline_s)
        identity = WorkerIdentity(f"worker-{port}")
        model = _model()
        build_model(model, self.sample)
        source = client.store()
        session = client.join(identity)
        computer = MicroBatchComputer(
            model, self.job, {TaskKind.TRAIN: self.reader}, self.sample, source, source.specs()
        )
        return Worker(client, computer, source, session, identity, deadline_s=deadline_s)

    def rows(self) -> np.ndarray:
        return self.store.lookup({"items": np.arange(50)})["items"]


class _At(Hooks):
    """Calls something at some versions, before the next one begins; it must not wait for the job."""

    def __init__(self, versions: set[int], call: Callable[..., object]) -> None:
        self._versions, self._call = versions, call

    def on_version(self, version: int, logs: object) -> None:
        if version in self._versions:
            self._call()


def _stop_once_ended(job: _Job) -> None:
    """Ends the job as soon as its worker has given up, in a thread of its own."""

    def stop() -> None:
        assert job.ended.wait(60), "the worker carried on"
        job.master.stop("enough")

    threading.Thread(target=stop, daemon=True).start()


def _run(job: _Job, worker: Worker, hooks: Hooks) -> list[BaseException]:
    failures: list[BaseException] = []

    def work() -> None:
        try:
            worker.run()
        except ElastableError as error:
            failures.append(error)
        finally:
            job.ended.set()

    thread = threading.Thread(target=work, daemon=True)
    thread.start()
    try:
        job.master.run(hooks)
    finally:
        thread.join(timeout=60)
        job.server.stop()
    assert not thread.is_alive()
    return failures


@pytest.mark.parametrize("error", [Unavailable("away"), ShardLost("shard 1 of 2 is lost")])
def test_nobody_waits_for_a_master_that_has_ended_to_hear_of_a_lost_store(
    error: ElastableError, caplog: pytest.LogCaptureFixture
) -> None:
    job = _Job()
    worker = job.worker(job.port, deadline_s=0.2)
    job.server.stop(0.0)
    session = worker._session
    assert isinstance(session, RemoteSession)
    assert session._ended.wait(60)
    worker._report(error)
    assert "could not be informed" not in caplog.text
    worker._report(BadGradient("of the model"))
    assert "could not be informed" in caplog.text


def _undisturbed() -> np.ndarray:
    job = _Job()
    assert _run(job, job.worker(job.port), Hooks()) == []
    return job.rows()


def test_a_worker_whose_connection_is_cut_joins_again_and_the_numbers_are_the_same() -> None:
    expected = _undisturbed()
    job = _Job()
    with tcp_proxy(job.port) as proxy:
        cuts: list[int] = []
        hooks = _At({5, 12, 13, 30}, lambda: cuts.append(proxy.cut()))
        assert _run(job, job.worker(proxy.port), hooks) == []
    assert len(cuts) == 4
    assert max(cuts) >= 1, "no connection was there to be cut"
    assert job.master.status().version == 40
    np.testing.assert_array_equal(job.rows(), expected)


def test_a_master_that_stays_away_is_given_up_by_name_after_the_deadline() -> None:
    job = _Job()
    with tcp_proxy(job.port) as proxy:
        worker = job.worker(proxy.port, deadline_s=6.0)

        def away() -> None:
            proxy.close()
            _stop_once_ended(job)

        failures = _run(job, worker, _At({5}, away))
    assert len(failures) == 1
    assert isinstance(failures[0], Unavailable)
    assert f"127.0.0.1:{proxy.port}" in str(failures[0])


def test_a_worker_does_not_carry_on_in_another_job() -> None:
    """A fresh master at the same address runs another job: its versions mean other numbers."""
    first, second = _Job("first"), _Job("second")
    proxy = TcpProxy(first.port)
    try:
        worker = first.worker(proxy.port)

        def replace() -> None:
            proxy.server_port = second.port
            proxy.cut()
            _stop_once_ended(first)

        failures = _run(first, worker, _At({5}, replace))
    finally:
        proxy.close()
        second.server.stop()
    assert [type(failure) for failure in failures] == [JobFailed]
    assert "second" in str(failures[0])
    assert "first" in str(failures[0])
    assert (second.master.status().version, second.master.status().state) == (0, "waiting")
