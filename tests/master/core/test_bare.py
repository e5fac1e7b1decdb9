"""A parameter server without a model."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from elastable.embedding_store.contract.arrays import Int64
from elastable.embedding_store.contract.spec import InitializerSpec, OptimizerSpec, TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import BadInput, IdOutOfRange, NotFinite, TableNotFound
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master.api import AsyncPushId, EvaluationReport, JobSpec, Push, PushOutcome, SyncPushId, WorkerIdentity
from elastable.master.core import bare_master
from elastable.master.core.bare_master import BareMaster

SPEC = TableSpec(
    "t",
    2,
    vocabulary_size=9,
    initializer=InitializerSpec("zeros"),
    optimizer=OptimizerSpec.of("sgd", learning_rate=0.5),
)


@pytest.fixture
def store() -> Iterator[MemoryStore]:
    with MemoryStore() as made:
        yield made


def push(sequence: int, ids: list[int], value: float = 1.0, incarnation: str = "c", table: str = "t") -> Push:
    slices = Slices(np.array(ids, np.int64), np.full((len(ids), 2), value, np.float32))
    return Push(AsyncPushId(incarnation, sequence), 1, slices={table: slices})


def rows(store: MemoryStore, ids: list[int]) -> list[float]:
    asked: Int64 = np.array(ids, np.int64)
    return [float(value) for value in store.lookup({"t": asked})["t"][:, 0]]


def test_a_push_is_a_commit_once(store: MemoryStore) -> None:
    master = BareMaster(store)
    store.create_table(SPEC)
    first = master.report_gradient(push(1, [3, 3, 4]))
    assert (first.outcome, first.version) == (PushOutcome.ACCEPTED, 1)
    assert rows(store, [3, 4, 5]) == [-1.0, -0.5, 0.0]
    again = master.report_gradient(push(1, [3, 3, 4]))
    assert (again.outcome, again.version) == (PushOutcome.DUPLICATE, 1)
    store.create_table(TableSpec("late", 2))
    assert master.report_gradient(push(2, [7], table="late")).version == 2
    assert rows(store, [3]) == [-1.0]


def test_what_does_not_fit_changes_nothing(store: MemoryStore) -> None:
    master = BareMaster(store)
    store.create_table(SPEC)
    with pytest.raises(TableNotFound, match="'u'"):
        master.report_gradient(push(1, [1], table="u"))
    with pytest.raises(IdOutOfRange, match="id 9 at position 1"):
        master.report_gradient(push(1, [1, 9]))
    with pytest.raises(NotFinite, match="'t'"):
        master.report_gradient(push(1, [1], np.nan))
    with pytest.raises(BadInput, match="incarnation, sequence"):
        master.report_gradient(Push(SyncPushId(0, 0), 1))
    assert store.version() == 0
    assert master.report_gradient(push(1, [1])).outcome is PushOutcome.ACCEPTED


def test_pushes_that_are_not_finite_can_be_skipped(store: MemoryStore) -> None:
    master = BareMaster(store, JobSpec(mode="async", not_finite="skip"))
    store.create_table(SPEC)
    assert master.report_gradient(push(1, [1], np.inf)).outcome is PushOutcome.SKIPPED
    assert master.report_gradient(push(1, [1], np.inf)).outcome is PushOutcome.DUPLICATE
    assert store.version() == 0


def test_many_clients_lose_nothing(store: MemoryStore) -> None:
    master = BareMaster(store)
    store.create_table(SPEC)

    def client(name: str) -> None:
        for sequence in range(1, 21):
            master.report_gradient(push(sequence, [1], incarnation=name))
            master.report_gradient(push(sequence, [1], incarnation=name))

    with ThreadPoolExecutor(4) as pool:
        list(pool.map(client, "abcd"))
    assert store.version() == 80
    assert rows(store, [1]) == [-40.0]
    assert master.status().records_trained == 80


def test_workers_may_join_but_there_is_nothing_to_do(store: MemoryStore) -> None:
    master = BareMaster(store)
    session = master.join(WorkerIdentity("w", "here", 1))
    assert session.job.mode == "async"
    assert master.lease_tasks("w", 3, 0.01).tasks == ()
    snapshot = master.pull_dense("w", None, 0.0)
    assert snapshot.variables == () if snapshot else False
    assert master.report_evaluation(EvaluationReport("w", 0, 0, 1, ())) is PushOutcome.STALE
    master.report_failure("w", BadInput("its own affair"), fatal=True)
    status = master.status()
    assert (status.state, [worker.identity.incarnation for worker in status.workers]) == ("training", ["w"])
    session.close()
    assert master.status().workers == ()
    master.stop("done")
    assert master.lease_tasks("w", 3, 60.0).finished
    assert master.status().state == "finished"


def test_clients_that_pushed_last_are_counted(store: MemoryStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bare_master, "_MOST_COUNTED", 3)
    master = BareMaster(store)
    store.create_table(SPEC)
    master.join(WorkerIdentity("first"))
    for number in range(5):
        master.report_gradient(push(1, [1], incarnation=f"c{number}"))
        master.report_gradient(push(number + 1, [1], incarnation="first"))
    assert [worker.micro_batches for worker in master.status().workers] == [5]
    assert set(master._pushes) == {"c3", "c4", "first"}
