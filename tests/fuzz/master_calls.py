"""The calls of the Master service, of a job with a model."""

import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import numpy as np
from google.protobuf.descriptor import FieldDescriptor

from elastable.embedding_store.errors import ElastableError
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.wire.access.credentials import PROOF_KEYS, Proof
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.embedding_store.wire.shared.shared_store import SharedMemoryStore, channels_of
from elastable.master.api import (
    AsyncPushId,
    EvaluationReport,
    JobSpec,
    Push,
    ServedMaster,
    SyncPushId,
    Tensor,
    WorkerIdentity,
)
from elastable.master.core.job_master import Master
from elastable.master.model.discovery import create_tables, discover_tables
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.master.rpc.messages import evaluation_frames, evaluation_from_frames, push_frames, push_from_frames
from elastable.master.v1 import master_pb2
from tests.fuzz.calls import WAIT_S, Call, CallTarget, Seed, served
from tests.fuzz.mutator import Mutator
from tests.fuzz.store_calls import SPECS, store_words
from tests.fuzz.target import Finding
from tests.master.fakes import Bench, FakeWorker, job_of

_WORKERS = ["one", "two", "three"]
_DTYPES = ["float32", "float64", "int64", "bool", "complex64", "float8"]
_STATES_AT_END = ("finished", "failed", "stopping")


def master_words(m: Mutator, field: FieldDescriptor) -> object:
    if field.name == "incarnation":
        return m.text(_WORKERS)
    if field.name == "dtype":
        return m.text(_DTYPES)
    if field.name == "error":
        return m.text(["BadInput", "StoreFailed", "ElastableError", "KeyError", "JobFailed"])
    if field.name == "job":
        return m.text(["", "test", "fuzzed"])
    if field.name == "table":
        return m.text([*SPECS, "t"])
    if field.name in ("places", "want", "micro_batch", "version", "sequence", "records") and m.chance(0.7):
        return m.small(4)
    return None


def words_of_all(m: Mutator, field: FieldDescriptor) -> object:
    known = master_words(m, field)
    return store_words(m, field) if known is None else known


def _first_frame(frames: Iterable[bytes], kind: type[master_pb2.GradientFrame | master_pb2.EvaluationFrame]) -> Seed:
    message = kind.FromString(next(iter(frames)))
    return message.header, message.body


def _push(m: Mutator) -> Seed:
    name = SyncPushId(m.small(2), m.small(4)) if m.chance(0.5) else AsyncPushId(m.choice(_WORKERS), 1 + m.small(20), -1)
    table = m.choice(["t", "any", "fixed"])
    dim = SPECS[table].dim if table in SPECS else 2
    ids = np.array([m.small(9) for _ in range(m.small(4))], np.int64)
    slices = {table: Slices(ids, np.full((len(ids), dim), 0.5, np.float32))}
    push = Push(name, m.small(3), (), slices, (), ())
    return _first_frame(push_frames(push), master_pb2.GradientFrame)


def _evaluation(m: Mutator) -> Seed:
    metrics = (np.ones((), np.float32), np.ones((), np.float32))
    report = EvaluationReport(m.choice(_WORKERS), m.small(3), m.small(3), m.small(3), metrics)
    return _first_frame(evaluation_frames(report), master_pb2.EvaluationFrame)


def _lease(m: Mutator) -> Seed:
    request = master_pb2.LeaseTasksRequest(incarnation=m.choice(_WORKERS), want=m.small(3), wait_ms=1)
    if m.chance(0.5):
        request.holding.tasks.add(kind=1 + m.small(1), version=m.small(2), micro_batch=m.small(4))
    return request, b""


def _pull(m: Mutator) -> Seed:
    request = master_pb2.PullDenseRequest(incarnation=m.choice(_WORKERS), wait_ms=1)
    if m.chance(0.5):
        request.version = m.small(2)
    return request, b""


def _join(m: Mutator) -> Seed:
    return master_pb2.JoinRequest(incarnation=m.choice(_WORKERS), host="here", pid=m.small(9)), b""


def _failure(m: Mutator) -> Seed:
    error = m.choice(("BadInput", "ModelError", "KeyError"))
    request = master_pb2.ReportFailureRequest(incarnation=m.choice(_WORKERS), error=error, message=m.text())
    request.fatal = m.chance(0.02)
    return request, b""


def _pushed(master: MasterClient) -> None:
    slices = {"any": Slices(np.arange(1, 4), np.ones((3, SPECS["any"].dim), np.float32))}
    master.report_gradient(Push(AsyncPushId("worker", 1, -1), 3, (), slices, (), ()))


MASTER_CALLS: dict[str, Call] = {
    "Join": Call(_join, lambda master: master.join(WorkerIdentity("worker", "here", 1)).close(), first_reply=True),
    "LeaseTasks": Call(_lease, lambda master: master.lease_tasks("worker", 1, 0.0, ())),
    "PullDense": Call(_pull, lambda master: master.pull_dense("worker", None, 0.0)),
    "ReportGradient": Call(_push, _pushed, master_pb2.GradientFrame, {"Gradient": push_from_frames}),
    "ReportEvaluation": Call(
        _evaluation,
        lambda master: master.report_evaluation(EvaluationReport("worker", 0, 0, 1, ())),
        master_pb2.EvaluationFrame,
        {"Evaluation": evaluation_from_frames},
    ),
    "ReportFailure": Call(_failure, lambda master: master.report_failure("worker", ValueError("no"), False)),
    "GetStatus": Call(lambda m: (master_pb2.GetStatusRequest(), b""), lambda master: master.status()),
    "StopJob": Call(lambda m: (master_pb2.StopJobRequest(reason=m.text()), b""), lambda master: master.stop("enough")),
}
"""By name."""


class Successors:
    """Masters one after the other behind one server: a job that has ended is followed by the next one."""

    pushes_wait = True

    def __init__(self, make: Callable[[], ServedMaster]) -> None:
        self._make = make
        self.current = make()

    def follow(self) -> None:
        self.current = self._make()

    def not_ready(self) -> str | None:
        """None: clients can always call."""

    def __getattr__(self, name: str) -> Any:
        return getattr(self.current, name)


class JobCalls(CallTarget):
    """As the master of a training job: pushes of micro-batches, versions that are committed when all are in."""

    name = "job-calls"
    share = 60
    rare = frozenset({"StopJob", "ReportFailure"})
    service = master_pb2.DESCRIPTOR.services_by_name["Master"]
    # One secret of all workers: what lies behind the check of whose name it is, is what is to be met.
    metadata = ((PROOF_KEYS[Proof.SESSION], bytes(16)),)

    def open(self) -> None:
        self.store = self.held.enter_context(SharedMemoryStore(1))
        self.bench = Bench(store=self.store)
        self._beginning = dict(self.bench.dense.tensors())
        self._thread: threading.Thread | None = None
        self.masters = Successors(self._next_job)
        self.held.callback(self._end_job)
        master = master_service(self.masters, channels_of(self.store))  # type: ignore[arg-type]
        server, self.channel = served(self.held, store_service(self.store), master)
        self.client = self.held.enter_context(MasterClient(server.address, WAIT_S, session=bytes(16)))
        for worker in _WORKERS:
            self.client.join(WorkerIdentity(worker)).close()
        self.calls = {**MASTER_CALLS, "ReportGradient": replace(MASTER_CALLS["ReportGradient"], seed=self._push)}

    def _push(self, m: Mutator) -> Seed:
        """A push of a micro-batch that is in work, or nearly."""
        if m.chance(0.2):
            return _push(m)
        snapshot = self.bench.master.pull_dense("one", None, 0.0)
        if snapshot is None:
            return _push(m)
        ids = np.array([m.small(9) for _ in range(m.small(4))], np.int64)
        push = Push(
            SyncPushId(snapshot.version, 2 * snapshot.version + m.small(2)),
            3,
            tuple(0.01 * one for one in snapshot.variables),
            {"t": Slices(ids, np.full((len(ids), 2), 0.5, np.float32))},
            snapshot.states,
            (np.ones((), np.float32), np.ones((), np.float32)),
        )
        return _first_frame(push_frames(push), master_pb2.GradientFrame)

    def words(self, m: Mutator, field: FieldDescriptor) -> object:
        return words_of_all(m, field)

    def case(self, m: Mutator) -> str | None:
        """One call; a job that it ended is followed by a new one."""
        came = super().case(m)
        ends = came == "StopJob: done" or (came or "").startswith("ReportFailure")
        if ends and self.masters.status().state in _STATES_AT_END:
            self.masters.follow()
        return came

    def check(self) -> None:
        """A good worker trains a job over this server as in one process, to the bit."""
        if not self._expected:
            bench = Bench()
            undisturbed = FakeWorker(bench.master, bench.store)
            undisturbed.start()
            bench.master.run()
            undisturbed.join(WAIT_S)
            self._expected = bench.everything()
        self._job = job_of()
        try:
            self.masters.follow()
            worker = FakeWorker(self.client, self.client.store())
            worker.start()
            worker.join(WAIT_S)
            assert self._thread is not None
            self._thread.join(WAIT_S)
            for ours, theirs in zip(self._expected, self.bench.everything(), strict=True):
                if not np.array_equal(ours, theirs):
                    raise Finding(f"a good worker's numbers differ after the fuzzing: {ours} and {theirs}")
        finally:
            self._job = None
            self.masters.follow()

    _job: JobSpec | None = None
    _expected: Sequence[Tensor] = ()

    def _next_job(self) -> ServedMaster:
        self._end_job()
        for name in self.store.specs():
            self.store.drop_table(name)
        self.store.reset_version(0)
        bench = self.bench  # one model: TensorFlow keeps something of every one that was made
        create_tables(self.store, discover_tables(bench.model, bench.job.seed))
        bench.dense.restore(self._beginning)
        job = self._job or job_of(train_records=1_000_000, epochs=3)
        bench.master = master = Master(job, self.store, bench.dense, bench.metrics)
        self._thread = threading.Thread(target=_driven, args=(master,), name="job", daemon=True)
        self._thread.start()
        if self._job is None:
            for worker in _WORKERS[:2]:
                master.join(WorkerIdentity(worker))
        return master

    def _end_job(self) -> None:
        if self._thread is not None:
            self.bench.master.stop("the next one begins")
            self._thread.join(WAIT_S)


def _driven(master: Master) -> None:
    """Runs a job to its end, whatever that is: failing it is what some calls are for."""
    with suppress(ElastableError):
        master.run()
