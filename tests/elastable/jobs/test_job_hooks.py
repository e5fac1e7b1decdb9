"""Whoever tells others of a version waits until it is logged: callbacks, the run directory, checkpoints."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import keras
import numpy as np
import pytest

from elastable.callbacks.callback_list import JobCallbacks
from elastable.embedding_store.contract.arrays import Float32
from elastable.embedding_store.contract.row_data import RowBlock
from elastable.embedding_store.contract.spec import TableSpec
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.embedding_store.errors import Unsupported
from elastable.jobs import job_hooks
from elastable.jobs.job_hooks import JobHooks
from elastable.master.api import JobSpec
from elastable.master.model.dense import DenseState
from elastable.master.tasks.progress import Progress
from elastable.output.run_directory import RunDirectory
from tests.untyped import Keywords

JOB = JobSpec(micro_batch_size=10, epochs=2, train_records=100)


@pytest.fixture(scope="module")
def model() -> keras.Model:
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    return model


def hooks_of(
    model: keras.Model,
    callbacks: Sequence[keras.callbacks.Callback] = (),
    run: RunDirectory | None = None,
    saved: list[Any] | None = None,
    written: Callable[[], int] | None = None,
    version: int = 0,
) -> JobHooks:
    called = JobCallbacks(callbacks, model, DenseState(model), MemoryStore(), JOB, Progress)
    called.begin()
    save = None if saved is None else lambda: saved.append(1)
    rest: Keywords = {"checkpoint_every": 4, "written": written, "version": version}
    return JobHooks(called, lambda reason: None, run, save, **rest)


def test_no_hook_is_called_for_a_version_that_nothing_hears_of(model: keras.Model) -> None:
    assert not any(hooks_of(model).waits_for_log(version) for version in range(1, 20))
    epochs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    assert not any(hooks_of(model, [epochs]).waits_for_log(version) for version in range(1, 20))


def test_callbacks_of_batches_hear_of_logged_versions(model: keras.Model) -> None:
    batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    assert all(hooks_of(model, [batches]).waits_for_log(version) for version in range(1, 20))


def test_only_callbacks_of_batches_may_assign_between_versions(model: keras.Model) -> None:
    epochs = keras.callbacks.LambdaCallback(on_epoch_end=lambda epoch, logs: None)
    batches = keras.callbacks.LambdaCallback(on_train_batch_end=lambda batch, logs: None)
    assert not hooks_of(model, [epochs]).may_assign()
    assert hooks_of(model, [batches]).may_assign()


def test_versions_that_are_saved_are_logged(model: keras.Model) -> None:
    saved: list[int] = []
    hooks = hooks_of(model, saved=saved)
    for version in range(1, 10):
        waits, before = hooks.waits_for_log(version), len(saved)
        hooks.on_version(version, {})
        assert waits == (len(saved) > before) == (version % 4 == 0)


def test_a_batch_begins_after_the_checkpoint_before_it(model: keras.Model) -> None:
    """A job that is resumed from the checkpoint begins the batch itself."""
    seen: list[str | int] = []

    def begin(batch: int, logs: object) -> None:
        seen.append(f"batch {batch}")

    hooks = hooks_of(model, [keras.callbacks.LambdaCallback(on_train_batch_begin=begin)], saved=seen)
    hooks.on_epoch_begin(0)
    for version in range(1, 11):
        hooks.on_version(version, {})
    hooks.on_epoch_begin(1)
    assert seen == [*(f"batch {batch}" for batch in range(4)), 1, *(f"batch {batch}" for batch in range(4, 8)), 1,
                    "batch 8", "batch 9", "batch 0"]  # fmt: skip


@pytest.mark.parametrize("hook", ["on_train_batch_begin", "on_train_batch_end", "on_epoch_begin"])
def test_rows_written_between_batches_are_refused(model: keras.Model, hook: str) -> None:
    """Workers look the next rows up before the hook is called."""
    with MemoryStore() as store:
        store.create_table(TableSpec("t", 2, 5))
        row: Float32 = np.ones((1, 2), np.float32)

        def write(number: int, logs: object = None) -> None:
            store.put("t", [RowBlock(np.array([number]), row, row[:, :0])])

        callbacks = [keras.callbacks.LambdaCallback(**{hook: write}), keras.callbacks.LambdaCallback()]
        hooks = hooks_of(model, callbacks, written=lambda: store.table_statistics("t").written)
        hooks.on_epoch_begin(0)
        if hook == "on_epoch_begin":
            hooks.on_version(1, {})
        else:
            with pytest.raises(Unsupported, match="has written rows of a table between two batches, at version 1"):
                hooks.on_version(1, {})


def test_versions_in_the_run_are_logged(model: keras.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr(job_hooks, "time", SimpleNamespace(monotonic=lambda: now[0]))
    run = RunDirectory(tmp_path / "run")
    hooks = hooks_of(model, run=run)
    waited = set()
    for version in range(1, 10):
        if hooks.waits_for_log(version):
            waited.add(version)
        now[0] += 0.3  # waiting takes long enough for a version to be due that was not
        hooks.on_version(version, {"loss": 1.0})
    run.close()
    lines = (run.path / "metrics.jsonl").read_text().splitlines()
    assert {json.loads(line)["version"] for line in lines} == waited
    assert 1 < len(waited) < 9


def test_an_epoch_that_ended_before_the_job_went_on_is_noted_with_its_version(
    model: keras.Model, tmp_path: Path
) -> None:
    """It was trained by a master that died before its evaluation: the next one evaluates it and makes no version."""
    run = RunDirectory(tmp_path / "run")
    hooks = hooks_of(model, run=run, version=10)
    hooks.on_epoch_end(0, {"loss": 1.0})
    hooks.on_epoch_begin(1)
    hooks.waits_for_log(11)
    hooks.on_version(11, {"loss": 0.5})
    assert hooks.untimed_records == 10  # the workers were on their way
    hooks.on_epoch_end(1, {"loss": 0.5})
    run.close()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["version"], line["epoch"]) for line in lines if line["kind"] == "epoch"] == [(10, 0), (11, 1)]
