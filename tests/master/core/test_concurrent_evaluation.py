"""Evaluation during training: every version that is due, once, of exactly that version, whoever dies."""

import logging
from collections.abc import Mapping
from functools import partial

import numpy as np
import pytest

from elastable.embedding_store.contract.snapshot import Snapshot
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import StaleVersion
from elastable.master.api import DenseSnapshot, EvaluationReport, PushOutcome, Task, TaskKind
from elastable.master.core import driver
from elastable.master.core.hooks import Hooks
from elastable.master.core.job_state import ConcurrentEvaluation
from elastable.master.master_options import MasterOptions
from tests.contracts.store_samples import commit, fixed, int64, update
from tests.master.fakes import Bench, FakeWorker, drive, job_of
from tests.untyped import Keyword
from tests.waiting import until

EVERY = 2


class Results(Hooks):
    """What evaluations gave, in the order in which they ended."""

    def __init__(self) -> None:
        self.of: list[tuple[int, dict[str, float]]] = []

    def on_evaluation(self, version: int, logs: Mapping[str, float]) -> None:
        self.of.append((version, dict(logs)))


class Evaluator(FakeWorker):
    """Reports, of an evaluated micro-batch, numbers of the very rows and variables that its version has."""

    def __init__(self, bench: Bench, deaths: int = 0, **options: Keyword) -> None:
        super().__init__(bench.master, bench.store, **options)
        self.deaths = deaths

    def work(self, task: Task) -> None:
        if task.kind is TaskKind.TRAIN:
            super().work(task)
            return
        self.tasks.discard(task)
        incarnation = self.identity.incarnation
        try:
            snapshot = self.master.pull_dense(incarnation, task.version, 0.05)
            rows = self.store.lookup({"t": np.arange(10)}, task.version)["t"]
        except StaleVersion:
            return
        assert snapshot is not None
        assert snapshot.version == task.version
        total = float(sum(value.sum(dtype=np.float64) for value in (*snapshot.variables, rows)))
        metrics = (np.full((), total * (task.stop - task.start)), np.full((), task.stop - task.start, np.float64))
        report = EvaluationReport(incarnation, task.version, task.micro_batch, task.stop - task.start,
                                  tuple(value.astype(np.float32) for value in metrics))  # fmt: skip
        if self.deaths and task.micro_batch % 2:
            # Computed, and not reported; or reported, and its session ends as if it had not been.
            self.deaths -= 1
            self.again()
            if self.deaths % 2:
                return
        self.outcomes.append(self.master.report_evaluation(report))
        assert self.master.report_evaluation(report) in (PushOutcome.DUPLICATE, PushOutcome.STALE)

    def again(self) -> None:
        self.session.close()
        self.tasks.clear()
        self.session = self.master.join(self.identity)


class Reference(Hooks):
    """What an evaluation of each version gives, computed on the spot."""

    def __init__(self, bench: Bench) -> None:
        self.bench = bench
        self.of: dict[int, float] = {}

    def on_version(self, version: int, logs: Mapping[str, float]) -> None:
        rows = self.bench.store.lookup({"t": np.arange(10)})["t"]
        variables = self.bench.dense.snapshot(version).variables
        self.of[version] = float(sum(value.sum(dtype=np.float64) for value in (*variables, rows)))


@pytest.mark.parametrize(("mode", "deaths"), [("sync", 0), ("sync", 5), ("async", 5)])
def test_every_version_that_is_due_is_evaluated_once(mode: str, deaths: int) -> None:
    job = job_of(mode=mode, epochs=3)
    reference = Bench(job)
    expected = Reference(reference)
    drive(reference, [FakeWorker(reference.master, reference.store)], expected)
    bench = Bench(job, options=MasterOptions(evaluate_every=EVERY))
    results = Results()
    drive(bench, [Evaluator(bench, deaths), *([Evaluator(bench)] if mode == "sync" else [])], results)
    ends = 4 if mode == "sync" else 8  # versions of an epoch
    due = [version for version in range(EVERY, 3 * ends, EVERY) if version % ends]
    assert sorted(version for version, _ in results.of) == due
    if mode == "sync":
        for version, logs in results.of:
            assert logs["val_loss"] == pytest.approx(expected.of[version], rel=1e-5), version
    assert bench.store.pins() == ()
    for ours, theirs in zip(bench.everything(), reference.everything(), strict=True):
        if mode == "sync":
            np.testing.assert_array_equal(ours, theirs, strict=True)


def test_a_job_that_is_stopped_lets_go_of_what_it_pinned() -> None:
    bench = Bench(job_of(epochs=1), options=MasterOptions(evaluate_every=1))

    class Stop(Hooks):
        def on_version(self, version: int, logs: Mapping[str, float]) -> None:
            if version == 3:
                assert {pin.version for pin in bench.store.pins()} <= {1, 2}
                bench.master.stop("enough")

    drive(bench, [TrainOnly(bench)], Stop())
    assert bench.store.pins() == ()


class TrainOnly(FakeWorker):
    """Takes evaluation tasks, and never does them."""

    def __init__(self, bench: Bench) -> None:
        super().__init__(bench.master, bench.store, want=8)

    def work(self, task: Task) -> None:
        if task.kind is TaskKind.TRAIN:
            super().work(task)
        else:
            self.tasks.discard(task)


def test_all_that_are_given_up_at_once_make_room_for_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    """A store server that was started again has no pin of before, and training waits for fewer evaluations."""
    monkeypatch.setattr(driver, "ConcurrentEvaluation", partial(ConcurrentEvaluation, renew_every_s=0.01))
    bench = Bench(job_of(epochs=1), options=MasterOptions(evaluate_every=1))
    pin, pins = bench.store.pin, list[Snapshot]()

    def kept(version: int | None = None, lease_s: float = 60.0) -> Snapshot:
        pins.append(pin(version, lease_s))
        return pins[-1]

    monkeypatch.setattr(bench.store, "pin", kept)

    class Lose(Hooks):
        def on_version(self, version: int, logs: Mapping[str, float]) -> None:
            if version == 3:
                for each in pins:
                    each.close()
                until(lambda: not any(each.readable() for each in bench.master._state.concurrent.values()))

    class Trains(TrainOnly):
        def work(self, task: Task) -> None:
            if task.version >= 3:  # evaluations after the loss
                FakeWorker.work(self, task)
            else:
                super().work(task)

    drive(bench, [Trains(bench)], Lose())
    assert bench.master.progress().version == 4


def test_it_needs_nobody_to_renew_its_pin() -> None:
    """A callback of the job that takes longer than the lease gives no evaluation up."""
    with MemoryStore(threads=1) as store:
        store.create_table(fixed())
        evaluation = ConcurrentEvaluation(DenseSnapshot(0, (), ()), store.pin(lease_s=600.0), renew_every_s=0.01)
        commit(store, {"cities": update(int64(1, 2), 4)})
        (lease,) = store._pins._leases[0]
        ends = lease.ends
        until(lambda: lease.ends > ends)
        store.lookup({"cities": int64(1)}, version=0)
        assert evaluation.readable()
        evaluation.end()
        assert not store.pins()
        with pytest.raises(StaleVersion):
            store.lookup({"cities": int64(1)}, version=0)


def test_one_whose_version_is_gone_is_given_up_by_name(caplog: pytest.LogCaptureFixture) -> None:
    with MemoryStore(threads=1, before_image_bytes=100) as store, caplog.at_level(logging.WARNING):
        store.create_table(fixed())
        evaluation = ConcurrentEvaluation(DenseSnapshot(0, (), ()), store.pin(), renew_every_s=0.01)
        commit(store, {"cities": update(np.arange(90), 4)})  # more than the store keeps before-images of
        until(lambda: not evaluation.readable())
        evaluation.end()
    assert len(caplog.messages) == 1
    assert caplog.messages[0].startswith("the evaluation of version 0 is given up: the pin of version 0 is gone")
    assert "before_image_bytes allows 100" in caplog.messages[0]
