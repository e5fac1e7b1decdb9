"""A master over gRPC: the same answers and errors as the master behind, and sessions that end with their worker."""

import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace
from pathlib import Path
from typing import Any

import grpc
import numpy as np
import pytest

from elastable.embedding_store import errors
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadGradient, BadInput, ElastableError, FutureVersion, StaleVersion
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof, Role
from elastable.embedding_store.wire.channels.server_connection import MetadataChannel
from elastable.embedding_store.wire.server.grpc_server import GrpcServer, Service
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master import api
from elastable.master.api import (
    DenseSnapshot,
    EvaluationReport,
    Push,
    PushOutcome,
    PushReply,
    ServedMaster,
    SyncPushId,
    WorkerIdentity,
)
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.tasks.worker_records import LocalSession
from elastable.master.v1 import master_pb2, master_pb2_grpc
from tests.certificates import Authority
from tests.waiting import until

pytestmark = pytest.mark.process

JOB = api.JobSpec(job="scripted", micro_batch_size=8, seed=-3, average="sum", not_finite="skip")
SNAPSHOT = DenseSnapshot(3, (np.arange(6, dtype=np.float32).reshape(2, 3),), (np.array([7]),), ("kernel",), ("count",))


TASKS = (api.Task(3, api.TaskKind.TRAIN, 5, 0, 40, 48), api.Task(3, api.TaskKind.EVALUATE, 1, 0, 8, 16))


def _noted(name: str, answer: Callable[..., object]) -> Callable[..., object]:
    """A method that notes what it is asked, and gives that answer."""

    def method(self: "Scripted", *asked: object) -> object:
        self._note(name, *asked)
        return answer(self, *asked)

    return method


class Scripted(ServedMaster):
    """A master with scripted answers that remembers its requests."""

    def __init__(self) -> None:
        self.asked: list[tuple[object, ...]] = []
        self.error: ElastableError | None = None
        self.snapshot = SNAPSHOT
        self.end: Future[str] = Future()
        self.open: dict[str, int] = {}
        self.changed = threading.Condition()

    def _note(self, *asked: object) -> None:
        self.asked.append(asked)
        if self.error is not None:
            raise self.error

    def _count(self, incarnation: str, change: int) -> None:
        with self.changed:
            self.open[incarnation] = self.open.get(incarnation, 0) + change
            self.changed.notify_all()

    def join(self, worker: WorkerIdentity) -> LocalSession:
        self._note("join", worker)
        self._count(worker.incarnation, 1)
        return LocalSession(JOB, lambda: self._count(worker.incarnation, -1))

    lease_tasks: Any = _noted(
        "lease", lambda _, __, ___, ____, holding=None: api.Lease(TASKS, revoked=tuple(holding or ()))
    )
    pull_dense: Any = _noted("pull", lambda self, _, version, __: self.snapshot if version in (None, 3) else None)
    report_gradient: Any = _noted("push", lambda *_: PushReply(PushOutcome.STALE, "too late", 4))
    report_evaluation: Any = _noted("evaluation", lambda *_: PushOutcome.DUPLICATE)
    report_failure: Any = _noted("failure", lambda *_: None)
    stop: Any = _noted("stop", lambda *_: None)

    def status(self) -> api.JobStatus:
        if self.error is not None:
            raise self.error
        return self.status_of("training")

    def status_of(self, state: str) -> api.JobStatus:
        return api.JobStatus("scripted", state, "sync", 3, 9, 0, 1, 24, {"loss": 0.5}, (), "memory")

    def ended(self) -> Future[str]:
        return self.end

    def await_open(self, incarnation: str, count: int) -> None:
        """Waits until so many sessions of a worker are open."""
        with self.changed:
            assert self.changed.wait_for(lambda: self.open.get(incarnation) == count, timeout=60), self.open


@pytest.fixture(params=[False, True], ids=["pushes-at-once", "pushes-that-wait"])
def scripted(request: pytest.FixtureRequest) -> Scripted:
    master = Scripted()
    master.pushes_wait = request.param
    return master


@pytest.fixture
def server(scripted: Scripted) -> Iterator[GrpcServer]:
    with GrpcServer(
        "127.0.0.1:0", [master_service(scripted), store_service(MemoryStore())], anonymous=Role.ADMINISTRATOR
    ) as server:
        yield server


@pytest.fixture
def client(server: GrpcServer) -> Iterator[MasterClient]:
    with MasterClient(server.address, deadline_s=60) as client:
        yield client


def test_every_call_is_handed_on_and_its_answer_back(client: MasterClient, scripted: Scripted) -> None:
    client.join(WorkerIdentity("w"))
    lease = client.lease_tasks("w", 4, 0.25)
    assert lease == api.Lease(TASKS)
    assert client.lease_tasks("w", 4, 0.25, ()) == lease
    assert client.lease_tasks("w", 4, 0.25, lease.tasks) == api.Lease(TASKS, revoked=TASKS)
    for version, found in ((None, True), (3, True), (4, False)):
        snapshot = client.pull_dense("w", version, 0.5)
        assert (snapshot is not None) is found
        if snapshot is not None:
            np.testing.assert_array_equal(snapshot.variables[0], SNAPSHOT.variables[0])
            np.testing.assert_array_equal(snapshot.states[0], SNAPSHOT.states[0])
            assert (snapshot.version, snapshot.variable_names, snapshot.state_names) == (3, ("kernel",), ("count",))
    report = EvaluationReport("w", 3, 1, 8, ())
    assert client.report_gradient(Push(SyncPushId(2, 4), 8)) == PushReply(PushOutcome.STALE, "too late", 4)
    assert client.report_evaluation(report) is PushOutcome.DUPLICATE
    assert client.status() == scripted.status()
    client.stop("enough")
    client.report_failure("w", BadGradient("why"), fatal=True)
    _, incarnation, error, fatal = scripted.asked.pop()
    assert (incarnation, type(error), str(error), fatal) == ("w", BadGradient, "why", True)
    assert scripted.asked == [
        ("join", WorkerIdentity("w")),
        ("lease", "w", 4, 0.25, None),
        ("lease", "w", 4, 0.25, ()),
        ("lease", "w", 4, 0.25, lease.tasks),
        ("pull", "w", None, 0.5),
        ("pull", "w", 3, 0.5),
        ("pull", "w", 4, 0.5),
        ("push", Push(SyncPushId(2, 4), 8)),
        ("evaluation", report),
        ("stop", "enough"),
    ]


@pytest.mark.parametrize("rows", [1, 100_000, 500_000])
def test_a_dense_part_of_any_size_arrives_again_and_again(client: MasterClient, scripted: Scripted, rows: int) -> None:
    scripted.snapshot = DenseSnapshot(3, (np.arange(2 * rows, dtype=np.float32).reshape(rows, 2),), (), ("kernel",), ())
    client.join(WorkerIdentity("w"))
    for version, found in ((3, True), (4, False), (3, True), (4, False), (3, True)):
        snapshot = client.pull_dense("w", version, 0.0)
        assert (snapshot is not None) is found
        if snapshot is not None:
            np.testing.assert_array_equal(snapshot.variables[0], scripted.snapshot.variables[0])


@pytest.mark.parametrize("rows", [1, 40_000, 80_000])
def test_a_push_arrives_whole(client: MasterClient, scripted: Scripted, rows: int) -> None:
    values = np.random.default_rng(rows).normal(size=(rows, 16)).astype(np.float32)
    sent = Push(api.AsyncPushId("w", 2, 5), 9, (values[0],), {"t": Slices(np.arange(rows), values)}, (values[:1],), ())
    client.join(WorkerIdentity("w"))
    client.report_gradient(sent)
    _, (_, push) = scripted.asked
    assert isinstance(push, Push)
    assert (push.id, push.records, push.metrics) == (sent.id, 9, ())
    np.testing.assert_array_equal(push.dense[0], values[0])
    np.testing.assert_array_equal(push.slices["t"].indices, np.arange(rows))
    np.testing.assert_array_equal(push.slices["t"].values, values)
    np.testing.assert_array_equal(push.states[0], values[:1])


def calls_of(client: MasterClient) -> list[Callable[[], object]]:
    return [
        lambda: client.join(WorkerIdentity("w")),
        lambda: client.lease_tasks("w", 1, 0),
        lambda: client.pull_dense("w", 2, 0),
        lambda: client.report_gradient(Push(SyncPushId(2, 4), 8)),
        lambda: client.report_evaluation(EvaluationReport("w", 3, 1, 8, ())),
        lambda: client.report_failure("w", BadGradient("why"), False),
        client.status,
        lambda: client.stop(""),
    ]


@pytest.mark.parametrize("error", [StaleVersion("version 2 is past"), FutureVersion("not yet"), BadGradient("shape")])
def test_errors_of_a_master_arrive_as_they_are(client: MasterClient, scripted: Scripted, error: ElastableError) -> None:
    client.join(WorkerIdentity("w"))
    scripted.error = error
    for call in calls_of(client):
        with pytest.raises(type(error)) as caught:
            call()
        assert type(caught.value) is type(error)
        assert str(caught.value) == str(error)


def test_a_session_tells_the_job_and_its_end(client: MasterClient, scripted: Scripted) -> None:
    session = client.join(WorkerIdentity("w", "host", 17))
    assert scripted.asked == [("join", WorkerIdentity("w", "host", 17))]
    assert session.job == JOB
    assert session.alive()
    assert session.finished == ""
    scripted.end.set_result("the job finished at version 3 of 9")
    until(lambda: session.finished == "the job finished at version 3 of 9")
    assert session.alive(), "the worker leaves, it is not sent away"
    session.close()
    session.close()
    assert not session.alive()
    scripted.await_open("w", 0)


def test_a_session_that_begins_after_the_end_hears_of_it_at_once(client: MasterClient, scripted: Scripted) -> None:
    scripted.end.set_result("the job failed at version 3 of 9")
    session = client.join(WorkerIdentity("late"))
    until(lambda: session.finished == "the job failed at version 3 of 9")
    assert session.alive()


def test_a_server_that_stops_ends_its_sessions(server: GrpcServer, client: MasterClient, scripted: Scripted) -> None:
    session = client.join(WorkerIdentity("w"))
    server.stop(grace_s=20)
    until(lambda: not session.alive())
    scripted.await_open("w", 0)


def test_a_master_that_is_gone_is_looked_for_where_it_is_by_then(server: GrpcServer) -> None:
    asked = []

    def find(gone: str) -> str:
        asked.append(gone)
        return server.address

    with MasterClient("127.0.0.1:1", deadline_s=60, find=find) as client:
        assert client.status().job == JOB.job
        assert (asked, client.address) == (["127.0.0.1:1"], server.address)


def test_every_call_shows_the_token_and_none_is_taken_without(scripted: Scripted, tmp_path: Path) -> None:
    credentials = Authority(tmp_path / "tls").mutual()
    services = [master_service(scripted), store_service(MemoryStore())]
    with GrpcServer("127.0.0.1:0", services, credentials=credentials) as server:
        with MasterClient(server.address, 60, credentials) as client:
            for call in (*calls_of(client), lambda: client.store().version()):
                call()
        asked = len(scripted.asked)
        with MasterClient(server.address, 60, replace(credentials, token=None)) as client:
            for call in (*calls_of(client), lambda: client.store().version()):
                with pytest.raises(errors.Unauthenticated, match=f"{server.address} does not accept this client"):
                    call()
        assert len(scripted.asked) == asked


@pytest.mark.parametrize("wait_s", [-1, 61, float("nan")])
def test_a_wait_must_be_one_that_ends(client: MasterClient, wait_s: float) -> None:
    with pytest.raises(BadInput, match="wait of"):
        client.lease_tasks("w", 1, wait_s)


def test_a_foreign_client_is_refused_what_cannot_be(server: GrpcServer) -> None:
    with grpc.insecure_channel(server.address) as channel:
        stub = master_pb2_grpc.MasterStub(MetadataChannel(channel, PROOF_KEYS[Proof.SESSION], bytes(16)))
        joined = stub.Join(master_pb2.JoinRequest(incarnation="w"), timeout=60)
        next(joined)  # type: ignore[call-overload]
        for call, message in (
            (lambda: stub.LeaseTasks(master_pb2.LeaseTasksRequest(wait_ms=-1), timeout=60), "wait_ms -1"),
            (lambda: next(stub.Join(master_pb2.JoinRequest(), timeout=60)), "incarnation is empty"),  # type: ignore[call-overload]
            (lambda: stub.ReportGradient(iter([]), timeout=60), "ended before its first frame"),
            (lambda: stub.ReportEvaluation(iter([master_pb2.EvaluationFrame(body=b"a")]), timeout=60), "no header"),
        ):
            with pytest.raises(grpc.RpcError, match=message) as caught:
                call()
            assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_a_job_that_cannot_be_read_leaves_no_session_open() -> None:
    left = threading.Event()

    def join(request: bytes, context: grpc.ServicerContext) -> Iterator[bytes]:
        context.add_callback(left.set)
        yield b"\xff\xff\xff"
        left.wait(60)

    handlers = {"Join": grpc.unary_stream_rpc_method_handler(join)}
    service = Service(master_pb2.DESCRIPTOR.services_by_name["Master"].full_name, handlers)
    with GrpcServer("127.0.0.1:0", [service]) as server, MasterClient(server.address, 60) as client:
        with pytest.raises(errors.StoreFailed, match="a job description that cannot be read"):
            client.join(WorkerIdentity("w"))
        assert left.wait(60)
