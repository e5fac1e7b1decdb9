"""Jobs whose rows follow every step, killed and resumed: to the bit those that were never killed."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from elastable.master.checkpoints.checkpoint import open_checkpoint
from elastable.master.checkpoints.comparing import compare_dense, compare_tables
from tests.elastable.processes import Finished, run_elastable

MODEL = Path(__file__).with_name("every_row_job.py")
EPOCH, EVERY = 12, 5
"""Versions: checkpoints are those of 5, 10, 15, 20 and 24, and epochs end at 12 and 24."""


def train(home: Path, *more: str) -> Finished:
    options = ("--epochs", "2", "--micro-batch-size", "8", "--grads-to-wait", "2", "--seed", "5", "--no-export")
    saving = ("--checkpoint-every", str(EVERY), "--keep", "0", "--checkpoint-dir", str(home / "saved"))
    ran = run_elastable("train", MODEL, *options, *saving, "--run-dir", home / "runs", "--deadline", "60", *more)
    assert ran.code == 0, f"{ran.out}\n{ran.err}"
    return ran


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The checkpoints of a job that nothing happened to."""
    home = tmp_path_factory.mktemp("whole")
    train(home, "--workers", "1")
    return home / "saved"


@pytest.mark.parametrize(
    ("version", "workers", "store"),
    [(5, 2, "memory"), (15, 1, "encoding:memory,file://{home}/rows,memory")],
)
def test_a_killed_job_ends_with_the_same_bits(
    version: int, workers: int, store: str, whole: Path, tmp_path: Path
) -> None:
    """A job that was killed after a checkpoint has that one and the older ones."""
    shutil.copytree(whole, tmp_path / "saved")
    for later in range(version + 1, 2 * EPOCH + 1):
        shutil.rmtree(tmp_path / "saved" / f"ckpt-{later:010d}", ignore_errors=True)
    ran = train(tmp_path, "--resume", "--workers", str(workers), "--store", store.format(home=tmp_path))
    assert f"resuming at version {version}" in ran.out
    result = json.loads((tmp_path / "runs" / "latest" / "result.json").read_text())
    assert result["version"] == 2 * EPOCH
    names = sorted(path.name for path in whole.iterdir())
    assert sorted(path.name for path in (tmp_path / "saved").iterdir()) == names
    for name in names:
        ours, theirs = open_checkpoint(tmp_path / "saved" / name), open_checkpoint(whole / name)
        assert compare_dense(ours, theirs) == []
        assert [table.same for table in compare_tables(ours, theirs)] == [True, True]
        for table in ours.manifest.tables:
            assert ours.table_state(table).untouched_decay is not None
            assert ours.table_state(table) == theirs.table_state(table)
