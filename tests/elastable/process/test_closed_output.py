"""What becomes of a command whose output nobody reads any more, as after `| head`."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TextIO

from elastable.master.checkpoints.checkpoint import open_checkpoint
from tests.elastable.processes import CLICK_JOB, LIMIT_S, _children, is_running
from tests.preloaded.client import PreloadedProcess

OUTPUT_CLOSED = 141  # 128 + SIGPIPE, as shells report it of other commands


@contextmanager
def piped(home: Path, *words: str | Path) -> Iterator[tuple[PreloadedProcess, TextIO]]:
    """A command, and what it prints."""
    reader, writer = os.pipe()
    with open(reader) as printed, (home / "stderr").open("wb") as errors:
        command = ["-m", "elastable", *map(str, words)]
        process = PreloadedProcess(command, writer, errors, home, {**os.environ, "COLUMNS": "200"})
        os.close(writer)
        try:
            yield process, printed
        finally:
            process.kill()
            process.wait()


def test_a_job_stops_with_a_checkpoint_and_its_workers_end(tmp_path: Path) -> None:
    words = ("--epochs", "100000", "--micro-batch-size", "512", "--workers", "2", "--no-export", "--deadline", "60")
    places = ("--run-dir", tmp_path / "runs", "--checkpoint-dir", tmp_path / "saved")
    with piped(tmp_path, "train", CLICK_JOB, *words, *places) as (job, printed):
        while "epoch 2" not in printed.readline():
            pass
        workers = _children(job.pid)
        printed.close()
        assert job.wait(LIMIT_S) == OUTPUT_CLOSED, (tmp_path / "stderr").read_text()
        assert workers
        assert not any(map(is_running, workers))
    said = (tmp_path / "stderr").read_text()
    assert "cut off from the reader of its output at version" in said
    assert f"--resume --checkpoint-dir {tmp_path / 'saved'}" in said
    assert open_checkpoint(tmp_path / "saved").version > 0


def test_other_commands_end_without_a_word(tmp_path: Path) -> None:
    with piped(tmp_path, "config", "show", "train") as (command, printed):
        printed.close()
        code = command.wait(LIMIT_S)
    assert (code, (tmp_path / "stderr").read_text()) == (OUTPUT_CLOSED, "")
