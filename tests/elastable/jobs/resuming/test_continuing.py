"""Day 1, then day 2 continued from it, is one job over both days, to the bit; what does not fit is refused by name."""

import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest

from elastable.embedding_store.errors import BadInput
from elastable.jobs.options import JobOptions
from elastable.master.checkpoints.checkpoint import Checkpoint
from tests.elastable.kept_jobs import assert_same, kept, trained
from tests.elastable.processes import run_elastable
from tests.once import once

MODEL = Path(__file__).with_name("days_job.py")
OPTIONS = ("--micro-batch-size", "8", "--grads-to-wait", "2", "--seed", "5")
FIRST, LAST = 13, 23


def a_day(day: str, home: Path, *options: str | Path, changed: str = "") -> str:
    return trained(MODEL, home, *OPTIONS, *options, env={"DAY": day, "CHANGED": changed})


def refused(home: Path, *options: str | Path, day: str = "2", changed: str = "") -> str:
    env = {"DAY": day, "CHANGED": changed}
    words = ("--no-export", "--workers", "1", "--run-dir", home / "runs")
    ran = run_elastable("train", MODEL, *OPTIONS, *words, *options, env=env)
    assert ran.code != 0
    return " ".join((ran.out + ran.err).split())


def assert_one_job(ours: Checkpoint, whole: Checkpoint) -> None:
    assert ours.version == whole.version == LAST
    assert_same(ours, whole)
    for table in whole.manifest.tables:
        assert ours.table_state(table) == whole.table_state(table)
        touches = [sorted(rows_touched(one, table)) for one in (ours, whole)]
        assert touches[0] == touches[1]


def rows_touched(checkpoint: Checkpoint, table: str) -> list[tuple[int, ...]]:
    found = []
    for block in checkpoint.rows(table):
        if block.touches is not None:
            found += [(row, *touch) for row, touch in zip(block.ids.tolist(), block.touches.tolist(), strict=True)]
    return found


@pytest.fixture(scope="session")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One job over both days."""
    return once(tmp_path_factory, "both-days", lambda home: (a_day("both", home, "--workers", "1"), home)[1])


@pytest.fixture(scope="session")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The first day, by two workers."""
    return once(tmp_path_factory, "first-day", lambda home: (a_day("1", home, "--workers", "2"), home)[1])


def test_from_a_checkpoint(whole: Path, first: Path, tmp_path: Path) -> None:
    said = a_day("2", tmp_path, "--workers", "1", "--continue-from", first / "saved")
    assert f"continuing from {first / 'saved'}, version {FIRST}" in said
    assert_one_job(kept(tmp_path), kept(whole))


def test_the_same_command_goes_on_after_a_death_on_the_second_day(first: Path, tmp_path: Path) -> None:
    """Checkpoints of both days lie in one folder, and rows at store servers."""
    shutil.copytree(first / "saved", tmp_path / "saved")
    words = ("--workers", "2", "--stores", "2", "--continue-from", tmp_path / "saved", "--resume")
    assert "continuing from" in a_day("2", tmp_path, *words, "--checkpoint-every", "17")
    (tmp_path / "undisturbed").mkdir()
    shutil.copytree(tmp_path / "saved", tmp_path / "undisturbed" / "saved")
    shutil.rmtree(tmp_path / "saved" / f"ckpt-{LAST:010d}")
    assert "resuming at version 17" in a_day("2", tmp_path, *words)
    assert_one_job(kept(tmp_path), kept(tmp_path / "undisturbed"))


@pytest.mark.sampled(2)  # with servers, above, from checkpoints
@pytest.mark.parametrize("servers", [(), ("--stores", "2")])
def test_in_files_nothing_is_copied(servers: Sequence[str], whole: Path, tmp_path: Path) -> None:
    url = f"file://{tmp_path}/rows"
    a_day("1", tmp_path / "one", "--workers", "1", "--store", url, *servers)
    a_day("2", tmp_path / "two", "--workers", "2", "--store", url, "--continue-from", url, *servers)
    assert_one_job(kept(tmp_path / "two"), kept(whole))


def test_in_redis_and_from_there_to_memory(whole: Path, redis_url: str, tmp_path: Path) -> None:
    a_day("1", tmp_path / "one", "--workers", "2", "--store", redis_url)
    a_day("2", tmp_path / "copied", "--workers", "1", "--continue-from", redis_url)
    # Unfinished business is resumed, a job that has ended is continued: one command for every day.
    a_day("2", tmp_path / "two", "--workers", "1", "--store", redis_url, "--continue-from", redis_url, "--resume")
    for home in ("copied", "two"):
        assert_one_job(kept(tmp_path / home), kept(whole))


def test_another_model_is_matched_by_name(first: Path, tmp_path: Path) -> None:
    origin = ("--continue-from", first / "saved")
    assert "table 'words': dim was 4 and is 8" in refused(tmp_path, *origin, changed="dim")
    said = refused(tmp_path, *origin, changed="optimizer")
    assert "optimizer was OptimizerSpec(name='adam'" in said
    assert "--warm-start" in said
    said = refused(tmp_path, *origin, changed="table")
    assert "the model has no hidden/kernel, hidden/bias: leave them out by name (--leave-out" in said
    said = a_day("2", tmp_path, "--workers", "1", *origin, "--leave-out", "hidden", changed="table")
    assert "new in this model, and begun anew: places, joined/kernel, joined/bias" in said
    assert kept(tmp_path).version == LAST
    said = refused(tmp_path, "--continue-from", tmp_path / "saved")
    assert "the model has no table places" in said


def test_a_wrong_one_names_the_right_one(first: Path, tmp_path: Path) -> None:
    saved = first / "saved"
    said = refused(tmp_path, "--resume", "--checkpoint-dir", saved)
    assert "train_records was 202 and is 149" in said
    assert "by --continue-from" in said
    with pytest.raises(BadInput, match="--continue-from and --warm-start: the first takes all that a job left"):
        JobOptions(MODEL, continue_from=saved, warm_start=saved)
    with pytest.raises(BadInput, match="--leave-out needs --continue-from"):
        JobOptions(MODEL, leave_out=("words",))
    nothing = f"file://{tmp_path}/nothing"
    assert "no checkpoint, no run directory, and no store with a log" in refused(tmp_path, "--continue-from", nothing)
    assert not (tmp_path / "nothing").exists()


@pytest.mark.slow
def test_a_job_that_was_interrupted_is_continued_with_a_warning(first: Path, tmp_path: Path) -> None:
    a_day("1", tmp_path / "half", "--workers", "1", "--checkpoint-every", "6")
    shutil.rmtree(tmp_path / "half" / "saved" / f"ckpt-{FIRST:010d}")
    said = a_day("2", tmp_path, "--workers", "1", "--continue-from", tmp_path / "half" / "saved")
    assert "had not ended, at version 12: what is left of its data is not trained. --resume" in said
    assert kept(tmp_path).version == 12 + LAST - FIRST
