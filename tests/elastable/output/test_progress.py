"""What a person sees, where nobody can be shown anything."""

import io
import json
from pathlib import Path

import keras
import pytest
from rich.console import Console

from elastable.callbacks.best_versions import BestVersions
from elastable.callbacks.callback_list import JobCallbacks
from elastable.callbacks.freezing import Freezing
from elastable.command import main
from elastable.embedding_store.engine.memory_store import MemoryStore
from elastable.jobs.job_hooks import JobHooks
from elastable.master.api import JobSpec, JobStatus
from elastable.master.keras.dense import DenseState
from elastable.master.tasks.progress import Progress
from elastable.master.tasks.schedule import Schedule
from elastable.output.progress_bars import JobConsole, JobProgress
from elastable.output.run_directory import RunDirectory
from elastable.process.exit_codes import ExitCode


def full_disk() -> io.TextIOWrapper:
    """Fails at every write, and has nothing left to be written at its end."""
    return io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)


def test_a_full_disk_behind_the_output_ends_no_job() -> None:
    with full_disk() as full, pytest.raises(OSError, match="No space left"):
        Console(file=full).print("a line")
    with full_disk() as full, JobProgress(JobConsole(file=full), 100) as progress:
        progress.epoch(0, 2, {"loss": 1.0})
        progress.evaluation(3, {"val_loss": 1.0})


def test_an_error_that_cannot_be_printed_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["elastable", "status", "--master", "nowhere"])
    with full_disk() as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == ExitCode.BAD_INPUT


def at(version: int, records: int) -> JobStatus:
    return JobStatus("j", "training", "sync", version, 40, 0, 2, records, {}, (), "memory")


def test_the_speed_of_a_job_that_goes_on_does_not_count_what_was_trained_before() -> None:
    written = io.StringIO()
    with JobProgress(JobConsole(file=written, width=200), 1_000_000, trained=800_000) as progress:
        progress.show(at(879, 800_000))
    assert " 0 examples/s" in written.getvalue()
    live = JobProgress(JobConsole(file=io.StringIO(), force_terminal=True), 1_000_000, trained=800_000)
    with live:
        for _ in range(2):
            live.show(at(879, 800_000))
        (task,) = live._progress.tasks
        assert not task.speed
        assert task.completed == 800_000


def test_an_epoch_that_ended_before_the_job_went_on_is_noted_with_its_version(tmp_path: Path) -> None:
    """It was trained by a master that died before its evaluation: the next one evaluates it and makes no version."""
    job = JobSpec(micro_batch_size=10, epochs=2, train_records=8790)
    model = keras.Sequential([keras.Input((2,)), keras.layers.Dense(1)])
    model.compile("sgd", "mse")
    dense = DenseState(model)
    best = BestVersions([], MemoryStore(), dense, job, Progress)
    callbacks = JobCallbacks([], model, 2, 879, Freezing(model, dense), best)
    run = RunDirectory(tmp_path / "run")
    callbacks.begin()
    hooks = JobHooks(callbacks, Schedule(job), lambda reason: None, run, version=879)
    hooks.on_epoch_end(0, {"loss": 1.0})
    hooks.on_epoch_begin(1)
    hooks.on_version(880, {"loss": 0.5})
    assert hooks.untimed_records == 10  # the workers were on their way
    hooks.on_epoch_end(1, {"loss": 0.5})
    run.close()
    lines = [json.loads(line) for line in (run.path / "metrics.jsonl").read_text().splitlines()]
    assert [(line["version"], line["epoch"]) for line in lines if line["kind"] == "epoch"] == [(879, 0), (880, 1)]
