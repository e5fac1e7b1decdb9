"""What a person sees, where nobody can be shown anything."""

import io

import pytest
from rich.console import Console

from elastable.command import main
from elastable.master.api import JobStatus
from elastable.output.progress_bars import JobConsole, JobProgress
from elastable.process.exit_codes import ExitCode


def full_disk() -> io.TextIOWrapper:
    """Fails at every write, and has nothing left to be written at its end."""
    return io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)


def test_a_full_disk_behind_the_output_ends_no_job() -> None:
    with full_disk() as full, pytest.raises(OSError, match="No space left"):
        Console(file=full).print("a line")
    with full_disk() as full, JobProgress(JobConsole(file=full), 100) as progress:
        progress.epoch(2, 0, {"loss": 1.0})
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
        (task,) = live.tasks
        assert not task.speed
        assert task.completed == 800_000
