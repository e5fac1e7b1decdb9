"""Stand-ins for what the master is used with: a layer, and workers whose gradients are a pure function."""

import threading
import uuid
from collections.abc import Callable, Mapping
from dataclasses import replace

import keras
import numpy as np

from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.spec import OptimizerSpec, TableSpec
from elastable.embedding_store.contract.store import EmbeddingStore
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import ElastableError, StaleVersion
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master import api
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_master import Master
from elastable.master.master_options import MasterOptions
from elastable.master.model.dense import DenseState
from elastable.master.model.dense_names import NAMES
from elastable.master.model.discovery import create_tables, discover_tables
from elastable.master.model.model_metrics import ModelMetrics
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.record_order import record_order
from tests.untyped import Keyword

RECORDS, VALIDATION = 23, 7


@keras.saving.register_keras_serializable("tests")
class StoreLayer(keras.layers.Layer):
    """Keeps the protocol of `elastable.master.model.discovery.StoreBackedLayer`; its rows are zeros here."""

    def __init__(
        self,
        dim: int = 2,
        table: str | None = None,
        constraint: keras.constraints.Constraint | None = None,
        **kwargs: Keyword,
    ) -> None:
        super().__init__(**kwargs)
        self.dim, self.table, self.embeddings_constraint = dim, table, constraint

    @property
    def table_name(self) -> str:
        return self.table or self.name

    @property
    def table_is_explicit(self) -> bool:
        return self.table is not None

    def table_spec(self, seed: int, optimizer: OptimizerSpec) -> TableSpec:
        return TableSpec(self.table_name, self.dim, vocabulary_size=10, seed=seed, optimizer=optimizer)

    def call(self, inputs: keras.KerasTensor) -> keras.KerasTensor:
        return keras.ops.zeros((*inputs.shape[:1], self.dim)) + keras.ops.cast(inputs[:, :1], "float32")


def small_model(optimizer: object = None, metrics: list[keras.metrics.Metric] | None = None) -> keras.Model:
    keras.utils.set_random_seed(7)
    inputs = keras.Input((1,), batch_size=4, dtype="int64")
    hidden = keras.layers.BatchNormalization()(StoreLayer(table="t")(inputs))
    model = keras.Model(inputs, keras.layers.Dense(1, activation="sigmoid")(hidden))
    model.compile(optimizer or keras.optimizers.Adam(0.05), "binary_crossentropy", metrics=metrics or [])
    ids, labels = np.zeros((4, 1), np.int64), np.zeros((4, 1), np.float32)
    model.compute_metrics(ids, labels, model(ids))
    return model


def job_of(**changes: Keyword) -> api.JobSpec:
    """A sync job of 2 epochs, 23 records, micro-batches of 3, two to a version."""
    job = api.JobSpec(
        job="test", micro_batch_size=3, grads_to_wait=2, epochs=2, seed=5, train_records=RECORDS,
        validation_records=VALIDATION,
    )  # fmt: skip
    return replace(job, **changes)


class Bench:
    """A model, a store and the master over them."""

    def __init__(
        self,
        job: api.JobSpec | None = None,
        make: Callable[[], keras.Model] = small_model,
        options: MasterOptions | None = None,
        store: EmbeddingStore | None = None,
        start: Progress | None = None,
        tensors: dict[str, Array] | None = None,
    ) -> None:
        self.job = job or job_of()
        self.model = make()
        self.store = store or MemoryStore()
        create_tables(self.store, discover_tables(self.model, self.job.seed))
        self.dense = DenseState(self.model)
        if tensors is not None:
            self.dense.restore(tensors)
        self.metrics = ModelMetrics(self.model)
        self.master = Master(self.job, self.store, self.dense, self.metrics, start=start, options=options)

    def everything(self) -> list[api.Tensor]:
        """Every number the job computes: dense part, optimizer, rows and slots."""
        block = next(iter(self.store.scan("t")))
        order = np.argsort(block.ids)
        rows: list[api.Tensor] = [block.ids[order], block.weights[order], block.slots[order]]
        # Not their names: Keras counts these on with every model of a process.
        return [*(value for key, value in self.dense.tensors().items() if key != NAMES), *rows]


def gradient(
    job: api.JobSpec, task: api.Task, snapshot: api.DenseSnapshot, store: EmbeddingStore, push_id: api.PushId
) -> api.Push:
    """A push that is a pure function of the version's numbers and the micro-batch's records."""
    order = record_order(job.train_records, task.epoch, job.seed, job.shuffle, None)
    records = order.take(task.start, task.stop)
    ids = (records * 7 + 3) % 10
    rows = store.lookup({"t": ids}, task.version if job.mode == "sync" else None)["t"]
    signal = (np.sin(records, dtype=np.float64)).astype(np.float32)
    dense = tuple(np.cos(value + signal.mean(dtype=np.float32)) for value in snapshot.variables)
    states = tuple(value + np.float32(0.1) * signal[0] for value in snapshot.states)
    metrics = tuple(np.full((), count, np.float32) for count in (float(signal.sum()), len(records)))
    return api.Push(push_id, len(records), dense, {"t": Slices(ids, np.tanh(rows + signal[:, None]))}, states, metrics)


class FakeWorker(threading.Thread):
    """Does tasks until the job ends; `die_after` pushes it vanishes with its leases."""

    def __init__(
        self, master: api.MasterApi, store: EmbeddingStore, die_after: int | None = None, want: int = 3
    ) -> None:
        super().__init__(daemon=True)
        self.identity = api.WorkerIdentity(uuid.uuid4().hex, "here", 1)
        self.master, self.store, self.left, self.want = master, store, die_after, want
        self.session = master.join(self.identity)
        self.job = self.session.job
        self.tasks: set[api.Task] = set()
        self.outcomes: list[api.PushOutcome] = []
        self.sequence = 0
        self.error: ElastableError | None = None

    def run(self) -> None:
        try:
            while self.left is None or self.left > 0:
                lease = self.master.lease_tasks(self.identity.incarnation, max(0, self.want - len(self.tasks)), 0.05)
                if lease.finished:
                    break
                self.tasks.update(lease.tasks)
                if self.tasks:
                    self.work(min(self.tasks))
        except ElastableError as error:
            self.error = error
        finally:
            self.session.close()

    def work(self, task: api.Task) -> None:
        incarnation = self.identity.incarnation
        try:
            snapshot = self.master.pull_dense(incarnation, task.version if self.job.mode == "sync" else None, 0.05)
            if snapshot is None:
                return
            self.tasks.discard(task)
            if task.kind is api.TaskKind.EVALUATE:
                metrics = tuple(np.full((), count, np.float32) for count in (task.micro_batch, 1))
                report = api.EvaluationReport(
                    incarnation, task.version, task.micro_batch, task.stop - task.start, metrics
                )
                self.outcomes.append(self.master.report_evaluation(report))
                return
            push = gradient(self.job, task, snapshot, self.store, self.push_id(task))
            self.outcomes.append(self.master.report_gradient(push).outcome)
        except StaleVersion:
            self.tasks.discard(task)
            return
        if self.left is not None:
            self.left -= 1

    def push_id(self, task: api.Task) -> api.SyncPushId | api.AsyncPushId:
        if self.job.mode == "sync":
            return api.SyncPushId(task.version, task.micro_batch)
        self.sequence += 1
        return api.AsyncPushId(self.identity.incarnation, self.sequence, task.micro_batch)


class StopAt(Hooks):
    """Stops the job at a version."""

    def __init__(self, bench: Bench, version: int) -> None:
        self.bench, self.version = bench, version

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        if version == self.version:
            self.bench.master.stop("interrupted")


class Unheard(Hooks):
    """Tells nobody of a version."""

    def waits_for_log(self, version: int) -> bool:
        return False


class Ahead(MemoryStore):
    """As where somebody reads its memory: versions are logged on another thread."""

    def _show_ahead(self, version: int) -> bool:
        return True


def drive(bench: Bench, workers: list[FakeWorker], hooks: Hooks | None = None) -> None:
    for worker in workers:
        worker.start()
    bench.master.run(hooks)
    for worker in workers:
        worker.join(timeout=60)
        assert not worker.is_alive()
