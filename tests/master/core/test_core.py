"""The master as a whole: exact, whoever works, dies, joins, or sends rubbish."""

import threading
from collections.abc import Callable, Mapping
from dataclasses import replace

import keras
import numpy as np
import pytest

from elastable.embedding_store import errors
from elastable.embedding_store.contract.arrays import Array
from elastable.embedding_store.contract.row_data import Commit
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.shards.server_contract import Slices
from elastable.master import api
from elastable.master.core import job_master
from elastable.master.core.hooks import Hooks
from elastable.master.master_options import MasterOptions
from elastable.master.push_check import check_push
from elastable.master.tasks.progress import Progress
from tests.master.fakes import RECORDS, VALIDATION, Bench, FakeWorker, StopAt, drive, gradient, job_of, small_model
from tests.untyped import Keyword

VERSIONS = 8  # 23 records in micro-batches of 3, two to a version, twice


class Diary(Hooks):
    """Writes down each notification, and its thread."""

    def __init__(self) -> None:
        self.entries: list[tuple[str, int]] = []
        self.logs, self.versions = list[dict[str, float]](), list[dict[str, float]]()
        self.threads: set[int] = set()

    def note(self, what: str, number: int) -> None:
        self.entries.append((what, number))
        self.threads.add(threading.get_ident())

    def on_epoch_begin(self, epoch: int) -> None:
        self.note("begin", epoch)

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        self.note("version", version)
        self.versions.append(dict(logs))

    def on_evaluation_begin(self, version: int) -> None:
        self.note("evaluate", version)

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        self.note("end", epoch)
        self.logs.append(dict(logs))


def result(bench: Bench, workers: int = 1, hooks: Hooks | None = None, **worker: Keyword) -> list[Array]:
    drive(bench, [FakeWorker(bench.master, bench.store, **worker) for _ in range(workers)], hooks)
    return bench.everything()


def same(one: list[Array], other: list[Array]) -> bool:
    return len(one) == len(other) and all(map(np.array_equal, one, other))


def clipped() -> object:
    return small_model(keras.optimizers.Adagrad(0.1, global_clipnorm=0.5))


def scheduled() -> object:
    schedule = keras.optimizers.schedules.ExponentialDecay(0.5, 3, 0.5)
    return small_model(keras.optimizers.SGD(schedule, momentum=0.9))


@pytest.mark.parametrize("make", [clipped, scheduled])
def test_the_number_of_workers_changes_no_bit(make: Callable[..., object]) -> None:
    one = result(Bench(make=make), 1)
    assert same(one, result(Bench(make=make), 4))
    assert same(one, result(Bench(make=make), 2, want=1))


def test_dying_workers_change_no_bit() -> None:
    expected = result(Bench(), 1)
    bench = Bench()
    workers = [FakeWorker(bench.master, bench.store, die_after) for die_after in (1, 2, 3, None)]
    drive(bench, workers)
    assert same(expected, bench.everything())


def test_a_job_tells_its_hooks_in_order_and_in_the_driving_thread() -> None:
    bench, diary = Bench(), Diary()
    result(bench, 2, diary)
    first = [("begin", 0), *(("version", v) for v in range(1, 5)), ("evaluate", 4), ("end", 0)]
    second = [("begin", 1), *(("version", v) for v in range(5, 9)), ("evaluate", 8), ("end", 1)]
    assert diary.entries == first + second
    assert diary.threads == {threading.get_ident()}
    status = bench.master.status()
    assert (status.state, status.version, status.versions_total) == ("finished", VERSIONS, VERSIONS)
    assert (status.epoch, status.epochs, status.records_trained) == (1, 2, 2 * RECORDS)
    # Evaluation states are (micro-batch, 1): their mean is (0 + 1 + 2) / 3.
    assert [logs["val_loss"] for logs in diary.logs] == [1.0, 1.0]
    assert diary.logs[0]["loss"] == diary.versions[3]["loss"] == pytest.approx(np.sin(range(RECORDS)).mean(), rel=1e-5)
    assert status.metrics == diary.logs[1]


class Clicking(Diary):
    """A callback's doings: another rate after the first epoch, the end at version 6."""

    def __init__(self, bench: Bench) -> None:
        super().__init__()
        self.bench = bench

    def on_epoch_end(self, epoch: int, logs: Mapping[str, float]) -> None:
        super().on_epoch_end(epoch, logs)
        self.bench.model.optimizer.learning_rate = 0.001

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        super().on_version(version, logs)
        if version == 6:
            self.bench.master.stop("seen enough")


def test_hooks_may_change_the_rate_and_stop_at_an_exact_version() -> None:
    results = []
    for workers in (1, 3):
        bench = Bench()
        results.append(result(bench, workers, Clicking(bench)))
        status = bench.master.status()
        assert (status.version, status.state, status.stopped) == (6, "finished", "seen enough")
        assert (bench.store.version(), bench.master.stop_reason) == (6, "seen enough")
        assert bench.master.progress().records == RECORDS + 12
    assert same(*results)


def test_a_resumed_job_gives_the_bits_of_an_uninterrupted_one() -> None:
    expected, whole = Bench(), Diary()
    result(expected, 1, whole)
    for stop in (3, 4, 6):
        bench = Bench()
        result(bench, 2, StopAt(bench, stop))
        progress = Progress.from_json(bench.master.progress().to_json())
        assert (progress.version, bench.store.version()) == (stop, stop)
        resumed = Bench(store=bench.store, start=progress, tensors=bench.dense.tensors())
        diary = Diary()
        assert same(expected.everything(), result(resumed, 1, diary))
        assert diary.logs == whole.logs[-len(diary.logs) :]
        assert resumed.master.progress().records == 2 * RECORDS


def test_a_finished_job_that_is_resumed_ends_at_once() -> None:
    bench = Bench()
    result(bench, 1)
    again = Bench(store=bench.store, start=bench.master.progress())
    diary = Diary()
    again.master.run(diary)
    assert again.master.status().state == "finished"
    assert diary.entries == []


@pytest.mark.parametrize(("mode", "last"), [("sync", 16), ("async", 24)])
def test_a_job_that_continues_another_counts_on_from_it(mode: str, last: int) -> None:
    store = _at(8)
    job = job_of(mode=mode, versions_before=8, parts_before=2, micro_batches_before=16)
    bench, diary = Bench(job, store=store, start=Progress(8, evaluated=True)), Diary()
    workers = [FakeWorker(bench.master, store), FakeWorker(bench.master, store, die_after=3)]
    drive(bench, workers, diary)
    status = bench.master.status()
    assert (status.version, status.versions_total, status.state) == (last, last, "finished")
    assert (status.records_trained, status.records_total) == (2 * RECORDS, 2 * RECORDS)
    assert len(diary.logs) == 2
    first = api.AsyncPushId("w", 1, 15) if mode == "async" else api.SyncPushId(8, 15)
    with pytest.raises(errors.BadInput, match=r"micro-batch 15 is not of (this job|version 8)"):
        Bench(job, store=_at(8), start=Progress(8, evaluated=True)).master.report_gradient(api.Push(first, 3))


def _at(version: int) -> MemoryStore:
    store = MemoryStore()
    store.reset_version(version)
    return store


def test_a_store_at_another_version_is_refused() -> None:
    store = MemoryStore()
    store.reset_version(3)
    with pytest.raises(errors.BadInput, match="store is at version 3, the job begins at version 0"):
        Bench(store=store)


def test_async_counts_every_micro_batch_once() -> None:
    bench, diary = Bench(job_of(mode="async")), Diary()
    workers = [FakeWorker(bench.master, bench.store, die_after) for die_after in (1, 3, None, None)]
    drive(bench, workers, diary)
    status = bench.master.status()
    assert (status.version, status.records_trained) == (16, 2 * RECORDS)
    assert [entry for entry in diary.entries if entry[0] != "version"] == [
        ("begin", 0), ("evaluate", 8), ("end", 0), ("begin", 1), ("evaluate", 16), ("end", 1),
    ]  # fmt: skip
    assert [logs["val_loss"] for logs in diary.logs] == [1.0, 1.0]
    assert bench.dense.steps()[0].number == 16
    accepted = sum(worker.outcomes.count(api.PushOutcome.ACCEPTED) for worker in workers)
    assert accepted == 16 + 2 * 3


class Running:
    def __init__(self, bench: Bench, hooks: Hooks | None = None) -> None:
        self.bench, self.master = bench, bench.master
        self.error: BaseException | None = None
        self.thread = threading.Thread(target=self.run, args=(hooks,), daemon=True)
        self.session = self.master.join(api.WorkerIdentity("me"))
        self.thread.start()

    def run(self, hooks: Hooks | None) -> None:
        try:
            self.master.run(hooks)
        except errors.ElastableError as error:
            self.error = error

    def __enter__(self) -> "Running":
        return self

    def __exit__(self, *error: object) -> None:
        self.master.stop("the test is over")
        self.thread.join(timeout=60)
        assert not self.thread.is_alive()

    def tasks(self, want: int) -> list[api.Task]:
        return sorted(self.master.lease_tasks("me", want, 60.0).tasks)

    def push(self, task: api.Task, push_id: api.PushId | None = None) -> api.Push:
        sync = self.bench.job.mode == "sync"
        snapshot = self.master.pull_dense("me", task.version if sync else None, 60.0)
        assert snapshot is not None
        return gradient(
            self.bench.job, task, snapshot, self.bench.store, push_id or api.SyncPushId(task.version, task.micro_batch)
        )


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_push_that_comes_twice_at_once_counts_once(monkeypatch: pytest.MonkeyPatch, mode: str) -> None:
    """The second while the tensors of the first are checked, without the lock."""
    with Running(Bench(job_of(mode=mode))) as job:
        task, first = job.tasks(1)[0], list[api.PushReply]()
        push = job.push(task, None if mode == "sync" else api.AsyncPushId("me", 1, task.micro_batch))

        def checking(*of: object) -> None:
            monkeypatch.setattr(job_master, "check_push", check_push)
            first.append(job.master.report_gradient(push))
            check_push(*of)  # type: ignore[arg-type]

        monkeypatch.setattr(job_master, "check_push", checking)
        assert job.master.report_gradient(push).outcome is api.PushOutcome.DUPLICATE
        assert first[0].outcome is api.PushOutcome.ACCEPTED
        assert job.master.status().workers[0].micro_batches == 1


def test_what_does_not_fit_is_refused_and_changes_nothing() -> None:
    with Running(Bench()) as job:
        task = job.tasks(1)[0]
        good = job.push(task)
        before = job.bench.everything() if job.bench.store.row_count("t") else job.bench.dense.tensors()
        nan = (np.full_like(good.dense[0], np.nan), *good.dense[1:])
        for wrong, kind, message in (
            (replace(good, id=api.SyncPushId(5, 10)), errors.FutureVersion, "version 5"),
            (
                replace(good, job="yesterday"),
                errors.JobFailed,
                r"another job now \(test\); the push is of yesterday",
            ),
            (
                replace(good, id=api.SyncPushId(0, 7)),
                errors.BadInput,
                "7 is not of version 0, which is made of 0 to 1",
            ),
            (replace(good, records=2), errors.BadInput, "has 3 records, but the push reports 2"),
            (replace(good, id=api.AsyncPushId("me", 1)), errors.BadInput, "synchronous"),
            (replace(good, dense=()), errors.BadGradient, "0 dense gradient tensors"),
            (replace(good, dense=nan), errors.NotFinite, "batch_normalization"),
        ):
            with pytest.raises(kind, match=message):
                job.master.report_gradient(wrong)
        assert same(list(before.values()), list(job.bench.dense.tensors().values()))  # type: ignore[union-attr]
        assert job.master.report_gradient(good).outcome is api.PushOutcome.ACCEPTED


def test_pushes_that_are_not_finite_can_be_skipped() -> None:
    with Running(Bench(job_of(not_finite="skip", epochs=1, validation_records=0))) as job:
        for task in (task for _ in range(4) for task in job.tasks(2) if task.kind is api.TaskKind.TRAIN):
            push = job.push(task)
            if task.micro_batch in (0, 2, 3):
                push.slices["t"].values[0, 0] = np.inf
            reply = job.master.report_gradient(push)
            bad = task.micro_batch in (0, 2, 3)
            assert reply.outcome is (api.PushOutcome.SKIPPED if bad else api.PushOutcome.ACCEPTED)
            assert ("NaN" in reply.reason or "inf" in reply.reason) is bad
            if bad and task.version == 0:
                assert job.master.report_gradient(push).outcome is api.PushOutcome.DUPLICATE
        assert job.master.wait(60)
        status = job.master.status()
        assert (status.version, status.records_trained) == (4, RECORDS - 9)
        assert job.bench.dense.steps()[0].number == 4
        assert all(np.isfinite(value).all() for value in job.bench.everything())


def test_evaluations_count_once_and_for_their_version_only() -> None:
    job_spec = job_of(epochs=1, grads_to_wait=8)
    with Running(Bench(job_spec)) as job:
        for task in job.tasks(8):
            job.master.report_gradient(job.push(task))
        task = job.tasks(1)[0]
        assert (task.kind, task.version, task.stop) == (api.TaskKind.EVALUATE, 1, 3)
        metrics = (np.ones((), np.float32), np.ones((), np.float32))
        for version, outcome in ((0, "stale"), (1, "accepted"), (1, "duplicate")):
            assert job.master.report_evaluation(api.EvaluationReport("me", version, 0, 3, metrics)) == outcome
        with pytest.raises(errors.FutureVersion):
            job.master.report_evaluation(api.EvaluationReport("me", 2, 0, 3, metrics))
        with pytest.raises(errors.BadGradient, match="metric"):
            job.master.report_evaluation(api.EvaluationReport("me", 1, 1, 3, ()))
        assert job.master.status().state == "evaluating"
        for number in range(1, -(-VALIDATION // 3)):
            job.master.report_evaluation(api.EvaluationReport("me", 1, number, 3, metrics))
        assert job.master.wait(60)
        assert job.master.status().metrics["val_loss"] == 1.0


def test_a_stopped_job_lets_its_workers_go() -> None:
    with Running(Bench()) as job:
        task = job.tasks(1)[0]
        push = job.push(task)
        job.master.stop("enough")
        assert job.master.wait(60)
        assert job.master.lease_tasks("me", 1, 0.0).finished
        assert job.master.report_gradient(push).outcome is api.PushOutcome.STALE
        with pytest.raises(errors.StaleVersion, match="ended"):
            job.master.pull_dense("me", 3, 0.0)
        assert job.master.status().state == "finished"


def test_a_fatal_failure_of_a_worker_fails_the_job_for_everybody() -> None:
    with Running(Bench()) as job:
        job.master.report_failure("me", errors.BadInput("some record is broken"), fatal=False)
        assert job.master.status().state == "training"
        job.master.report_failure("me", errors.BadInput("the file is broken"), fatal=True)
        with pytest.raises(errors.BadInput, match="the file is broken"):
            job.master.wait(60)
        for ask in (
            lambda: job.master.lease_tasks("me", 1, 0.0),
            lambda: job.master.pull_dense("me", None, 0.0),
            lambda: job.master.join(api.WorkerIdentity("late")),
        ):
            with pytest.raises(errors.JobFailed, match="BadInput: the file is broken"):
                ask()
        assert job.master.status().state == "failed"
        job.thread.join(timeout=60)
        assert isinstance(job.error, errors.BadInput)


class Failing(MemoryStore):
    def commit(self, commit: Commit) -> None:
        raise errors.StoreFailed("the disk is on fire")


def test_a_store_that_goes_on_failing_fails_the_job_with_its_error() -> None:
    bench = Bench(store=Failing(), options=MasterOptions(commit_deadline_s=0.2))
    worker = FakeWorker(bench.master, bench.store)
    with pytest.raises(errors.StoreFailed, match="on fire"):
        drive(bench, [worker])
    worker.join(timeout=60)
    assert isinstance(worker.error, errors.JobFailed)
    assert (bench.master.status().state, bench.dense.steps()[0].number) == ("failed", 0)


def test_a_hook_that_raises_fails_the_job() -> None:
    class Broken(Hooks):
        def on_version(self, version: int, logs: Mapping[str, float]) -> None:
            raise ZeroDivisionError("in a callback")

    bench = Bench()
    worker = FakeWorker(bench.master, bench.store)
    with pytest.raises(ZeroDivisionError):
        drive(bench, [worker], Broken())
    worker.join(timeout=60)
    assert "ZeroDivisionError: in a callback" in str(worker.error)


def test_without_workers_a_job_waits() -> None:
    with Running(Bench()) as job:
        job.session.close()
        job.session.close()
        assert job.master.status().state == "waiting"
        assert not job.master.wait(0.0)


def test_a_worker_is_there_until_its_last_session_ends() -> None:
    with Running(Bench()) as job:
        second = job.master.join(api.WorkerIdentity("me"))
        assert second.job == job.bench.job
        job.session.close()
        assert not job.session.alive()
        assert second.alive()
        assert job.tasks(1)
        second.close()
        with pytest.raises(errors.NotJoined, match="has not joined"):
            job.tasks(1)


def test_slices_of_every_size_and_none() -> None:
    """A version whose pushes touch no row at all is a version."""
    with Running(Bench(job_of(epochs=1, grads_to_wait=8, validation_records=0))) as job:
        for task in job.tasks(8):
            push = job.push(task)
            empty = {"t": Slices(np.empty(0, np.int64), np.empty((0, 2), np.float32))} if task.micro_batch % 2 else {}
            assert job.master.report_gradient(replace(push, slices=empty)).outcome is api.PushOutcome.ACCEPTED
        assert job.master.wait(60)
        assert job.bench.store.version() == 1
        assert job.bench.store.row_count("t") == 0
