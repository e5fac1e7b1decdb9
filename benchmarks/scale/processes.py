"""The processes of a job of stub workers: a master whose dense part is an array, and workers that pause.

Everything else is what a job has: the worker's loop, its lookups ahead, pushes to store servers, leases and versions.
"""

import threading
import time
import uuid
from collections.abc import Mapping, Sequence
from multiprocessing.connection import Connection
from typing import cast

import numpy as np

from benchmarks.scale.setting import Setting
from elastable.embedding_store.composite.store_servers import StoreServers
from elastable.embedding_store.contract.arrays import Float32, Int64
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.open_store import open_store
from elastable.embedding_store.shards.server_contract import Slices
from elastable.embedding_store.support.store_url import server_addresses
from elastable.embedding_store.wire.pushes.remote_store import ShardClient
from elastable.embedding_store.wire.server.grpc_server import GrpcServer
from elastable.embedding_store.wire.service.store_service import store_service
from elastable.master.api import DenseSnapshot, JobSpec, Task, Tensor, WorkerIdentity
from elastable.master.commits.dense_part import DensePart
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_master import Master
from elastable.master.push_check import TensorSpec
from elastable.master.rpc.client import MasterClient
from elastable.master.rpc.master_service import master_service
from elastable.process.heap import keep_collections_short
from elastable.worker.runtime.compute import MicroBatchComputer, Prepared
from elastable.worker.runtime.loop import Worker
from elastable.worker.step.id_set import make_id_sets
from elastable.worker.step.trainable import StepResult

TABLE = "t"
_POOL = 16  # different micro-batches of a worker
_DEADLINE_S = 120.0


def table_spec(setting: Setting) -> TableSpec:
    """The table of a job."""
    return TableSpec(TABLE, setting.dim, setting.rows, optimizer=OptimizerSpec.of("adagrad", learning_rate=0.01))


def drawn_ids(setting: Setting, worker: int) -> list[Int64]:
    """The ids of a worker's micro-batches, which it uses in turn: int64 `[ids]` each."""
    random = np.random.default_rng((2026, worker))
    return [random.integers(0, setting.rows, setting.ids) for _ in range(_POOL)]


def run_master(setting: Setting, stores: str, pipe: Connection) -> None:
    """Serves a job; says its address, and to every question the monotonic times of all versions so far."""
    job = JobSpec(
        job="scale", micro_batch_size=1, train_records=1_000_000_000, grads_to_wait=setting.workers, average="records",
        shuffle=False, store_url=stores,
    )  # fmt: skip
    with open_store(stores, deadline_s=_DEADLINE_S) as store:
        store.create_table(table_spec(setting))
        master, stamps = Master(job, store, _ArrayDense(setting.dense)), _Stamps()
        keep_collections_short()
        with GrpcServer("127.0.0.1:0", [store_service(store), master_service(master)]) as server:
            threading.Thread(target=master.run, args=(stamps,), daemon=True).start()
            pipe.send(server.address)
            while pipe.recv():
                pipe.send(list(stamps.times))


def run_worker(setting: Setting, master: str, number: int) -> None:
    """Works until the job ends."""
    client = MasterClient(master, deadline_s=_DEADLINE_S)
    identity = WorkerIdentity(uuid.uuid4().hex, "stub", number)
    session = client.join(identity)
    servers = StoreServers([ShardClient(each, _DEADLINE_S) for each in server_addresses(session.job.store_url)])
    computer = cast(MicroBatchComputer, _Pauses(setting, servers.specs(), number))
    keep_collections_short()
    Worker(client, computer, servers, session, identity, deadline_s=_DEADLINE_S, rows_to=servers).run()


class _Pauses:
    """What a worker asks of `MicroBatchComputer`: ids and gradients of the size of real ones, after a pause."""

    def __init__(self, setting: Setting, specs: Mapping[str, TableSpec], number: int) -> None:
        random = np.random.default_rng(number)
        self._specs, self._step_s = specs, setting.step_s
        self._ids = drawn_ids(setting, number)
        self._rows: Float32 = random.standard_normal((setting.ids, setting.dim)).astype(np.float32)
        self._dense: Float32 = random.standard_normal(setting.dense).astype(np.float32)

    def prepare(self, task: Task) -> Prepared:
        ids = self._ids[task.micro_batch % _POOL]
        return Prepared(task, (), make_id_sets([TABLE], [ids], self._specs), 1)

    def hold(self, snapshot: DenseSnapshot) -> None:
        assert len(snapshot.variables) == 1

    def train(self, prepared: Prepared, bets: Mapping[str, Float32]) -> StepResult:
        ids = prepared.ids.unique[TABLE]
        assert bets[TABLE].shape == (len(ids), self._rows.shape[1])
        time.sleep(self._step_s)
        return StepResult(0.0, (self._dense,), {TABLE: Slices(ids, self._rows[: len(ids)])}, (), ())


class _ArrayDense(DensePart):
    """One variable, and a step of plain gradient descent."""

    def __init__(self, values: int) -> None:
        self.variables = (TensorSpec("dense", (values,), np.dtype(np.float32)),)
        self._values = np.zeros(values, np.float32)

    def snapshot(self, version: int, tensors: Mapping[str, Tensor] | None = None) -> DenseSnapshot:
        copied = self._values.copy()
        copied.flags.writeable = False
        return DenseSnapshot(version, (copied,), ())

    def apply(self, gradients: Sequence[Tensor], states: Sequence[Tensor], rate_share: float = 1.0) -> None:
        self._values -= np.float32(0.01 * rate_share) * gradients[0]

    def tensors(self) -> dict[str, Tensor]:
        return {"dense": self._values.copy()}


class _Stamps(Hooks):
    """When versions came.

    Attributes:
        times: Of every version, by the monotonic clock.
    """

    def __init__(self) -> None:
        self.times: list[float] = []

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        self.times.append(time.monotonic())
