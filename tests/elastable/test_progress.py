"""What a person sees, where nobody can be shown anything."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from elastable.command import main
from elastable.exit_codes import ExitCode
from elastable.progress import JobConsole, JobProgress


def full_disk() -> io.TextIOWrapper:
    """Fails at every write, and has nothing left to be written at its end."""
    return io.TextIOWrapper(io.FileIO("/dev/full", "w"), write_through=True)


def test_a_full_disk_behind_the_output_ends_no_job() -> None:
    with full_disk() as full, pytest.raises(OSError, match="No space left"):
        Console(file=full).print("a line")
    with full_disk() as full, JobProgress(JobConsole(file=full), 100) as progress:
        progress.epoch(0, 2, {"loss": 1.0})
        progress.evaluation(3, {"val_loss": 1.0})


def test_an_error_that_nobody_can_be_told_keeps_its_exit_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.argv", ["elastable", "status", "--master", "nowhere"])
    with full_disk() as full:
        monkeypatch.setattr("sys.stderr", full)
        with pytest.raises(SystemExit) as ended:
            main()
    assert ended.value.code == ExitCode.BAD_INPUT
