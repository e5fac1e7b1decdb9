"""Nobody acts in another worker's name: each attack at a real master, by a client that knows all but the secret."""

import threading
from collections.abc import Callable
from contextlib import ExitStack, suppress
from dataclasses import dataclass

import grpc
import numpy as np
import pytest

from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, ElastableError, NotJoined, PermissionDenied
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.v1 import store_pb2, store_pb2_grpc
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Credentials, Proof
from elastable.embedding_store.wire.channels.server_connection import MetadataChannel
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import AsyncPushId, EvaluationReport, JobSpec, Push, PushOutcome, SyncPushId, WorkerIdentity
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.rpc import master_service as service
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.v1 import master_pb2, master_pb2_grpc
from tests.embedding_store.shards import served_shards
from tests.waiting import until

SYNC = JobSpec(job="j", micro_batch_size=2, train_records=16, grads_to_wait=2, average="sum")
ASYNC = JobSpec(job="j", mode="async", micro_batch_size=2, train_records=16, average="sum")
SEEN = TableSpec("seen", 1, initializer=InitializerSpec("zeros"), optimizer=OptimizerSpec.of("sgd", learning_rate=1.0))
SECRET = bytes(range(16))
SESSION_KEY = PROOF_KEYS[Proof.SESSION]


@dataclass
class Served:
    """A job with an honest worker, `w`, and a stranger's connection."""

    master: Master
    store: MemoryStore
    address: str
    worker: MasterClient
    stranger: MasterClient


def serve(held: ExitStack, job: JobSpec) -> Served:
    store = held.enter_context(MemoryStore(1))
    store.create_table(SEEN)
    master, address = drive(held, job, store)
    worker, stranger = (held.enter_context(MasterClient(address, 60)) for _ in range(2))
    return Served(master, store, address, worker, stranger)


def drive(held: ExitStack, job: JobSpec, store: EmbeddingStore) -> tuple[Master, str]:
    """A master at work, and its address."""
    master = Master(job, store, DensePart(), options=MasterOptions(lease_seconds=3_600.0))
    server = held.enter_context(GrpcServer("127.0.0.1:0", [store_service(store), master_service(master)]))
    driver = threading.Thread(target=_quietly, args=(master.run,), daemon=True)
    driver.start()
    held.callback(driver.join, 60)
    held.callback(master.stop, "the test is over")
    return master, server.address


def _quietly(run: Callable[[], object]) -> None:
    with suppress(ElastableError):  # tests look at the job's status
        run()


def push_of(job: JobSpec, micro_batch: int, incarnation: str = "w", sequence: int = 1) -> Push:
    records = np.arange(2 * micro_batch, 2 * micro_batch + 2)
    name = (
        SyncPushId(micro_batch // 2, micro_batch)
        if job.mode == "sync"
        else AsyncPushId(incarnation, sequence, micro_batch)
    )
    slices = {"seen": Slices(records, -np.ones((2, 1), np.float32))}
    return Push(name, 2, slices=slices, job="j", incarnation=incarnation)


@pytest.mark.parametrize("joined", [False, True], ids=["a stranger", "another worker"])
@pytest.mark.parametrize("job", [SYNC, ASYNC], ids=["sync", "async"])
def test_every_call_in_another_workers_name_is_refused(held: ExitStack, job: JobSpec, joined: bool) -> None:
    served = serve(held, job)
    served.worker.join(WorkerIdentity("w", "host", 1))
    if joined:
        served.stranger.join(WorkerIdentity("other", "host", 2))
    kind = PermissionDenied if joined else NotJoined
    stranger, lease = served.stranger, served.worker.lease_tasks("w", 2, 10.0)
    attacks: dict[str, Callable[[], object]] = {
        "takes its leases": lambda: stranger.lease_tasks("w", 8, 0.0),
        "gives its leases back": lambda: stranger.lease_tasks("w", 0, 0.0, ()),
        "reads the dense part": lambda: stranger.pull_dense("w", None, 0.0),
        "pushes": lambda: stranger.report_gradient(push_of(job, 0)),
        "reports an evaluation": lambda: stranger.report_evaluation(EvaluationReport("w", 0, 0, 2, ())),
        "fails the job": lambda: stranger.report_failure("w", BadInput("forged"), fatal=True),
    }
    for what, attack in attacks.items():
        with pytest.raises(kind) as caught:
            attack()
        assert type(caught.value) is kind, what
    with pytest.raises(PermissionDenied, match="worker 'w' is another session's"):
        stranger.join(WorkerIdentity("w"))
    status = served.master.status()
    assert (status.state, status.version, status.refusals) == ("training", 0, ())
    assert {worker.identity.incarnation: worker.leases for worker in status.workers}["w"] == len(lease.tasks) > 0
    # And the worker itself goes on.
    assert served.worker.report_gradient(push_of(job, lease.tasks[0].micro_batch)).outcome is PushOutcome.ACCEPTED


def test_a_worker_of_the_proto_files_alone_pushes_rows_to_store_servers(held: ExitStack) -> None:
    """What the first event of its session gives it is what a store server asks for; a stranger has nothing of it."""
    (server,), store = held.enter_context(served_shards.served(1))
    store.create_table(SEEN)
    driven, address = drive(held, SYNC, store)
    opened = [held.enter_context(grpc.insecure_channel(each)) for each in (address, server.address)]
    master, rows = master_pb2_grpc.MasterStub(opened[0]), store_pb2_grpc.StoreStub(opened[1])
    secret = ((SESSION_KEY, SECRET),)
    events = master.Join(master_pb2.JoinRequest(incarnation="w"), metadata=secret)
    held.callback(events.cancel)
    joined = next(iter(events))
    slices = [store_pb2.SlicesEntry(table="seen", count=2, dim=1)]
    for number in range(2):
        header = store_pb2.RowPushHeader(job="j", micro_batch=number, parts=[store_pb2.RowPart(slices=slices)])
        body = np.array([2 * number, 2 * number + 1], "<i8").tobytes() + np.full(2, -1, "<f4").tobytes()
        frame = store_pb2.RowPushFrame(header=header, body=body)
        for shown in ((), secret, ((SESSION_KEY, joined.store_session[:-1] + b"v"),)):
            with pytest.raises(grpc.RpcError, match="has not joined job j"):
                rows.PushRows(iter([frame]), timeout=60, metadata=shown)
        pushed = rows.PushRows(iter([frame]), timeout=60, metadata=((SESSION_KEY, joined.store_session),))
        assert pushed.outcome == store_pb2.RowPushReply.OUTCOME_ACCEPTED
        name = master_pb2.PushId(sync_id=master_pb2.SyncPushId(version=0, micro_batch=number))
        gradient = master_pb2.GradientHeader(push=name, records=2, job="j", incarnation="w")
        frames = iter([master_pb2.GradientFrame(header=gradient)])
        assert master.ReportGradient(frames, timeout=60, metadata=secret).outcome == master_pb2.PUSH_OUTCOME_ACCEPTED
    until(lambda: driven.status().version == 1)
    np.testing.assert_array_equal(store.lookup({"seen": np.arange(5)})["seen"][:, 0], [1, 1, 1, 1, 0])


def test_a_sync_push_without_a_name_needs_a_worker_too(held: ExitStack) -> None:
    served = serve(held, SYNC)
    with pytest.raises(NotJoined):
        served.stranger.report_gradient(push_of(SYNC, 0, ""))
    served.worker.join(WorkerIdentity("w"))
    assert served.worker.report_gradient(push_of(SYNC, 0, "")).outcome is PushOutcome.ACCEPTED


def test_a_failure_without_a_name_needs_a_worker_too(held: ExitStack) -> None:
    served = serve(held, SYNC)
    with pytest.raises(NotJoined):
        served.stranger.report_failure("", BadInput("forged"), fatal=True)
    assert served.master.status().state == "waiting"


def test_strangers_do_not_stop_a_job(held: ExitStack) -> None:
    served = serve(held, SYNC)
    served.worker.join(WorkerIdentity("w"))
    for client in (served.stranger, served.worker):
        with pytest.raises(PermissionDenied, match="StopJob is for the role administrator"):
            client.stop("no more")
    assert served.master.stop_reason is None


def test_the_administrator_stops_it(held: ExitStack) -> None:
    master = Master(SYNC, held.enter_context(MemoryStore(1)), DensePart())
    server = GrpcServer("127.0.0.1:0", [master_service(master)], credentials=Credentials(token="t" * 16))
    held.enter_context(server)
    held.enter_context(MasterClient(server.address, 60, Credentials(token="t" * 16))).stop("enough")
    assert master.stop_reason == "enough"


def test_a_worker_that_joins_again_is_known_by_its_secret(held: ExitStack) -> None:
    served = serve(held, SYNC)
    session = served.worker.join(WorkerIdentity("w"))
    again = held.enter_context(MasterClient(served.address, 60, session=SECRET))
    with pytest.raises(PermissionDenied):
        again.join(WorkerIdentity("w"))
    session.close()
    with pytest.raises(PermissionDenied):
        again.join(WorkerIdentity("w"))  # its name is its own while it is away
    assert served.worker.join(WorkerIdentity("w")).alive()
    assert again.join(WorkerIdentity("v")).alive()
    more = held.enter_context(MasterClient(served.address, 60, session=SECRET))
    assert more.join(WorkerIdentity("v")).alive(), "whoever has the secret is that worker, over any connection"


def test_a_push_that_was_under_way_as_its_session_broke_counts(held: ExitStack) -> None:
    served = serve(held, SYNC)
    served.worker.join(WorkerIdentity("w")).close()
    assert served.worker.report_gradient(push_of(SYNC, 0)).outcome is PushOutcome.ACCEPTED


@pytest.mark.parametrize("secret", [None, b"", b"short", bytes(65)])
def test_a_secret_that_is_none_is_refused(held: ExitStack, secret: bytes | None) -> None:
    served = serve(held, SYNC)
    with grpc.insecure_channel(served.address) as channel:
        shown = channel if secret is None else MetadataChannel(channel, SESSION_KEY, secret)
        with pytest.raises(grpc.RpcError, match=SESSION_KEY) as caught:
            next(master_pb2_grpc.MasterStub(shown).Join(master_pb2.JoinRequest(incarnation="w"), timeout=60))  # type: ignore[call-overload]
    assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


def test_no_reply_and_no_log_shows_a_secret(held: ExitStack, caplog: pytest.LogCaptureFixture) -> None:
    served = serve(held, SYNC)
    client = held.enter_context(MasterClient(served.address, 60, session=b"0123456789-secret"))
    with caplog.at_level("DEBUG"):
        client.join(WorkerIdentity("s"))
        with pytest.raises(PermissionDenied) as caught:
            served.stranger.join(WorkerIdentity("s"))
    assert "0123456789-secret" not in caplog.text + str(caught.value) + str(client.status())


def test_names_are_forgotten_but_not_of_workers_there(held: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(service, "_MOST", 4)
    served = serve(held, SYNC)
    served.worker.join(WorkerIdentity("w"))
    for number in range(20):
        served.stranger.join(WorkerIdentity(f"passing-{number}")).close()
    with pytest.raises(PermissionDenied):
        served.stranger.join(WorkerIdentity("w"))
    assert served.worker.lease_tasks("w", 1, 10.0).tasks
